"""A short soak: twenty thousand calls of engines that come and go."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Start

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_memory_is_flat_and_the_loop_does_not_stall(start: Start) -> None:
    soak = start(
        [sys.executable, "-m", "bench.soak", "--json", "--calls", "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    printed, progress = soak.communicate(timeout=540)
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 7, progress
    assert [line["metric"] for line in lines if line["ok"] is False] == []
    assert soak.returncode == 0
