"""Keeps the records of a pool that outlives its daemon true, and brings its blocks back.

Decided here: that a record follows the state of its block and nothing else, and in which order
found blocks count as used: as they were saved, of one save the deepest first to go. This file does
not know where records lie, sessions, or files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from trikv.core.adopting import bring_back
from trikv.core.blocks import Blocks
from trikv.core.errors import KvError
from trikv.core.index import Index
from trikv.core.ledger import Found, Ledger
from trikv.core.pages import Pages
from trikv.core.room import Room
from trikv.core.words import Entries, ShapeId, SpaceId

BATCH_BLOCKS: Final = 4_096  # brought back at once, so that nobody waits for long


@dataclass(frozen=True, slots=True)
class _Named:
    origin: bytes
    tenant: str
    page_bytes: tuple[int, ...]


class Keeper:
    """Watches the blocks of one pool."""

    def __init__(
        self, ledger: Ledger, pages: Pages, blocks: Blocks, index: Index, room: Room
    ) -> None:
        self._ledger = ledger
        self._pages = pages
        self._blocks = blocks
        self._index = index
        self._room = room
        self._named: dict[SpaceId, _Named] = {}
        self._voided: dict[SpaceId, int | None] = {}
        self._is_adopting = False
        blocks.watchers = (*blocks.watchers, self)

    def open_space(self, space: SpaceId, shape: ShapeId, origin: bytes, tenant: str) -> None:
        """Blocks of a space are kept from now on, under its origin."""
        self._named[space] = _Named(origin, tenant, self._pages.page_bytes(shape))

    def retire_space(self, space: SpaceId) -> None:
        """Nobody can reach a space any more: from now on no daemon finds its blocks."""
        named = self._named.pop(space, None)
        if named is not None:
            self._voided[space] = self._ledger.void(named.origin)

    def close_space(self, space: SpaceId) -> None:
        """A space without blocks is forgotten."""
        self._named.pop(space, None)
        self._ledger.reuse(self._voided.pop(space, None))

    def sealed(self, entries: Entries) -> None:
        """Write their records."""
        if self._is_adopting:
            return  # they have them
        spaces = self._blocks.space[entries]
        for space in np.unique(spaces).tolist():
            named = self._named.get(space)
            if named is not None:
                mine = entries[spaces == space]
                self._ledger.enter(
                    self._blocks.slot[mine],
                    self._index.hashes_of(mine),
                    self._blocks.depth[mine],
                    origin=named.origin,
                    tenant=named.tenant,
                    page_bytes=named.page_bytes,
                )

    def unsealed(self, entries: Entries) -> None:
        """Strike their records."""
        self._ledger.strike(self._blocks.slot[entries])

    def adopt(self, open_space: Callable[[Found], tuple[SpaceId, ShapeId]]) -> Iterator[int]:
        """Bring back what an earlier daemon has left, a batch a step; nothing was saved before.

        Args:
            open_space: makes the space of found blocks known; refuses with a `KvError`.

        Yields:
            Blocks brought back by each step. Records that find no place are struck.
        """
        for found in list(self._ledger.recover()):
            try:
                space, shape = open_space(found)
            except KvError:
                self._ledger.strike(found.slots)
                continue
            # Oldest first, and of one save the deepest first: the order of eviction.
            order = np.lexsort((-found.depths, found.sequences))
            for start in range(0, len(order), BATCH_BLOCKS):
                batch = order[start : start + BATCH_BLOCKS]
                yield self._adopt(found, batch, space, shape)

    def _adopt(
        self,
        found: Found,
        batch: "np.ndarray[tuple[int], np.dtype[np.int64]]",
        space: SpaceId,
        shape: ShapeId,
    ) -> int:
        slots = found.slots[batch]
        self._is_adopting = True
        try:
            parts = self._pages, self._blocks, self._index
            back, entries = bring_back(
                *parts, space, shape, slots, found.words[batch], found.depths[batch]
            )
        finally:
            self._is_adopting = False
        self._ledger.strike(np.delete(slots, back))
        self._room.touch(shape, entries[::-1])
        return len(entries)
