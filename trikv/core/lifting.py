"""What an owner reads from its disks for other nodes: how much, and when pages are given back.

Decided here: the budget. Pages that are being read for peers, or were and are still lent, hold at
most so much of the pool; what goes beyond is not read, so it is absent for the peer that asked, and
so is what follows. Blocks that arrive are pinned until the loan is over for which they were read.
This file does not know peers' connections, disks or how long anybody waits.

| a row that is read for a loan | then |
| --- | --- |
| arrives while the loan lasts, or before it is made | pinned, until the loan is over |
| arrives later | spare: the first to go |
| does not arrive | given back |
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.below import SSD, Below
from trikv.core.blocks import SEALED
from trikv.core.cache import Cache
from trikv.core.lending import Lending, Loan
from trikv.core.parts import ReadPart
from trikv.core.reading import PEERS
from trikv.core.shared import Shared
from trikv.core.words import Entries, PeerId, SpaceId, TransferId, Words

LIFTS_MAX: Final = 256
"""Loans that wait for reads at once; a further one gets what is in the pool."""


@dataclass(slots=True, eq=False)
class Lift:
    """Blocks that one loan needs from disks.

    Attributes:
        waits: rows of the pool that are being read, for this loan or for whomever.
        parts: the reads of it that were prepared for this loan.
        block_bytes: of the pool, a block.
        held: rows that have arrived for it, pinned.
        is_over: its loan has ended, or was not made.
    """

    waits: Entries
    generations: NDArray[np.uint32]
    parts: tuple[ReadPart, ...]
    block_bytes: int
    held: Entries = field(default_factory=lambda: np.empty(0, np.int32))
    is_over: bool = False


class Lifting:
    """All that one owner reads for other nodes.

    Attributes:
        bytes_max: of the pool, for all of them together; 0: nothing is read for others.
        bytes: pages that are being read for others, or were and are not given back yet.
        count: lifts that are not over.
        lent_blocks_total, lent_bytes_total: blocks that were read for a loan and lent by it.
        refused_blocks_total: were on a disk, and over the budget.
        late_blocks_total: were being read when the loan was made without them.

    At the bound: fewer blocks are read, from the front; down to none.
    """

    def __init__(
        self, cache: Cache, below: Below, shared: Shared, lending: Lending, bytes_max: int
    ) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self.count = 0
        self.lent_blocks_total = 0
        self.lent_bytes_total = 0
        self.refused_blocks_total = 0
        self.late_blocks_total = 0
        self._cache = cache
        self._below = below
        self._shared = shared
        self._lending = lending
        self._lifts: dict[TransferId, Lift] = {}  # by landing, until all its rows have ended
        below.ended = self._ended

    def begin(self, peer: PeerId, origin: bytes, words: Words) -> Lift | None:
        """Have read what a peer asks for and only disks have; None: there is nothing to wait for.

        Returns:
            To be ended by `end`, once; whoever reads takes its parts.
        """
        space = self._shared.space_of(origin)
        if self.bytes_max == 0 or space is None or space not in self._cache.spaces:
            return None
        each = self._cache.spaces[space].block_bytes
        words = words[: self._lending.grants.room(peer, each)]
        if len(words) == 0 or self.count >= LIFTS_MAX:
            return None
        limit = max(0, self.bytes_max - self.bytes) // each
        waits, parts = self._read(space, words, limit)
        if len(waits) == 0:
            return None
        lift = Lift(waits, self._cache.blocks.generation[waits], parts, each)
        self.count += 1
        for part in parts:
            self._lifts[part.landing.transfer] = lift
            self.bytes += len(part.rows) * each
        return lift

    def is_waiting(self, lift: Lift) -> bool:
        """Whether something is being read that the loan could have."""
        return bool(self._left(lift).any())

    def lent(self, lift: Lift, loan: Loan) -> None:
        """The loan for which blocks were read was made."""
        count = int(np.isin(loan.grant.entries, lift.held).sum())
        self.lent_blocks_total += count
        self.lent_bytes_total += count * sum(loan.page_bytes)
        self.late_blocks_total += int(self._left(lift).sum())

    def end(self, lift: Lift) -> None:
        """The loan is over, or was not made: what was read for it may go."""
        assert not lift.is_over
        lift.is_over = True
        self.count -= 1
        self.bytes -= len(lift.held) * lift.block_bytes
        if len(lift.held):
            self._cache.room.unpin(lift.held)

    def _left(self, lift: Lift) -> NDArray[np.bool_]:
        same = self._cache.blocks.generation[lift.waits] == lift.generations
        left: NDArray[np.bool_] = same & self._below.reading.is_any(lift.waits)
        return left

    def _read(
        self, space: SpaceId, words: Words, limit: int
    ) -> tuple[Entries, tuple[ReadPart, ...]]:
        """Prepare to bring up what stands before the first block that nobody has or gets.

        Args:
            space: theirs.
            words: in prefix order; not from a request's first block on.
            limit: how many may be read.

        Returns:
            (waits, parts): rows of the pool that are being read now, by whomever, and the reads
            that were prepared here.
        """
        below, cache = self._below, self._cache
        disks, rows = below.find(space, words)
        on_disk = np.flatnonzero(disks >= 0)
        end = on_disk.item(limit) if len(on_disk) > limit else len(disks)
        disks, rows, words = disks[:end], rows[:end], words[:end]
        parts: list[ReadPart] = []
        if bool((disks >= 0).any()):
            landing = cache.prepare_fetch(space, words, disks >= 0, source=SSD, is_spare=True)
            at = landing.positions
            parts = below.prepare(landing, disks[at], rows[at], PEERS)
        for part in parts:
            depths = below.lowers[part.disk].blocks.depth[part.entries]
            cache.blocks.depth[part.pool_entries] = depths
        self.refused_blocks_total += len(on_disk) - sum(len(part.rows) for part in parts)
        line = cache.index.find(space, words)
        line = line[line >= 0]
        return line[below.reading.is_any(line)], tuple(parts)

    def _ended(self, part: ReadPart, arrived: NDArray[np.bool_]) -> None:
        """A part of a read has ended, for whomever it was."""
        landing = part.landing
        lift = self._lifts.get(landing.transfer)
        if lift is None:
            return
        if landing.left == 0:
            del self._lifts[landing.transfer]
        blocks = self._cache.blocks
        entries = landing.entries[part.rows[arrived]]
        same = blocks.state[entries] == SEALED  # else it was dropped meanwhile
        kept = entries[same] if not lift.is_over else entries[:0]
        blocks.pin(kept)
        lift.held = np.concatenate((lift.held, kept))
        self.bytes -= (len(part.rows) - len(kept)) * lift.block_bytes
