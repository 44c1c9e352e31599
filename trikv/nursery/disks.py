"""One disk below the pool as the daemon's tasks use it.

Decided here: how a disk's blocks are found after a start while it serves already, what a disk that
fails does to the blocks that are under way, and what is told about it. This file does not know
which blocks are wanted or worth a write.

| a disk | then |
| --- | --- |
| is being scanned | what was found so far is read; nothing is written |
| fails, hangs | is off: its blocks are misses; memory that it may still touch is never used again |
"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Final, Protocol

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.core.adopting import parts_of
from trikv.core.below import Below
from trikv.core.blocks import SEALED
from trikv.core.errors import NotReadyError
from trikv.core.lower import Lower
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.parts import ReadPart, SpillPart
from trikv.core.slots import Reads, Recovered, Writes
from trikv.tiers.front import DiskFailedError
from trikv.tiers.ssd import IoStalledError

log = structlog.get_logger()

PLACED_AT_ONCE: Final = 4_096
SORTED_HERE: Final = 8_192  # blocks that are sorted in a millisecond: no thread for these
RATE_START: Final = 500e6  # bytes a second, until some have been read
RATE_WEIGHT: Final = 0.2


class Disk(Protocol):
    """What keeps the bytes; see `trikv.tiers.ssd.Disk`."""

    path: str
    ring_name: str
    region_bytes: int
    region_count: int
    was_clean: bool
    fault: str
    bytes_written: int
    bytes_read: int
    io_error_count: int
    sum_error_count: int

    @property
    def first_sequence(self) -> int:
        """The least sequence of this opening."""

    def state(self) -> str:
        """What a person should know, one line; empty when all is well."""

    def scan(self) -> AsyncIterator[Recovered]:
        """What it holds."""

    async def cut(self, region: int, page_bytes: tuple[int, ...]) -> bool:
        """Cut a region for a shape."""

    async def write(self, writes: Writes) -> NDArray[np.bool_]:
        """Put blocks and their records there."""

    async def read(self, reads: Reads) -> NDArray[np.bool_]:
        """Bring blocks into memory."""

    async def void(self, origin: bytes, sequence: int) -> None:
        """Older records of an origin are dead, durably."""

    async def close(self) -> None:
        """A clean end."""


class DiskTier:
    """A disk, the core's view of it, and the pool's memory.

    Attributes:
        number: which of `Below.lowers` it is.
        capacity_bytes: as set.
        scanned: set once all that was there has been found.
        found_blocks: so many were found at the start.
        spilled_bytes, promoted_bytes: written, and read for requests.
    """

    def __init__(self, disk: Disk, below: Below, pool_address: int, capacity_bytes: int) -> None:
        self.disk = disk
        self.below = below
        self.number = len(below.lowers)
        tenants = below.cache.tenants
        self.lower = Lower(
            disk.region_count,
            disk.region_bytes,
            first_sequence=disk.first_sequence,
            tenants=tenants and tenants.beside(disk.region_count * disk.region_bytes),
        )
        below.lowers.append(self.lower)
        self.capacity_bytes = capacity_bytes
        self.scanned = trio.Event()
        self.found_blocks = 0
        self.rate = RATE_START
        self._address = np.uint64(pool_address)
        self._limiter = trio.CapacityLimiter(1)

    @property
    def fault(self) -> str:
        """Why it is off, one line; empty while it works."""
        return self.lower.fault

    @property
    def state(self) -> str:
        """Serving, scanning while not all that is there has been found, or off."""
        if self.fault:
            return "off"
        return "serving" if self.scanned.is_set() else "scanning"

    @property
    def shown_state(self) -> str:
        """The state, and what a person should know about it."""
        notice = self.fault or self.disk.state()
        return f"{self.state}: {notice}" if notice else self.state

    @property
    def used_bytes(self) -> int:
        """Slots of blocks that are there or on their way; 0 while it is off."""
        return 0 if self.fault else self.lower.pages.used_bytes

    @property
    def block_count(self) -> int:
        """Blocks that can be read."""
        return 0 if self.fault else self.lower.blocks.counts[SEALED]

    def check(self) -> None:
        """Believe the disk when it says that it is off."""
        if self.disk.fault and not self.lower.fault:
            self._withhold(self.disk.fault)
            log.error("disk.failed", path=self.disk.path, reason=self.disk.fault)

    def _withhold(self, fault: str) -> None:
        self.lower.withhold(fault)
        self.below.lost()

    # -- at the start

    async def recover(self) -> None:
        """Find what the disk holds; what was found can be read at once."""
        begin_s = trio.current_time()
        try:
            async for found in self.disk.scan():
                for part in parts_of(found):
                    self.found_blocks += self.lower.adopt(part)
                    await trio.lowlevel.checkpoint()
            entries, keys = self.lower.adopted()
            if len(entries) <= SORTED_HERE:
                order = np.lexsort(keys)
            else:
                sort = partial(np.lexsort, keys)
                order = await trio.to_thread.run_sync(sort, limiter=self._limiter)
            for at in range(0, len(entries), PLACED_AT_ONCE):
                self.lower.place(entries[order[at : at + PLACED_AT_ONCE]])
                await trio.lowlevel.checkpoint()
        except RuntimeError as error:  # no thread could be started
            self._withhold(f"its blocks could not be sorted: {error}")
        self.check()
        self.lower.end_adopting()
        self.scanned.set()
        took_s = round(trio.current_time() - begin_s, 3)
        log.info(
            "disk.ready",
            path=self.disk.path,
            ring=self.disk.ring_name,
            blocks=self.found_blocks,
            was_clean=self.disk.was_clean,
            took_s=took_s,
        )

    # -- reading

    async def read(self, part: ReadPart) -> None:
        """Fill a part's pages; its blocks end whatever happens.

        Cancellation: what the disk has begun is waited for.
        """
        landing = part.landing
        addresses = landing.offsets[:, part.rows].T.astype(np.uint64) + self._address
        reads = Reads(
            part.regions,
            part.slots,
            np.ascontiguousarray(addresses),
            landing.lengths,
            part.sums,
        )
        arrived = np.zeros(len(part.rows), np.bool_)
        held = np.zeros(len(part.rows), np.bool_)
        begin_s = trio.current_time()
        try:
            with trio.CancelScope(shield=True):  # its answer says what memory is free again
                arrived = await self.disk.read(reads)
        except IoStalledError as error:
            arrived, held = error.right, error.held
        finally:
            self.check()
            if held.any():
                self.below.quarantine_read(part, arrived, held)
            else:
                self.below.end_read(part, arrived)
        took_s = trio.current_time() - begin_s
        if took_s > 0 and arrived.all():
            self.rate += RATE_WEIGHT * (part.bytes / took_s - self.rate)

    # -- writing

    async def write(self, part: SpillPart) -> int:
        """Write a part's blocks and their records; they end whatever happens.

        Cancellation: what the disk has begun is waited for.

        Returns:
            How many blocks the disk has now.
        """
        plan, count = part.plan, len(part.entries)
        origin = np.frombuffer(self.below.origin(part.chain.space), np.uint8)
        writes = Writes(
            plan.regions,
            plan.slots,
            np.ascontiguousarray(part.offsets.T.astype(np.uint64) + self._address),
            plan.page_bytes,
            np.broadcast_to(origin, (count, ORIGIN_BYTES)),
            part.words,
            part.depths,
            np.full(count, plan.sequence, np.int64),
        )
        written = np.zeros(count, np.bool_)
        held = np.zeros(count, np.bool_)
        try:
            with trio.CancelScope(shield=True):  # as above
                if await self._cut(plan.cuts, plan.page_bytes):
                    written = await self.disk.write(writes)
        except IoStalledError as error:
            held = error.held
        finally:
            self.check()
            if held.any():
                self.below.quarantine_spill(part, writes.sums, held)
                kept = 0
            else:
                kept = self.below.end_spill(part, written, writes.sums)
        return kept

    async def _cut(self, regions: tuple[int, ...], page_bytes: tuple[int, ...]) -> bool:
        for region in regions:
            if not await self.disk.cut(region, page_bytes):
                return False
        return True

    # -- forgetting

    async def void(self, origin: bytes) -> None:
        """Make durable that an origin's blocks so far are dead.

        Raises:
            NotReadyError: that is not certain; they might come back after a restart.
        """
        try:
            await self.disk.void(origin, self.below.floor(self.number, origin))
        except DiskFailedError as error:
            self.check()
            raise NotReadyError(
                f"the SSD at {self.disk.path} cannot be told to forget: {error}"
            ) from error

    async def close(self) -> None:
        """A clean end; a disk that cannot do so is as after a crash."""
        if self.fault:
            return
        try:
            await self.disk.close()
        except DiskFailedError as error:
            self.check()
            log.warning("disk.unclean", path=self.disk.path, reason=str(error))
