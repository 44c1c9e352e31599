"""Spaces that nobody can reach any more: their blocks are dropped a few at a time.

Decided here: how much is done in one go, so that no call waits for a large reset. This file does
not know why a space was retired, or what dropping takes.
"""

from collections import deque
from typing import Final

import numpy as np

from trikv.core.blocks import FILLING, SEALED, Blocks
from trikv.core.words import Entries, SpaceId

ROWS: Final = 1 << 17  # looked at in one step: some 0.1 ms
BLOCKS: Final = 1_024  # dropped in one step: some 2 ms


class Retired:
    """A queue of spaces, and how far the first one has been looked through.

    Rows that are reserved later are of other spaces: nobody saves into a retired one.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._queue: deque[SpaceId] = deque()
        self._at = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, space: SpaceId) -> None:
        """Its filling and sealed blocks are to be dropped."""
        self._queue.append(space)

    def next(self) -> tuple[SpaceId, Entries]:
        """Blocks of one space that are to be dropped now; none at its end, and in between."""
        space, blocks = self._queue[0], self._blocks
        end = min(self._at + ROWS, blocks.row_count)
        window = slice(self._at, end)
        states = blocks.state[window]
        mine = blocks.space[window] == space
        mine &= (states == FILLING) | (states == SEALED)
        found = np.flatnonzero(mine)[:BLOCKS] + self._at
        self._at = found.item(-1) + 1 if len(found) == BLOCKS else end
        if self._at >= blocks.row_count or not blocks.used_by_space.get(space):
            self._queue.popleft()
            self._at = 0
        return space, found.astype(np.int32)
