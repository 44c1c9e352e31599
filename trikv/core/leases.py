"""Promises to engines: blocks of a lease stay loadable until its deadline.

Decided here: who may use a lease, for how long, and when it is over. This file does not pin: it
returns the entries whose pins the caller takes or gives back.

| event | lease |
| --- | --- |
| granted | active until `now + ttl` |
| asked again by its request | deadline moves |
| loaded by its last rank, released, expired, engine lost | over: its pins are returned once |
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from trikv.core.errors import LeaseLostError, OverloadedError
from trikv.core.rows import is_all
from trikv.core.words import Entries, InstanceName, LeaseId, RequestId, SpaceId

STALE_MAX: Final = 1_024
"""Deadlines of ended leases that may wait for their time, beside one a lease: they hold nothing."""


@dataclass(slots=True)
class Lease:
    """One active promise; `entries` are in prefix order and pinned once for it."""

    id: LeaseId
    instance: InstanceName
    request: RequestId
    space: SpaceId
    entries: Entries
    ranks_left: int  # bit r: rank r has not loaded yet
    deadline_s: float
    block_bytes: int
    ranks_all: int

    def is_on(self, entries: Entries) -> bool:
        """True while it promises exactly these entries, and no rank has loaded from it."""
        same = len(entries) == len(self.entries) and is_all(entries == self.entries)
        return same and self.ranks_left == self.ranks_all


@dataclass(slots=True)
class Leases:
    """All active leases.

    Attributes:
        leases_max: how many may be active.
        pinned_bytes_max: how many bytes of the pool all leases together may hold.
    """

    ttl_s: float
    leases_max: int
    pinned_bytes_max: int
    active: dict[LeaseId, Lease] = field(default_factory=dict)
    pinned_bytes: int = 0
    _by_request: dict[tuple[InstanceName, RequestId], dict[SpaceId, LeaseId]] = field(
        default_factory=dict
    )
    _deadlines: list[tuple[float, LeaseId]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def number_from(self, first: int) -> None:
        """Have the leases to come numbered from here: before any is granted.

        Engines remember numbers longer than a daemon lives: they must not be those of other leases.
        """
        assert not self.active
        self._numbers = itertools.count(first)

    def room(self, block_bytes: int, *, instead_of: Lease | None = None) -> int:
        """How many blocks of this size may be promised now, or once `instead_of` has ended."""
        count, held = len(self.active), self.pinned_bytes
        if instead_of is not None:
            count -= 1
            held -= instead_of.block_bytes * len(instead_of.entries)
        if count >= self.leases_max:
            return 0
        return max(0, self.pinned_bytes_max - held) // block_bytes

    def of_request(self, instance: InstanceName, request: RequestId) -> list[Lease]:
        """The active leases of a request, at most one a space."""
        return [self.active[one] for one in self._by_request.get((instance, request), {}).values()]

    def of_space(self, instance: InstanceName, request: RequestId, space: SpaceId) -> Lease | None:
        """The active lease of a request in one space, if it has one."""
        lease_id = self._by_request.get((instance, request), {}).get(space)
        return self.active[lease_id] if lease_id is not None else None

    def grant(
        self,
        instance: InstanceName,
        request: RequestId,
        entries: Entries,
        *,
        space: SpaceId,
        block_bytes: int,
        rank_count: int,
        now_s: float,
    ) -> Lease:
        """Promise that `entries` stay loadable for `ttl_s` seconds.

        Args:
            instance: whose promise it is.
            request: asking again replaces or renews; it must have no active lease in `space`.
            entries: at least one, in prefix order; the caller pins each of them once.
            space: the entries' space.
            block_bytes: of the pool, a block.
            rank_count: how many ranks will load; the lease ends with the last of them.
            now_s: seconds on the caller's monotonic clock.

        Raises:
            OverloadedError: a limit is reached; nothing was changed.
        """
        assert len(entries) > 0
        assert self.of_space(instance, request, space) is None
        if len(entries) > self.room(block_bytes):
            raise OverloadedError("no more leases or leased bytes are allowed")
        lease_id = LeaseId(next(self._numbers))
        ranks = (1 << rank_count) - 1
        deadline_s = now_s + self.ttl_s
        lease = Lease(
            lease_id, instance, request, space, entries, ranks, deadline_s, block_bytes, ranks
        )
        self.active[lease_id] = lease
        self._by_request.setdefault((instance, request), {})[space] = lease_id
        self.pinned_bytes += block_bytes * len(entries)
        if len(self._deadlines) >= 2 * len(self.active) + STALE_MAX:  # most have ended early
            self._deadlines = [(one.deadline_s, one.id) for one in self.active.values()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (lease.deadline_s, lease_id))
        return lease

    def renew(self, lease: Lease, *, now_s: float) -> None:
        """Move the deadline to `ttl_s` seconds from now."""
        lease.deadline_s = now_s + self.ttl_s

    def use(self, lease_id: LeaseId, instance: InstanceName, rank: int, *, now_s: float) -> Lease:
        """Check that `rank` of `instance` may load from this lease now.

        Raises:
            LeaseLostError: unknown, another instance's, expired, or loaded by this rank already.
        """
        lease = self.active.get(lease_id)
        if lease is None or lease.instance != instance:
            raise LeaseLostError("the lease is unknown, expired or released: query again")
        if lease.deadline_s <= now_s:
            raise LeaseLostError("the lease has expired: query again")
        if not lease.ranks_left >> rank & 1:
            raise LeaseLostError(f"rank {rank} has loaded from this lease already")
        return lease

    def consumed(self, lease: Lease, rank: int) -> Entries | None:
        """Note that `rank` has begun its load with pins of its own.

        Returns:
            The entries to unpin when this was the last rank, else None.
        """
        lease.ranks_left &= ~(1 << rank)
        return None if lease.ranks_left else self.end(lease)

    def end(self, lease: Lease) -> Entries:
        """End a lease; returns the entries to unpin."""
        del self.active[lease.id]
        by_space = self._by_request[lease.instance, lease.request]
        del by_space[lease.space]
        if not by_space:
            del self._by_request[lease.instance, lease.request]
        self.pinned_bytes -= lease.block_bytes * len(lease.entries)
        return lease.entries

    def expire(self, *, now_s: float) -> list[Lease]:
        """End every lease whose deadline has come.

        Returns:
            The ended leases; the caller unpins their entries.
        """
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self.active.get(lease_id)
            if lease is None:
                continue
            if lease.deadline_s > now_s:  # renewed since it was pushed
                heapq.heappush(self._deadlines, (lease.deadline_s, lease_id))
                continue
            self.end(lease)
            ended.append(lease)
        return ended

    def of_instance(self, instance: InstanceName) -> list[Lease]:
        """All active leases of an engine (a scan: engines end seldom)."""
        return [lease for lease in self.active.values() if lease.instance == instance]
