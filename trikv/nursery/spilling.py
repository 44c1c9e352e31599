"""The task that writes the pool's blocks to the disks.

Decided here: how much is written at once, and what is written when the daemon ends. Which blocks,
and which first, is the core's (`core/spills.py`). A save never waits for this.
"""

from typing import Final

import structlog
import trio

from trikv.core.below import Below, SpillPart
from trikv.core.spills import FILLING_UP
from trikv.nursery.disks import DiskTier

log = structlog.get_logger()

BATCH_BYTES: Final = 16 << 20
POOL_PART: Final = 8  # a batch pins at most so small a part of the pool
BUDGET_S: Final = 5.0  # how often an exhausted budget is looked at again


class Spilling:
    """Writes batch after batch, one at a time on each disk."""

    def __init__(self, below: Below, tiers: list[DiskTier]) -> None:
        self.spilled_blocks_total = 0
        self.failed_blocks_total = 0
        self._below = below
        self._tiers = tiers
        self._bell = trio.Event()
        self._is_writing = False
        pool_bytes = below.cache.pages.capacity_bytes
        self._batch_bytes = min(BATCH_BYTES, pool_bytes // POOL_PART)

    def ring(self) -> None:
        """Something was saved or used."""
        self._bell.set()

    @property
    def waiting_count(self) -> int:
        """Requests whose blocks wait to be written, or are being written."""
        return len(self._below.spills) + self._is_writing

    @property
    def is_full(self) -> bool:
        """The pool fills up: what no disk holds is written before it is evicted."""
        pages = self._below.cache.pages
        return pages.used_bytes >= (1 - FILLING_UP) * pages.capacity_bytes

    async def run(self) -> None:
        """Write until cancelled; begins when what the disks hold is known.

        Cancellation: the batch under way is waited for.
        """
        for tier in self._tiers:
            await tier.scanned.wait()
        while True:
            self._bell = trio.Event()
            while await self.write_next(is_full=self.is_full):
                await trio.lowlevel.checkpoint()
            if len(self._below.spills) and self._is_broke():
                await trio.sleep(BUDGET_S)
            else:
                await self._bell.wait()

    async def drain(self) -> None:
        """Write all that is worth keeping; whoever ends the daemon bounds it."""
        while await self.write_next(is_full=True):
            await trio.lowlevel.checkpoint()

    async def write_next(self, *, is_full: bool) -> bool:
        """Write the next batch; False: there is nothing to write."""
        spills = self._below.spills
        waiting = spills.next(is_full=is_full, now_s=trio.current_time())
        if waiting is None:
            return False
        parts, has_more = self._below.spill(waiting.chain, self._batch_bytes)
        if has_more:
            spills.put_back(waiting)
        self._is_writing = len(parts) > 0
        try:
            async with trio.open_nursery() as nursery:
                for part in parts:
                    spills.budget.spend(part.bytes)
                    nursery.start_soon(self._write, part)
        finally:
            self._is_writing = False
        return True

    async def _write(self, part: SpillPart) -> None:
        kept = await self._tiers[part.disk].write(part)
        self.spilled_blocks_total += kept
        self.failed_blocks_total += len(part.entries) - kept

    def _is_broke(self) -> bool:
        return self._below.spills.budget.left(now_s=trio.current_time()) <= 0
