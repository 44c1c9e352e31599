"""Daemons that are killed while they write."""

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.tiers.test_rings import why_not

KILLS = int(os.environ.get("TRIKV_KILLS", "25"))  # of each ring
PATIENCE_S = 300.0


@pytest.mark.parametrize("ring", ["uring", "threads"])
def test_killed_at_any_moment(ring: str, start: Start, tmp_path: Path) -> None:
    """Nothing torn is believed, and nothing acknowledged is lost: the kernel had it."""
    if reason := why_not(ring):
        pytest.skip(f"{ring}: {reason}")
    command = [sys.executable, "-m", "tests.tiers.killed_writer", str(tmp_path / "disk")]
    child = start([*command, "0", str(KILLS), ring], stdout=-1, stderr=-1)
    said, complaint = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 0, complaint
    words = said.split()
    assert words[:2] == [str(KILLS), "killed,"]
    assert int(words[2]) > 10 * KILLS  # or this shows nothing
