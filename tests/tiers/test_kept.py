"""A kept pool whose writer is killed hundreds of times."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S, ROOT, Start

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


EMPTIED = """
import os, signal, sys
from pathlib import Path
from trikv.tiers import kept

folder, pool_mib, calls = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def killed_after(real):
    def call(*arguments):
        global calls
        got = real(*arguments)
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return got
    return call

for name in ("ftruncate", "posix_fallocate", "pread"):
    setattr(os, name, killed_after(getattr(os, name)))
print(kept.open_kept(folder, pool_mib << 20, 2 << 20).note)
"""


@pytest.mark.parametrize("calls", range(1, 8))
def test_killed_while_a_pool_is_emptied_or_made_the_next_one_begins(
    start: Start, tmp_path: Path, calls: int
) -> None:
    """Nobody has to delete anything by hand."""
    folder = Path("/dev/shm") / f"trikv-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    program = tmp_path / "program.py"
    program.write_text(EMPTIED)

    def life(pool_mib: int, calls: int) -> int:
        child = start([sys.executable, str(program), str(folder), str(pool_mib), str(calls)])
        return child.wait(timeout=PATIENCE_S)

    try:
        life(8, calls)
        assert life(8, -1) == 0
        was_killed = life(12, calls) != 0
        assert was_killed or calls > 5
        assert life(12, -1) == 0
        assert life(8, -1) == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
