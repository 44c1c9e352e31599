"""One disk that keeps blocks: written, found again after any kind of end, verified when read.

Decided here: the order data, record, visible; when a disk is given up; what a caller learns about
memory that a hung disk may still touch. Formats are in `core/slots.py` and `core/superblock.py`,
the file in `diskfile.py`, operations in `ring.py`. This file does not know which blocks are wanted.

Nothing is synchronised but the superblock: when it is formatted, opened, when blocks are declared
dead, and at a clean end. Whatever else a power cut takes is a miss.
"""

import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.disklayout import layout_of
from trikv.core.errors import BadRequestError
from trikv.core.pages import PAGE_ALIGN
from trikv.core.slots import (
    NO_SLOTS,
    Reads,
    Recovered,
    Regions,
    Writes,
    make_header,
    make_records,
)
from trikv.core.superblock import Superblock
from trikv.tiers.diskfile import DiskFile, open_file
from trikv.tiers.front import DiskFailedError, Front, write_page
from trikv.tiers.ring import IO_S_MAX, open_ring
from trikv.tiers.rings import AUTO, make_queue, why_not
from trikv.tiers.runs import OPERATION_BYTES_MAX, join, sum_blocks
from trikv.tiers.scan import scan
from trikv.tiers.table import Table
from trikv.tiers.threads import in_thread
from trikv.tiers.transfers import HELD, NOBODYS, Ring, Transfers

ERRORS_A_MINUTE_MAX: Final = 16
MINUTE_S: Final = 60.0
VERIFIED_AT_ONCE: Final = 16 << 20  # bytes read before their sums are made, while more are read
HASHERS: Final = 2
SUMMED_INLINE_MAX: Final = 512 << 10  # bytes: takes less than to wake a thread
GIVEN_UP: Final = frozenset({errno.ESHUTDOWN, errno.ECANCELED})  # not the disk's own answers


class IoStalledError(Exception):
    """The disk hangs and is off; some of the call's memory must never be used again.

    Attributes:
        right: bool[n], blocks whose outcome is known and good.
        held: bool[n], blocks whose memory the kernel may still read or write.
    """

    def __init__(self, right: NDArray[np.bool_], held: NDArray[np.bool_]) -> None:
        super().__init__("an operation has no answer")
        self.right = right
        self.held = held


