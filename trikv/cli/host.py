"""A host of the replay: one pool, and a disk below it where the case has one.

Decided here: what one replayed request does to the core, copies and I/O taking no time. This file
does not know traces or capacities of several pools.
"""

from typing import Final

import numpy as np

from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.lower import Lower
from trikv.core.plans import Key, Limits
from trikv.core.policies import MAKERS
from trikv.core.spills import FILLING_UP, Budget, Spills
from trikv.core.words import SpaceId, Words

PAGE: Final = 4096
SPACE: Final = SpaceId(1)
ORIGIN: Final = bytes(32)
SLAB_SLOTS_MIN: Final = 256
SLAB_SLOTS_MAX: Final = 1024
LIMITS: Final = Limits(
    leased_fraction=1.0,
    filling_fraction=1.0,
    filling_fraction_many_ranks=1.0,
    fetching_fraction=1.0,
    chains_max=1024,
)


def _slots_of_slab(blocks: int) -> int:
    """So many that slabs have a few slots more than there are blocks."""
    if blocks <= SLAB_SLOTS_MAX:
        return blocks
    return min(range(SLAB_SLOTS_MAX, SLAB_SLOTS_MIN, -1), key=lambda one: -blocks % one)


class Host:
    """A pool for exactly `blocks` blocks, and a disk.

    Attributes:
        ssd_blocks: slots of the disk: as many as were asked for, or a few more; 0: no disk.
        written_blocks, read_blocks: what the disk has done.
    """

    def __init__(
        self, blocks: int, policy: str, ranks: int, *, ssd_blocks: int, write_through: bool
    ) -> None:
        slots = _slots_of_slab(blocks)
        slab_bytes = slots * ranks * PAGE
        self.cache = Cache(
            -(-blocks // slots) * slab_bytes,
            slab_bytes,
            entries_max=blocks,
            seed=1,
            limits=LIMITS,
            policy=MAKERS[policy],
        )
        self.cache.open_space(SPACE, (PAGE,) * ranks)
        self.ranks = ranks
        self.ssd_blocks = self.written_blocks = self.read_blocks = 0
        self._below: Below | None = None
        if ssd_blocks:
            slots = _slots_of_slab(ssd_blocks)
            self.ssd_blocks = -(-ssd_blocks // slots) * slots
            lower = Lower(
                -(-ssd_blocks // slots),
                slots * ranks * PAGE,
                slot_bytes_min=ranks * PAGE,
                first_sequence=1,
                seed=1,
            )
            lower.end_adopting()
            self._below = Below(
                self.cache, (lower,), Spills(Budget(None), write_through=write_through)
            )
            self._below.open_space(SPACE, ORIGIN, (PAGE,) * ranks)

    def ask(self, key: Key, words: Words, *, now_s: float) -> tuple[int, int]:
        """Find what is there; returns (blocks found, of these from the disk)."""
        hit = self.cache.query(key, words, now_s=now_s)
        if self._below is None or hit.count == len(words):
            return hit.count, 0
        count, fetched = hit.count, -1
        while fetched:
            fetched = self._fetch(words, count)
            found = self.cache.query(key, words, now_s=now_s).count
            fetched, count = found - count, found
        return count, count - hit.count

    def _fetch(self, words: Words, first: int) -> int:
        assert self._below is not None
        coming = self._below.fetch(SPACE, words, first, len(words) - first)
        for part in coming.parts:
            self._below.end_read(part, np.ones(len(part.rows), np.bool_))
            self.read_blocks += len(part.rows)
        return coming.count

    def save(self, key: Key, words: Words, first: int, *, now_s: float) -> None:
        """Save what is not there, on all ranks."""
        for rank in range(self.ranks):
            plan = self.cache.prepare_save(key, words, rank=rank, first=first, now_s=now_s)
            self.cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        self.cache.expire_fills(now_s=now_s)

    def end(self, key: Key, *, now_s: float) -> None:
        """The request has ended; then the disk writes what is worth it."""
        self.cache.release(key.instance, key.request)
        if self._below is None:
            return
        pages, spills = self.cache.pages, self._below.spills
        while True:
            is_full = pages.used_bytes > (1 - FILLING_UP) * pages.capacity_bytes
            waiting = spills.next(is_full=is_full, now_s=now_s)
            if waiting is None:
                return
            parts, _ = self._below.spill(waiting.chain, 1 << 62, range(len(self._below.lowers)))
            for part in parts:
                count = len(part.entries)
                sums = np.zeros(count, np.uint64)
                self.written_blocks += self._below.end_spill(part, np.ones(count, np.bool_), sums)
