"""Pool pages that something below the pool fills: a disk now, other nodes next.

Decided here: which absent blocks of a request get pages for it, what is not evicted for them, and
that blocks which have arrived are the request's most recent ones, behind their ancestors. This file
does not know where the bytes come from or who waits for them.

| row | event | becomes |
| --- | --- | --- |
| absent | `reserve` finds room | filling, all pages claimed by the one who fetches |
| filling | arrived | sealed, as if it had been saved |
| filling | not arrived | absent |
| filling | dropped (`reset`) meanwhile | doomed until the fetch ends |

A second request finds the filling rows in the index and waits for the same fetch.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import FILLING, SEALED, Blocks
from trikv.core.ceiling import TIERS
from trikv.core.index import Index
from trikv.core.pages import Pages
from trikv.core.plans import SpaceFacts
from trikv.core.room import Room
from trikv.core.rows import may_repeat
from trikv.core.words import Entries, Offsets, ShapeId, SpaceId, TransferId, Words


@dataclass(slots=True, eq=False)
class Landing:
    """Pages that are being filled; every row is ended exactly once, in as many parts as one likes.

    Attributes:
        positions: int64[n], where the blocks stand in the request.
        entries: their rows.
        words: their hashes.
        offsets: int64[pages, n], byte offsets in the pool.
        lengths: bytes of each page of a block.
        source: where the bytes come from, an index into `TIERS`.
        is_spare: nobody here has asked for them: they are not used, and the first to go.
        left: rows that have not ended.
    """

    transfer: TransferId
    space: SpaceId
    positions: NDArray[np.int64]
    entries: Entries
    words: Words
    offsets: Offsets
    lengths: tuple[int, ...]
    source: int
    left: int
    line: Entries  # all blocks of the request up to the last of these, root first
    generations: NDArray[np.uint32]  # of `line`
    is_spare: bool = False


class Landings:
    """The rows that something below fills.

    Attributes:
        is_landing: bool of all rows of the pool.
        bytes: pages of rows whose fetch has not ended.
        blocks_total, failed_blocks_total: arrived, and not, since the start.
    """

    def __init__(self, pages: Pages, blocks: Blocks, index: Index, room: Room) -> None:
        self.is_landing = np.zeros(blocks.capacity, np.bool_)
        self.bytes = 0
        self.blocks_total = 0
        self.failed_blocks_total = 0
        self._credit = np.zeros(blocks.capacity, np.uint8)  # a tier that no query was told of
        self._has_credit = False
        self._pages = pages
        self._blocks = blocks
        self._index = index
        self._room = room

    def reserve(
        self,
        transfer: TransferId,
        space: SpaceId,
        facts: SpaceFacts,
        words: Words,
        wanted: NDArray[np.bool_],
        *,
        bytes_max: int,
        source: int,
    ) -> Landing:
        """Give pages to the leading wanted blocks that are absent and find room.

        Args:
            transfer: names the copy.
            space: theirs.
            facts: of the space.
            words: hashes of a request's blocks, from its first one on.
            wanted: which of them can be had from below.
            bytes_max: of the pool, for all landings together.
            source: an index into `TIERS`.

        At the bound: fewer, down to none. No block of the request itself is evicted for another.
        """
        line = self._index.find(space, words)
        positions = _distinct(words, np.flatnonzero((line < 0) & wanted))
        count = min(len(positions), max(0, bytes_max - self.bytes) // facts.block_bytes)
        self._room.make_beside(facts.shape, count, line[line >= 0], space=space)
        count = min(count, self._blocks.unused_count)
        slots = self._pages.allocate(facts.shape, count)
        positions = positions[: len(slots)]
        entries = self._blocks.reserve(
            slots, positions.astype(np.int32), space=space, page_count=facts.page_count
        )
        if len(entries):
            self._blocks.claim_whole(entries)
            self._pages.set_owner(slots, entries)
            self._index.insert(space, words[positions], entries)
        self.is_landing[entries] = True
        self._credit[entries] = 0
        self.bytes += len(entries) * facts.block_bytes
        line[positions] = entries
        end = positions.item(-1) + 1 if len(positions) else 0
        line = line[:end]
        offsets = np.array(
            [self._pages.offsets(slots, page) for page in range(facts.page_count)], np.int64
        )
        return Landing(
            transfer,
            space,
            positions,
            entries,
            words[positions],
            offsets.reshape(facts.page_count, -1),
            self._pages.page_bytes(facts.shape),
            source,
            len(entries),
            line,
            self._blocks.generation[line],
        )

    def end(
        self,
        landing: Landing,
        facts: SpaceFacts,
        rows: NDArray[np.int64],
        arrived: NDArray[np.bool_],
    ) -> None:
        """Nothing writes the pages of these rows any more.

        Args:
            landing: from `reserve`.
            facts: of its space.
            rows: indices into `landing.entries`, each ended once.
            arrived: bool[len(rows)], whose bytes are right on all pages.
        """
        entries = landing.entries[rows]
        assert bool(self.is_landing[entries].all())
        self.is_landing[entries] = False
        landing.left -= len(rows)
        self.bytes -= len(rows) * facts.block_bytes
        sealed, freed = self._blocks.fill_whole(entries[arrived])
        self._room.free(freed)
        lost, freed = self._blocks.fail(entries[~arrived])
        self._index.remove(lost)
        self._room.free(freed)
        self._credit[sealed] = landing.source
        self._has_credit |= len(sealed) > 0
        self.blocks_total += len(sealed)
        self.failed_blocks_total += len(rows) - len(sealed)
        if landing.is_spare:
            self._room.spare(facts.shape, sealed)
        else:
            self._touch(facts.shape, landing)

    def abandon(self, landing: Landing, facts: SpaceFacts, rows: NDArray[np.int64]) -> Entries:
        """Whoever fills these rows has no end: returns those that are to be dropped, claimed on."""
        entries = landing.entries[rows]
        landing.left -= len(rows)
        self.bytes -= len(rows) * facts.block_bytes
        self.failed_blocks_total += len(rows)
        filling: Entries = entries[self._blocks.state[entries] == FILLING]
        return filling

    def take_credit(self, hits: Entries) -> tuple[int, ...]:
        """How many of these blocks came from each tier below, each told once."""
        if not self._has_credit:
            return (0,) * (len(TIERS) - 1)
        credit = self._credit[hits]
        self._credit[hits] = 0
        return tuple(np.bincount(credit, minlength=len(TIERS))[1:].tolist())

    def _touch(self, shape: ShapeId, landing: Landing) -> None:
        """The request's whole chain: no parent is older than its child."""
        line = landing.line
        live = (line >= 0) & (self._blocks.generation[line] == landing.generations)
        live &= self._blocks.state[line] == SEALED
        self._room.touch(shape, line[live])


def _distinct(words: Words, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without those whose hash stands at an earlier one."""
    if not may_repeat(words[positions]):
        return positions
    _, first = np.unique(words[positions], axis=0, return_index=True)
    kept: NDArray[np.int64] = positions[np.sort(first)]
    return kept
