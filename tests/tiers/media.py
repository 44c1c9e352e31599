"""A disk in memory that forgets what was not synchronised, and a world that uses one."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core import superblock
from trikv.core.disklayout import grow, layout_for
from trikv.core.slots import Reads, Recovered, Writes, slot_bytes
from trikv.core.superblock import Superblock
from trikv.tiers.runs import Memory, view
from trikv.tiers.ssd import Disk
from trikv.tiers.transfers import Transfers

SECTOR = 512
REGION_BYTES = 2 << 20
CAPACITY = 8 << 20  # three regions
CAPACITY_MAX = 16 << 20
SHAPES = ((32768,), (4096,), (40960, 24576), (131072,), (8192,) * 5)


class PowerCutError(Exception):
    """The machine is off."""


class Media:
    """Bytes as every reader sees them, and which of them would survive."""

    def __init__(self, now: bytearray, safe: bytearray) -> None:
        self.now = now
        self.safe = safe
        self.unsafe: list[tuple[int, bytes]] = []  # writes since the last synchronisation

    def write(self, offset: int, data: bytes) -> None:
        self.now[offset : offset + len(data)] = data
        self.unsafe.append((offset, data))

    def synchronise(self) -> None:
        for offset, data in self.unsafe:
            self.safe[offset : offset + len(data)] = data
        self.unsafe.clear()

    def after_power_cut(self, rng: random.Random) -> "Media":
        """What is found: unsynchronised writes are lost, whole, torn, in any order."""
        kept_p, torn_p = rng.choice([0.0, 0.5, 0.9, 1.0]), rng.choice([0.0, 0.3, 1.0])
        writes = list(self.unsafe)
        if rng.random() < 0.5:
            rng.shuffle(writes)
        for offset, data in writes:
            if rng.random() >= kept_p:
                continue
            is_torn = rng.random() < torn_p
            for at in range(0, len(data), SECTOR):
                if not is_torn or rng.random() < 0.7:
                    self.safe[offset + at : offset + at + SECTOR] = data[at : at + SECTOR]
        return Media(self.safe, bytearray(self.safe))


class MediaRing:
    """Carries out operations on a `Media`; see `ssd.Ring`."""

    name = "media"
    joins_memory = True

    def __init__(self, media: Media, rng: random.Random) -> None:
        self.media = media
        self.power: int | None = None  # operations until it is cut
        self._rng = rng

    async def run(self, transfers: Transfers) -> None:
        for index, offset in enumerate(transfers.offsets.tolist()):
            if self._rng.random() < 0.3:
                await trio.lowlevel.checkpoint()
            pieces = transfers.pieces[transfers.first[index] : transfers.first[index + 1]].tolist()
            for address, length in pieces:
                assert address % 4096 == length % 4096 == offset % 4096 == 0
                assert 0 <= offset <= len(self.media.now) - length
                if transfers.is_write:
                    self.media.write(offset, bytes(view(address, length)))
                else:
                    view(address, length)[:] = self.media.now[offset : offset + length]
                offset += length  # noqa: PLW2901  # pieces follow one another
                self._spend()
            transfers.results[index] = 0
        await trio.lowlevel.checkpoint()

    async def sync(self) -> None:
        await trio.lowlevel.checkpoint()
        self._spend()
        self.media.synchronise()

    def _spend(self) -> None:
        if self.power is not None:
            self.power -= 1
            if self.power <= 0:
                raise PowerCutError


Key = tuple[int, int]  # origin, word


@dataclass(frozen=True)
class Kept:
    """A block that the disk has acknowledged."""

    sequence: int
    version: int
    region: int
    position: int
    lengths: tuple[int, ...]
    sum: int


@dataclass
class World:
    """Somebody who writes and reads blocks, knows what each must be, and loses power now and then.

    The bytes of a block follow from its key and version; a void makes the next version.
    """

    rng: random.Random
    media: Media = field(
        default_factory=lambda: Media(*(bytearray(CAPACITY_MAX) for _ in range(2)))
    )
    kept: dict[Key, Kept] = field(default_factory=dict)
    history: dict[tuple[Key, int], tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    voided: dict[int, int] = field(default_factory=dict)
    version: dict[int, int] = field(default_factory=dict)
    cut: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: Memory = field(default_factory=lambda: Memory(REGION_BYTES * 2))
    busy: set[tuple[int, int]] = field(default_factory=set)  # slots that are being written
    being_cut: set[int] = field(default_factory=set)
    keeps: deque[Memory] = field(default_factory=lambda: deque(maxlen=8))
    capacities: set[int] = field(default_factory=set)  # what it may have, by what was done to it
    was_formatted: bool = False
    found_count: int = 0
    sequence: int = 0

    # -- what a block is

    def content(self, key: Key, version: int, lengths: tuple[int, ...]) -> list[NDArray[np.uint8]]:
        seed = hash((key, version, lengths)) & 0xFFFFFFFF
        words = np.arange(sum(lengths) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15 + seed)
        return np.split(words.view(np.uint8), np.cumsum(lengths)[:-1])

    def origin(self, number: int) -> bytes:
        return bytes([number + 1]) * 16 + number.to_bytes(4, "little") + bytes(12)

    # -- lives

    async def open(self) -> Disk:
        front = bytes(self.media.now[:8192])
        is_cut_off = superblock.is_unfinished(front) and not any(self.media.now[8192:])
        found = None if is_cut_off else superblock.read(front)
        self.ring = MediaRing(self.media, self.rng)
        if found is None:
            assert not self.was_formatted, "it was there"
            layout = layout_for(CAPACITY, REGION_BYTES)
            uuid = self.rng.randbytes(16)
            found = Superblock(uuid, CAPACITY, layout.region_bytes, layout.region_count)
        else:
            assert found.capacity_bytes in self.capacities, "neither old nor new"
            more = self.rng.choice([0, 0, 0, 5, 3 << 20, 4 << 20])
            if more and found.capacity_bytes + more <= CAPACITY_MAX:
                grow(found, found.capacity_bytes + more)
        if self.rng.random() < 0.2:
            self.ring.power = self.rng.randrange(1, 6)  # in the midst of it
        self.capacities.add(found.capacity_bytes)
        disk = Disk(self.ring, found)
        await disk.start()
        self.capacities, self.ring.power = {found.capacity_bytes}, None
        self.was_formatted = True
        self.sequence = disk.first_sequence
        return disk

    async def recover(self, disk: Disk, *, was_clean: bool) -> None:
        """All that is found is what was once written, and not dead; after a clean end it is all."""
        best: dict[Key, Kept] = {}
        self.cut = {}
        self.busy, self.being_cut = set(), set()
        async for batch in disk.scan():
            for region, pages in zip(batch.cut.tolist(), batch.page_bytes, strict=True):
                assert region not in self.cut
                self.cut[region] = pages
            for key, one in self._blocks(batch):
                if key not in best or best[key].sequence < one.sequence:
                    best[key] = one
        right = await self.read(disk, best)
        if was_clean:
            assert right.items() >= self.kept.items(), "lost in a clean stop"
        self.kept = right
        self.found_count += len(right)

    def _blocks(self, batch: Recovered) -> list[tuple[Key, Kept]]:
        blocks = []
        for row, region in enumerate(batch.regions.tolist()):
            number = int(batch.origins[row, 0]) - 1
            assert batch.origins[row].tobytes() == self.origin(number)
            key = number, int(batch.words[row, 0])
            sequence = int(batch.sequences[row])
            version, lengths = self.history[key, sequence]
            assert sequence >= self.voided.get(number, 0), "a dead block"
            assert batch.depths[row] == key[1] % 7
            assert self.cut[region] == lengths
            position, total = int(batch.positions[row]), int(batch.sums[row])
            blocks.append((key, Kept(sequence, version, region, position, lengths, total)))
        return blocks

    # -- what one does with a disk

    async def read(self, disk: Disk, wanted: dict[Key, Kept]) -> dict[Key, Kept]:
        """Those whose bytes came back; they must be exact."""
        right = {}
        for lengths in SHAPES:
            blocks = [(key, one) for key, one in wanted.items() if one.lengths == lengths]
            most = len(self.memory.bytes) // sum(lengths)
            for first in range(0, len(blocks), most):
                part = blocks[first : first + most]
                addresses = self._addresses(len(part), lengths)
                reads = Reads(
                    np.array([one.region for _, one in part]),
                    np.array([one.position for _, one in part]),
                    addresses,
                    lengths,
                    np.array([one.sum for _, one in part], np.uint64),
                )
                is_right = await disk.read(reads)
                for row, (key, one) in enumerate(part):
                    if is_right[row]:
                        pages = self.content(key, one.version, lengths)
                        for address, page in zip(addresses[row].tolist(), pages, strict=True):
                            there = np.frombuffer(view(address, len(page)), np.uint8)
                            assert np.array_equal(there, page), "wrong bytes"
                        right[key] = one
        return right

    async def write(self, disk: Disk, lengths: tuple[int, ...], count: int, base: int) -> None:
        """Write blocks, into a region that has room, or make some."""
        region = await self._region(disk, lengths)
        if region is None:
            return
        used = {(one.region, one.position) for one in self.kept.values()} | self.busy
        count_max = REGION_BYTES // slot_bytes(lengths)
        free = [at for at in range(count_max) if (region, at) not in used]
        positions = self.rng.sample(free, min(count, len(free)))
        if self.rng.random() < 0.5:
            positions.sort()
        fresh = [(base, word) for word in range(12) if (base, word) not in self.kept]
        keys = self.rng.sample(fresh, min(len(positions), len(fresh)))
        positions = positions[: len(keys)]
        if not keys:
            return
        writes = self._writes(region, positions, keys, lengths)
        versions = [self.version.get(base, 0)] * len(keys)
        for key, sequence, version in zip(keys, writes.sequences.tolist(), versions, strict=True):
            self.history[key, sequence] = version, lengths
        slots = {(region, position) for position in positions}
        self.busy |= slots
        written = await disk.write(writes)
        self.busy -= slots
        assert written.all()
        for row, key in enumerate(keys):
            sequence, total = int(writes.sequences[row]), int(writes.sums[row])
            one = Kept(sequence, versions[row], region, positions[row], lengths, total)
            self.kept[key] = one

    def _writes(
        self, region: int, positions: list[int], keys: list[Key], lengths: tuple[int, ...]
    ) -> Writes:
        count = len(keys)
        memory = Memory(sum(lengths) * count)
        addresses = self._addresses(count, lengths, memory)
        for row, key in enumerate(keys):
            pages = self.content(key, self.version.get(key[0], 0), lengths)
            for address, page in zip(addresses[row].tolist(), pages, strict=True):
                view(address, len(page))[:] = page.data
        self.keeps.append(memory)
        words = np.zeros((count, 4), np.uint64)
        words[:, 0] = words[:, 3] = [word for _, word in keys]
        self.sequence += count
        return Writes(
            np.full(count, region),
            np.array(positions),
            addresses,
            lengths,
            np.frombuffer(self.origin(keys[0][0]) * count, np.uint8).reshape(count, 32),
            words,
            np.array([word % 7 for _, word in keys], np.int32),
            np.arange(self.sequence - count, self.sequence),
        )

    def _addresses(
        self, count: int, lengths: tuple[int, ...], memory: Memory | None = None
    ) -> NDArray[np.uint64]:
        """As in a pool: all pages of a rank, then those of the next."""
        memory = memory or self.memory
        starts = np.cumsum([0, *lengths[:-1]]) * count
        steps = np.arange(count)[:, None] * np.array(lengths)
        return (memory.address + starts + steps).astype(np.uint64)

    async def _region(self, disk: Disk, lengths: tuple[int, ...]) -> int | None:
        mine = [region for region, pages in self.cut.items() if pages == lengths]
        taken = self.cut.keys() | self.being_cut
        free = [region for region in range(disk.region_count) if region not in taken]
        if mine and (not free or self.rng.random() < 0.7):
            return self.rng.choice(mine)
        if not free:
            held = {region for region, _ in self.busy} | self.being_cut
            free = [region for region in range(disk.region_count) if region not in held]
        if not free:
            return None
        region = self.rng.choice(free)
        self.kept = {key: one for key, one in self.kept.items() if one.region != region}
        self.cut.pop(region, None)
        self.being_cut.add(region)
        is_cut = await disk.cut(region, lengths)
        self.being_cut.discard(region)
        assert is_cut
        self.cut[region] = lengths
        return region

    def evict(self) -> None:
        for key in self.rng.sample(sorted(self.kept), len(self.kept) // 2):
            del self.kept[key]

    async def void(self, disk: Disk, number: int) -> None:
        """After this the origin's blocks may be other bytes."""
        self.kept = {key: one for key, one in self.kept.items() if key[0] != number}
        sequence = self.sequence
        await disk.void(self.origin(number), sequence)
        self.voided[number] = sequence
        self.version[number] = self.version.get(number, 0) + 1
