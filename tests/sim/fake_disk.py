"""A disk that is late, failing, hung or torn, whose bytes outlive the daemon that wrote them."""

import random
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.slots import Reads, Recovered, Writes
from trikv.tiers.front import DiskFailedError
from trikv.tiers.ssd import IoStalledError

EPOCH_SHIFT = 40
STALL_S = 20.0
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class DiskFaults:
    """How bad a disk is."""

    byte_s: float = 1e-8  # seconds a byte takes, one operation after another
    late_s_mean: float = 0.001  # and how long it takes to begin
    fail_p: float = 0.0  # a block's operation fails
    flip_p: float = 0.0  # a block that was written is not what it was
    hang_p: float = 0.0  # a call has no end, and its memory may be touched for ever
    tear_p: float = 0.0  # of what was under way at a crash: the record arrives, not the bytes


@dataclass(slots=True)
class Record:
    origin: bytes
    words: tuple[int, ...]
    depth: int
    sequence: int
    data_sum: int
    generation: int


@dataclass(slots=True)
class Medium:
    """What is left when a daemon has gone."""

    rng: random.Random
    region_count: int
    region_bytes: int
    epoch: int = 0
    data: dict[Place, bytes] = field(default_factory=dict)
    records: dict[Place, Record] = field(default_factory=dict)
    headers: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)
    voids: dict[bytes, int] = field(default_factory=dict)
    under_way: list[tuple[Place, bytes, Record]] = field(default_factory=list)

    def crash(self, faults: DiskFaults) -> None:
        """Of what was being written anything may have arrived."""
        for place, data, record in self.under_way:
            if self.rng.random() < 0.5:
                self.data[place] = data if self.rng.random() >= faults.tear_p else b"torn"
            if self.rng.random() < faults.tear_p:
                self.records[place] = record
        self.under_way.clear()


