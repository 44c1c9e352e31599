"""Room in the pool: which blocks go when another wants their place, and what goes with them.

Decided here: the order of recency across calls, when a shape takes a whole slab from another, and
that pages, row and key of a block go together. This file does not know spaces, leases, requests or
who asks; what may not go now is pinned in the columns.
"""

import itertools
from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import SEALED, Blocks
from trikv.core.counters import Counters
from trikv.core.eviction import NEVER, LeafFirstLru
from trikv.core.index import Index
from trikv.core.pages import Pages
from trikv.core.policies import Ground, Maker, Policy
from trikv.core.rows import is_all, rows_of
from trikv.core.tenants import TenantOrders, Tenants
from trikv.core.words import Entries, ShapeId, SpaceId, Stamp

EVICT_BATCH: Final = 256
"""Blocks evicted at once when room is needed, so that the cost is paid seldom and in bulk."""

SPARES_MAX: Final = 1_024

NOWHERE: Final = 2**63 - 1
"""A stamp that no block has."""
SHARE: Final = 16
"""Of a shape's blocks one in so many go at most, and then other shapes' slabs are looked at again:
behind its coldest ones may stand some that are warmer than those."""
NEAR: Final = 4
"""So many times what is needed is looked through for blocks that a disk holds too."""


class Room:
    """The pages and rows of one pool, and the order in which each shape's blocks give theirs up.

    Attributes:
        recency: int64[entry], the stamp of the last touch, -1 without one.
        orders: a shape's blocks, those to evict first in front; sealed blocks only.
        prefers_below: True: of the blocks whose turn is near, those that a disk holds too go first.
        prefers_copied: likewise, those that another node holds too.
    """

    def __init__(
        self,
        pages: Pages,
        blocks: Blocks,
        index: Index,
        counters: Counters,
        *,
        maker: Maker,
        tenants: Tenants | None = None,
    ) -> None:
        self.recency = np.full(blocks.capacity, -1, np.int64)
        self.orders: dict[ShapeId, Policy] = {}
        self.prefers_below = False
        self.prefers_copied = False
        self._seen_at = np.zeros(blocks.capacity, np.int32)  # scratch of `touch`
        self._pages = pages
        self._blocks = blocks
        self._index = index
        self._counters = counters
        self._maker = maker
        self._tenants = tenants
        self._stamps = itertools.count(1)
        self._spares: dict[ShapeId, deque[tuple[Entries, NDArray[np.uint32]]]] = {}

    def open(self, shape: ShapeId) -> None:
        """Make a shape known; the same shape may be opened again."""
        if shape not in self.orders:
            blocks = min(self._pages.slot_count(shape), self._blocks.capacity)
            ground = Ground(self.recency, blocks, self._index.names_of)
            self.orders[shape] = self._new_order(shape, ground)

    def _new_order(self, shape: ShapeId, ground: Ground) -> Policy:
        if self._tenants is None:
            return self._maker(ground)
        return TenantOrders(
            self._tenants,
            self._maker,
            ground,
            space=self._blocks.space,
            replica=self._blocks.replica,
            block_bytes=self._pages.slot_bytes(shape),
        )

    def count(self, shape: ShapeId) -> int:
        """How many blocks of a shape fit without evicting any."""
        return min(self._pages.free_count(shape), self._blocks.unused_count)

    def make_beside(self, shape: ShapeId, count: int, kin: Entries, *, space: SpaceId) -> None:
        """As `make`, but sealed blocks of `kin` stay: what is wanted needs them.

        Args:
            shape: whose blocks want room.
            count: of blocks, those that fit already included.
            kin: rows in any state, as often as one likes.
            space: of what is wanted.
        """
        if count <= self.count(shape):
            return
        kin = np.unique(kin)
        kin = kin[self._blocks.state[kin] == SEALED]
        self._blocks.pin(kin)
        block_bytes = self._pages.slot_bytes(shape)
        batch = min(EVICT_BATCH, 1 + self._pages.capacity_bytes // (16 * block_bytes))
        self.make(shape, count, batch=batch, space=space)
        self.unpin(kin)

    def make(self, shape: ShapeId, count: int, *, batch: int, space: SpaceId) -> None:
        """Evict until `count` blocks of a shape fit, or nothing more can be evicted.

        A whole slab of another shape goes first when all its blocks are colder than ours: so a pool
        full of one model gives another model its space, and not the other way round.

        Args:
            shape: whose blocks want room.
            count: of blocks, those that fit already included.
            batch: blocks evicted at once at least, where there are so many.
            space: theirs; with quotas its tenant matters.
        """
        if self._tenants is not None:
            self._tenants.asking = self._tenants.of(space)
        order, others = self.orders[shape], NEVER
        while (missing := count - self.count(shape)) > 0:
            spares = self._take_spares(shape, missing)
            if len(spares):
                self._evict(spares)
                continue
            coldest = order.coldest()
            if coldest is None or coldest > others:
                others = self._reclaim_slab(shape, colder_than=coldest)
                if others == NEVER:
                    continue
            most = max(missing, batch)
            if others < NOWHERE and isinstance(order, LeafFirstLru):
                most = min(most, 1 + self._pages.used_slots(shape) // SHARE)
            victims = self._victims(order, most)
            if (
                len(victims) == 0
                and self._reclaim_slab(shape, colder_than=None) > NEVER
                and not self._evict_any(shape, count, batch)
            ):
                return
            self._evict(victims)

    def _victims(self, order: Policy, count: int) -> Entries:
        """The next to go; what would be lost goes back to its place while others can go."""
        prefers = self.prefers_below or self.prefers_copied
        if not prefers or not isinstance(order, LeafFirstLru):
            return order.victims(count, self._blocks.evictable)
        near = order.take(NEAR * count, self._blocks.evictable)
        is_spare = self._blocks.below[near] | self._blocks.replica[near]
        chosen = np.concatenate((np.flatnonzero(is_spare), np.flatnonzero(~is_spare)))[:count]
        is_chosen = np.zeros(len(near), np.bool_)
        is_chosen[chosen] = True
        order.restore(near[~is_chosen])
        self.recency[near[is_chosen]] = NEVER
        return near[is_chosen]

    def spare(self, shape: ShapeId, entries: Entries) -> None:
        """Sealed blocks that are in no order yet go before all others, until they are touched.

        At the bound, with `SPARES_MAX` calls whose blocks are still spare: the oldest of them go
        now, but for those that somebody holds, which are last in their order then.
        """
        if len(entries) == 0:
            return
        queue = self._spares.setdefault(shape, deque())
        queue.append((entries, self._blocks.generation[entries]))
        if len(queue) > SPARES_MAX:
            live = self._still_spare(*queue.popleft())
            is_free = self._blocks.evictable[live]
            self._evict(live[is_free])
            self.touch(shape, live[~is_free])

    def _take_spares(self, shape: ShapeId, count: int) -> Entries:
        """Spare blocks to evict next; those that somebody holds stay spare."""
        queue = self._spares.get(shape)
        found = [np.empty(0, np.int32)]
        for _ in range(len(queue) if queue else 0):
            assert queue is not None
            if count <= 0:
                break
            live = self._still_spare(*queue.popleft())
            free = live[self._blocks.evictable[live]][:count]
            left = live[~np.isin(live, free)]
            if len(left):
                queue.append((left, self._blocks.generation[left]))
            found.append(free)
            count -= len(free)
        return np.concatenate(found)

    def _still_spare(self, entries: Entries, generations: NDArray[np.uint32]) -> Entries:
        blocks = self._blocks
        is_same = (blocks.generation[entries] == generations) & (blocks.state[entries] == SEALED)
        spare: Entries = entries[is_same & (self.recency[entries] == NEVER)]
        return spare

    def free(self, entries: Entries) -> None:
        """Give back the pages of rows that have become absent."""
        if len(entries):
            self._pages.free(self._blocks.slot[entries])

    def unpin(self, entries: Entries) -> None:
        """One reader less of each row, all of one shape: it may be evictable again, or be free."""
        evictable, freed = self._blocks.unpin(entries)
        self.free(freed)
        if len(evictable):
            slot = self._blocks.slot.item(evictable.item(0))
            self._order_of_slab(slot // self._pages.slots_per_slab_max).unpark(evictable)

    def touch(self, shape: ShapeId, entries: Entries, *, is_use: bool = False) -> None:
        """Sealed blocks, root first, were used or are new: they are the last to go.

        An engine may name a block twice in one request; it counts where it stands last.

        Args:
            shape: of all of them.
            entries: root first.
            is_use: True when a request finds them for the first time, which is counted.
        """
        rows = rows_of(entries)
        if not isinstance(rows, slice) and not is_all(entries[1:] > entries[:-1]):
            places = np.arange(len(entries), dtype=np.int32)
            self._seen_at[rows] = places
            entries = entries[self._seen_at[rows] == places]
            rows = rows_of(entries)
        if len(entries):
            stamp = Stamp(next(self._stamps))
            if is_use:
                self.orders[shape].used(entries)
            self.orders[shape].touch(entries, stamp)
            self._pages.used(self._blocks.slot[rows], stamp)

    def count_uses(self, shape: ShapeId, entries: Entries) -> None:
        """A request that had not been counted uses sealed blocks."""
        self.orders[shape].used(entries)

    def _reclaim_slab(self, shape: ShapeId, *, colder_than: int | None) -> int:
        """Evict the coldest slab of another shape that nobody holds, if it is colder than that.

        Returns:
            `NEVER` when one was evicted; else the stamp of the coldest one that may go, `NOWHERE`
            when there is none.
        """
        for slab in self._pages.slabs_of_other_shapes(shape).tolist():
            newest = self._pages.newest_use.item(slab)
            if colder_than is not None and newest >= colder_than:
                return newest
            entries = self._pages.entries_in_slab(slab)
            if bool(self._blocks.evictable[entries].all()) and self._may_lose(slab, entries):
                self._order_of_slab(slab).forget(entries)
                self._evict(entries)
                self._counters.reclaimed_slabs_total += 1
                return NEVER
        return NOWHERE

    def _may_lose(self, slab: int, entries: Entries) -> bool:
        order = self._order_of_slab(slab)
        if self._tenants is None or not isinstance(order, TenantOrders):
            return True
        return self._tenants.may_lose(order.tenants_of(entries), order.block_bytes)

    def _evict_any(self, shape: ShapeId, count: int, batch: int) -> bool:
        """When rows, not pages, are short: evict from the other shapes' orders."""
        if self._blocks.unused_count >= min(count, self._pages.free_count(shape)):
            return False
        for other, order in self.orders.items():
            if other != shape:
                victims = self._take_spares(other, batch)
                if len(victims) == 0:
                    victims = order.victims(batch, self._blocks.evictable)
                if len(victims):
                    self._evict(victims)
                    return True
        return False

    def _order_of_slab(self, slab: int) -> Policy:
        return self.orders[self._pages.shape_of_slab(slab)]

    def _evict(self, victims: Entries) -> None:
        if len(victims) == 0:
            return
        if self.prefers_below:
            unwritten = int(np.count_nonzero(~self._blocks.below[victims]))
            self._counters.evicted_unwritten_blocks_total += unwritten
        self._index.remove(victims)
        self._blocks.evict(victims)
        self.free(victims)
        self._counters.evicted_blocks_total += len(victims)
