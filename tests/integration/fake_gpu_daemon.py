"""A daemon's tasks with copiers of a fake GPU, and engines' ranks on it."""

import contextlib
import mmap
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import trio
from numpy.typing import NDArray

from tests.answers import answer_of
from tests.conftest import PATIENCE_S
from tests.integration import fake_gpu
from tests.integration.daemons import hashes
from trikv import config
from trikv.core.banks import WHOLE, Parts
from trikv.core.calls import (
    Declare,
    GpuMemory,
    GroupPieces,
    Load,
    Query,
    Register,
    Save,
    Signals,
)
from trikv.core.layout import Piece, Range
from trikv.core.words import InstanceName, LeaseId, RequestId
from trikv.nursery.choices import slab_bytes_for
from trikv.nursery.copier import Copier
from trikv.nursery.copiers import PoolPlace
from trikv.nursery.keeping import Opened
from trikv.nursery.serve import Daemon, build, run_trio
from trikv.nursery.sessions import Session
from trikv.tiers.hostmem import HeldProcess
from trikv.tiers.pool import Pool, open_pool
from trikv.wire import ALLOCATION_BYTES_MAX, hashes_to_words

UUID = bytes(range(16))
BLOCKS = 64
PAGE = 4096


def memfd(size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd, mmap.mmap(fd, size)


@dataclass
class Gpu:
    """One "GPU" with its control, and the daemon's way to start copiers for it."""

    control_fd: int
    control: mmap.mmap

    def command(self, uuid: str, pool: PoolPlace, sockets: Sequence[int]) -> Sequence[str]:
        assert uuid == UUID.hex()
        named = {
            "pool-fd": pool.fd,
            "pool-bytes": pool.bytes,
            "parent": os.getpid(),
            "control-pid": os.getpid(),
            "control-fd": self.control_fd,
        }
        flags = [f"--{name}={value}" for name, value in named.items()]
        tail = ["--sockets", *map(str, sockets)]
        return [sys.executable, "-m", "tests.integration.fake_gpu", *flags, *tail]


@dataclass
class Rank:
    """A rank of an engine, the only one unless said otherwise, whose blocks lie in one memfd."""

    daemon: Daemon
    name: str = "engine"
    pieces: tuple[Piece, ...] = (Piece(0, 0, PAGE, PAGE),)
    blocks: int = BLOCKS
    word_count: int = 0
    number: int = 0
    ranks: int = 1
    replicas: int = 1
    sections: tuple[int, ...] = ()
    session: Session = field(init=False)
    memory: NDArray[np.uint8] = field(init=False)
    events: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        end = max(p.offset + (self.blocks - 1) * p.stride + p.bytes for p in self.pieces)
        self.fd, mapped = memfd(end)
        self.memory = np.frombuffer(mapped, np.uint8)
        self.event_fd, self.events = memfd(8)
        self.word_fd, self.word_memory = memfd(max(4, 4 * self.word_count))
        self.page_bytes = sum(one.bytes for one in self.pieces)

    async def attach(self) -> tuple[int, ...]:
        service = self.daemon.service
        self.session = service.hello(HeldProcess(os.getpid()), "test")
        name = InstanceName(self.name)
        if self.number == 0:
            await service.declare(self.session, Declare(name, self.ranks, (("model", "m"),)))
        return await self.register()

    async def register(self) -> tuple[int, ...]:
        name = InstanceName(self.name)
        events = tuple(fake_gpu.handle(self.event_fd, at) for at in range(8))
        handles = (fake_gpu.handle(self.fd), fake_gpu.handle(self.word_fd))
        signals = Signals(1, 0, self.word_count) if self.word_count else None
        gpu = GpuMemory(UUID, handles, events, signals)
        call = Register(
            name,
            self.number,
            (
                Range(ALLOCATION_BYTES_MAX, len(self.memory)),
                Range(2 * ALLOCATION_BYTES_MAX, len(self.word_memory)),
            ),
            (GroupPieces(self.blocks, self.pieces, "bytes", self.replicas, self.sections),),
            0,
            0,
            gpu,
        )
        return (await self.daemon.service.register(self.session, call)).writers

    def words(self) -> list[int]:
        raw: list[int] = np.frombuffer(self.word_memory, np.uint32)[: self.word_count].tolist()
        return raw

    def block(self, number: int) -> bytes:
        parts = (p.offset + number * p.stride for p in self.pieces)
        sizes = (p.bytes for p in self.pieces)
        return b"".join(
            self.memory[at : at + n].tobytes() for at, n in zip(parts, sizes, strict=True)
        )

    async def save(
        self,
        names: Sequence[object],
        blocks: Sequence[int],
        event: int = 0,
        first: int = 0,
        shown: tuple[int, int] = (0, 0),
    ) -> int:
        words = hashes_to_words(hashes(*names), 32)
        ids = np.array(blocks, np.int32)
        call = Save(self.number, 0, RequestId("r"), first, words, ids, 0, 0, event, *shown)
        save = partial(self.daemon.service.save, self.session, call)
        return (await answer_of(save)).saved_count

    def query(
        self, names: Sequence[object], request: str = "q", *, is_alone: bool = False
    ) -> tuple[int, int]:
        """How many are there, and the lease; its load is announced, as a connection does it."""
        words = hashes_to_words(hashes(*names), 32)
        call = Query(RequestId(request), 0, words, is_alone=is_alone)
        answer = self.daemon.service.query(self.session, call)
        if is_alone:
            self.daemon.service.expect_load(self.session, call, answer)
        return answer.hit_count, answer.lease

    async def load(
        self,
        names: Sequence[object],
        blocks: Sequence[int],
        budget_s: float = 0,
        request: str = "q",
    ) -> list[int]:
        """Positions that did not arrive."""
        hits, lease = self.query(names, request)
        assert hits == len(names)
        return await self.load_leased(lease, blocks, budget_s)

    async def load_leased(
        self, lease: int, blocks: Sequence[int], budget_s: float = 0, first: int = 0
    ) -> list[int]:
        """Likewise."""
        ids = np.array(blocks, np.int32)
        call = Load(self.number, LeaseId(lease), first, ids, budget_s)
        return (await self.ask(call)).tolist()

    async def ask(self, call: Load) -> NDArray[np.int32]:
        """What a load is answered with."""
        return await answer_of(partial(self.daemon.service.load, self.session, call))


@contextlib.asynccontextmanager
async def running(
    gpu: Gpu, pool_bytes: int = 8 << 20, parts: Parts = WHOLE
) -> AsyncIterator[Daemon]:
    """The daemon's tasks with copiers for the fake GPU; at the end nothing may be left."""
    flags = ["--pool-size", str(pool_bytes), "--slab-size", "1mb", "--drain-seconds", "0"]
    pool: Pool = open_pool(pool_bytes, use_hugepages=False, spread=lambda *_: parts)
    settings = config.load(flags, {})
    daemon = build(settings, Opened(pool, slab_bytes_for(pool.bytes, settings.slab_size)), None)
    daemon.facts.copiers.refusal = ""
    daemon.facts.copiers.command = gpu.command
    closing = trio.Event()
    try:
        async with trio.open_nursery() as nursery:
            opened = trio.Event()
            nursery.start_soon(run_trio, daemon, closing, lambda _: opened.set())
            await opened.wait()
            try:
                yield daemon
            finally:
                gpu.control[fake_gpu.HANG] = 0
                pids = [one.pid for one in daemon.facts.copiers.by_gpu.values()]
                closing.set()
        assert not [pid for pid in pids if exists(pid)]
    finally:
        pool.close()


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def copier(daemon: Daemon) -> Copier:
    return daemon.facts.copiers.by_gpu[UUID.hex()]


def maps(pid: int) -> set[str]:
    """Inodes of what a process has mapped; a short one may stand in an address as well."""
    return {line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}


async def until(check: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    with trio.fail_after(limit_s):
        while not check():  # noqa: ASYNC110  # of other processes' doings
            await trio.sleep(0.005)


def fill(rank: Rank, seed: int = 0) -> None:
    rank.memory[:] = np.random.default_rng(seed).integers(0, 256, len(rank.memory), np.uint8)
