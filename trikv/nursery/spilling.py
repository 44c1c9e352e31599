"""The task that writes the pool's blocks to the disks.

Decided here: how much is written at once, that no disk waits for another one, and what is written
when the daemon ends. Which blocks, and which first, is the core's (`core/spills.py`). A save never
waits for this.
"""

import math
from typing import Final

import structlog
import trio

from trikv.core.below import Below
from trikv.core.parts import SpillPart
from trikv.core.spills import FILLING_UP
from trikv.nursery.disks import DiskTier

log = structlog.get_logger()

BATCH_BYTES: Final = 16 << 20
POOL_PART: Final = 8  # batches of all disks pin at most so small a part of the pool
BUDGET_S: Final = 5.0  # how often an exhausted budget is looked at again
SCAN_S: Final = 30.0
"""A disk whose blocks have not all been found by then is not waited for: others may write anew what
it holds."""


class Spilling:
    """Writes batch after batch, one at a time on each disk: what one is slow to take, others get.

    At the bound: with all disks writing, requests wait in `Spills`, which forgets the oldest.
    """

    def __init__(self, below: Below, tiers: list[DiskTier]) -> None:
        self.spilled_blocks_total = 0
        self.failed_blocks_total = 0
        self._below = below
        self._tiers = tiers
        self._bell = trio.Event()
        self._busy: set[int] = set()  # disks that are writing
        self._patient_until_s = -math.inf

    def ring(self) -> None:
        """Something was saved or used, found or written."""
        self._bell.set()

    @property
    def waiting_count(self) -> int:
        """Requests whose blocks wait to be written, and batches that are being written."""
        return len(self._below.spills) + len(self._busy)

    @property
    def is_full(self) -> bool:
        """The pool fills up: what no disk holds is written before it is evicted."""
        pages = self._below.cache.pages
        return pages.used_bytes >= (1 - FILLING_UP) * pages.capacity_bytes

    async def run(self) -> None:
        """Write until cancelled; begins when what the disks hold is known.

        Cancellation: batches under way are waited for.
        """
        self._patient_until_s = trio.current_time() + SCAN_S
        async with trio.open_nursery() as nursery:
            for tier in self._tiers:
                nursery.start_soon(self._ring_when_found, tier)
            while True:
                self._bell = trio.Event()
                while self._begin_next(nursery, is_full=self.is_full):
                    await trio.lowlevel.checkpoint()
                with trio.move_on_after(self._pause_s()):
                    await self._bell.wait()

    async def drain(self) -> None:
        """Write all that is worth keeping; whoever ends the daemon bounds it.

        Cancellation: batches under way are waited for.
        """
        self._patient_until_s = -math.inf
        async with trio.open_nursery() as nursery:
            while True:
                self._bell = trio.Event()
                if self._begin_next(nursery, is_full=True):
                    await trio.lowlevel.checkpoint()
                elif self._busy:
                    await self._bell.wait()
                else:
                    return

    def _begin_next(self, nursery: trio.Nursery, *, is_full: bool) -> bool:
        """Begin the next batch; False: there is nothing to write, or nobody to take it."""
        now_s, spills = trio.current_time(), self._below.spills
        working = [one for one in self._tiers if not one.fault]
        idle = {one.number for one in working if one.scanned.is_set()} - self._busy
        is_early = now_s < self._patient_until_s and not self._are_found(working)
        if working and (is_early or not idle):
            return False
        waiting = spills.next(is_full=is_full, now_s=now_s)
        if waiting is None:
            return False
        parts, has_more = self._below.spill(waiting.chain, self._batch_bytes, idle)
        if has_more:
            spills.put_back(waiting)
        for part in parts:
            spills.budget.spend(part.bytes)
            self._busy.add(part.disk)
            nursery.start_soon(self._write, part)
        return True

    async def _write(self, part: SpillPart) -> None:
        try:
            kept = await self._tiers[part.disk].write(part)
        finally:
            self._busy.discard(part.disk)
            self.ring()
        self.spilled_blocks_total += kept
        self.failed_blocks_total += len(part.entries) - kept

    async def _ring_when_found(self, tier: DiskTier) -> None:
        await tier.scanned.wait()
        self.ring()

    @staticmethod
    def _are_found(tiers: list[DiskTier]) -> bool:
        return all(one.scanned.is_set() for one in tiers)

    @property
    def _batch_bytes(self) -> int:
        pool_bytes = self._below.cache.pages.capacity_bytes
        return min(BATCH_BYTES, pool_bytes // POOL_PART // max(1, len(self._tiers)))

    def _pause_s(self) -> float:
        """How long nothing changes if nobody rings."""
        now_s = trio.current_time()
        if not self._are_found(self._tiers) and now_s < self._patient_until_s:
            return self._patient_until_s - now_s
        is_broke = len(self._below.spills) > 0 and self._below.spills.budget.left(now_s=now_s) <= 0
        return BUDGET_S if is_broke else math.inf
