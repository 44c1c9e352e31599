"""A daemon of its own for a benchmark, and an engine attached to it through the real client."""

import contextlib
import ctypes
import hashlib
import logging
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trikv.address import parse
from trikv.cli.status import fetch_status
from trikv.connector.calls import Calls
from trikv.connector.client import Client, Introduction, Settings

READY_S = 30.0
HASH_BYTES = 32
Child = subprocess.Popen[bytes]


def die_with_parent() -> None:
    """Make the kernel kill this child when the benchmark is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def command(address: str, *arguments: str) -> list[str]:
    """What starts a daemon."""
    return [sys.executable, "-m", "trikv.nursery.serve", "--addr", address, *arguments]


def start(words: list[str], log: IO[str] | int = subprocess.DEVNULL) -> Child:
    """Begin to start a process that ends with this one; does not wait for it."""
    return subprocess.Popen(words, stderr=log, preexec_fn=die_with_parent)  # noqa: PLW1509


@contextlib.contextmanager
def serving(words: list[str], log: Path, ready: str, ready_s: float = READY_S) -> Iterator[Child]:
    """Run a process that says in its log when it is ready, until the block ends."""
    with log.open("w") as stderr:
        child = start(words, stderr)
    try:
        deadline_s = time.monotonic() + ready_s
        while ready not in log.read_text():
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)
        yield child
    finally:
        child.terminate()
        child.wait(30)


@contextlib.contextmanager
def daemon(*arguments: str) -> Iterator[str]:
    """Run a daemon on a private socket; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/trikv.sock"
        log = Path(os.environ.get("BENCH_LOGS", folder)) / f"daemon-{time.time_ns()}.log"
        with serving(command(address, *arguments), log, "daemon.ready"):
            yield address


def status(address: str) -> dict[str, Any]:
    """What `trikv status --json` says."""
    return fetch_status([parse(address)], timeout_s=READY_S)


@contextlib.contextmanager
def spawned(target: Callable[..., None], *args: object) -> Iterator[SpawnProcess]:
    """Run a function in a new interpreter, killed when the block ends."""
    child = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


def pid_of(address: str) -> int:
    """The daemon's process, from the socket's other end."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(address.removeprefix("unix:"))
        size = struct.calcsize("3i")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def hashes(name: str, count: int) -> bytes:
    """A chain of made-up hashes, one blob."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(count * HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Engine:
    """A scheduler's and a worker's client of one engine, as the connector has them."""

    scheduler: Calls
    worker: Calls
    memory: NDArray[np.uint8]  # [block, byte]


@contextlib.contextmanager
def engine(address: str, *, blocks: int, page_bytes: int, pieces: int = 1) -> Iterator[Engine]:
    """Attach an engine of one rank."""
    name = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    memory = np.ones((blocks, page_bytes), np.uint8)
    size = page_bytes // pieces
    layout = [
        {"memory": 0, "offset": at * size, "stride": page_bytes, "bytes": size}
        for at in range(pieces)
    ]
    process = {"process": {"address": memory.ctypes.data, "bytes": memory.nbytes}}
    group = {"blockCount": blocks, "pieces": layout, "layout": "bytes"}
    rank = {"instance": name, "rank": 0, "memories": [process], "groups": [group]}
    fields = [{"name": "model", "value": f"bench {page_bytes}"}]
    declared = {"name": name, "rankCount": 1, "fields": fields}
    log = logging.getLogger("bench")
    settings = Settings("bench", address)
    worker, scheduler = Client(settings, log), Client(settings, log)
    worker.start(Introduction("register", lambda: {"rank": rank}, offers_memory=True))
    scheduler.start(Introduction("declare", lambda: {"instance": declared}))
    try:
        deadline_s = time.monotonic() + READY_S
        while not (worker.is_ready and scheduler.is_ready):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the engine did not attach")
            time.sleep(0.02)
        yield Engine(Calls(scheduler), Calls(worker), memory)
    finally:
        scheduler.close()
        worker.close()
