"""Disks that fail, hang or lie: what a caller learns, and when a disk is given up."""

import errno
import os
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.tiers.disks import (
    CAPACITY,
    LAYOUT,
    ORIGIN,
    PAGE,
    RECORDS_AT,
    REGION_BYTES,
    REGIONS_AT,
    Batch,
    batch,
    fill,
    found,
)
from tests.tiers.media import Media, MediaRing
from tests.tiers.queues import ScriptedQueue
from trikv.core.superblock import Superblock, read
from trikv.tiers.front import DiskFailedError
from trikv.tiers.ring import open_ring
from trikv.tiers.ssd import ERRORS_A_MINUTE_MAX, Disk, IoStalledError
from trikv.tiers.threads import move
from trikv.tiers.transfers import Transfers

Fails = Callable[[bool, int, int], bool]  # is it a write, from, to


class BadRing(MediaRing):
    """Operations fail where a test says so."""

    def __init__(self, media: Media) -> None:
        super().__init__(media, random.Random(1))
        self.fails: Fails = lambda *_: False
        self.count = 0

    async def run(self, transfers: Transfers) -> None:
        await super().run(transfers)
        for index, offset in enumerate(transfers.offsets.tolist()):
            pieces = transfers.pieces[transfers.first[index] : transfers.first[index + 1]]
            self.count += 1
            if self.fails(transfers.is_write, offset, offset + int(pieces[:, 1].sum())):
                transfers.results[index] = errno.EIO


def media() -> Media:
    return Media(bytearray(CAPACITY), bytearray(CAPACITY))


async def start(ring: MediaRing) -> Disk:
    front = read(bytes(ring.media.now[:8192]))
    fresh = Superblock(bytes(range(16)), CAPACITY, LAYOUT.region_bytes, LAYOUT.region_count)
    disk = Disk(ring, front or fresh)
    await disk.start()
    return disk


def at_block(number: int) -> Fails:
    """The sector of one block is bad."""
    place = REGIONS_AT + number * PAGE[0] + 512

    def fails(_: bool, first: int, last: int) -> bool:  # noqa: FBT001
        return first <= place < last

    return fails


async def test_a_bad_sector_costs_one_block() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    blocks = await fill(disk, 20)
    ring.fails, ring.count = at_block(7), 0
    assert await blocks.read(disk) == [number != 7 for number in range(20)]
    assert ring.count == 1 + 20  # all in one operation, and each by itself when that failed
    assert disk.io_error_count == 2
    assert disk.fault == ""


async def test_a_block_that_cannot_be_written_is_not_there() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    assert await disk.cut(0, PAGE)
    ring.fails = at_block(3)
    blocks = batch(disk)
    right = await disk.write(blocks.writes)
    assert right.tolist() == [number != 3 for number in range(8)]
    assert disk.bytes_written == 7 * PAGE[0]
    ring.fails = lambda *_: False
    disk = await start(ring)
    there = await found(disk)
    assert set(there) == set(blocks.writes.words[right, 0].tolist())


async def test_a_record_that_cannot_be_written_is_no_block() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    assert await disk.cut(0, PAGE)
    second = RECORDS_AT + 4096
    ring.fails = lambda is_write, first, last: is_write and first <= second < last
    blocks = batch(disk, 20)
    right = await disk.write(blocks.writes)
    assert not right[16:].any()
    assert disk.fault == ""


async def test_a_region_that_cannot_be_cut() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    ring.fails = lambda is_write, first, _: is_write and first < RECORDS_AT
    assert not await disk.cut(0, PAGE)
    blocks = batch(disk)
    with pytest.raises(AssertionError):
        await disk.write(blocks.writes)


async def test_unreadable_tables_hide_their_blocks_only() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    await fill(disk, 20)
    assert await disk.cut(1, PAGE)
    other = batch(disk, 4, region=1, seed=2)
    assert (await disk.write(other.writes)).all()
    disk = await start(ring)
    second = RECORDS_AT + 4096
    ring.fails = lambda is_write, first, last: not is_write and first <= second < last
    there = await found(disk)
    assert set(other.writes.words[:, 0].tolist()) <= set(there)
    assert len(there) < 24


