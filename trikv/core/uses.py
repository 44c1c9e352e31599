"""What requests have used, told to the order of eviction when nobody waits for it.

Decided here: which blocks of a request are touched together, when a query's touch is made up for,
and what counts as one use. This file does not know keys, leases or who asks.
"""

from typing import Final

from trikv.core.blocks import SEALED, Blocks
from trikv.core.chains import Chain
from trikv.core.room import Room
from trikv.core.words import Entries, ShapeId

UNTOUCHED_MAX: Final = 64
"""Queries whose blocks have not been touched yet; a further one touches them all."""


class Uses:
    """Touches of requests' chains; a query's wait for `settle`."""

    def __init__(self, blocks: Blocks, room: Room) -> None:
        self._blocks = blocks
        self._room = room
        self._untouched: list[tuple[ShapeId, Chain, bool]] = []

    def live(self, chain: Chain) -> Entries:
        """The sealed blocks of a request, root first."""
        entries = chain.entries[: chain.length]
        known = entries >= 0
        known &= self._blocks.generation[entries] == chain.generations[: chain.length]
        known &= self._blocks.state[entries] == SEALED
        return entries[known]

    def touch(self, shape: ShapeId, chain: Chain, sealed: Entries | None = None) -> None:
        """Make a request's whole chain the most recent: no parent is older than its child."""
        self._room.touch(shape, self.live(chain))
        if sealed is not None:  # positions that a later call of the request has overwritten
            self._room.touch(shape, sealed[self._room.recency[sealed] < 0])

    def queried(self, shape: ShapeId, chain: Chain, *, is_first: bool) -> None:
        """A query has found the chain; it is one use however often its request asks."""
        self._untouched.append((shape, chain, is_first))
        if len(self._untouched) >= UNTOUCHED_MAX:
            self.settle()

    def saved(self, shape: ShapeId, entries: Entries) -> None:
        """A request saves what is there, which a gap kept its query from finding: a use as well.

        Args:
            shape: of the entries.
            entries: of positions that it had not come to before; -1 where nothing is there.
        """
        found = entries[entries >= 0]
        if len(found):
            self._room.count_uses(shape, found[self._blocks.state[found] == SEALED])

    def settle(self) -> None:
        """Note what queries have used; done before anything is saved, and thus before evictions."""
        untouched, self._untouched = self._untouched, []
        for shape, chain, is_first in untouched:
            self._room.touch(shape, self.live(chain), is_use=is_first)
