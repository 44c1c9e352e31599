"""Which part of the pool lies in which NUMA node's memory.

Decided here: how the pool is divided, and in which order its slabs are first used. A *bank* is the
part of the pool in one NUMA node's memory, named by that node's number. This file does not know who
is near a bank, or how memory gets there.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Offsets

ANY_BANK: Final = -1
"""Nobody knows, or it does not matter."""

Parts = tuple[tuple[int, int], ...]
"""Where each part of the pool begins, in bytes, ascending from 0; and its bank."""
WHOLE: Final[Parts] = ((0, ANY_BANK),)


def divide(size_bytes: int, banks: Sequence[int], *, unit: int) -> Parts:
    """Equal parts in a row, one a bank, each a multiple of `unit`; the last has the rest."""
    if not banks:
        return WHOLE
    count = len(banks)
    return tuple((at * size_bytes // count // unit * unit, bank) for at, bank in enumerate(banks))


class Banks:
    """The parts of a pool that is cut into slabs.

    Attributes:
        is_split: there are several banks, so it matters which one a slab is in.
        of_slab: int64[slab]; a slab that lies in two belongs to that of its first byte.
    """

    def __init__(self, parts: Parts, slab_count: int, slab_bytes: int) -> None:
        self._begins = np.array([begin for begin, _ in parts], np.int64)
        self._numbers = np.array([bank for _, bank in parts], np.int64)
        self.is_split = len({bank for _, bank in parts}) > 1
        self.of_slab = self.at(np.arange(slab_count, dtype=np.int64) * slab_bytes)

    def at(self, offsets: Offsets) -> NDArray[np.int64]:
        """The bank of each place in the pool."""
        found: NDArray[np.int64] = self._numbers[
            np.searchsorted(self._begins, offsets, side="right") - 1
        ]
        return found

    def far_count(self, offsets: Offsets, bank: int) -> int:
        """How many of these places lie in another bank than `bank`; 0 where it does not matter."""
        if bank == ANY_BANK or not self.is_split:
            return 0
        return int(np.count_nonzero(self.at(offsets) != bank))

    def order(self) -> NDArray[np.int64]:
        """All slabs, ascending in each bank, banks taking turns."""
        turn = np.empty(len(self.of_slab), np.int64)
        for bank in set(self.of_slab.tolist()):
            mine = np.flatnonzero(self.of_slab == bank)
            turn[mine] = np.arange(len(mine))
        return np.argsort(turn, kind="stable")


ONE_BANK: Final = Banks(WHOLE, 0, 1)
