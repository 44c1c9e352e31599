"""Reads and writes of disks that are under way: which blocks, and where they lie on both sides.

Decided here: nothing; these are what `Below` gives to whoever moves the bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.chains import Chain
from trikv.core.landing import Landing
from trikv.core.lower import WritePlan
from trikv.core.words import Entries, Offsets, Words

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ReadPart:
    """Blocks of one landing that one disk has, in prefix order.

    Attributes:
        rows: indices into the landing's columns.
        entries: the disk's rows, pinned until `Below.end_read`.
        regions, slots: where they lie there.
    """

    disk: int
    landing: Landing
    rows: Int64s
    entries: Entries
    regions: Int64s
    slots: Int64s
    sums: NDArray[np.uint64]

    def take(self, at: Int64s) -> "ReadPart":
        """Some of these blocks."""
        return ReadPart(
            self.disk,
            self.landing,
            self.rows[at],
            self.entries[at],
            self.regions[at],
            self.slots[at],
            self.sums[at],
        )

    @property
    def pool_entries(self) -> Entries:
        """The pool's rows that it fills."""
        entries: Entries = self.landing.entries[self.rows]
        return entries

    @property
    def bytes(self) -> int:
        """Bytes to read."""
        return len(self.rows) * sum(self.landing.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class SpillPart:
    """Blocks of one request that one disk is to hold, root first.

    Attributes:
        plan: the disk's side.
        entries: the pool's rows, pinned until `Below.end_spill`.
        offsets: int64[pages, n], where their pages lie in the pool.
        kin: the disk's rows of their ancestors, root first.
    """

    disk: int
    plan: WritePlan
    chain: Chain
    entries: Entries
    offsets: Offsets
    words: Words
    depths: NDArray[np.int32]
    kin: Entries

    @property
    def bytes(self) -> int:
        """Bytes to write."""
        return len(self.entries) * sum(self.plan.page_bytes)


@dataclass(frozen=True, slots=True)
class Coming:
    """What a request can wait for: blocks behind those at hand, and the reads that bring them."""

    count: int
    parts: tuple[ReadPart, ...] = ()