class FakeDisk:
    """See `trikv.nursery.disks.Disk`; addresses are offsets of `pool`."""

    path = "/fake"
    ring_name = "fake"
    was_clean = False
    io_error_count = 0
    sum_error_count = 0

    def __init__(self, medium: Medium, pool: NDArray[np.uint8], faults: DiskFaults) -> None:
        medium.epoch += 1
        self.medium = medium
        self.region_count, self.region_bytes = medium.region_count, medium.region_bytes
        self.fault = ""
        self.bytes_written = self.bytes_read = 0
        self.reads_longest_s = 0.0
        self.is_closed = False
        self._pool = pool
        self._faults = faults
        self._rng = medium.rng
        self._arm = trio.CapacityLimiter(1)
        self._held: list[int] = []  # where a hung read may still write

    @property
    def first_sequence(self) -> int:
        return self.medium.epoch << EPOCH_SHIFT

    def state(self) -> str:
        return self.fault

    async def scan(self) -> AsyncIterator[Recovered]:
        medium = self.medium
        for region, (pages, generation) in sorted(medium.headers.items()):
            await self._pause(4096)
            found = [
                (place[1], one)
                for place, one in medium.records.items()
                if place[0] == region
                and one.generation == generation
                and one.sequence >= medium.voids.get(one.origin, 0)
            ]
            yield Recovered(
                np.array([region], np.int64),
                np.array([sum(pages)], np.int64),
                (pages,),
                np.full(len(found), region, np.int64),
                np.array([at for at, _ in found], np.int64),
                np.array([list(one.origin) for _, one in found], np.uint8).reshape(-1, 32),
                np.array([one.words for _, one in found], np.uint64).reshape(-1, 4),
                np.array([one.depth for _, one in found], np.int32),
                np.array([one.sequence for _, one in found], np.int64),
                np.array([one.data_sum for _, one in found], np.uint64),
                np.full(len(found), sum(pages), np.int64),
            )

    async def cut(self, region: int, page_bytes: tuple[int, ...]) -> bool:
        await self._pause(4096)
        if self.fault or self._rng.random() < self._faults.fail_p:
            return False
        generation = self.medium.headers.get(region, ((), 0))[1] + 1
        self.medium.headers[region] = page_bytes, generation
        return True

    async def write(self, writes: Writes) -> NDArray[np.bool_]:
        rows = range(len(writes.regions))
        right = np.zeros(len(rows), np.bool_)
        if self.fault:
            return right
        places = list(zip(writes.regions.tolist(), writes.positions.tolist(), strict=True))
        begun = [self._take(writes.addresses[row].tolist(), writes.lengths) for row in rows]
        for row, place in enumerate(places):
            pages, generation = self.medium.headers[place[0]]
            assert sum(pages) == sum(writes.lengths)
            writes.sums[row] = zlib.crc32(begun[row])
            record = Record(
                writes.origins[row].tobytes(),
                tuple(writes.words[row].tolist()),
                int(writes.depths[row]),
                int(writes.sequences[row]),
                int(writes.sums[row]),
                generation,
            )
            self.medium.under_way.append((place, begun[row], record))
        await self._work(len(rows) * sum(writes.lengths), right, [])
        for row, (place, data, record) in enumerate(self.medium.under_way):
            # The pool's pages were not anybody else's meanwhile.
            assert self._take(writes.addresses[row].tolist(), writes.lengths) == data
            right[row] = self._rng.random() >= self._faults.fail_p
            self.medium.data[place] = data if right[row] else b"failed"
            if right[row]:
                self.medium.records[place] = record
        self.medium.under_way.clear()
        self.bytes_written += int(right.sum()) * sum(writes.lengths)
        return right

    async def read(self, reads: Reads) -> NDArray[np.bool_]:
        begin_s = trio.current_time()
        right = np.zeros(len(reads.regions), np.bool_)
        if self.fault:
            return right
        await self._work(len(right) * sum(reads.lengths), right, reads.addresses.ravel().tolist())
        for row, place in enumerate(
            zip(reads.regions.tolist(), reads.positions.tolist(), strict=True)
        ):
            if self._rng.random() < self._faults.flip_p and place in self.medium.data:
                self.medium.data[place] = b"\1" + self.medium.data[place][1:]
            data = self.medium.data.get(place, b"")
            at = 0
            for address, length in zip(reads.addresses[row].tolist(), reads.lengths, strict=True):
                part = np.frombuffer(data[at : at + length], np.uint8)
                self._pool[address : address + len(part)] = part
                at += length
            is_whole = zlib.crc32(data) == reads.sums[row]
            right[row] = is_whole and self._rng.random() >= self._faults.fail_p
        self.bytes_read += int(right.sum()) * sum(reads.lengths)
        self.reads_longest_s = max(self.reads_longest_s, trio.current_time() - begin_s)
        return right

    async def void(self, origin: bytes, sequence: int) -> None:
        await self._pause(4096)
        if self.fault:
            raise DiskFailedError(self.fault)
        self.medium.voids[origin] = sequence

    async def close(self) -> None:
        await self._pause(4096)
        self.is_closed = True

    def haunt(self) -> None:
        """The kernel touches what it never gave back."""
        for address in self._held:
            self._pool[address : address + 64] = 0xBB

    async def _work(self, size: int, right: NDArray[np.bool_], into: list[int]) -> None:
        if self._rng.random() < self._faults.hang_p:
            await trio.sleep(STALL_S)
            self.fault = "an operation has no answer"
            self._held += into
            self.medium.under_way.clear()
            raise IoStalledError(right, np.ones(len(right), np.bool_))
        await self._pause(size)

    async def _pause(self, size: int) -> None:
        async with self._arm:
            late_s = self._rng.expovariate(1 / self._faults.late_s_mean)
            await trio.sleep(late_s + size * self._faults.byte_s)

    def _take(self, addresses: list[int], lengths: tuple[int, ...]) -> bytes:
        pairs = zip(addresses, lengths, strict=True)
        return b"".join(self._pool[address : address + one].tobytes() for address, one in pairs)
