"""An owner's and a reader's pool in one process, and fetches between them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.chunks import Runs
from trikv.tiers.peer import Fetch, Outcome

MIB = 1 << 20
SLOTS_MAX = 1 << 16
PATIENCE_S = 60
LATER_S = 200.0  # than any fetch here may take
MARK = 0xA5
"""What landing pages hold before anything has come."""


@dataclass(eq=False)
class Memory:
    """A pool without a mapping of its own."""

    memory: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


@functools.cache
def noise(size: int) -> NDArray[np.uint8]:
    """Bytes of which no two blocks are the same, and none is `MARK` or the one after."""
    return np.frombuffer(np.random.default_rng(7).bytes(size), np.uint8) & 0x7F


def owner_pool(size: int = 32 * MIB) -> Memory:
    return Memory(noise(size).copy())


def landing_pool(size: int = 32 * MIB) -> Memory:
    return Memory(np.full(size, MARK, np.uint8))


def rows(pool: Memory, *runs: tuple[int, int, int]) -> Runs:
    """Runs (offset at the owner, offset here, bytes)."""
    places = np.array(runs, np.int64).reshape(-1, 3)
    places[:, 1] += pool.address
    return places


def shuffled(pool: Memory, *, count: int, size: int) -> Runs:
    """As many runs as fit, at the owner and here in different orders."""
    return runs_of(pool, count, size)


def runs_of(pool: Memory, count: int, size: int) -> Runs:
    """Runs of a churned pool: no neighbours here are neighbours there."""
    rng = np.random.default_rng(11)
    slots = min(len(pool.memory) // size, SLOTS_MAX)
    far, near = (rng.permutation(slots)[:count] * size for _ in range(2))
    return np.column_stack((far, near + pool.address, np.full(len(far), size)))


def is_right(runs: Runs, source: NDArray[np.uint8], pool: Memory) -> bool:
    places = [(a, b - pool.address, n) for a, b, n in runs.tolist()]
    return all((source[a : a + n] == pool.memory[b : b + n]).all() for a, b, n in places)


def fetch_of(runs: Runs, token: bytes = b"", *, seconds: float = 120) -> Fetch:
    return Fetch(runs, trio.current_time() + seconds, token)


def arrived_right(fetch: Fetch, owner: Memory, pool: Memory) -> list[bool]:
    """Whether the bytes of each run are the owner's."""
    return [
        bool((owner.memory[a : a + n] == here(pool, b, n)).all()) for a, b, n in fetch.runs.tolist()
    ]


def is_untouched(fetch: Fetch, pool: Memory) -> bool:
    return all((here(pool, b, n) == MARK).all() for _, b, n in fetch.runs.tolist())


def here(pool: Memory, address: int, size: int) -> NDArray[np.uint8]:
    at = address - pool.address
    return pool.memory[at : at + size]


async def condition(is_met: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not is_met():  # noqa: ASYNC110  # a thread of the double tells nobody
            await trio.sleep(0.005)


def check(fetch: Fetch, source: Memory, pool: Memory, *, all_arrived: bool = True) -> None:
    arrived = fetch.outcome == Outcome.ARRIVED
    assert arrived.all() or not all_arrived
    assert np.array(arrived_right(fetch, source, pool))[arrived].all()
