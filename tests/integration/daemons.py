"""Starting a real daemon, and an engine's half of the wire for tests: pycapnp and numpy only."""

import asyncio
import contextlib
import contextvars
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import capnp
import numpy as np

from tests.conftest import PATIENCE_S, Start
from trikv import wire

UNTIMED = (
    *("--heartbeat-seconds", "600"),
    *("--lease-seconds", "600"),
    *("--fill-seconds", "600"),
)
"""Nothing ends because its time is over: what a test waits for comes of what was done."""
IS_INSIDE = contextvars.ContextVar("a kj loop runs here", default=False)


@dataclass(slots=True)
class RunningDaemon:
    process: subprocess.Popen[str]
    path: Path
    log: Path

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def events(self) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


def daemon_command(*arguments: str, before: str = "") -> list[str]:
    """The command of a daemon; `before` is Python that its process runs first."""
    if before:
        program = f"{before}\nfrom trikv.nursery import serve\nserve.main()"
        return [sys.executable, "-c", program, *arguments]
    return [sys.executable, "-m", "trikv.nursery.serve", *arguments]


def start_daemon(
    start: Start,
    folder: Path,
    *arguments: str,
    before: str = "",
    within: tuple[str, ...] = (),
    **environ: str,
) -> RunningDaemon:
    """Start a daemon on a private socket and wait for its ready line.

    `within` is a command that runs another one, such as `ip netns exec`.
    """
    path, log = folder / "run" / "trikv.sock", folder / f"daemon-{time.monotonic_ns()}.log"
    given = arguments if "--addr" in arguments else ("--addr", f"unix:{path}", *arguments)
    if "--http-addr" not in given:  # one port of the host, and many daemons
        given = (*given, "--http-addr", "off")
    if "--pool-size" not in given:
        given = (*given, "--pool-size", "64mb")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIKV_")}
    with log.open("w") as stderr:
        command = [*within, *daemon_command(*given, before=before)]
        process = start(command, stderr=stderr, env=clean | environ)
    deadline_s = time.monotonic() + PATIENCE_S
    while '"daemon.ready"' not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.02)
    return RunningDaemon(process, path, log)


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """The bootstrap capability at an address."""
    async with contextlib.nullcontext() if IS_INSIDE.get() else capnp.kj_loop():
        token = IS_INSIDE.set(True)
        if address.startswith("unix:"):
            stream = await capnp.AsyncIoStream.create_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            stream = await capnp.AsyncIoStream.create_connection(host, int(port))
        client = capnp.TwoPartyClient(stream)
        try:
            yield client.bootstrap().cast_as(wire.SCHEMA.Kv)
        finally:
            stream.close()
            client.close()
            IS_INSIDE.reset(token)


def spawn(start: Start, daemon: RunningDaemon, command: str) -> subprocess.Popen[str]:
    return start(
        [sys.executable, "-m", "tests.integration.engine_process", daemon.address, command],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )


def hashes(*names: object) -> bytes:
    """One made-up 32-byte hash a name."""
    return b"".join(hashlib.sha256(str(name).encode()).digest() for name in names)


@dataclass(slots=True)
class Engine:
    """A one-process engine with `ranks` ranks whose blocks are numpy rows of this process."""

    session: Any
    name: str = "engine"
    ranks: int = 1
    replicas: int = 1
    block_count: int = 64
    page_bytes: int = 8192
    fields: dict[str, str] = field(default_factory=lambda: {"model": "m"})
    memory: list[np.ndarray] = field(default_factory=list)
    fences: np.ndarray = field(default_factory=lambda: np.zeros(4, np.uint64))

    async def attach(self) -> Any:
        for rank in range(self.ranks):
            self.memory.append(np.zeros((self.block_count, self.page_bytes), np.uint8))
            wire_ok(await self.register(rank))
        return wire_ok(await self.declare())

    async def declare(self) -> Any:
        fields = [{"name": name, "value": value} for name, value in self.fields.items()]
        instance = {"name": self.name, "rankCount": self.ranks, "fields": fields}
        return (await self.session.declare(instance)).reply

    async def register(self, rank: int, **changes: Any) -> Any:
        memory = self.memory[rank]
        process = {"address": memory.ctypes.data, "bytes": memory.nbytes}
        half = self.page_bytes // 2
        pieces = [
            {"memory": 0, "offset": at, "stride": self.page_bytes, "bytes": half}
            for at in (0, half)
        ]
        group = {"blockCount": self.block_count, "pieces": pieces, "layout": "bytes"}
        group["replicas"] = self.replicas
        message = {
            "instance": self.name,
            "rank": rank,
            "memories": [{"process": process}],
            "groups": [group],
            "fences": {"address": self.fences.ctypes.data, "count": len(self.fences)},
        }
        return (await self.session.register(message | changes)).reply

    async def query(self, blob: bytes, request: str = "r") -> Any:
        message = {"request": request, "hashBytes": 32, "hashes": blob}
        return (await self.session.query(message)).reply

    async def save(self, blob: bytes, blocks: list[int], rank: int = 0, **changes: Any) -> Any:
        message = {
            "rank": rank,
            "request": "r",
            "hashBytes": 32,
            "hashes": blob,
            "blocks": np.array(blocks, "<i4").tobytes(),
        }
        return (await self.session.save(message | changes)).reply

    async def load(
        self, lease: int, blocks: list[int], rank: int = 0, first: int = 0, **changes: Any
    ) -> Any:
        message = {
            "rank": rank,
            "lease": lease,
            "first": first,
            "blocks": np.array(blocks, "<i4").tobytes(),
        }
        return (await self.session.load(message | changes)).reply


def wire_ok(reply: Any) -> Any:
    assert reply.which() == "ok", (reply.error.code, reply.error.message)
    return reply.ok


def wire_code(reply: Any) -> str:
    assert reply.which() == "error"
    return str(reply.error.code)


def fill(engine: Engine, rank: int = 0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + rank)
    engine.memory[rank][:] = rng.integers(0, 256, engine.memory[rank].shape, np.uint8)
    return engine.memory[rank].copy()


def failed(reply: Any) -> list[int]:
    return np.frombuffer(wire_ok(reply).failed, "<i4").tolist()


async def hello(kv: Any, protocol: int = wire.PROTOCOL) -> Any:
    return (await kv.hello({"protocol": protocol, "software": "test"})).reply


@contextlib.asynccontextmanager
async def attached(address: str, **options: Any) -> AsyncIterator[Engine]:
    """A ready engine."""
    async with connected(address) as kv:
        engine = Engine(wire_ok(await hello(kv)).session, **options)
        await engine.attach()
        yield engine


async def status(address: str) -> dict[str, Any]:
    async with connected(address) as kv:
        facts: dict[str, Any] = (await kv.status()).status.to_dict()
        facts["counters"] = {row["name"]: row["value"] for row in facts["counters"]}
        return facts


async def wait_for(address: str, what: Any, seconds: float = PATIENCE_S) -> dict[str, Any]:
    """Ask for the status until `what(status)` holds."""
    async with asyncio.timeout(seconds):
        while not what(facts := await status(address)):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.02)
    return facts
