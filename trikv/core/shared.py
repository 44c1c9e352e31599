"""Which spaces are one with those of other nodes, and what of them is told to the metaservers.

Decided here: what a space is called between nodes, that every block which becomes or stops being
readable there is told, with whether it is in the pool or on a disk only, and that a namespace which
was reset here is shared with nobody any more: what others hold under its name may be of the weights
before. This file does not know who is told.

| a block of a space that is shared | is told as |
| --- | --- |
| sealed in the pool, on a disk or not | held |
| on a disk only, of which the owner reads for others | held below |
| in neither | no longer held |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.adverts import Part
from trikv.core.below import Below
from trikv.core.blocks import SEALED, Blocks
from trikv.core.cache import Cache
from trikv.core.lower import Lower
from trikv.core.owners import ORIGIN_BYTES
from trikv.core.words import Entries, SpaceId, Words

SNAPSHOT_ROWS: Final = 16_384
"""Looked at in one step of a full announcement: less than a millisecond."""

Bools = NDArray[np.bool_]
Tell = Callable[[Part], object]
"""Takes what has changed; keeps no view of its words but reads them soon."""


class Shared:
    """The spaces of one cache that other nodes may know; a `Watcher` of its blocks.

    Attributes:
        tell: told of blocks that are held now, in the pool or below, and no longer.
        announce_anew: called when more has changed than can be told one by one.
        lift_bytes_max: larger blocks are not read from a disk for others, so they are not told of
            while they are there; 0: none are.
    """

    def __init__(self, cache: Cache, below: Below, *, lift_bytes_max: int = 0) -> None:
        self.cache = cache
        self.lift_bytes_max = lift_bytes_max
        self.tell: Tell = lambda _part: None
        self.announce_anew: Callable[[], object] = lambda: None
        self._below = below
        self._origins: dict[SpaceId, bytes] = {}  # those that are told of
        self._spaces: dict[bytes, SpaceId] = {}  # those that may be asked for
        self._reset: set[bytes] = set()
        self._lowers: list[_Disk] = []
        cache.blocks.watchers = (*cache.blocks.watchers, self)
        below.lost = self._lost
        for lower in below.lowers:
            self.watch(lower)

    def watch(self, lower: Lower) -> None:
        """A disk, the next of `Below.lowers`, is part of what is held; once each."""
        disk = _Disk(self, lower, {})
        self._lowers.append(disk)
        lower.blocks.watchers = (*lower.blocks.watchers, disk)

    def open_space(self, space: SpaceId, origin: bytes) -> None:
        """A space has this origin (that on disks is longer); may be called again.

        `Below.open_space` was called before.
        """
        origin = origin[:ORIGIN_BYTES]
        if origin in self._reset or space in self._origins:
            return
        self._origins[space] = origin
        self._spaces[origin] = space
        has_more = space in self.cache.blocks.sealed_by_space  # a pool that outlived a daemon
        if self.cache.spaces[space].block_bytes <= self.lift_bytes_max:
            for disk, number in zip(self._lowers, self._below.numbers(space), strict=True):
                if number is not None:
                    disk.origins[number] = origin
                    has_more |= number in disk.lower.blocks.sealed_by_space
        if has_more:
            self.announce_anew()

    def retire_space(self, space: SpaceId) -> None:
        """Nobody may reach a space's blocks any more, nor those of others under its name."""
        origin = self._origins.get(space)
        if origin is not None:
            self._reset.add(origin)
            self._spaces.pop(origin, None)

    def close_space(self, space: SpaceId) -> None:
        """A space without blocks in the pool is forgotten; unknown ones are fine."""
        origin = self._origins.pop(space, None)
        if origin is None or self._spaces.get(origin) != space:
            return
        del self._spaces[origin]
        for disk in self._lowers:
            for number in [one for one, name in disk.origins.items() if name == origin]:
                del disk.origins[number]
                if number in disk.lower.blocks.sealed_by_space:  # nobody could read them up
                    self.announce_anew()

    def origin_of(self, space: SpaceId) -> bytes | None:
        """What a space is called between nodes; None: it is not shared."""
        origin = self._origins.get(space)
        return origin if origin is not None and origin in self._spaces else None

    def space_of(self, origin: bytes) -> SpaceId | None:
        """The space of an origin; None: it is not shared, or not known."""
        return self._spaces.get(origin)

    def sealed(self, entries: Entries) -> None:
        """See `Watcher`."""
        for origin, words in self._by_origin(entries):
            self.tell(Part(origin, words, is_held=True))

    def unsealed(self, entries: Entries) -> None:
        """See `Watcher`; their keys can still be read, though they are out of the index."""
        for origin, words in self._by_origin(entries):
            self.tell_lost(origin, words)

    def snapshot(self) -> Iterator[Part]:
        """All that is held, a part a step; changes between two steps are told besides."""
        for entries in _sealed_rows(self.cache.blocks):
            for origin, words in self._by_origin(entries):
                if origin in self._spaces:
                    yield Part(origin, words, is_held=True)
        for disk in self._lowers:
            for entries in _sealed_rows(disk.lower.blocks):
                if disk.lower.fault:
                    break
                yield from (part for part in disk.parts(entries) if part.is_below)

    def parts_below(self, origin: bytes, words: Words) -> Iterator[Part]:
        """What is told of blocks that a disk holds: nothing of those that are in the pool too."""
        space = self._spaces.get(origin)
        if space is not None:
            words = words[~self._is_sealed(space, words)]
            if len(words):
                yield Part(origin, words, is_held=True, is_below=True)

    def tell_lost(self, origin: bytes, words: Words) -> None:
        """Blocks have left the pool or a disk: what is left of them, maybe nothing."""
        space = self._spaces.get(origin)
        if space is not None:
            words = words[~self._is_sealed(space, words)]
            is_below = self._is_below(space, words)
            if is_below.any():
                self.tell(Part(origin, words[is_below], is_held=True, is_below=True))
                words = words[~is_below]
        if len(words):
            self.tell(Part(origin, words, is_held=False))

    def _lost(self) -> None:
        """A disk is not used any more."""
        self.announce_anew()

    def _is_sealed(self, space: SpaceId, words: Words) -> Bools:
        rows = self.cache.index.find(space, words)
        found: Bools = (rows >= 0) & (self.cache.blocks.state[rows] == SEALED)
        return found

    def _is_below(self, space: SpaceId, words: Words) -> Bools:
        facts = self.cache.spaces.get(space)
        if facts is None or facts.block_bytes > self.lift_bytes_max:
            return np.zeros(len(words), np.bool_)
        return self._below.has(space, words)

    def _by_origin(self, entries: Entries) -> Iterator[tuple[bytes, Words]]:
        spaces = self.cache.blocks.space[entries]
        for space in np.unique(spaces).tolist():
            origin = self._origins.get(SpaceId(space))
            if origin is not None:
                yield origin, self.cache.index.hashes_of(entries[spaces == space])


