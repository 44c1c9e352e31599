"""The engines of the simulation: they ask, load, check, compute, save, and die."""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from tests.answers import answer_of
from tests.sim.fakes import GPU_BASE, FakeProcess, content
from trikv.core.calls import Declare, GpuMemory, GroupPieces, Load, Query, Register, Save
from trikv.core.errors import EngineLostError, KvError, NotReadyError
from trikv.core.layout import Piece, Range
from trikv.core.words import InstanceName, LeaseId, RequestId
from trikv.nursery.sessions import Session

PIECE_BYTES = 64
FENCES = 8
MARKER = 0xEE
LIFE_S = 3_600.0
"""Virtual seconds that no engine's life may take; 500 were seen, most of them in stalled copies."""


@dataclass(slots=True)
class Report:
    """What a world came to."""

    loads: int = 0
    loads_wrong: int = 0
    blocks_loaded: int = 0
    blocks_failed: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    deaths: int = 0
    registered_again: int = 0
    late_writes: int = 0
    waited_longest_s: float = 0.0
    from_disk: int = 0
    quarantined_bytes: int = 0
    trace: list[tuple[float, str]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)


class FakeEngine:
    """One engine: asks, loads, checks, computes, saves; sometimes dies and comes back."""

    def __init__(self, world: Any, number: int, model: str, ranks: int, pieces: int) -> None:  # noqa: ANN401  # it knows us
        self.world = world
        self.number = number
        self.model = model
        self.ranks = ranks
        self.pieces = pieces
        self.block_count = 48
        self.is_on_gpu = world.rng.random() < 0.5
        self.generation = 0
        self.requests = 0

    # -- life

    async def live(self, requests: int) -> None:
        rng, faults = self.world.rng, self.world.faults
        await self.attach()
        for _ in range(requests):
            try:
                await self.request()
            except KvError as error:
                self.world.note(error.code)
                if self.session().is_closing:
                    await self.attach()
            await self.register_again()
            if rng.random() < faults.silence_p:
                await trio.sleep(30)
                await self.attach()
            if rng.random() < faults.engine_death_p:
                self.die()
                await trio.sleep(rng.random() * 2)
                await self.attach()
            await trio.sleep(rng.random() * 0.1)
        self.die()

    def die(self) -> None:
        self.world.report.deaths += 1
        for process in self.processes:
            process.alive = False

    def session(self) -> Session:
        return self.sessions[-1]

    async def attach(self) -> None:
        """Processes, sessions and registrations from nothing; the scheduler's session is last."""
        self.generation += 1
        service, layer_bytes = self.world.service, self.block_count * PIECE_BYTES
        arena = self.pieces * layer_bytes + 8 * FENCES
        self.name = InstanceName(f"engine-{self.number}-{self.generation}")
        self.processes = [FakeProcess(self.world.next_pid(), arena) for _ in range(self.ranks + 1)]
        self.sessions = [service.hello(process, "fake") for process in self.processes]
        self.live_tasks = trio.CancelScope()
        self.world.nursery.start_soon(self.beat, self.live_tasks, self.sessions)
        fields = (("model", self.model), ("m", self.model))
        await service.declare(self.sessions[-1], Declare(self.name, self.ranks, fields))
        for rank in range(self.ranks):
            await self.register(rank)

    async def register(self, rank: int) -> None:
        """Offer a rank's memory, again while its GPU's copier is away."""
        layer_bytes, process = self.block_count * PIECE_BYTES, self.processes[rank]
        pieces = tuple(
            Piece(0, layer * layer_bytes, PIECE_BYTES, PIECE_BYTES) for layer in range(self.pieces)
        )
        gpu = GpuMemory(bytes(16), (bytes(64),), ()) if self.is_on_gpu else None
        call = Register(
            self.name,
            rank,
            (Range(GPU_BASE if gpu is not None else process.base, len(process.arena)),),
            (GroupPieces(self.block_count, pieces, "bytes"),),
            process.base + self.pieces * layer_bytes,
            FENCES,
            gpu,
        )
        for _ in range(60):
            try:
                await self.world.service.register(self.sessions[rank], call)
            except NotReadyError:
                await trio.sleep(0.5)
            else:
                return

    async def register_again(self) -> None:
        """Ranks whose session has ended, their process being alive: its GPU's copier died."""
        for rank, process in enumerate(self.processes[:-1]):
            if self.sessions[rank].is_closing and process.alive:
                self.sessions[rank] = self.world.service.hello(process, "fake")
                with suppress(KvError):
                    await self.register(rank)
                    self.world.report.registered_again += 1

    async def beat(self, scope: trio.CancelScope, sessions: list[Session]) -> None:
        with scope:
            while True:
                await trio.sleep(2)
                if not any(process.alive for process in self.processes):
                    return
                for session in sessions:
                    with suppress(KvError):
                        self.world.service.heartbeat(session)

    # -- one request

    async def request(self) -> None:
        world, rng = self.world, self.world.rng
        self.requests += 1
        request = RequestId(f"r{self.requests}")
        hashes = world.prompt(self.model)
        words = np.frombuffer(b"".join(hashes), "<u8").reshape(-1, 4)
        answer = world.service.query(self.session(), Query(request, 0, words))
        if answer.coming_count:
            begin_s, call = trio.current_time(), Query(request, 0, words, wait_s=2.0)
            answer = await world.service.query_late(self.session(), call)
            world.report.waited_longest_s = max(
                world.report.waited_longest_s, trio.current_time() - begin_s
            )
        if rng.random() < 0.2:  # asked again before it is loaded
            await trio.sleep(rng.choice([0.01, 5.0]))
            answer = world.service.query(self.session(), Query(request, 0, words))
        if answer.lease and rng.random() < 0.5:
            call = Query(request, 0, words, is_alone=rng.random() < 0.8)
            world.service.expect_load(self.session(), call, answer)
            await trio.sleep(rng.choice([0, 0.01, 5.0]))
        blocks = np.array(rng.sample(range(self.block_count), len(hashes)), np.int32)
        done = 0
        if answer.hit_count:
            done = await self.load(answer.lease, answer.hit_count, blocks, hashes)
        for at in range(done, len(hashes)):
            for rank in range(self.ranks):
                self.write(rank, blocks[at], content(self.model, rank, hashes[at], self.page_bytes))
        cuts = sorted({done, len(hashes), *(rng.randint(done, len(hashes)) for _ in range(2))})
        for first, last in pairwise(cuts):
            await self.save(request, first, words[first:last], blocks[first:last])
        if rng.random() >= world.faults.abandon_p:
            world.service.release(self.session(), [request])

    async def load(
        self, lease: int, count: int, blocks: NDArray[np.int32], hashes: list[bytes]
    ) -> int:
        world = self.world
        first = world.rng.randint(0, count - 1) if world.rng.random() < 0.3 else 0
        wanted = blocks[first:count]
        good = np.ones(count - first, np.bool_)
        results: list[NDArray[np.int32] | None] = [None] * self.ranks

        async def one(rank: int) -> None:
            if world.rng.random() < world.faults.rank_lazy_p:
                return
            call = Load(rank, LeaseId(lease), first, wanted, world.rng.choice([0.0, 1.0]))
            try:
                results[rank] = await answer_of(
                    partial(world.service.load, self.sessions[rank], call)
                )
            except KvError as error:
                world.note(error.code)

        async with trio.open_nursery() as nursery:
            for rank in range(self.ranks):
                nursery.start_soon(one, rank)
        for rank, failed in enumerate(results):
            if failed is None:
                good[:] = False
                continue
            good[failed] = False
            world.report.blocks_failed += len(failed)
            for at in set(range(len(wanted))) - set(failed.tolist()):
                world.report.loads += 1
                expected = content(self.model, rank, hashes[first + at], self.page_bytes)
                if not np.array_equal(self.read(rank, wanted[at]), expected):
                    world.report.loads_wrong += 1
        await self.reuse(wanted, results)
        prefix = int(np.argmin(good)) if not good.all() else len(good)
        world.report.blocks_loaded += prefix
        return first + prefix if first == 0 else 0

    async def reuse(
        self, blocks: NDArray[np.int32], results: list[NDArray[np.int32] | None]
    ) -> None:
        """The engine may use blocks that did not arrive at once: nothing is written there later."""
        failed = [
            (rank, block)
            for rank, which in enumerate(results)
            for block in (blocks if which is None else blocks[which])
        ]
        marker = np.full(self.page_bytes, MARKER, np.uint8)
        for rank, block in failed:
            self.write(rank, block, marker)
        if failed:
            await trio.sleep(self.world.rng.random())
        for rank, block in failed:
            self.world.report.late_writes += not np.array_equal(self.read(rank, block), marker)

    async def save(
        self, request: RequestId, first: int, words: NDArray[np.uint64], blocks: NDArray[np.int32]
    ) -> None:
        world = self.world
        is_preempted = world.rng.random() < world.faults.preempt_p

        async def one(rank: int) -> None:
            if world.rng.random() < world.faults.rank_lazy_p:
                return
            fence = world.rng.randrange(FENCES)
            generation = int(self.fence(rank)[fence])
            call = Save(rank, 0, request, first, words, blocks, fence, generation)
            try:
                await answer_of(partial(world.service.save, self.sessions[rank], call))
            except KvError as error:
                world.note(error.code)

        async with trio.open_nursery() as nursery:
            for rank in range(self.ranks):
                nursery.start_soon(one, rank)
            if is_preempted:
                await trio.sleep(world.rng.random() * 0.02)
                for rank in range(self.ranks):
                    self.fence(rank)[:] += 1
                    for block in blocks:
                        self.write(rank, block, np.full(self.page_bytes, MARKER, np.uint8))
        if is_preempted:
            raise EngineLostError("preempted")  # the rest of this request is not computed

    # -- memory

    @property
    def page_bytes(self) -> int:
        return self.pieces * PIECE_BYTES

    def fence(self, rank: int) -> NDArray[np.uint64]:
        return self.processes[rank].arena[-8 * FENCES :].view(np.uint64)

    def pieces_of(self, rank: int, block: int) -> list[NDArray[np.uint8]]:
        layer_bytes = self.block_count * PIECE_BYTES
        starts = [layer * layer_bytes + int(block) * PIECE_BYTES for layer in range(self.pieces)]
        return [self.processes[rank].arena[start : start + PIECE_BYTES] for start in starts]

    def write(self, rank: int, block: int, page: NDArray[np.uint8]) -> None:
        for number, piece in enumerate(self.pieces_of(rank, block)):
            piece[:] = page[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]

    def read(self, rank: int, block: int) -> NDArray[np.uint8]:
        return np.concatenate(self.pieces_of(rank, block))
