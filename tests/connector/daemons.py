"""Starts the fake daemon, or the real one, for tests; its knobs; children die with the test.

`TRIKV_TEST_DAEMON=real` runs what can be run against `python -m trikv.nursery.serve`.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
IS_REAL = os.environ.get("TRIKV_TEST_DAEMON") == "real"


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Daemon:
    """One daemon at `folder/trikv.sock`."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.path = folder / "trikv.sock"
        self.address = f"unix:{self.path}"
        self.child: subprocess.Popen[str] | None = None
        self.start(**knobs)

    def start(self, **knobs: Any) -> None:
        command = [sys.executable, str(HERE / "fake_daemon.py"), str(self.path)]
        # The daemon needs no vLLM; another version's files must not shadow anything there.
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environ,
            preexec_fn=die_with_parent,
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "ready\n"
        if knobs:
            self.tell(**knobs)

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

    def wait(self, name: str, count: int, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while self.counts().get(name, 0) < count:
            assert time.monotonic() < until, f"{name} stays {self.counts()}"
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        assert self.child is not None
        self.child.send_signal(number)

    def kill(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.wait(30)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()
