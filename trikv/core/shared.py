"""Which spaces are one with those of other nodes, and what of them is told to the metaservers.

Decided here: what a space is called between nodes, that every block which becomes or stops being
sealed there is told, and that a namespace which was reset here is shared with nobody any more: what
others hold under its name may be of the weights before. This file does not know who is told.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from trikv.core.blocks import SEALED
from trikv.core.cache import Cache
from trikv.core.owners import ORIGIN_BYTES
from trikv.core.words import Entries, SpaceId, Words

SNAPSHOT_ROWS: Final = 16_384
"""Looked at in one step of a full announcement: less than a millisecond."""

Tell = Callable[[bytes, Words], object]
"""Takes an origin and hashes of blocks; keeps no view of them but reads them soon."""


class Shared:
    """The spaces of one cache that other nodes may know; a `Watcher` of its blocks.

    Attributes:
        advertise, withdraw: told of blocks that are held now, and no longer.
        announce_anew: called when more has come into sight than can be told one by one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.advertise: Tell = lambda _origin, _words: None
        self.withdraw: Tell = lambda _origin, _words: None
        self.announce_anew: Callable[[], object] = lambda: None
        self._origins: dict[SpaceId, bytes] = {}  # those that are told of
        self._spaces: dict[bytes, SpaceId] = {}  # those that may be asked for
        self._reset: set[bytes] = set()
        cache.blocks.watchers = (*cache.blocks.watchers, self)

    def open_space(self, space: SpaceId, origin: bytes) -> None:
        """A space has this origin (that on disks is longer); may be called again."""
        origin = origin[:ORIGIN_BYTES]
        if origin in self._reset or space in self._origins:
            return
        self._origins[space] = origin
        self._spaces[origin] = space
        if self.cache.blocks.sealed_by_space.get(space):  # found in a pool that outlived a daemon
            self.announce_anew()

    def retire_space(self, space: SpaceId) -> None:
        """Nobody may reach a space's blocks any more, nor those of others under its name."""
        origin = self._origins.get(space)
        if origin is not None:
            self._reset.add(origin)
            self._spaces.pop(origin, None)

    def close_space(self, space: SpaceId) -> None:
        """A space without blocks is forgotten; unknown ones are fine."""
        origin = self._origins.pop(space, None)
        if origin is not None and self._spaces.get(origin) == space:
            del self._spaces[origin]

    def origin_of(self, space: SpaceId) -> bytes | None:
        """What a space is called between nodes; None: it is not shared."""
        origin = self._origins.get(space)
        return origin if origin is not None and origin in self._spaces else None

    def space_of(self, origin: bytes) -> SpaceId | None:
        """The space of an origin; None: it is not shared, or not known."""
        return self._spaces.get(origin)

    def sealed(self, entries: Entries) -> None:
        """See `Watcher`."""
        self._tell(entries, self.advertise)

    def unsealed(self, entries: Entries) -> None:
        """See `Watcher`; their keys can still be read, though they are out of the index."""
        self._tell(entries, self.withdraw)

    def snapshot(self) -> Iterator[tuple[bytes, Words]]:
        """All that is held, a part a step; changes between two steps are told besides."""
        blocks = self.cache.blocks
        first = 0
        while first < blocks.row_count:
            states = blocks.state[first : first + SNAPSHOT_ROWS]
            entries = (np.flatnonzero(states == SEALED) + first).astype(np.int32)
            for origin, mine in self._by_origin(entries):
                if origin in self._spaces:
                    yield origin, self.cache.index.hashes_of(mine)
            first += SNAPSHOT_ROWS

    def _tell(self, entries: Entries, tell: Tell) -> None:
        for origin, mine in self._by_origin(entries):
            tell(origin, self.cache.index.hashes_of(mine))

    def _by_origin(self, entries: Entries) -> Iterator[tuple[bytes, Entries]]:
        spaces = self.cache.blocks.space[entries]
        for space in np.unique(spaces).tolist():
            origin = self._origins.get(SpaceId(space))
            if origin is not None:
                yield origin, entries[spaces == space]
