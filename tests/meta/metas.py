"""Starting real metaservers, and light nodes: the client of a daemon without a daemon."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import capnp
import numpy as np
import trio

from tests.conftest import Start
from trikv import address as addresses
from trikv.core.adverts import Part
from trikv.core.proofs import Secret
from trikv.core.words import Words
from trikv.meta.client import Identity, MetaClient
from trikv.meta.messages import Located
from trikv.process.guest import Guest
from trikv.streams import Loop

T = TypeVar("T")
WAIT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
A, B = b"a" * 20, b"b" * 20


@dataclass(slots=True)
class RunningMeta:
    process: subprocess.Popen[str]
    log: Path
    address: str
    http: str

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if line["event"] == name]


def meta_command(*arguments: str, before: str = "") -> list[str]:
    """The command of a metaserver; `before` is Python that its process runs first."""
    if before:
        program = f"{before}\nfrom trikv.meta import serve\nserve.main()"
        return [sys.executable, "-c", program, *arguments]
    return [sys.executable, "-m", "trikv.meta.serve", *arguments]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TRIKV_")}


def start_meta(
    start: Start,
    folder: Path,
    *arguments: str,
    before: str = "",
    within: tuple[str, ...] = (),
) -> RunningMeta:
    """Start a metaserver on a free port of its own, unless told, and wait for its ready line."""
    log = folder / f"meta-{time.monotonic_ns()}.log"
    given = [*arguments]
    for name, value in (("--addr", "127.0.0.1:0"), ("--http-addr", "off"), ("--memory", "8mb")):
        if name not in given:
            given += [name, value]
    with log.open("w") as stderr:
        command = [*within, *meta_command(*given, before=before)]
        process = start(command, stderr=stderr, env=clean_environment(), cwd=ROOT)
    deadline_s = time.monotonic() + WAIT_S
    while '"meta.ready"' not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.02)
    meta = RunningMeta(process, log, "", "")
    ready = meta.events("meta.ready")[0]
    meta.address, meta.http = ready["addr"], ready["http"]
    return meta


def hosted(main: Callable[[], Awaitable[T]]) -> T:
    """Run a Trio function where a daemon runs its own: as asyncio's guest, inside capnp's loop."""

    async def host() -> T:
        closing, guest = trio.Event(), Guest()

        async def run_trio(open_calls: Callable[[trio.Nursery], None]) -> None:
            async with trio.open_nursery() as calls:
                open_calls(calls)
                await closing.wait()

        await guest.start(run_trio)
        async with capnp.kj_loop():
            try:
                async with asyncio.timeout(2 * WAIT_S):
                    return await guest.run(main)
            finally:
                guest.close_calls()
                closing.set()
                (await guest.ended).unwrap()

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(host())


def in_cluster(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of an async function that runs as `hosted` says."""

    @functools.wraps(test)
    def wrapped(**fixtures: Any) -> None:
        hosted(lambda: test(**fixtures))

    return wrapped


def keys(seed: int, count: int) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 4), np.uint64)


@dataclass
class LightNode:
    """A node that holds blocks without bytes."""

    address: str
    metas: list[str]
    secret: Secret | None = None
    epoch: int = field(default_factory=time.time_ns)
    rails: tuple[str, ...] = ()
    held: dict[bytes, list[Words]] = field(default_factory=dict)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    lent: int = 0

    def __post_init__(self) -> None:
        self.client = MetaClient(
            Identity(self.address, self.epoch, self.rails),
            [addresses.parse(meta) for meta in self.metas],
            self.secret,
            self.snapshot,
            lambda: self.lent,
        )

    def snapshot(self) -> Iterable[Part]:
        for origin, parts in self.held.items():
            for part in parts:
                yield Part(origin, part, is_held=True)

    def save(self, origin: bytes, words: Words) -> None:
        self.held.setdefault(origin, []).append(words)
        self.client.tell(Part(origin, words, is_held=True))

    def evict(self, origin: bytes, words: Words) -> None:
        gone = {row.tobytes() for row in words}
        left = [row for part in self.held[origin] for row in part if row.tobytes() not in gone]
        self.held[origin] = [np.array(left, np.uint64).reshape(-1, 4)]
        self.client.tell(Part(origin, words, is_held=False))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            await self.client.run(task_status=task_status)

    @property
    def is_announced(self) -> bool:
        """All is told to all metaservers that it knows."""
        return all(
            line.is_usable
            and line.is_complete
            and not line.adverts.is_lost
            and not line.adverts.take()
            for line in self.client.lines
        )

    async def owners(self, origin: bytes, words: Words) -> list[str]:
        """Who holds each of the leading blocks."""
        plan = await self.client.locate(origin, words)
        return [one.address for one in plan for _ in range(one.count)]

    async def plan(self, origin: bytes, words: Words) -> list[Located]:
        return await self.client.locate(origin, words)


async def until(claim: Callable[[], Any], seconds: float = WAIT_S) -> None:
    """Wait for something to become true, be it awaited or not."""
    with trio.fail_after(seconds):
        while True:
            told = claim()
            if await told if isinstance(told, Awaitable) else told:
                return
            await trio.sleep(0.02)


async def finds(node: LightNode, origin: bytes, words: Words, owners: list[str]) -> None:
    """Wait until these are the owners that are told."""

    async def same() -> bool:
        return await node.owners(origin, words) == owners

    await until(same)
