"""The pure heart of a daemon: which blocks are in the pool, who may read them, what makes room.

Decided here: how index, pages, block life, recency, leases and chains move together for each call
of an engine. All methods are synchronous and take `now_s`; each returns what the shell has to copy.
This file does not know connections, memory, tasks, clocks or logs.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from trikv.core.banks import WHOLE, Parts
from trikv.core.blocks import FILLING, SEALED, Blocks
from trikv.core.chains import Chains
from trikv.core.counters import Counters
from trikv.core.errors import BadRequestError
from trikv.core.fills import Fills, check_distinct
from trikv.core.index import Index
from trikv.core.landing import Landing, Landings
from trikv.core.leases import Lease, Leases
from trikv.core.pages import Pages
from trikv.core.plans import Hit, Key, Limits, LoadPlan, SavePlan, SpaceFacts
from trikv.core.policies import Maker, leaf_first_lru
from trikv.core.replicas import own_turns, page_of
from trikv.core.retired import Retired
from trikv.core.room import Room
from trikv.core.rows import is_all, rows_of
from trikv.core.spills import Spills
from trikv.core.tenants import Tenants
from trikv.core.uses import Uses
from trikv.core.words import (
    Entries,
    InstanceName,
    LeaseId,
    RequestId,
    SpaceId,
    TransferId,
    Words,
)

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]


class Cache:
    """All blocks of one pool."""

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        *,
        entries_max: int,
        seed: int,
        limits: Limits,
        policy: Maker = leaf_first_lru,
        tenants: Tenants | None = None,
        pool_parts: Parts = WHOLE,
    ) -> None:
        self.limits = limits
        self.counters = Counters()
        self.pages = Pages(capacity_bytes, slab_bytes, parts=pool_parts)
        self.index = Index(entries_max, seed=seed)
        self.blocks = Blocks(entries_max)
        self.tenants = tenants
        parts = (self.pages, self.blocks, self.index, self.counters)
        self.room = Room(*parts, maker=policy, tenants=tenants)
        self.recency = self.room.recency
        self.uses = Uses(self.blocks, self.room)
        self.landings = Landings(self.pages, self.blocks, self.index, self.room)
        self.leases = Leases(
            limits.lease_s, limits.leases_max, int(capacity_bytes * limits.leased_fraction)
        )
        self.chains = Chains(limits.chains_max)
        self.spaces: dict[SpaceId, SpaceFacts] = {}
        self.transfers: set[TransferId] = set()
        self._retired = Retired(self.blocks)
        self._orders = self.room.orders
        self._fills = Fills(limits, *parts[:3], self.room, self.uses)
        self._spills: Spills | None = None
        self._numbers = itertools.count(1)

    def attach_spills(self, spills: Spills) -> None:
        """There are disks below: they are told what is saved and used, and evicted to."""
        self._spills = spills
        self.room.prefers_below = True

    # -- spaces

    def open_space(self, space: SpaceId, page_bytes: tuple[int, ...], tenant: str = "") -> None:
        """Make a space known, and whose it is; the same space may be opened again.

        Raises:
            BadRequestError: a block does not fit a slab.
        """
        shape = self.pages.add_shape(page_bytes)
        self.room.open(shape)
        if self.tenants is not None:
            self.tenants.assign(space, tenant)
        self.spaces[space] = SpaceFacts(shape, len(page_bytes), self.pages.slot_bytes(shape))

    def close_space(self, space: SpaceId) -> None:
        """Forget a space that has no blocks, doomed ones included; unknown ones are fine."""
        self.spaces.pop(space, None)
        if self.tenants is not None:
            self.tenants.forget(space)

    def retire_space(self, space: SpaceId) -> int:
        """Nobody can reach a space any more: `drop_retired` forgets its blocks bit by bit.

        Returns:
            How many there are, those that somebody still holds included.
        """
        self._retired.add(space)
        return self.blocks.used_by_space.get(space, 0)

    def drop_retired(self) -> bool:
        """Forget some blocks of retired spaces; False: there was nothing to do."""
        if not len(self._retired):
            return False
        space, entries = self._retired.next()
        self._orders[self.spaces[space].shape].forget(entries)
        self._drop(entries)
        self.counters.dropped_blocks_total += len(entries)
        return True

    # -- query and leases

    def query(self, key: Key, words: Words, *, now_s: float) -> Hit:
        """Count the leading blocks at hand and promise exactly these for a while.

        The request's earlier lease is renewed when it covers the same blocks, else replaced. That
        the blocks were used is noted by `settle`, which the caller need not wait for.

        At the bound: with leases at their limit the answer is shorter, down to a miss.
        """
        facts = self.spaces[key.space]
        hits = self.index.find_prefix(key.space, words)
        rows = rows_of(hits)
        sealed = self.blocks.state[rows] == SEALED
        if not is_all(sealed):
            hits = hits[: int(np.argmin(sealed))]
            rows = rows_of(hits)
        chain = self.chains.of(key.instance, key.request, key.space)
        asked_before, chain.asked_blocks = chain.asked_blocks, max(chain.asked_blocks, len(words))
        chain.put(0, hits, self.blocks.generation[rows])
        self.uses.queried(facts.shape, chain, is_first=asked_before == 0)
        if self._spills is not None and len(hits) and asked_before == 0:
            self._spills.used(chain)
        lease = self._promise(key, facts, hits, now_s=now_s)
        count = len(lease.entries) if lease else 0
        self.counters.query_total += 1
        self.counters.query_blocks_total += len(words)
        self.counters.query_hit_blocks_total += count
        self.counters.query_shortened_total += count < len(hits)
        landed = self.landings.take_credit(hits[:count])
        return Hit(count, lease, asked_before, landed)

    def settle(self) -> None:
        """Note what queries have used; done before anything is saved, and thus before evictions."""
        self.uses.settle()

    def _promise(self, key: Key, facts: SpaceFacts, hits: Entries, *, now_s: float) -> Lease | None:
        old = self.leases.of_space(key.instance, key.request, key.space)
        if old is not None and old.is_on(hits) and old.deadline_s > now_s:
            self.leases.renew(old, now_s=now_s)
            self.counters.lease_renewed_total += 1
            return old
        granted = hits[: self.leases.room(facts.block_bytes, instead_of=old)]
        self.blocks.pin(granted)  # before the old lease lets go, so that nothing falls between
        if old is not None:
            self.room.unpin(self.leases.end(old))
        if len(granted) == 0:
            return None
        self.counters.lease_granted_total += 1
        return self.leases.grant(
            key.instance,
            key.request,
            granted,
            space=key.space,
            block_bytes=facts.block_bytes,
            rank_count=facts.page_count * key.replicas,
            now_s=now_s,
        )

    def expire_leases(self, *, now_s: float) -> int:
        """End the leases whose time is over; returns how many."""
        ended = self.leases.expire(now_s=now_s)
        for lease in ended:
            self.room.unpin(lease.entries)
        self.counters.lease_expired_total += len(ended)
        return len(ended)

    def release(self, instance: InstanceName, request: RequestId) -> None:
        """The request has ended: its lease ends, its chain is forgotten."""
        for lease in self.leases.of_request(instance, request):
            self.room.unpin(self.leases.end(lease))
        self.chains.forget(instance, request)

    def release_instance(self, instance: InstanceName) -> None:
        """All requests of an engine have ended."""
        for lease in self.leases.of_instance(instance):
            self.room.unpin(self.leases.end(lease))
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
        replicas: int = 1,
    ) -> LoadPlan:
        """Pin the blocks that `rank` wants to copy out; the lease's end no longer matters to them.

        Raises:
            LeaseLostError: query again.
            BadRequestError: the lease has no such blocks.
        """
        lease = self.leases.use(lease_id, instance, rank, now_s=now_s)
        if count < 1 or first + count > len(lease.entries):
            held = len(lease.entries)
            raise BadRequestError(f"blocks {first} to {first + count - 1} of a lease on {held}")
        entries = lease.entries[first : first + count]
        over = self.leases.consumed(lease, rank)
        if over is None or len(over) > count:  # else the lease's pins are this load's from now on
            self.blocks.pin(entries)
            if over is not None:
                self.room.unpin(over)
        self.counters.load_total += 1
        offsets = self.pages.offsets(self.blocks.slot[entries], page_of(rank, replicas))
        return LoadPlan(self._begin(), entries, offsets)

    def complete_load(self, plan: LoadPlan, *, copied_count: int, copied_bytes: int) -> None:
        """The copy has ended, well or not: nothing reads the pages any more."""
        self._end(plan.transfer)
        self.room.unpin(plan.entries)
        self.counters.load_blocks_total += copied_count
        self.counters.load_bytes_total += copied_bytes
        self.counters.load_failed_blocks_total += len(plan.entries) - copied_count

    # -- save

    def prepare_save(
        self, key: Key, words: Words, *, rank: int, first: int, now_s: float
    ) -> SavePlan:
        """Claim pages for the blocks that this rank has to copy; those that are there cost nothing.

        Args:
            key: the request's.
            words: hashes of the blocks at positions `first` and after.
            rank: whose turns, and whose page.
            first: position in the request of the first block.
            now_s: for the deadline by which all ranks must have saved.

        At the bound: blocks that find no room are refused from the end of the message.

        Raises:
            BadRequestError: a hash stands twice in the message; nothing was changed.
        """
        check_distinct(words)
        self.settle()
        facts = self.spaces[key.space]
        chain = self.chains.of(key.instance, key.request, key.space)
        entries = self.index.find(key.space, words)
        absent, at_hand = np.flatnonzero(entries < 0), entries[entries >= 0]
        self.uses.saved(facts.shape, entries[max(0, chain.length - first) :])
        reserved = self._fills.reserve(
            key, facts, chain, at_hand, words[absent], absent + first, now_s=now_s
        )
        entries[absent[: len(reserved)]] = reserved
        is_own = own_turns(rank, key.replicas, first, len(words))
        page = page_of(rank, key.replicas)
        mine, present, refused = self._fills.claim(entries, page, is_own)
        chain.put(first, entries, self.blocks.generation[entries])
        if len(mine) == 0:
            self.uses.touch(facts.shape, chain)
        self.counters.save_total += 1
        self.counters.save_present_blocks_total += present
        self.counters.save_refused_blocks_total += refused
        offsets = self.pages.offsets(self.blocks.slot[entries[mine]], page)
        return SavePlan(
            self._begin(), key, page, mine, entries[mine], offsets, present, refused, chain
        )

    def complete_save(self, plan: SavePlan, copied: Bools, *, copied_bytes: int) -> None:
        """The copy has ended: blocks whose pages are all there become visible, failed ones go.

        Args:
            plan: from `prepare_save`, completed once.
            copied: bool[len(plan.entries)], whose bytes are whole and were not fenced off.
            copied_bytes: for the counters.
        """
        self._end(plan.transfer)
        self.settle()
        facts = self.spaces[plan.key.space]
        sealed, freed = self.blocks.fill(plan.entries[copied], plan.page)
        self.room.free(freed)
        if not bool(copied.all()):
            lost, freed = self.blocks.fail(plan.entries[~copied])
            self.index.remove(lost)
            self._fills.bytes -= len(lost) * facts.block_bytes
            self.room.free(freed)
        self._fills.bytes -= len(sealed) * facts.block_bytes
        self.uses.touch(facts.shape, plan.chain, sealed)
        if self._spills is not None and len(sealed):
            self._spills.saved(plan.chain)
        self.counters.save_blocks_total += int(copied.sum())
        self.counters.save_failed_blocks_total += int((~copied).sum())
        self.counters.save_bytes_total += copied_bytes
        self.counters.sealed_blocks_total += len(sealed)

    def expire_fills(self, *, now_s: float) -> int:
        """Give up blocks whose ranks did not all save in time; returns how many."""
        late = self._fills.expired(now_s=now_s)
        self._drop(late)
        self.counters.fill_expired_blocks_total += len(late)
        return len(late)

    # -- fetches from below

    def prepare_fetch(
        self, space: SpaceId, words: Words, wanted: Bools, *, source: int, is_spare: bool = False
    ) -> Landing:
        """Claim pages for blocks that something below the pool will fill; see `Landings.reserve`.

        At the bound: fewer blocks, down to none, whose landing is over at once.
        """
        self.settle()
        bytes_max = int(self.pages.capacity_bytes * self.limits.fetching_fraction)
        landing = self.landings.reserve(
            self._begin(),
            space,
            self.spaces[space],
            words,
            wanted,
            bytes_max=bytes_max,
            source=source,
        )
        landing.is_spare = is_spare
        if landing.left == 0:
            self._end(landing.transfer)
        return landing

    def complete_fetch(self, landing: Landing, rows: Int64s, arrived: Bools) -> None:
        """A part of a fetch has ended; see `Landings.end`."""
        if len(rows) == 0:
            return
        self.settle()
        self.landings.end(landing, self.spaces[landing.space], rows, arrived)
        if landing.left == 0:
            self._end(landing.transfer)

    def abandon_fetch(self, landing: Landing, rows: Int64s) -> None:
        """These rows may be written to at any time: out of sight, and never used again."""
        self._drop(self.landings.abandon(landing, self.spaces[landing.space], rows))
        if landing.left == 0 and len(rows):
            self._end(landing.transfer)

    # -- facts

    @property
    def filling_bytes(self) -> int:
        """Pool bytes of blocks that are not whole yet, or that are being fetched."""
        return self._fills.bytes + self.landings.bytes

    def spaces_in_use(self) -> set[SpaceId]:
        """Spaces that have blocks in any state."""
        return set(map(SpaceId, self.blocks.used_by_space))

    def blocks_by_space(self) -> dict[SpaceId, int]:
        """Sealed blocks of each space that has any."""
        return {SpaceId(space): count for space, count in self.blocks.sealed_by_space.items()}

    # -- room

    def _drop(self, entries: Entries) -> None:
        """Take filling and sealed blocks out of sight now, free them when nobody holds them."""
        if len(entries) == 0:
            return
        was_filling = entries[self.blocks.state[entries] == FILLING]
        saved = was_filling[~self.landings.is_landing[was_filling]]
        self._fills.gave_up(saved, self.spaces)
        self.index.remove(entries)
        self.room.free(self.blocks.drop(entries))

    def _begin(self) -> TransferId:
        transfer = TransferId(next(self._numbers))
        self.transfers.add(transfer)
        return transfer

    def _end(self, transfer: TransferId) -> None:
        self.transfers.remove(transfer)  # a second completion is a bug of ours: KeyError