def test_many_errors_a_minute_turn_a_disk_off() -> None:
    async def live() -> None:
        ring = BadRing(media())
        disk = await start(ring)
        blocks = await fill(disk, 1)
        ring.fails = at_block(0)
        for _ in range(2 * ERRORS_A_MINUTE_MAX):  # one every four seconds is bearable
            await trio.sleep(4.0)
            assert await blocks.read(disk) == [False]
        assert disk.fault == ""
        for _ in range(ERRORS_A_MINUTE_MAX):
            assert await blocks.read(disk) == [False]
        assert disk.state() == (
            f"{ERRORS_A_MINUTE_MAX} errors within a minute, the last: Input/output error"
        )
        ring.fails, ring.count = (lambda *_: False), 0
        assert await blocks.read(disk) == [False]
        assert not (await disk.write(blocks.writes)).any()
        assert not await disk.cut(1, PAGE)
        for call in (disk.close(), disk.void(ORIGIN, 1)):
            with pytest.raises(DiskFailedError):
                await call
        assert ring.count == 0

    trio.run(live, clock=MockClock(autojump_threshold=0))


async def test_a_superblock_that_cannot_be_written_refuses_the_start() -> None:
    ring = BadRing(media())
    ring.fails = lambda is_write, first, _: is_write and first == 4096
    with pytest.raises(DiskFailedError, match="its superblock cannot be written"):
        await start(ring)


async def test_a_disk_that_returns_other_bytes_is_not_believed() -> None:
    ring = BadRing(media())
    disk = await start(ring)
    blocks = await fill(disk, 8)
    place = REGIONS_AT
    ring.media.now[place : place + 2 * PAGE[0]] = (
        ring.media.now[place + PAGE[0] : place + 2 * PAGE[0]] * 2
    )
    assert await blocks.read(disk) == [False] + [True] * 7
    assert disk.sum_error_count == 1


