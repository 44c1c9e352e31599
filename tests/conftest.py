"""What all tests share: hypothesis profiles, the order of the run, and children that die with it.

Order: fast and telling first, so that a broken core fails in seconds and not after an engine start.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("gate", derandomize=True, max_examples=50, deadline=None)
settings.register_profile(
    "night", max_examples=5_000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))

ROOT = Path(__file__).resolve().parent
LAST = ("integration", "meta", "connector", "guest", "e2e", "gpu")  # slow ones last
SECOND_CHANCE = {"integration", "meta", "connector", "e2e"}  # real processes: docs/decisions/0006
PATIENCE_S = 60.0
"""A limit that only ends what hangs: a machine may stall for many seconds."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)

Start = Callable[..., subprocess.Popen[str]]


def pytest_configure() -> None:
    """Orphans of our children come to us, so that the end of the run can find them."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(ROOT).parts[0]

    items.sort(key=lambda item: LAST.index(folder(item)) + 1 if folder(item) in LAST else 0)
    for item in items:
        if folder(item) in SECOND_CHANCE:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"failed at first: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # those that have ended left nothing behind
            pass
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            os.kill(pid, signal.SIGKILL)
            terminalreporter.write_line(f"killed what a test left behind: {pid} {name}")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes that end with the test, whole groups of them; see `started`."""
    yield from started()


@pytest.fixture(scope="module")
def start_shared() -> Iterator[Start]:
    """Like `start`, for a process that all tests of a module use."""
    yield from started()


def started() -> Iterator[Start]:
    """Yield a `Popen` in text mode whose child leads a group of its own.

    The group is killed at the end, and the child dies at once if the thread that started it does
    (so start from the main thread).
    """
    children: list[subprocess.Popen[str]] = []

    def start(args: list[str], **options: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            args,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  # one system call, no lock taken
            **options,
        )
        children.append(child)
        return child

    try:
        yield start
    finally:
        for child in children:
            end(child)


def end(child: subprocess.Popen[str]) -> None:
    """Kill the group that `child` leads, its orphans too, and close our ends of its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Collect the living processes below `pid`, children before parents' next children."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:  # the thread ended meanwhile
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found
