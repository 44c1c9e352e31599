"""What is fake in the simulation: processes, their memory, and how badly copies go.

Every byte an engine computes is a function of (model, rank, block hash), so any load can be
checked, whoever saved it.
"""

import hashlib
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.core.errors import EngineLostError, NotReadyError
from trikv.core.layout import Place
from trikv.nursery.sessions import Attachment
from trikv.tiers.copies import Copy, Process

PAGE_BYTES_MAX = 1 << 16
GPU_BASE = 1 << 40  # where a rank's GPU memory begins, as it is registered


@dataclass(frozen=True, slots=True)
class Faults:
    """How bad the world is."""

    copy_s_mean: float = 0.01
    copy_stall_p: float = 0.0  # a block's copy takes a minute
    copy_fail_p: float = 0.0  # the engine's memory is gone half-way
    engine_death_p: float = 0.0  # a request at whose end the engine is killed
    silence_p: float = 0.0  # a request during which the engine freezes past its heartbeat
    preempt_p: float = 0.0  # blocks are overwritten while their save runs, fence raised
    rank_lazy_p: float = 0.0  # a rank does not save, or does not load
    abandon_p: float = 0.0  # a request ends without release
    copier_death_p: float = 0.0  # a copy during which the GPU's copier begins to die
    copier_hang_p: float = 0.0  # a copy during which it stands still, until it is killed


class FakeProcess:
    """An engine's process: an arena of bytes at made-up addresses."""

    def __init__(self, pid: int, arena_bytes: int) -> None:
        self.pid = pid
        self.base = 1 << 32 | pid << 24
        self.arena = np.zeros(arena_bytes, np.uint8)
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def close(self) -> None:
        """Nothing holds it."""

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        start = address - self.base
        assert 0 <= start <= len(self.arena) - size, "the daemon left the registered memory"
        return self.arena[start : start + size]


