"""The owner's side of a loan: which blocks a peer gets to read, pinned until it is over.

Decided here: that only sealed blocks of shared spaces are lent, how much of the pool may be, and
that pins end with the answered release or after the fence, never before. This file does not know
how a peer reads, or how a fence is made.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import SEALED
from trikv.core.cache import Cache
from trikv.core.errors import OverloadedError
from trikv.core.grants import Fence, Grant, Grants
from trikv.core.shared import Shared
from trikv.core.words import GrantId, Offsets, PeerId, SpaceId, Words

LENT_FRACTION: Final = 0.25
"""Of the pool, to all peers together: as much cannot be evicted meanwhile."""
PEER_FRACTION: Final = 0.125
GRANTS_MAX: Final = 4_096
PEER_GRANTS_MAX: Final = 64
TTL_S_MAX: Final = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """Blocks that a peer may read.

    Attributes:
        positions: int64[n], where they stand in what it asked for.
        offsets: int64[pages, n], where their pages lie in the pool.
        page_bytes: of each page.
    """

    grant: Grant
    positions: NDArray[np.int64]
    offsets: Offsets
    page_bytes: tuple[int, ...]

    @property
    def runs(self) -> NDArray[np.int64]:
        """(offset, bytes) of each page."""
        sizes = np.repeat(np.array(self.page_bytes, np.int64), self.offsets.shape[1])
        return np.column_stack((self.offsets.ravel(), sizes))


class Lending:
    """All loans of one pool.

    At the bound: who asks for more than is left is refused while others have grants; alone it gets
    fewer blocks, from the front.
    """

    def __init__(self, cache: Cache, shared: Shared) -> None:
        capacity = cache.pages.capacity_bytes
        self.grants = Grants(
            ttl_s_max=TTL_S_MAX,
            grants_max=GRANTS_MAX,
            peer_grants_max=PEER_GRANTS_MAX,
            bytes_max=int(capacity * LENT_FRACTION),
            peer_bytes_max=int(capacity * PEER_FRACTION),
        )
        self.lent_blocks_total = 0
        self.lent_bytes_total = 0
        self.expired_grants_total = 0
        self._cache = cache
        self._shared = shared

    @property
    def lent_blocks(self) -> int:
        """Blocks of all grants; one that is lent twice counts twice."""
        return self.grants.block_count

    def lend(
        self, peer: PeerId, origin: bytes, words: Words, *, ttl_s: float, now_s: float
    ) -> Loan | None:
        """Pin what is here of some blocks, for a time; None: nothing is.

        Raises:
            OverloadedError: so much may not be lent beside what is; later it may.
        """
        cache, space = self._cache, self._shared.space_of(origin)
        if space is None or space not in cache.spaces:
            return None
        facts = cache.spaces[space]
        found = cache.index.find(space, words)
        positions = np.flatnonzero(found >= 0)
        positions = positions[cache.blocks.state[found[positions]] == SEALED]
        _, first = np.unique(found[positions], return_index=True)
        positions = positions[np.sort(first)]
        room = self.grants.room(peer, facts.block_bytes)
        if room < len(positions) and self.grants.count:
            raise OverloadedError("as much is lent as may be: ask again")
        positions = positions[:room]
        if len(positions) == 0:
            return None
        entries = found[positions]
        grant = self.grants.grant(
            peer, entries, block_bytes=facts.block_bytes, ttl_s=ttl_s, now_s=now_s
        )
        cache.blocks.pin(entries)
        slots = cache.blocks.slot[entries]
        pages = range(facts.page_count)
        offsets = np.array([cache.pages.offsets(slots, page) for page in pages], np.int64)
        self.lent_blocks_total += len(entries)
        page_bytes = cache.pages.page_bytes(facts.shape)
        self.lent_bytes_total += len(entries) * sum(page_bytes)
        return Loan(grant, positions, offsets.reshape(facts.page_count, -1), page_bytes)

    def release(self, peer: PeerId, grant: GrantId) -> tuple[bool, Grant | None]:
        """A peer reads no more, by its own word: was the grant valid all the time?

        Not where its blocks were reset meanwhile: they may be of other weights than they are named.

        Returns:
            (was valid, the grant whose pins the caller ends with `unpin`).
        """
        held = self.grants.find(peer, grant)
        released = self.grants.release(peer, grant)
        if held is None or not released.was_valid:
            return False, None
        space = SpaceId(self._cache.blocks.space.item(held.entries[0]))
        return self._shared.origin_of(space) is not None, held

    def unpin(self, grant: Grant) -> None:
        """Nothing of a released grant is read any more."""
        self._cache.room.unpin(grant.entries)

    def expire(self, *, now_s: float) -> list[Fence]:
        """Grants whose time is over; see `Grants.expire`."""
        fences = self.grants.expire(now_s=now_s)
        self.expired_grants_total += sum(len(fence.grants) for fence in fences)
        return fences

    def lose(self, peer: PeerId) -> Fence | None:
        """A peer is gone; see `Grants.lose`."""
        return self.grants.lose(peer)

    def fenced(self, fence: Fence) -> None:
        """Its peer can read nothing any more: the pins end."""
        self.grants.fenced(fence)
        for grant in fence.grants:  # one by one: two of them may have pinned the same rows
            self._cache.room.unpin(grant.entries)
