"""The pure heart of a daemon: which blocks are in the pool, who may read them, what makes room.

Decided here: how index, pages, block life, recency, leases and chains move together for each call
of an engine. All methods are synchronous and take `now_s`; each returns what the shell has to copy.
This file does not know connections, memory, tasks, clocks or logs.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import Blocks, State
from trikv.core.chains import Chain, Chains
from trikv.core.counters import Counters
from trikv.core.errors import BadRequestError
from trikv.core.eviction import LeafFirstLru
from trikv.core.index import Index
from trikv.core.leases import Lease, Leases
from trikv.core.pages import Pages
from trikv.core.words import (
    Entries,
    InstanceName,
    LeaseId,
    Offsets,
    RequestId,
    ShapeId,
    SpaceId,
    Stamp,
    TransferId,
    Words,
)

EVICT_BATCH = 256
"""Blocks evicted at once when room is needed, so that the cost is paid seldom and in bulk."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a cache; each has its behaviour at the bound in the method that meets it."""

    lease_s: float = 30.0
    leases_max: int = 16_384
    leased_fraction: float = 0.5
    fill_s: float = 30.0
    filling_fraction: float = 0.5
    filling_fraction_many_ranks: float = 0.1
    chains_max: int = 65_536


@dataclass(frozen=True, slots=True)
class Key:
    """Who calls about what: an instance's request in one space."""

    instance: InstanceName
    request: RequestId
    space: SpaceId


@dataclass(frozen=True, slots=True)
class SpaceFacts:
    """How blocks of a space lie in the pool."""

    shape: ShapeId
    rank_count: int
    block_bytes: int  # of the pool: all ranks' pages with their padding


@dataclass(frozen=True, slots=True)
class Hit:
    """Answer to a query."""

    count: int
    lease: Lease | None


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A copy from an engine's memory into pages that are claimed for it until `complete_save`."""

    transfer: TransferId
    key: Key
    rank: int
    positions: NDArray[np.int64]  # which blocks of the message are to be copied
    entries: Entries
    offsets: Offsets
    present_count: int
    refused_count: int
    chain: Chain  # the request's, kept for the touch at the end even when the request ends before


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A copy of pinned pages into an engine's memory; the pins end with `complete_load`."""

    transfer: TransferId
    entries: Entries
    offsets: Offsets