async def test_tables_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next chunk is read while a thread looks through this one."""
    monkeypatch.setattr("trikv.tiers.scan.CHUNK_BYTES", 4096)
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    wanted: list[set[int]] = []
    for region in range(3):
        assert await disk.cut(region, PAGE)
        blocks = batch(disk, 16, region=region, seed=region)
        assert (await disk.write(blocks.writes)).all()
        wanted.append(set(blocks.writes.words[:, 0].tolist()))
    for _ in range(10):
        batches = [one async for one in (await start(ring)).scan()]
        assert [one.cut.tolist() for one in batches] == [[0], [1], [2]]
        assert [set(one.words[:, 0].tolist()) for one in batches] == wanted


async def test_images_of_records_are_bounded_and_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trikv.tiers.table.IMAGE_BYTES_MAX", 4096)
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    wanted: set[int] = set()
    for region in (0, 0, 1, 2, 2):
        assert await disk.cut(region, PAGE)
    for turn in range(4):
        for region in range(3):
            blocks = batch(disk, 5, region=region, first=5 * turn, seed=10 * turn + region)
            assert (await disk.write(blocks.writes)).all()
            wanted |= set(blocks.writes.words[:, 0].tolist())
            table = disk._table
            assert len(table._images) <= 1
            assert table._image_bytes == sum(map(len, table._images.values()))
    assert set(await found(await start(ring))) == wanted


# -- a disk that hangs


class HalfDeadQueue(ScriptedQueue):
    """Carries out what is before `hangs_from` and never answers for the rest."""

    hangs_from: int = CAPACITY

    def __init__(self, fd: int) -> None:
        super().__init__(depths=(32, 32))
        self.fd = fd

    def submit(self) -> bool:
        for taken in list(self.taken.values()):
            if taken.offset < self.hangs_from:
                place = self.fd, taken.offset, taken.pieces
                self.end(taken.ticket, move(*place, is_write=taken.is_write))
        return True


Use = Callable[[Disk, HalfDeadQueue, Batch], Awaitable[None]]


async def with_hanging_disk(use: Use, clock: MockClock) -> None:
    fd = os.memfd_create("disk")
    os.ftruncate(fd, CAPACITY)
    queue = HalfDeadQueue(fd)
    async with open_ring(queue, fd, io_s_max=20.0) as ring:
        fresh = Superblock(bytes(range(16)), CAPACITY, LAYOUT.region_bytes, LAYOUT.region_count)
        disk = Disk(ring, fresh)
        await disk.start()
        blocks = await fill(disk, 4)
        clock.autojump_threshold = 0  # no sooner: threads take real time
        await use(disk, queue, blocks)
        assert disk.fault == "an operation hangs: the disk does not answer"
        assert disk.state() == disk.fault
        assert await blocks.read(disk) == [False] * 4
        with pytest.raises(DiskFailedError):
            await disk.close()
    os.close(fd)


def run_hanging(use: Use) -> None:
    clock = MockClock()
    trio.run(with_hanging_disk, use, clock, clock=clock)


def test_a_read_that_hangs_tells_whose_memory_is_lost() -> None:
    async def use(disk: Disk, queue: HalfDeadQueue, blocks: Batch) -> None:
        assert await disk.cut(1, PAGE)
        other = batch(disk, 2, region=1, seed=2)
        assert (await disk.write(other.writes)).all()
        both = batch(disk, 4)
        both.writes.regions[2:], both.writes.positions[2:] = 1, [0, 1]
        both.writes.sums[:2], both.writes.sums[2:] = blocks.writes.sums[:2], other.writes.sums
        queue.hangs_from = REGIONS_AT + REGION_BYTES
        with pytest.raises(IoStalledError) as stalled:
            await disk.read(both.reads())
        assert stalled.value.held.tolist() == [False, False, True, True]
        assert stalled.value.right.tolist() == [True, True, False, False]

    run_hanging(use)


def test_a_cancelled_read_that_hangs_tells_all_the_same() -> None:
    async def use(disk: Disk, queue: HalfDeadQueue, blocks: Batch) -> None:
        queue.hangs_from = REGIONS_AT
        with pytest.raises(IoStalledError) as stalled, trio.move_on_after(1.0):
            await disk.read(blocks.reads())
        assert stalled.value.held.all()
        assert trio.current_time() >= 20.0

    run_hanging(use)


def test_a_write_that_hangs() -> None:
    async def use(disk: Disk, queue: HalfDeadQueue, _: Batch) -> None:
        queue.hangs_from = REGIONS_AT
        blocks = batch(disk, 3, first=8)
        with pytest.raises(IoStalledError) as stalled:
            await disk.write(blocks.writes)
        assert stalled.value.held.all()
        assert not stalled.value.right.any()

    run_hanging(use)


def test_a_record_that_hangs_is_no_block_and_holds_none_of_its_memory() -> None:
    async def use(disk: Disk, queue: HalfDeadQueue, _: Batch) -> None:
        queue.hangs_from = 0
        queue_all = queue.submit

        def submit() -> bool:
            for taken in list(queue.taken.values()):
                if taken.offset >= REGIONS_AT:
                    queue.end(taken.ticket)
            return queue_all()

        queue.submit = submit  # type: ignore[method-assign]
        blocks = batch(disk, 3, first=8)
        assert not (await disk.write(blocks.writes)).any()

    run_hanging(use)


def test_others_are_told_when_a_disk_hangs() -> None:
    async def use(disk: Disk, queue: HalfDeadQueue, blocks: Batch) -> None:
        queue.hangs_from = REGIONS_AT + 2 * PAGE[0]
        results: list[object] = []

        async def call(number: int) -> None:
            one = batch(disk, 1, first=number)
            one.writes.sums[:] = blocks.writes.sums[number]
            try:
                results.append((number, (await disk.read(one.reads())).tolist()))
            except IoStalledError as stalled:
                results.append((number, stalled.held.tolist()))

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(call, number)
                await wait_all_tasks_blocked()
        assert sorted(results) == [(number, [True]) for number in range(4)]

    run_hanging(use)


async def test_blocks_of_several_ranks() -> None:
    lengths = (8192, 40960, 4096)
    ring = BadRing(media())
    disk = await start(ring)
    assert await found(disk) == {}
    assert await disk.cut(2, lengths)
    blocks = batch(disk, 5, region=2, seed=3)
    base = blocks.memory.address
    size, starts = 5 * PAGE[0], (0, 8192 * 5, 8192 * 5 + 40960 * 5)
    places = [[base + at + row * n for at, n in zip(starts, lengths)] for row in range(5)]  # noqa: B905
    assert starts[2] + 5 * 4096 <= size
    writes = type(blocks.writes)(
        blocks.writes.regions,
        blocks.writes.positions,
        np.array(places, np.uint64),
        lengths,
        blocks.writes.origins,
        blocks.writes.words,
        blocks.writes.depths,
        blocks.writes.sequences,
    )
    ring.count = 0
    assert (await disk.write(writes)).all()
    assert ring.count == 2  # neighbours on the disk are one operation, their records another
    offset = REGIONS_AT + 2 * LAYOUT.region_bytes
    whole = blocks.bytes
    for row in range(5):
        for at, length in zip(starts, lengths, strict=True):
            page = whole[at + row * length : at + (row + 1) * length]
            assert ring.media.now[offset : offset + length] == page.tobytes()
            offset += length
