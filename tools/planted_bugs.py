"""Plants bugs one by one in a copy of the tree; looks for a simulated world that finds each.

    python tools/planted_bugs.py [--seeds 60]

Prints a table: bug, the first seed whose world goes wrong, and how. A bug that no seed finds, and a
place that the text of a bug no longer matches, end with exit code 1: then the simulation has become
blind, or this list stale. Takes some minutes; not part of `make test`.
"""

import argparse
import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
WORLD_S: Final = 60

BUGS: Final = (
    (
        "a load takes no pins of its own",
        "core/cache.py",
        "            self.blocks.pin(entries)\n            if over",
        "            if over",
    ),
    (
        "early free: a doomed block's pages go while a writer goes on",
        "core/blocks.py",
        "held = (self.writers[entries] > 0) | (self.pins[entries] > 0)",
        "held = self.pins[entries] > 0",
    ),
    (
        "lost event: the end of a copy is not told to the session",
        "nursery/copying.py",
        "            self._sessions.copy_ended(job.session)\n",
        "",
    ),
    (
        "double completion: a copy's outcome is applied twice",
        "nursery/copying.py",
        "            job.complete(arrived)\n",
        "            job.complete(arrived)\n            job.complete(arrived)\n",
    ),
    (
        "off by one: a lease on one block too many",
        "core/cache.py",
        "entries = lease.entries[first : first + count]",
        "entries = lease.entries[first + 1 : first + 1 + count]",
    ),
    (
        "the fence is not looked at",
        "nursery/copying.py",
        "            if self._is_still_theirs(job):\n",
        "            if True:\n",
    ),
    (
        "a block is visible when its first rank has saved",
        "core/blocks.py",
        "filled == self.wanted[rows]",
        "filled > 0",
    ),
    (
        "a failed copy counts as whole",
        "core/cache.py",
        "self.blocks.fill(plan.entries[copied], plan.page)",
        "self.blocks.fill(plan.entries, plan.page)",
    ),
    (
        "an evicted block stays in the index",
        "core/room.py",
        "        self._index.remove(victims)\n",
        "",
    ),
    (
        "the pages of another rank",
        "core/cache.py",
        "self.pages.offsets(self.blocks.slot[entries[mine]], page)",
        "self.pages.offsets(self.blocks.slot[entries[mine]], 0)",
    ),
    (
        "a block whose copy failed stays in the index",
        "core/cache.py",
        "            self.index.remove(lost)\n",
        "",
    ),
    (
        "half-filled blocks are never given up",
        "core/fills.py",
        "while self._begun and self._begun[0][0] <= now_s:",
        "while False:",
    ),
    (
        "a session ends under its copies",
        "nursery/sessions.py",
        "        if session.copies == 0:\n            self._finish(session)\n\n    def copy_ended",
        "        self._finish(session)\n\n    def copy_ended",
    ),
    (
        "a session's end does not unmap",
        "nursery/sessions.py",
        "            self.detach(attachment)\n",
        "            pass\n",
    ),
)

LOOK = """
import sys, traceback, structlog
structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
from tests.sim.test_world import live
from tests.sim.fakes import Faults
seed = int(sys.argv[1])
faults = Faults(0.01, 0.01, 0.05, 0.1, 0.05, 0.3, 0.05, 0.3, 0.1, 0.01)
try:
    report = live(seed, faults)
except BaseException as error:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print(f"{type(error).__name__} in {frame.name}: {str(error)[:60] or frame.line}")
else:
    left = {name: count for name, count in report.left.items() if count}
    if report.loads_wrong:
        print(f"{report.loads_wrong} loads with wrong bytes")
    elif report.late_writes:
        print(f"{report.late_writes} blocks written after they had failed")
    elif left:
        print(f"left behind: {left}")
"""


def die_with_parent() -> None:
    """Make the kernel kill this child when we are gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def look(tree: Path, seed: int) -> str:
    """What goes wrong in one world; empty when nothing does."""
    try:
        run = subprocess.run(
            [sys.executable, "-c", LOOK, str(seed)],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=WORLD_S,
            check=False,
            preexec_fn=die_with_parent,  # no threads here
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    return run.stdout.strip() or (run.stderr.strip().splitlines() or [""])[-1]


def main() -> int:
    """Plant, look, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=60)
    options = parser.parse_args()
    blind = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, place, old, new in BUGS:
            tree = Path(folder) / "tree"
            shutil.rmtree(tree, ignore_errors=True)
            for part in ("trikv", "tests", "schema"):
                shutil.copytree(ROOT / part, tree / part)
            file = tree / "trikv" / place
            text = file.read_text()
            if old not in text:
                print(f"{name:60} the place is gone: trikv/{place}")
                blind += 1
                continue
            planted = text.replace(old, new, 1)
            compile(planted, place, "exec")  # a tree that cannot start is no find
            file.write_text(planted)
            found = next(
                ((seed, how) for seed in range(options.seeds) if (how := look(tree, seed))), None
            )
            seed, how = found or ("-", "NOT FOUND")
            blind += found is None
            print(f"{name:60} seed {seed:>3}  {how}", flush=True)
    return int(blind > 0)


if __name__ == "__main__":
    sys.exit(main())
