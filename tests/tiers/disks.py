"""Blocks for tests of disks: what is written, and what came back."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.disklayout import layout_for
from trikv.core.slots import Reads, Writes
from trikv.tiers.runs import Memory
from trikv.tiers.ssd import Disk

REGION_BYTES = 2 << 20
CAPACITY = 8 << 20
PAGE = (65536,)
ORIGIN = bytes(range(32))
LAYOUT = layout_for(CAPACITY, REGION_BYTES)
_FIRST = np.array([0])
HEADERS_AT = int(LAYOUT.headers_at(_FIRST).item())
RECORDS_AT = int(LAYOUT.records_at(_FIRST).item())
REGIONS_AT = int(LAYOUT.regions_at(_FIRST).item())


@dataclass
class Batch:
    """Blocks of one rank in consecutive slots of one region, and their bytes."""

    writes: Writes
    memory: Memory
    bytes: NDArray[np.uint8]

    def reads(self) -> Reads:
        writes = self.writes
        places = writes.regions, writes.positions, writes.addresses, writes.lengths
        return Reads(*places, writes.sums)

    async def read(self, disk: Disk) -> list[bool]:
        """Which blocks come back; those that do are what was written."""
        self.memory.bytes[:] = 0
        right = await disk.read(self.reads())
        size = self.writes.lengths[0]
        there = self.memory.bytes.reshape(-1, size)[right]
        assert np.array_equal(there, self.bytes.reshape(-1, size)[right])
        return [bool(one) for one in right]


def batch(disk: Disk, count: int = 8, *, region: int = 0, first: int = 0, seed: int = 1) -> Batch:
    """Blocks of random bytes."""
    rng = np.random.default_rng(seed)
    memory = Memory(count * PAGE[0])
    memory.bytes[:] = rng.integers(0, 256, len(memory.bytes), np.uint8)
    addresses = memory.address + np.arange(count, dtype=np.uint64)[:, None] * np.uint64(PAGE[0])
    writes = Writes(
        np.full(count, region),
        first + np.arange(count),
        addresses.astype(np.uint64),
        PAGE,
        np.frombuffer(ORIGIN * count, np.uint8).reshape(count, 32),
        rng.integers(0, 1 << 63, (count, 4)).astype(np.uint64),
        np.arange(count, dtype=np.int32),
        disk.first_sequence + first + np.arange(count),
    )
    return Batch(writes, memory, memory.bytes.copy())


async def found(disk: Disk) -> dict[int, int]:
    """First word of each block that a scan finds, and its sum."""
    blocks: dict[int, int] = {}
    async for batch in disk.scan():
        blocks |= dict(zip(batch.words[:, 0].tolist(), batch.sums.tolist(), strict=True))
    return blocks


async def fill(disk: Disk, count: int = 8) -> Batch:
    """A disk without blocks gets some."""
    assert await found(disk) == {}
    assert await disk.cut(0, PAGE)
    blocks = batch(disk, count)
    assert (await disk.write(blocks.writes)).all()
    return blocks
