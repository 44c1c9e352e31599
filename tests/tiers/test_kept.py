"""A kept pool whose writer is killed hundreds of times."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from tests.conftest import ROOT, Start

KILLS = 200


def test_a_writer_killed_at_random_moments_leaves_no_wrong_byte(start: Start) -> None:
    folder = Path("/dev/shm") / f"trikv-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        child = start(
            [sys.executable, "-m", "tests.tiers.kept_crash", str(folder), str(KILLS), "7"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT.parent,
        )
        said, story = child.communicate(timeout=300)
        assert child.returncode == 0, story
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(said.strip())  # noqa: T201
    facts = json.loads(said.splitlines()[-1])
    assert facts["kills"] == KILLS
    assert facts["found"] > KILLS
    assert facts["wrong"] == 0
