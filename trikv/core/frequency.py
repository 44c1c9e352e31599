"""W-TinyLFU: new blocks pass a window, and stay only when used more often than what they displace.

Decided here: how uses are counted in bounded memory, and who wins a place. This file does not know
keys, only names of entries; the orders inside window and main part are those of `LeafFirstLru`.

Nothing is ever refused: while there is room nobody asks for victims, and what leaves the window
enters the main part unasked. The filter decides who goes when room is needed.

| entry | event | becomes |
| --- | --- | --- |
| unknown | touch | window |
| window, main | touch | the newest of its part |
| window, oldest beyond the window's share | touch of new ones into free room | main |
| window, oldest beyond the window's share; used more than main's oldest | `victims` | main |
| window, oldest beyond the window's share; not used more | `victims` | evicted |
| main, its oldest; used less than the window's | `victims` | evicted |
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.eviction import NEVER, LeafFirstLru
from trikv.core.words import Entries, Names, Stamp

WINDOW_SHARE: Final = 100  # the window is one part in so many
ROWS: Final = 4
COUNTERS_PER_BLOCK: Final = 2
COUNT_MAX: Final = 255
PERIOD_USES: Final = 4  # a generation of the sketch ends after so many uses a block
FACTORS: Final = np.array(
    [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F], [0x165667B19E3779F9], [0xD6E8FEB86659FD93]],
    np.uint64,
)

UNKNOWN: Final = 0
WINDOW: Final = 1
MAIN: Final = 2

Bools = NDArray[np.bool_]
Counts = NDArray[Any]  # uint8 or uint16


class Sketch:
    """How often names were used lately: a count-min sketch with conservative update.

    There are two generations: the present one, and the one before it, which counts half and ends
    with the next. So every count is halved once in `PERIOD_USES` uses a block, and no call pays
    for that: a generation begins as untouched memory.

    At the bound: counts of a generation stop at `COUNT_MAX`. A name that stands twice in a batch
    counts once; otherwise a count is too small only by its age, and too large only when all its
    places are shared.

    Cost: 16 to 32 bytes a block.
    """

    def __init__(self, blocks: int) -> None:
        self._bits = max(4, (COUNTERS_PER_BLOCK * max(blocks, 1) - 1).bit_length())
        self._shift = np.uint64(64 - self._bits)
        self._period = PERIOD_USES * max(blocks, 1)
        self._uses = 0
        self._before, self._present = self._begin(), self._begin()

    @property
    def bytes(self) -> int:
        """Memory of the counters, once written."""
        return 2 * self._present.nbytes

    def add(self, names: Names) -> None:
        """One use of each name."""
        if len(names) == 0:
            return
        if self._uses >= self._period:
            self._before, self._present, self._uses = self._present, self._begin(), 0
        self._uses += len(names)
        places = self._places(names)
        counts = self._present.take(places)
        fewest = counts.min(axis=0)
        more = fewest + (fewest < COUNT_MAX).astype(np.uint8)
        np.maximum.at(self._present, places.ravel(), np.tile(more, ROWS))

    def count(self, names: Names) -> Counts:
        """Estimated uses of each name; those of the generation before count half."""
        places = self._places(names)
        present = self._present.take(places).min(axis=0)
        before = self._before.take(places).min(axis=0)
        counts: Counts = present.astype(np.uint16) + (before >> np.uint8(1))
        return counts

    def _begin(self) -> Counts:
        return np.zeros(ROWS << self._bits, np.uint8)

    def _places(self, names: Names) -> NDArray[np.int64]:
        columns = ((names * FACTORS) >> self._shift).view(np.int64)
        return columns + (np.arange(ROWS)[:, None] << self._bits)


class WindowTinyLfu:
    """Evicts the less used of two: the window's oldest block and the main part's.

    At the bound: entries that are pinned are passed over as `LeafFirstLru` does.

    Cost: 51 bytes an entry and 16 to 32 a block that the pool can hold.
    """

    def __init__(
        self, recency: NDArray[np.int64], names: Callable[[Entries], Names], *, blocks: int
    ) -> None:
        """Order entries below `len(recency)`; `blocks` is how many the pool can really hold."""
        self._window = LeafFirstLru(recency)
        self._main = LeafFirstLru(recency)
        self._recency = recency
        self._names = names
        self._part = np.zeros(len(recency), np.uint8)
        self._all = np.ones(len(recency), np.bool_)
        self._full = 0  # so many entries there were, without those forgotten: more is free room
        self.sketch = Sketch(blocks)
        self._newest = NEVER

    def __len__(self) -> int:
        return len(self._window) + len(self._main)

    def used(self, entries: Entries) -> None:
        """Count one use of each entry."""
        self.sketch.add(self._names(entries))

    def touch(self, entries: Entries, stamp: int) -> None:
        """Entries, root first, become the newest of their part; new ones join the window."""
        self._newest = stamp
        parts = self._part.take(entries)
        is_main = parts == MAIN
        fresh = entries[parts == UNKNOWN]
        if len(fresh):
            self._part[fresh] = WINDOW
            self.sketch.add(self._names(fresh))
        if is_main.all():
            self._main.touch(entries, stamp)
        else:
            self._main.touch(entries[is_main], stamp)
            self._window.touch(entries[~is_main], stamp)
        if len(self) > self._full:
            self._grow(len(self) - self._full)

    def _grow(self, count: int) -> None:
        """So many entries came into free room: as many may leave the window for the main part."""
        self._full += count
        moved = self._window.take(min(count, max(self._excess(), 0)), self._all)
        self._part[moved] = MAIN
        self._main.keep(moved, self._newest)

    def _excess(self) -> int:
        """By how much the window is too long."""
        return len(self._window) - max(1, len(self) // WINDOW_SHARE)

    def victims(self, count: int, evictable: Bools) -> Entries:
        """Take out up to `count` entries, as the table says; pinned ones are passed over."""
        # As many new ones will come as go now, and push out of the window what is there.
        leaving = self._excess() + count - 1
        candidates = self._window.take(min(count, max(leaving, 0)), evictable)
        rivals = self._main.take(len(candidates), evictable)
        pairs = len(rivals)
        facing, unrivalled = candidates[:pairs], candidates[pairs:]
        wins = self._count(facing) > self._count(rivals)
        stay = facing[wins]
        self._part[stay] = MAIN
        gone = [np.where(wins, rivals, facing), unrivalled]
        self._main.restore(rivals[~wins])
        self._main.keep(stay, self._newest)
        missing = count - len(candidates)
        for order in (self._main, self._window):
            if missing > 0:
                gone.append(order.take(missing, evictable))
                missing -= len(gone[-1])
        taken: Entries = np.concatenate(gone)
        self._recency[taken] = NEVER
        self._part[taken] = UNKNOWN
        return taken

    def unpark(self, entries: Entries) -> None:
        """As in `LeafFirstLru`."""
        self._window.unpark(entries)
        self._main.unpark(entries)

    def forget(self, entries: Entries) -> None:
        """As in `LeafFirstLru`; uses stay counted."""
        self._window.forget(entries)
        self._main.forget(entries)
        self._full -= int(np.count_nonzero(self._part.take(entries)))
        self._part[entries] = UNKNOWN

    def coldest(self) -> Stamp | None:
        """A stamp not newer than the next victim's."""
        stamps = [one for one in (self._window.coldest(), self._main.coldest()) if one is not None]
        return min(stamps, default=None)

    def _count(self, entries: Entries) -> Counts:
        return self.sketch.count(self._names(entries))
