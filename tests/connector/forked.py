"""The real daemon with knobs, started again within milliseconds: a process that forks them.

    python -m tests.connector.forked SOCKET

Reads one JSON object a line from stdin and answers each with a line. `start`: fork a daemon with
these knobs: `protocol` (the version that it speaks), `copy_s` (the longest pause before each copy),
`arguments` (more flags). `kill`: end it with SIGKILL and reap it.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.connector.daemons import PATIENCE_S, ROOT, RealDaemon, clean_environ, die_with_parent
from trikv import wire
from trikv.nursery import serve
from trikv.tiers import hostmem


class ForkedDaemon(RealDaemon):
    """A daemon of `folder`, killed and started again with other knobs as a test likes."""

    def __init__(self, folder: Path, **knobs: Any) -> None:
        self.forker = subprocess.Popen(
            [sys.executable, "-m", "tests.connector.forked", str(folder / "trikv.sock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environ() | {"OPENBLAS_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,  # noqa: PLW1509  # one system call
        )
        self.pid = 0
        self.knobs = knobs
        super().__init__(folder)

    def ask(self, **order: Any) -> int:
        assert self.forker.stdin is not None
        assert self.forker.stdout is not None
        self.forker.stdin.write(json.dumps(order) + "\n")
        self.forker.stdin.flush()
        ready, _, _ = select.select([self.forker.stdout], [], [], 60)
        assert ready, "the forker does not answer"
        return int(self.forker.stdout.readline())

    def start(self, **knobs: Any) -> None:
        self.pid = self.ask(start=self.knobs | knobs)
        self.wait_ready()

    def wait_ready(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(self.path))  # a file may be there from the one before
                return
            assert time.monotonic() < until, "no socket"
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.pid:
            self.pid = self.ask(kill=True)

    def close(self) -> None:
        self.kill()
        self.forker.kill()
        self.forker.wait(PATIENCE_S)
        for pipe in (self.forker.stdin, self.forker.stdout):
            if pipe is not None:
                pipe.close()


def slowed(run: Callable[..., Any], copy_s: float) -> Callable[..., Any]:
    chance = random.Random(3)

    def slow(*args: Any) -> Any:
        time.sleep(chance.random() * copy_s)
        return run(*args)

    return slow


def become_daemon(path: str, knobs: dict[str, Any]) -> None:
    """In a forked child; does not return."""
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    wire.PROTOCOL = knobs.get("protocol", wire.PROTOCOL)
    if "copy_s" in knobs:
        hostmem.run = slowed(hostmem.run, knobs["copy_s"])
    address = f"unix:{path}"
    given = ["--addr", address, "--pool-size", "64mb", "--log-level", "error"]
    sys.argv = ["trikv-daemon", *given, *knobs.get("arguments", [])]
    try:
        serve.main()
    finally:
        os._exit(1)


def main() -> None:
    pid = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            pid = os.fork()
            if pid == 0:
                become_daemon(sys.argv[1], order["start"])
        elif pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = 0
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