class Cache:
    """All blocks of one pool."""

    def __init__(
        self, capacity_bytes: int, slab_bytes: int, *, entries_max: int, seed: int, limits: Limits
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.pages = Pages(capacity_bytes, slab_bytes)
        self.index = Index(entries_max, seed=seed)
        self.blocks = Blocks(entries_max)
        self.recency = np.full(entries_max, -1, np.int64)
        self.leases = Leases(
            limits.lease_s, limits.leases_max, int(capacity_bytes * limits.leased_fraction)
        )
        self.chains = Chains(limits.chains_max)
        self.spaces: dict[SpaceId, SpaceFacts] = {}
        self.transfers: set[TransferId] = set()
        self._orders: dict[ShapeId, LeafFirstLru] = {}
        self._filling_bytes = 0
        self._fills: deque[tuple[float, Entries, NDArray[np.uint32]]] = deque()
        self._stamps = itertools.count(1)
        self._numbers: Iterator[int] = itertools.count(1)

    # -- spaces

    def open_space(self, space: SpaceId, page_bytes: tuple[int, ...]) -> None:
        """Make a space known; the same space may be opened again.

        Raises:
            BadRequestError: a block does not fit a slab.
        """
        shape = ShapeId(self.pages.add_shape(page_bytes))
        self._orders.setdefault(shape, LeafFirstLru(self.recency))
        self.spaces[space] = SpaceFacts(shape, len(page_bytes), self.pages.slot_bytes(shape))

    def drop_space(self, space: SpaceId) -> int:
        """Forget all blocks of a space (a scan of the columns); returns how many left the index."""
        states = self.blocks.state
        mine = (self.blocks.space == space) & ((states == State.FILLING) | (states == State.SEALED))
        entries = np.flatnonzero(mine).astype(np.int32)
        self._orders[self.spaces[space].shape].forget(entries)
        self._drop(entries)
        self.counters.dropped_blocks_total += len(entries)
        return len(entries)

    # -- query and leases

    def query(self, key: Key, words: Words, *, now_s: float) -> Hit:
        """Count the leading blocks at hand and promise exactly these for a while.

        The request's earlier lease is renewed when it covers the same blocks, else replaced.

        At the bound: with leases at their limit the answer is shorter, down to a miss.
        """
        facts = self.spaces[key.space]
        entries = self.index.find_prefix(key.space, words)
        sealed = self.blocks.state[entries] == State.SEALED
        hits = entries if bool(sealed.all()) else entries[: int(np.argmin(sealed))]
        chain = self.chains.of(key.instance, key.request, key.space)
        chain.put(0, hits, self.blocks.generation[hits])
        self._touch(facts.shape, hits)
        lease = self._promise(key, facts, hits, now_s=now_s)
        count = len(lease.entries) if lease else 0
        self.counters.query_total += 1
        self.counters.query_blocks_total += len(words)
        self.counters.query_hit_blocks_total += count
        self.counters.query_shortened_total += count < len(hits)
        return Hit(count, lease)

    def _promise(self, key: Key, facts: SpaceFacts, hits: Entries, *, now_s: float) -> Lease | None:
        old = self.leases.of_request(key.instance, key.request)
        if old is not None and old.deadline_s > now_s and np.array_equal(old.entries, hits):
            self.leases.renew(old, now_s=now_s)
            self.counters.lease_renewed_total += 1
            return old
        self.blocks.pin(hits)  # before the old lease lets go, so that nothing falls between
        if old is not None:
            self._unpin(self.leases.end(old))
        granted = hits[: self.leases.room(facts.block_bytes)]
        self._unpin(hits[len(granted) :])
        if len(granted) == 0:
            return None
        self.counters.lease_granted_total += 1
        return self.leases.grant(
            key.instance,
            key.request,
            granted,
            block_bytes=facts.block_bytes,
            rank_count=facts.rank_count,
            now_s=now_s,
        )

    def expire_leases(self, *, now_s: float) -> int:
        """End the leases whose time is over; returns how many."""
        ended = self.leases.expire(now_s=now_s)
        for lease in ended:
            self._unpin(lease.entries)
        self.counters.lease_expired_total += len(ended)
        return len(ended)

    def release(self, instance: InstanceName, request: RequestId) -> None:
        """The request has ended: its lease ends, its chain is forgotten."""
        lease = self.leases.of_request(instance, request)
        if lease is not None:
            self._unpin(self.leases.end(lease))
        self.chains.forget(instance, request)

    def release_instance(self, instance: InstanceName) -> None:
        """All requests of an engine have ended."""
        for lease in self.leases.of_instance(instance):
            self._unpin(self.leases.end(lease))
        self.chains.forget_instance(instance)

    # -- load

    def prepare_load(
        self,
        lease_id: LeaseId,
        instance: InstanceName,
        rank: int,
        first: int,
        count: int,
        *,
        now_s: float,
    ) -> LoadPlan:
        """Pin the blocks that `rank` wants to copy out; expiry of the lease no longer matters to them.

        Raises:
            LeaseLostError: query again.
            BadRequestError: the lease has no such blocks.
        """
        lease = self.leases.use(lease_id, instance, rank, now_s=now_s)
        if count < 1 or first + count > len(lease.entries):
            raise BadRequestError(
                f"blocks {first} to {first + count - 1} of a lease on {len(lease.entries)}"
            )
        entries = lease.entries[first : first + count]
        self.blocks.pin(entries)
        over = self.leases.consumed(lease, rank)
        if over is not None:
            self._unpin(over)
        self.counters.load_total += 1
        return LoadPlan(self._begin(), entries, self.pages.offsets(self.blocks.slot[entries], rank))

    def complete_load(self, plan: LoadPlan, *, copied_count: int, copied_bytes: int) -> None:
        """The copy has ended, well or not: nothing reads the pages any more."""
        self._end(plan.transfer)
        self._unpin(plan.entries)
        self.counters.load_blocks_total += copied_count
        self.counters.load_bytes_total += copied_bytes
        self.counters.load_failed_blocks_total += len(plan.entries) - copied_count

    # -- save

    def prepare_save(
        self, key: Key, words: Words, *, rank: int, first: int, now_s: float
    ) -> SavePlan:
        """Claim pages for the blocks that this rank has to copy; blocks that are there cost nothing.

        Args:
            key: the request's.
            words: hashes of the blocks at positions `first` and after.
            rank: whose pages.
            first: position in the request of the first block.
            now_s: for the deadline by which all ranks must have saved.

        At the bound: blocks that find no room are refused from the end of the message.

        Raises:
            BadRequestError: a hash stands twice in the message; nothing was changed.
        """
        _check_distinct(words)
        facts = self.spaces[key.space]
        chain = self.chains.of(key.instance, key.request, key.space)
        entries = self.index.find(key.space, words)
        absent = np.flatnonzero(entries < 0)
        reserved = self._reserve(
            key.space, facts, chain, words[absent], absent + first, now_s=now_s
        )
        entries[absent[: len(reserved)]] = reserved
        known = np.flatnonzero(entries >= 0)
        claimed = self.blocks.claimed[entries[known]] >> np.uint64(rank) & np.uint64(1)
        mine = known[(self.blocks.state[entries[known]] == State.FILLING) & (claimed == 0)]
        self.blocks.claim(entries[mine], rank)
        chain.put(first, entries, self.blocks.generation[entries])
        if len(mine) == 0:
            self._touch_chain(facts.shape, chain)
        refused = len(absent) - len(reserved)
        present = len(words) - refused - len(mine)
        self.counters.save_total += 1
        self.counters.save_present_blocks_total += present
        self.counters.save_refused_blocks_total += refused
        offsets = self.pages.offsets(self.blocks.slot[entries[mine]], rank)
        return SavePlan(
            self._begin(), key, rank, mine, entries[mine], offsets, present, refused, chain
        )

    def complete_save(
        self, plan: SavePlan, copied: NDArray[np.bool_], *, copied_bytes: int
    ) -> None:
        """The copy has ended: blocks whose pages are all there become visible, failed ones go.

        Args:
            plan: from `prepare_save`, completed once.
            copied: bool[len(plan.entries)], whose bytes are whole and were not fenced off.
            copied_bytes: for the counters.
        """
        self._end(plan.transfer)
        facts = self.spaces[plan.key.space]
        sealed, freed = self.blocks.fill(plan.entries[copied], plan.rank)
        self._free(freed)
        lost, freed = self.blocks.fail(plan.entries[~copied])
        self._unindex(lost, was_filling=True)
        self._free(freed)
        self._filling_bytes -= len(sealed) * facts.block_bytes
        self._touch_chain(facts.shape, plan.chain, sealed)
        self.counters.save_blocks_total += int(copied.sum())
        self.counters.save_failed_blocks_total += int((~copied).sum())
        self.counters.save_bytes_total += copied_bytes
        self.counters.sealed_blocks_total += len(sealed)

    def expire_fills(self, *, now_s: float) -> int:
        """Give up blocks whose ranks did not all save in time; returns how many."""
        count = 0
        while self._fills and self._fills[0][0] <= now_s:
            _, entries, generations = self._fills.popleft()
            same = self.blocks.generation[entries] == generations
            late = entries[same & (self.blocks.state[entries] == State.FILLING)]
            self._drop(late)
            count += len(late)
        self.counters.fill_expired_blocks_total += count
        return count

    # -- facts

    @property
    def filling_bytes(self) -> int:
        """Pool bytes of blocks that not all ranks have filled."""
        return self._filling_bytes

    def blocks_by_space(self) -> dict[SpaceId, int]:
        """Sealed blocks of each space (a scan of the columns)."""
        spaces, counts = np.unique(
            self.blocks.space[self.blocks.state == State.SEALED], return_counts=True
        )
        return {
            SpaceId(int(space)): int(count) for space, count in zip(spaces, counts, strict=True)
        }

    # -- room

    def _reserve(
        self,
        space: SpaceId,
        facts: SpaceFacts,
        chain: Chain,
        words: Words,
        depths: NDArray[np.int64],
        *,
        now_s: float,
    ) -> Entries:
        """Pages on all ranks for the leading blocks that find room."""
        limits = self.limits
        fraction = (
            limits.filling_fraction if facts.rank_count == 1 else limits.filling_fraction_many_ranks
        )
        may_fill = int(self.pages.capacity_bytes * fraction) - self._filling_bytes
        count = min(len(words), max(0, may_fill) // facts.block_bytes)
        if count > self._room(facts.shape):
            # A block whose own ancestors would have to go for it is not worth its place.
            ancestors = self._live(chain)
            self.blocks.pin(ancestors)
            self._make_room(facts.shape, count)
            self._unpin(ancestors)
        slots = self.pages.allocate(facts.shape, min(count, self.blocks.unused_count))
        if len(slots) == 0:
            return np.empty(0, np.int32)
        entries = self.blocks.reserve(
            slots, depths[: len(slots)].astype(np.int32), space=space, rank_count=facts.rank_count
        )
        self.pages.set_owner(slots, entries)
        self.index.insert(space, words[: len(slots)], entries)
        self._filling_bytes += len(slots) * facts.block_bytes
        self._fills.append((now_s + limits.fill_s, entries, self.blocks.generation[entries]))
        return entries

    def _make_room(self, shape: ShapeId, count: int) -> None:
        """Evict until `count` blocks of a shape fit, or nothing more can be evicted.

        A whole slab of another shape goes first when all its blocks are colder than ours: so a pool
        full of one model gives another model its space, and not the other way round.
        """
        order = self._orders[shape]
        while (missing := count - self._room(shape)) > 0:
            coldest = order.coldest()
            if self._reclaim_slab(shape, colder_than=coldest):
                continue
            victims = order.victims(max(missing, EVICT_BATCH), self.blocks.evictable)
            if (
                len(victims) == 0
                and not self._reclaim_slab(shape, colder_than=None)
                and not self._evict_any(shape)
            ):
                return
            self._evict(victims)

    def _room(self, shape: ShapeId) -> int:
        return min(self.pages.free_count(shape), self.blocks.unused_count)

    def _reclaim_slab(self, shape: ShapeId, *, colder_than: int | None) -> bool:
        """Evict the coldest slab of another shape that nobody holds; False if there is none."""
        for slab in self.pages.slabs_of_other_shapes(shape):
            if colder_than is not None and self.pages.newest_use[slab] >= colder_than:
                return False
            entries = self.pages.entries_in_slab(int(slab))
            if bool(self.blocks.evictable[entries].all()):
                self._orders_forget(int(slab), entries)
                self._evict(entries)
                self.counters.reclaimed_slabs_total += 1
                return True
        return False

    def _evict_any(self, shape: ShapeId) -> bool:
        """When rows, not pages, are short: evict from the other shapes' orders."""
        if self.blocks.unused_count > 0:
            return False
        for other, order in self._orders.items():
            if other != shape:
                victims = order.victims(EVICT_BATCH, self.blocks.evictable)
                if len(victims):
                    self._evict(victims)
                    return True
        return False

    def _orders_forget(self, slab: int, entries: Entries) -> None:
        self._orders[ShapeId(self.pages.shape_of_slab(slab))].forget(entries)

    def _evict(self, victims: Entries) -> None:
        if len(victims) == 0:
            return
        self.index.remove(victims)
        self.blocks.evict(victims)
        self._free(victims)
        self.counters.evicted_blocks_total += len(victims)

    def _drop(self, entries: Entries) -> None:
        """Take filling and sealed blocks out of sight now, free them when nobody holds them."""
        was_filling = entries[self.blocks.state[entries] == State.FILLING]
        self._filling_bytes -= self._bytes_of(was_filling)
        self._unindex(entries, was_filling=False)
        self._free(self.blocks.drop(entries))

    def _unindex(self, entries: Entries, *, was_filling: bool) -> None:
        if was_filling:
            self._filling_bytes -= self._bytes_of(entries)
        self.index.remove(entries)

    def _bytes_of(self, entries: Entries) -> int:
        spaces, counts = np.unique(self.blocks.space[entries], return_counts=True)
        return sum(
            self.spaces[SpaceId(int(space))].block_bytes * int(count)
            for space, count in zip(spaces, counts, strict=True)
        )

    def _free(self, entries: Entries) -> None:
        """Give back the pages of rows that have become absent."""
        if len(entries):
            self.pages.free(self.blocks.slot[entries])

    def _unpin(self, entries: Entries) -> None:
        evictable, freed = self.blocks.unpin(entries)
        self._free(freed)
        if len(evictable):
            shape = self.spaces[SpaceId(int(self.blocks.space[evictable[0]]))].shape
            self._orders[shape].unpark(evictable)

    # -- recency

    def _live(self, chain: Chain) -> Entries:
        """The sealed blocks of a request, root first."""
        entries = chain.entries[: chain.length]
        known = entries >= 0
        known &= self.blocks.generation[entries] == chain.generations[: chain.length]
        known &= self.blocks.state[entries] == State.SEALED
        return entries[known]

    def _touch_chain(self, shape: ShapeId, chain: Chain, sealed: Entries | None = None) -> None:
        """Make a request's whole chain the most recent, so that no parent is older than its child."""
        self._touch(shape, self._live(chain))
        if sealed is not None:  # positions that a later call of the request has overwritten
            self._touch(shape, sealed[self.recency[sealed] < 0])

    def _touch(self, shape: ShapeId, entries: Entries) -> None:
        if len(entries):
            stamp = Stamp(next(self._stamps))
            self._orders[shape].touch(entries, stamp)
            self.pages.used(self.blocks.slot[entries], stamp)

    def _begin(self) -> TransferId:
        transfer = TransferId(next(self._numbers))
        self.transfers.add(transfer)
        return transfer

    def _end(self, transfer: TransferId) -> None:
        self.transfers.remove(transfer)  # a second completion is a bug of ours: KeyError


def _check_distinct(words: Words) -> None:
    if len(np.unique(words[:, 0])) < len(words) and len(np.unique(words, axis=0)) < len(words):
        raise BadRequestError("a block hash stands twice in one message")
