"""Promises to peers: blocks stay where they are until a peer has read them, or for so long.

Decided here: how much may be lent to one peer and in all, for how long, and what must be fenced
before pages are given back. This file does not pin and does not fence: it says which entries the
caller unpins, and when.

| event | grant |
| --- | --- |
| granted | active, its entries pinned by the caller |
| released by its peer | over: unpinned at once, for the peer says that it reads no more |
| its time is over, or its peer is lost | fenced: invisible, but pinned until no read can come |
| `fenced` | over: unpinned |

A reader believes what it has read only when `release` answers that the grant was still valid: its
entries have been pinned all the time.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trikv.core.errors import OverloadedError
from trikv.core.words import Entries, GrantId, PeerId

STALE_MAX: Final = 1_024
"""Deadlines of released grants that may wait for their time, beside one a grant."""


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """One promise; `entries` are pinned once for it, and `bytes` count until they are not."""

    id: GrantId
    peer: PeerId
    entries: Entries
    bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Fence:
    """Grants that are over while their peer may still read.

    The caller ends every way by which `peer` reads (queue pairs, streams), and then calls `fenced`.
    """

    peer: PeerId
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Released:
    """The answer to a release, and the entries to unpin."""

    was_valid: bool
    entries: Entries


@dataclass(slots=True)
class _Lent:
    """What one peer holds."""

    active: dict[GrantId, Grant] = field(default_factory=dict)
    bytes: int = 0  # of active grants and of those that are fenced
    count: int = 0  # likewise


@dataclass(slots=True)
class Grants:
    """All that is lent.

    Attributes:
        ttl_s_max: longest time of a grant; a peer that asks for more gets this.
        grants_max: grants in all, those that are being fenced too.
        peer_grants_max: likewise, of one peer.
        bytes_max: bytes of the pool that all grants together may hold.
        peer_bytes_max: likewise, of one peer.
    """

    ttl_s_max: float
    grants_max: int
    peer_grants_max: int
    bytes_max: int
    peer_bytes_max: int
    bytes: int = 0
    count: int = 0
    block_count: int = 0
    _peers: dict[PeerId, _Lent] = field(default_factory=dict)
    _fences: set[Fence] = field(default_factory=set)
    _deadlines: list[tuple[float, PeerId, GrantId]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def room(self, peer: PeerId, block_bytes: int) -> int:
        """How many blocks of this size may be lent to `peer` now."""
        lent = self._peers.get(peer) or _Lent()
        if self.count >= self.grants_max or lent.count >= self.peer_grants_max:
            return 0
        free = min(self.bytes_max - self.bytes, self.peer_bytes_max - lent.bytes)
        return max(0, free) // block_bytes

    def grant(
        self, peer: PeerId, entries: Entries, *, block_bytes: int, ttl_s: float, now_s: float
    ) -> Grant:
        """Promise that `entries` stay readable in place.

        Args:
            peer: whose promise it is; several grants may name the same entries.
            entries: at least one; the caller pins each of them once.
            block_bytes: of the pool, a block.
            ttl_s: seconds that the peer asks for, more than 0.
            now_s: seconds on the caller's monotonic clock.

        Raises:
            OverloadedError: a bound is reached; nothing was changed.
        """
        assert len(entries) > 0
        assert ttl_s > 0
        if len(entries) > self.room(peer, block_bytes):
            raise OverloadedError("no more grants or lent bytes are allowed")
        deadline_s = now_s + min(ttl_s, self.ttl_s_max)
        size = block_bytes * len(entries)
        grant = Grant(GrantId(next(self._numbers)), peer, entries, size, deadline_s)
        lent = self._peers.setdefault(peer, _Lent())
        lent.active[grant.id] = grant
        self._count(lent, grant, 1)
        self._note_deadline(grant)
        return grant

    def find(self, peer: PeerId, grant_id: GrantId) -> Grant | None:
        """A grant that is valid."""
        lent = self._peers.get(peer)
        return lent.active.get(grant_id) if lent else None

    def held(self, peer: PeerId) -> int:
        """How many grants a peer holds, those that are being fenced too."""
        lent = self._peers.get(peer)
        return lent.count if lent else 0

    def release(self, peer: PeerId, grant_id: GrantId) -> Released:
        """The peer reads no more under this grant, and asks whether what it has read is right.

        Valid while its pins have been held: also after the deadline, before `expire` has seen it.
        Unknown, another peer's, released before, or being fenced: not valid, and nothing to unpin.
        """
        lent = self._peers.get(peer)
        grant = lent.active.pop(grant_id, None) if lent else None
        if lent is None or grant is None:
            return Released(was_valid=False, entries=np.empty(0, np.int32))
        self._count(lent, grant, -1)
        self._forget(peer)
        return Released(was_valid=True, entries=grant.entries)

    def expire(self, *, now_s: float) -> list[Fence]:
        """Grants whose deadline has come, one fence a peer; their entries stay pinned.

        A peer's other grants stay valid: what it reads under them when it is fenced fails there.
        """
        over: dict[PeerId, list[Grant]] = {}
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, peer, grant_id = heapq.heappop(self._deadlines)
            lent = self._peers.get(peer)
            grant = lent.active.pop(grant_id, None) if lent else None
            if grant is not None:
                over.setdefault(peer, []).append(grant)
        return [self._fence(peer, grants) for peer, grants in over.items()]

    def lose(self, peer: PeerId) -> Fence | None:
        """The peer is gone: all its grants are over; None when it has none."""
        lent = self._peers.get(peer)
        if lent is None or not lent.active:
            return None
        grants = list(lent.active.values())
        lent.active.clear()
        return self._fence(peer, grants)

    def fenced(self, fence: Fence) -> Entries:
        """No read of that peer can come any more; returns the entries to unpin, once a fence."""
        self._fences.remove(fence)
        lent = self._peers[fence.peer]
        for grant in fence.grants:
            self._count(lent, grant, -1)
        self._forget(fence.peer)
        return np.concatenate([grant.entries for grant in fence.grants])

    def _fence(self, peer: PeerId, grants: list[Grant]) -> Fence:
        fence = Fence(peer, tuple(grants))
        self._fences.add(fence)
        return fence

    def _count(self, lent: _Lent, grant: Grant, sign: int) -> None:
        lent.count += sign
        lent.bytes += sign * grant.bytes
        self.count += sign
        self.bytes += sign * grant.bytes
        self.block_count += sign * len(grant.entries)

    def _forget(self, peer: PeerId) -> None:
        if self._peers[peer].count == 0:
            del self._peers[peer]

    def _note_deadline(self, grant: Grant) -> None:
        if len(self._deadlines) < 2 * self.count + STALE_MAX:
            heapq.heappush(self._deadlines, (grant.deadline_s, grant.peer, grant.id))
            return
        active = [one for lent in self._peers.values() for one in lent.active.values()]
        self._deadlines = [(one.deadline_s, one.peer, one.id) for one in active]
        heapq.heapify(self._deadlines)
