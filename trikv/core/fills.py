"""Blocks that engines are saving: how much of the pool they may hold, and for how long.

Decided here: what is claimed for a save, and when half blocks are given up. This file does not know
who saves or how blocks end.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import FILLING, Blocks
from trikv.core.chains import Chain
from trikv.core.errors import BadRequestError
from trikv.core.index import Index
from trikv.core.pages import Pages
from trikv.core.plans import Key, Limits, SpaceFacts
from trikv.core.room import Room
from trikv.core.rows import may_repeat
from trikv.core.uses import Uses
from trikv.core.words import Entries, SpaceId, Words


class Fills:
    """Rows that were claimed for saves and are not whole yet.

    Attributes:
        bytes: of the pool that they hold; who ends rows takes their bytes away.
    """

    def __init__(
        self, limits: Limits, pages: Pages, blocks: Blocks, index: Index, room: Room, uses: Uses
    ) -> None:
        self.bytes = 0
        self._limits = limits
        self._pages = pages
        self._blocks = blocks
        self._index = index
        self._room = room
        self._uses = uses
        self._begun: deque[tuple[float, Entries, NDArray[np.uint32]]] = deque()

    def reserve(
        self,
        key: Key,
        facts: SpaceFacts,
        chain: Chain,
        at_hand: Entries,
        words: Words,
        depths: NDArray[np.int64],
        *,
        now_s: float,
    ) -> Entries:
        """Pages for the leading blocks that find room, near the caller if they can be.

        A block whose own ancestors would have to go for it is not worth its place; and rows that
        were found for this message (`at_hand`) must not become others'. What one rank reserves
        waits for the saves of the others, if there are any.
        """
        limits = self._limits
        is_alone = facts.page_count * key.replicas == 1
        fraction = limits.filling_fraction if is_alone else limits.filling_fraction_many_ranks
        may_fill = int(self._pages.capacity_bytes * fraction) - self.bytes
        count = min(len(words), max(0, may_fill) // facts.block_bytes)
        if count > self._room.count(facts.shape):
            kin = np.concatenate((self._uses.live(chain), at_hand))
            self._room.make_beside(facts.shape, count, kin, space=key.space)
        count = min(count, self._blocks.unused_count)
        slots = self._pages.allocate(facts.shape, count, near=key.near)
        if len(slots) == 0:
            return np.empty(0, np.int32)
        entries = self._blocks.reserve(
            slots,
            depths[: len(slots)].astype(np.int32),
            space=key.space,
            page_count=facts.page_count,
        )
        self._pages.set_owner(slots, entries)
        self._index.insert(key.space, words[: len(slots)], entries)
        self.bytes += len(slots) * facts.block_bytes
        self._begun.append((now_s + limits.fill_s, entries, self._blocks.generation[entries]))
        return entries

    def claim(
        self, entries: Entries, page: int, is_own: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], int, int]:
        """Begin the copies that a rank has to make, of one page of each block.

        Args:
            entries: of a message; -1 where a block found no room.
            page: which of their pages the rank holds.
            is_own: bool[n], which of them are its to save.

        Returns:
            (positions, present, refused): where in the message they are; and of the rank's others,
            how many are there or on their way, and how many found no room.
        """
        own = np.flatnonzero(is_own & (entries >= 0))
        rows = entries[own]
        is_claimed = self._blocks.claimed[rows] >> np.uint64(page) & np.uint64(1)
        mine: NDArray[np.int64] = own[(self._blocks.state[rows] == FILLING) & (is_claimed == 0)]
        self._blocks.claim(entries[mine], page)
        return mine, len(own) - len(mine), int(np.count_nonzero(is_own)) - len(own)

    def expired(self, *, now_s: float) -> Entries:
        """Rows whose ranks did not all save in time; the caller gives them up."""
        found = [np.empty(0, np.int32)]
        while self._begun and self._begun[0][0] <= now_s:
            _, entries, generations = self._begun.popleft()
            same = self._blocks.generation[entries] == generations
            found.append(entries[same & (self._blocks.state[entries] == FILLING)])
        return np.concatenate(found)

    def gave_up(self, entries: Entries, spaces: Mapping[SpaceId, SpaceFacts]) -> None:
        """Rows that were claimed here are dropped, of whichever spaces."""
        found, counts = np.unique(self._blocks.space[entries], return_counts=True)
        for space, count in zip(found.tolist(), counts.tolist(), strict=True):
            self.bytes -= spaces[space].block_bytes * count


def check_distinct(words: Words) -> None:
    """Refuse a message that names a block twice.

    Raises:
        BadRequestError: it does.
    """
    if may_repeat(words) and len(np.unique(words, axis=0)) < len(words):
        raise BadRequestError("a block hash stands twice in one message")