class Disk:
    """The blocks of one file or device; made by `open_disk`.

    Attributes:
        path: where it is.
        ring_name: what carries out its operations.
        region_bytes, region_count: how it is cut.
        first_sequence: the least that a write of this opening may have; all that is found by `scan`
            is below.
        was_clean: the last opening ended by `close`.
        fault: why it is off, one line; empty while it works. Never works again until reopened.
        bytes_written, bytes_read: of blocks, whole ones.
        io_error_count: operations that failed.
        sum_error_count: blocks that were not what their record said.
    """

    def __init__(
        self, ring: Ring, superblock: Superblock, path: str = "", look: Callable[[], str] = str
    ) -> None:
        self.path = path
        self.ring_name = ring.name
        self.region_bytes = superblock.region_bytes
        self.was_clean = superblock.is_clean
        self.fault = ""
        self.bytes_written = 0
        self.bytes_read = 0
        self.io_error_count = 0
        self.sum_error_count = 0
        self._ring = ring
        self._look = look
        self._next_generation = 0
        self._superblock = superblock
        layout = layout_of(superblock)
        self.region_count = layout.region_count
        self._regions = Regions(layout, superblock.tag)
        self._front = Front(superblock, self._run, ring.sync)
        self._table = Table(self._regions, self._run)
        self._errors: deque[float] = deque(maxlen=ERRORS_A_MINUTE_MAX)
        self._hashers = trio.CapacityLimiter(HASHERS)

    @property
    def first_sequence(self) -> int:
        """The least sequence of this opening."""
        return self._superblock.first_sequence

    def state(self) -> str:
        """What is wrong or worth knowing, one line; empty when all is well. Cheap."""
        return self.fault or self._look()

    async def start(self) -> None:
        """Begin an epoch; before anything else.

        Raises:
            DiskFailedError: the superblock cannot be written.
        """
        with self._off_on_failure():
            await self._front.begin()
        self._next_generation = self.first_sequence

    async def scan(self) -> AsyncIterator[Recovered]:
        """What the disk holds, some megabytes of records at a time; before the first write.

        Blocks may be read as soon as they have been yielded. Of a key in two batches the higher
        sequence counts. Recency follows from (sequence, -depth).

        At the bound: what cannot be read is not found; a disk that fails ends the scan.
        """
        async for found in scan(self._regions, self._run, self._hashers, self._voids):
            yield found

    async def cut(self, region: int, page_bytes: tuple[int, ...]) -> bool:
        """Cut a region that has no blocks into slots for blocks with these pages.

        Args:
            region: none of its slots is in use.
            page_bytes: a block's on each rank, multiples of `PAGE_ALIGN`.

        Returns:
            Whether it is cut now; if not, nothing may be written there.
        """
        generation = self._next_generation
        self._next_generation += 1
        header = make_header(self._superblock.tag, region, generation, page_bytes)
        offset = self._regions.layout.headers_at(np.array([region])).item()
        self._regions.slot_bytes[region] = NO_SLOTS
        if not await write_page(self._run, offset, header):
            return False
        self._regions.cut(region, generation, page_bytes)
        self._table.cut(region)
        return True

    async def write(self, writes: Writes) -> NDArray[np.bool_]:
        """Put blocks into their slots, and then their records; fills in `writes.sums`.

        Ownership: the memory is the disk's until this returns.

        Cancellation: what the kernel has begun is waited for.

        Returns:
            bool[n], true where the block is on the disk and is found by a later scan. Elsewhere its
            slot holds nothing that will ever be believed.

        Raises:
            IoStalledError: the disk hangs; see there which memory is lost.
        """
        assert bool((self._regions.slot_bytes[writes.regions] != NO_SLOTS).all())
        assert bool((self._regions.length[writes.regions] == sum(writes.lengths)).all())
        moved = np.zeros(len(writes.regions), np.int64)
        right = np.zeros(len(moved), np.bool_)
        if self.fault or len(moved) == 0:
            await trio.lowlevel.checkpoint()
            return right
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(self._move, writes, moved, is_write=True))
                nursery.start_soon(self._sum, writes.addresses, writes.lengths, writes.sums)
            rows = np.flatnonzero(moved == 1)
            records = make_records(self._regions, writes)[rows]
            right[rows] = await self._table.put(
                writes.regions[rows], writes.positions[rows], records
            )
        finally:
            _raise_if_held(right, moved)
        self.bytes_written += int(np.count_nonzero(right)) * sum(writes.lengths)
        return right

    async def read(self, reads: Reads) -> NDArray[np.bool_]:
        """Bring blocks into memory and compare their sums.

        Ownership, cancellation and errors as with `write`.

        Returns:
            bool[n], true where the bytes are those that were written. Elsewhere the memory holds
            anything.
        """
        moved = np.zeros(len(reads.regions), np.int64)
        right = np.zeros(len(moved), np.bool_)
        if self.fault or len(moved) == 0:
            await trio.lowlevel.checkpoint()
            return right
        step = max(1, VERIFIED_AT_ONCE // sum(reads.lengths))
        order = np.argsort(self._regions.offsets(reads.regions, reads.positions), kind="stable")
        try:
            async with trio.open_nursery() as nursery:
                for first in range(0, len(order), step):
                    rows = order[first : first + step]
                    nursery.start_soon(self._read_some, reads, rows, moved, right)
        finally:
            _raise_if_held(right, moved)
        self.bytes_read += int(np.count_nonzero(right)) * sum(reads.lengths)
        return right

    async def void(self, origin: bytes, sequence: int) -> None:
        """Declare the records of an origin before `sequence` dead; durable when this returns.

        What `scan` yields from now on is without them; what it has yielded is the caller's.

        Cancellation: waits for the medium, or for the ring to give up.

        Raises:
            DiskFailedError: it may not be durable.
        """
        with self._off_on_failure():
            await self._front.void(origin, sequence)

    async def close(self) -> None:
        """Make all that was written durable and say so; after the last write.

        Raises:
            DiskFailedError: the next scan may find less.
        """
        if self.fault:
            raise DiskFailedError(self.fault)
        with self._off_on_failure():
            await self._front.end()

    # -- operations

    async def _read_some(
        self,
        reads: Reads,
        rows: NDArray[np.int64],
        moved: NDArray[np.int64],
        right: NDArray[np.bool_],
    ) -> None:
        part = Reads(
            reads.regions[rows],
            reads.positions[rows],
            reads.addresses[rows],
            reads.lengths,
            reads.sums[rows],
        )
        found = np.zeros(len(rows), np.int64)
        try:
            await self._move(part, found, is_write=False)
        finally:
            moved[rows] = found
        mine = np.flatnonzero(found == 1)
        actual = np.zeros(len(mine), np.uint64)
        await self._sum(part.addresses[mine], part.lengths, actual)
        is_right = actual == part.sums[mine]
        self.sum_error_count += int(np.count_nonzero(~is_right))
        right[rows[mine]] = is_right

    async def _move(
        self, blocks: Reads | Writes, states: NDArray[np.int64], *, is_write: bool
    ) -> None:
        """Move the blocks' bytes; states become 1, 0 (not moved) or `HELD`.

        When operations of several blocks fail, each block is tried again by itself.
        """
        assert not (blocks.addresses % np.uint64(PAGE_ALIGN)).any()
        offsets = self._regions.offsets(blocks.regions, blocks.positions)
        rows = np.arange(len(offsets))
        for bytes_max in (OPERATION_BYTES_MAX, 1):
            transfers, order, of = join(
                offsets[rows],
                blocks.addresses[rows],
                blocks.lengths,
                is_write=is_write,
                bytes_max=bytes_max,
                joins_memory=self._ring.joins_memory,
            )
            try:
                await self._run(transfers)
            finally:
                results = transfers.results[of]
                states[rows[order]] = np.where(results == HELD, HELD, results == 0)
            is_shared = np.bincount(of, minlength=len(transfers.offsets))[of] > 1
            rows = rows[order[(results > 0) & is_shared]]
            if len(rows) == 0 or self.fault:
                break

    async def _run(self, transfers: Transfers) -> None:
        """As the ring's, and judge the disk by the results."""
        if self.fault:
            transfers.results[:] = errno.ESHUTDOWN
            await trio.lowlevel.checkpoint()
            return
        await self._ring.run(transfers)
        results = transfers.results
        if not results.any():
            return
        if (results == HELD).any():
            self._fail("an operation hangs: the disk does not answer")
        failed = [one for one in results[results > 0].tolist() if one not in GIVEN_UP]
        self.io_error_count += len(failed)
        now_s = trio.current_time()
        for code in failed:
            if len(self._errors) == ERRORS_A_MINUTE_MAX and now_s - self._errors[0] < MINUTE_S:
                self._fail(
                    f"{ERRORS_A_MINUTE_MAX} errors within a minute, the last: {os.strerror(code)}"
                )
            self._errors.append(now_s)

    async def _sum(
        self, addresses: NDArray[np.uint64], lengths: tuple[int, ...], into: NDArray[np.uint64]
    ) -> None:
        """Sums of blocks, of many bytes in a thread."""
        call = partial(sum_blocks, addresses, lengths, into)
        if len(into) * sum(lengths) <= SUMMED_INLINE_MAX:
            call()
        else:
            await in_thread(call, self._hashers)

    @contextmanager
    def _off_on_failure(self) -> Iterator[None]:
        try:
            yield
        except DiskFailedError as error:
            self._fail(str(error))
            raise DiskFailedError(self.fault) from error

    def _fail(self, reason: str) -> None:
        """The disk is off; the first reason is the one to know."""
        self.fault = self.fault or reason

    def _voids(self, origins: NDArray[np.uint8], sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self._superblock.voids.are_dead(origins, sequences)


def _raise_if_held(right: NDArray[np.bool_], moved: NDArray[np.int64]) -> None:
    """Also in the place of a cancellation: whose memory is lost must not go unheard."""
    held = moved == HELD
    if held.any():
        raise IoStalledError(right, held)


@asynccontextmanager
async def open_disk(
    path: str,
    capacity_bytes: int,
    *,
    ring: str = AUTO,
    region_bytes: int = 0,
    io_s_max: float = IO_S_MAX,
    memory_fd: int = NOBODYS,
) -> AsyncIterator[Disk]:
    """Open or format a disk; leaving the block without `Disk.close` is like a crash.

    Args:
        path: a file, a device, or a folder in which the file is or is to be made.
        capacity_bytes: a hard limit.
        ring: what carries out operations.
        region_bytes: for tests; see `disklayout.layout_for`.
        io_s_max: an operation without an answer for so long turns the disk off.
        memory_fd: see `rings.make_queue`.

    Raises:
        BadRequestError: that ring does not work here.
        UnusableDiskError: it must not be used; one line says why, and it is as it was.
        DiskFailedError: it does not work.
    """
    if reason := await trio.to_thread.run_sync(why_not, ring):
        raise BadRequestError(f"{ring} {reason}", ring=ring)
    opened = partial(open_file, path, capacity_bytes, region_bytes=region_bytes)
    file: DiskFile = await trio.to_thread.run_sync(opened)
    served = None
    try:
        queue, failure = make_queue(ring, file.fd, memory_fd), None
        async with open_ring(queue, file.fd, io_s_max=io_s_max) as served:
            disk = Disk(served, file.superblock, file.path, file.look)
            try:
                await disk.start()
            except DiskFailedError as error:
                failure = error  # raised outside, as the ring's nursery would wrap it
            else:
                yield disk
        if failure is not None:
            raise failure
    finally:
        if served is None or not served.is_holding:  # else the number must not mean another file
            file.close()