class FakeMemory:
    """Copies block by block with pauses, so that everything else happens in between."""

    def __init__(self, pool_bytes: int, rng: random.Random, faults: Faults) -> None:
        self.pool = np.zeros(pool_bytes, np.uint8)
        self.rng = rng
        self.faults = faults

        self.copiers = FakeCopiers(rng, faults)

    def begin(
        self,
        transfer: Copy,
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> bool:
        if transfer.layout.place is None:
            return False
        self.copiers.begin(transfer, self.pool, is_stopped, ended)
        return True

    async def copy(self, transfer: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        assert transfer.layout.place is None
        arrived = np.zeros(len(transfer.blocks), np.bool_)
        process = transfer.process
        assert isinstance(process, FakeProcess)
        pieces = transfer.layout.addresses(transfer.blocks)
        for block, page in enumerate(transfer.offsets.tolist()):
            pause_s = self.rng.expovariate(1 / self.faults.copy_s_mean)
            if self.rng.random() < self.faults.copy_stall_p:
                pause_s += 60
            await trio.sleep(pause_s)
            if is_stopped():
                break
            if not process.alive:
                raise EngineLostError("gone")
            if self.rng.random() < self.faults.copy_fail_p:
                break
            await move(transfer, pieces[block].tolist(), self.pool, page, pause_s / 4)
            arrived[block] = True
        return arrived

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment | None:
        return None if call.gpu is None else await self.copiers.attach(on_lost)

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        del attachment, into_engine

    def bring(self, place: Place, lease: int, offsets: NDArray[np.int64]) -> None:
        """Read some of the pages now; the load of this lease will have them as they are."""
        some = self.rng.sample(offsets.tolist(), self.rng.randint(0, len(offsets)))
        pages = {at: self.pool[at : at + PAGE_BYTES_MAX].copy() for at in some}
        self.copiers.ahead[place.attachment] = (lease, pages)

    def detach(self, attachment: Attachment) -> None:
        self.copiers.detach(attachment)

    def read_word(self, process: Process, address: int) -> int | None:
        assert isinstance(process, FakeProcess)
        return int(process.view(address, 8).view(np.uint64)[0]) if process.alive else None


async def move(
    transfer: Copy, addresses: list[int], pool: NDArray[np.uint8], page: int, pause_s: float
) -> None:
    """One block; a save can be torn by an overwrite."""
    process = transfer.process
    assert isinstance(process, FakeProcess)
    for address, size in zip(addresses, transfer.layout.length.tolist(), strict=True):
        inside, outside = pool[page : page + size], process.view(address, size)
        target, source = (outside, inside) if transfer.into_engine else (inside, outside)
        target[:] = source
        page += size
        if not transfer.into_engine:
            await trio.sleep(pause_s)


class FakeCopiers:
    """One GPU's copier after the other: it maps late, hangs, and goes on moving while it dies.

    Its promise is the real one's: a copy ends, and its ranks are told, when it is dead.
    """

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.rng, self.faults = rng, faults
        self.nursery: trio.Nursery
        self.mapped: dict[int, Callable[[str], None]] = {}
        self.copies: dict[int, int] = {}  # by attachment, until it is detached
        self.ahead: dict[int, tuple[int, dict[int, NDArray[np.uint8]]]] = {}
        self.is_dying = False
        self.under_way: list[trio.CancelScope] = []
        self.back_s = 0.0
        self.deaths = 0
        self._numbers = itertools.count(1)

    async def attach(self, on_lost: Callable[[str], None]) -> Attachment:
        if self.is_dying or trio.current_time() < self.back_s:
            raise NotReadyError("the copier has ended")
        deaths = self.deaths
        await trio.sleep(self.rng.expovariate(1 / self.faults.copy_s_mean) * 10)
        if self.deaths > deaths:
            raise NotReadyError("the copier has ended")
        number = next(self._numbers)
        self.mapped[number], self.copies[number] = on_lost, 0
        return Attachment(number, 0, 1)

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        del attachment, into_engine

    def detach(self, attachment: Attachment) -> None:
        assert self.copies.pop(attachment.number) == 0, "unmapped under a copy"
        self.mapped.pop(attachment.number, None)

    def begin(
        self,
        transfer: Copy,
        pool: NDArray[np.uint8],
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        assert transfer.layout.place is not None
        number = transfer.layout.place.attachment
        assert number in self.copies, "a copy of memory that is not mapped"
        if number not in self.mapped:
            raise EngineLostError("the copier has ended")
        if is_stopped():
            ended(np.zeros(len(transfer.blocks), np.bool_))
            return
        self.copies[number] += 1
        self.nursery.start_soon(self._carry_out, number, transfer, pool, is_stopped, ended)

    async def _carry_out(
        self,
        number: int,
        transfer: Copy,
        pool: NDArray[np.uint8],
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        arrived = np.zeros(len(transfer.blocks), np.bool_)
        # Shielded: its process goes on while the daemon's tasks end.
        with trio.CancelScope(shield=True), trio.CancelScope() as scope:
            self.under_way.append(scope)
            arrived = await self._move(transfer, pool, is_stopped)
        self.under_way.remove(scope)
        self.copies[number] -= 1
        ended(arrived)

    async def _move(
        self, transfer: Copy, pool: NDArray[np.uint8], is_stopped: Callable[[], bool]
    ) -> NDArray[np.bool_]:
        process, faults = transfer.process, self.faults
        assert isinstance(process, FakeProcess)
        arrived = np.zeros(len(transfer.blocks), np.bool_)
        if self.rng.random() < faults.copier_death_p:
            self.nursery.start_soon(self.die, self.rng.random() * 3)
        pieces = transfer.layout.addresses(transfer.blocks) - np.uint64(GPU_BASE - process.base)
        assert transfer.layout.place is not None
        ahead = self.ahead.pop(transfer.layout.place.attachment, (0, {}))
        brought = ahead[1] if transfer.into_engine and ahead[0] == transfer.lease else {}
        for block, page in enumerate(transfer.offsets.tolist()):
            pause_s = self.rng.expovariate(1 / faults.copy_s_mean)
            if self.rng.random() < faults.copier_hang_p:
                self.nursery.start_soon(self.die, 10.0)
                pause_s = 11.0
            if is_stopped():
                break
            await trio.sleep(pause_s)  # a chunk that has begun is not stopped
            source, at = (brought[page], 0) if page in brought else (pool, page)
            await move(transfer, pieces[block].tolist(), source, at, pause_s / 4)
            arrived[block] = True
        return arrived

    async def die(self, after_s: float) -> None:
        if self.is_dying:
            return
        self.is_dying = True
        await trio.sleep(after_s)
        self.is_dying = False
        self.deaths += 1
        self.back_s = trio.current_time() + 1
        for scope in self.under_way:
            scope.cancel()
        mapped, self.mapped = self.mapped, {}
        for on_lost in mapped.values():
            on_lost("the copier has ended")


def content(model: str, rank: int, block_hash: bytes, size: int) -> NDArray[np.uint8]:
    """What the engine computes for a block."""
    seed = hashlib.blake2b(f"{model}/{rank}/".encode() + block_hash, digest_size=32).digest()
    return np.resize(np.frombuffer(seed, np.uint8), size)