@dataclass(frozen=True, slots=True, eq=False)
class _Disk:
    """A disk's blocks; a `Watcher` of them.

    Attributes:
        origins: what the origins of this disk are called between nodes; those that were shared.
    """

    shared: Shared
    lower: Lower
    origins: dict[SpaceId, bytes]

    def sealed(self, entries: Entries) -> None:
        """See `Watcher`."""
        for part in self.parts(entries):
            self.shared.tell(part)

    def unsealed(self, entries: Entries) -> None:
        """See `Watcher`."""
        for origin, words in self._by_origin(entries):
            self.shared.tell_lost(origin, words)

    def parts(self, entries: Entries) -> Iterator[Part]:
        """What is to be told of these blocks while the disk holds them."""
        for origin, words in self._by_origin(entries):
            yield from self.shared.parts_below(origin, words)

    def _by_origin(self, entries: Entries) -> Iterator[tuple[bytes, Words]]:
        if not self.origins:
            return
        numbers = self.lower.blocks.space[entries]
        for number in np.unique(numbers).tolist():
            origin = self.origins.get(SpaceId(number))
            if origin is not None:
                yield origin, self.lower.index.hashes_of(entries[numbers == number])


def _sealed_rows(blocks: Blocks) -> Iterator[Entries]:
    first = 0
    while first < blocks.row_count:
        found = np.flatnonzero(blocks.state[first : first + SNAPSHOT_ROWS] == SEALED)
        yield (found + first).astype(np.int32)
        first += SNAPSHOT_ROWS
