"""Daemons for the connector's tests: the fake one with its knobs, and the real one.

Not `tests/integration/daemons.py`: this file is imported by processes that run another vLLM,
without pytest.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0  # as in tests/conftest.py
LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)


def clean_environ() -> dict[str, str]:
    """Without the other vLLM's files, which a daemon must not need."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class FakeDaemon:
    """`fake_daemon.py` at `folder/trikv.sock`; see there for the knobs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trikv.sock"
        self.address = f"unix:{self.path}"
        self.child: subprocess.Popen[str] | None = None
        self.start()

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.connector.fake_daemon", str(self.path)]

    def start(self) -> None:
        self.child = subprocess.Popen(
            self.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environ(),
            preexec_fn=die_with_parent,  # noqa: PLW1509  # one system call
        )
        self.wait_ready()

    def wait_ready(self) -> None:
        assert self.child is not None
        assert self.child.stdout is not None
        ready, _, _ = select.select([self.child.stdout], [], [], PATIENCE_S)
        assert ready, "the daemon does not start"
        assert self.child.stdout.readline() == "ready\n"

    def tell(self, **knobs: Any) -> str:
        assert self.child is not None
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(knobs) + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline()

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.tell(counts=True))
        return found

    def wait(self, name: str, count: int, seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while self.counts().get(name, 0) < count:
            assert time.monotonic() < until, f"{name} stays below {count}: {self.counts()}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.child is not None
        self.child.send_signal(number)

    def close(self) -> None:
        """The test has ended."""
        self.kill()

    def kill(self) -> None:
        child, self.child = self.child, None
        if child is None:
            return
        child.kill()
        child.wait(PATIENCE_S)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


class RealDaemon(FakeDaemon):
    """`trikv-daemon`; it has no knobs."""

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "trikv.nursery.serve",
            "--addr",
            self.address,
            "--pool-size",
            "64mb",
            "--log-level",
            "error",
        ]

    def wait_ready(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.path.exists():
            assert time.monotonic() < until, "no socket"
            time.sleep(0.02)

    def tell(self, **knobs: Any) -> str:
        raise NotImplementedError(f"the real daemon has no {knobs}")

    def status(self) -> dict[str, Any]:
        """What `trikv status --json` says."""
        done = subprocess.run(
            [sys.executable, "-m", "trikv.cli.main", "status", "--json"],
            cwd=ROOT,
            env=clean_environ() | {"TRIKV_SOCKET": str(self.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def counts(self) -> dict[str, int]:
        """The real daemon's counters under the fake one's names."""
        status = self.status()
        counters = status["counters"]
        return {
            "saved": counters["trikv_save_blocks_total"],
            "loaded": counters["trikv_load_blocks_total"],
            "leases": status["pool"]["leaseCount"],
            "pages": status["pool"]["blockCount"],
        }
