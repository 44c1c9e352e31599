"""What is fake in the simulation: processes, their memory, and how badly copies go.

Every byte an engine computes is a function of (model, rank, block hash), so any load can be
checked, whoever saved it.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.core.errors import EngineLostError
from trikv.nursery.sessions import Attachment
from trikv.tiers.copies import Copy, Process


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

    async def copy(self, transfer: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
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
            at = page
            for address, size in zip(
                pieces[block].tolist(), transfer.layout.length.tolist(), strict=True
            ):
                inside, outside = self.pool[at : at + size], process.view(address, size)
                target, source = (outside, inside) if transfer.into_engine else (inside, outside)
                target[:] = source
                at += size
                if not transfer.into_engine:
                    await trio.sleep(pause_s / 4)  # a save can be torn by an overwrite
            arrived[block] = True
        return arrived

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> None:
        """Process memory: nothing is mapped."""

    def detach(self, attachment: Attachment) -> None:
        raise AssertionError("nothing was attached")

    async def read_word(self, process: Process, address: int) -> int | None:
        assert isinstance(process, FakeProcess)
        return int(process.view(address, 8).view(np.uint64)[0]) if process.alive else None


def content(model: str, rank: int, block_hash: bytes, size: int) -> NDArray[np.uint8]:
    """What the engine computes for a block."""
    seed = hashlib.blake2b(f"{model}/{rank}/".encode() + block_hash, digest_size=32).digest()
    return np.resize(np.frombuffer(seed, np.uint8), size)
