"""S3-FIFO: a small queue that most blocks never leave, a main queue, and ghosts of what left.

Decided here: when a block moves between the queues, in batches. This file does not know keys, only
names of entries; the queues themselves are logs of `LeafFirstLru`, each entry touched once.

| entry | event | becomes |
| --- | --- | --- |
| unknown, no ghost | touch | small |
| unknown, a ghost | touch | main |
| small, main | touch | unchanged: first in, first out |
| small, main | `used` | counted, up to `USES_MAX` |
| small, its turn, used `USES_TO_STAY` times | `victims` | main, count 0 |
| small, its turn | `victims` | evicted, leaves a ghost |
| main, its turn, used | `victims` | main again, as the newest; count one less |
| main, its turn, not used | `victims` | evicted |
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.eviction import NEVER, LeafFirstLru
from trikv.core.words import Entries, Names, Stamp

USES_MAX: Final = 3
USES_TO_STAY: Final = 2
SMALL_SHARE: Final = 10  # the small queue is one part in so many
ROUNDS_MAX: Final = 256  # rounds of second chances in one call, then uses no longer save a block
ROUND_MIN: Final = 64  # entries looked at in a round, at least

WAYS: Final = 8

UNKNOWN: Final = 0
SMALL: Final = 1
MAIN: Final = 2

Bools = NDArray[np.bool_]


class Ghosts:
    """Names of the last `count` blocks that were evicted.

    A name may be in one of `WAYS` places. That matters: with one place a fifth of the names were
    lost, and a prompt that came back with every fifth block on probation was soon cut in pieces.

    At the bound: the oldest are forgotten, and of more than `WAYS` names that want the same places
    the oldest a little early.

    Cost: 32 to 64 bytes a ghost.
    """

    def __init__(self, count: int) -> None:
        rows = max(1, 1 << (2 * max(count, 1) - 1).bit_length() >> WAYS.bit_length() - 1)
        self._mask = np.uint64(rows - 1)
        self._names = np.zeros((rows, WAYS), np.uint64)
        self._born = np.full((rows, WAYS), NEVER, np.int64)
        self._count = count
        self._births = 0

    def add(self, names: Names) -> None:
        """These blocks have left, the oldest first."""
        rows = (names & self._mask).view(np.int64)
        order = np.argsort(rows, kind="stable")
        rows, names = rows[order], names[order]
        # The first name of a row takes the row's oldest place, the second the next, and so on.
        rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
        fits = rank < WAYS
        rows, names, rank, order = rows[fits], names[fits], rank[fits], order[fits]
        by_age = np.argsort(self._born[rows], axis=1)
        ways = by_age[np.arange(len(rows)), rank]
        self._names[rows, ways] = names
        self._born[rows, ways] = self._births + order
        self._births += len(fits)

    def has(self, names: Names) -> Bools:
        """Which of these left lately."""
        rows = (names & self._mask).view(np.int64)
        same = self._names[rows] == names[:, None]
        same &= self._born[rows] >= max(0, self._births - self._count)
        found: Bools = same.any(axis=1)
        return found


class S3Fifo:
    """Evicts what was not used soon after it came; what was, only after a second round.

    At the bound: a call gives at most `ROUNDS_MAX` rounds of second chances; after that the oldest
    go, whatever their uses.

    Cost: 50 bytes an entry and 32 to 64 a ghost.
    """

    def __init__(
        self, recency: NDArray[np.int64], names: Callable[[Entries], Names], *, ghosts: int
    ) -> None:
        """Order entries below `len(recency)`; `ghosts` is how many evicted blocks to remember."""
        self._small = LeafFirstLru(recency)
        self._main = LeafFirstLru(recency)
        self._recency = recency
        self._names = names
        self._queue = np.zeros(len(recency), np.uint8)
        self._uses = np.zeros(len(recency), np.uint8)
        self._ghosts = Ghosts(ghosts)
        self._newest = NEVER

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def used(self, entries: Entries) -> None:
        """Count one use of each entry."""
        uses = self._uses.take(entries)
        self._uses[entries] = uses + (uses < USES_MAX)

    def touch(self, entries: Entries, stamp: int) -> None:
        """New entries, root first, join a queue; for known ones nothing changes."""
        self._newest = stamp
        fresh = entries[self._queue.take(entries) == UNKNOWN]
        if len(fresh) == 0:
            return
        self._uses[fresh] = 0
        known = self._ghosts.has(self._names(fresh))
        for queue, order, mine in (
            (SMALL, self._small, fresh[~known]),
            (MAIN, self._main, fresh[known]),
        ):
            self._queue[mine] = queue
            order.keep(mine[::-1], stamp)

    def victims(self, count: int, evictable: Bools) -> Entries:
        """Take out up to `count` entries, as the table says; pinned ones are passed over."""
        gone: list[Entries] = [np.empty(0, np.int32)]
        missing = count
        for turn in range(ROUNDS_MAX + 1):
            looks = (self._from_small, self._from_main)
            first, second = looks if self._excess(missing) > 0 else looks[::-1]
            found, seen = first(missing, evictable, is_last=turn == ROUNDS_MAX)
            if seen == 0:  # all of this queue is pinned
                found, seen = second(missing, evictable, is_last=turn == ROUNDS_MAX)
            gone.append(found)
            missing -= len(found)
            if missing <= 0 or seen == 0:
                break
        taken = np.concatenate(gone)
        self._recency[taken] = NEVER
        self._queue[taken] = UNKNOWN
        return taken

    def unpark(self, entries: Entries) -> None:
        """As in `LeafFirstLru`."""
        self._small.unpark(entries)
        self._main.unpark(entries)

    def forget(self, entries: Entries) -> None:
        """As in `LeafFirstLru`; a forgotten block leaves no ghost."""
        self._small.forget(entries)
        self._main.forget(entries)
        self._queue[entries] = UNKNOWN

    def coldest(self) -> Stamp | None:
        """A stamp not newer than the next victim's."""
        stamps = [one for one in (self._small.coldest(), self._main.coldest()) if one is not None]
        return min(stamps, default=None)

    def _excess(self, missing: int) -> int:
        """By how much the small queue is too long, or will be with as many new blocks as go now.

        Blocks go in batches before others come: without those to come, the main queue would lose
        what the small one will have too much.
        """
        share = len(self) // SMALL_SHARE if len(self._main) else 0
        return len(self._small) + missing - 1 - share

    def _from_small(self, missing: int, evictable: Bools, *, is_last: bool) -> tuple[Entries, int]:
        """What goes from the small queue; and how many were looked at."""
        excess = self._excess(missing)
        taken = self._small.take(min(excess, missing) if excess > 0 else missing, evictable)
        stays = (self._uses.take(taken) >= USES_TO_STAY) & (not is_last)
        promoted, gone = taken[stays], taken[~stays]
        self._queue[promoted] = MAIN
        self._uses[promoted] = 0
        self._main.keep(promoted, self._newest)
        self._ghosts.add(self._names(gone))
        return gone, len(taken)

    def _from_main(self, missing: int, evictable: Bools, *, is_last: bool) -> tuple[Entries, int]:
        """What goes from the main queue; and how many were looked at, those that stay included."""
        taken = self._main.take(max(missing, ROUND_MIN), evictable)
        stays = (self._uses.take(taken) > 0) & (not is_last)
        leaving = np.flatnonzero(~stays)[:missing]
        if len(leaving) == missing:  # those behind the last one that goes have not been looked at
            end = leaving.item(-1) + 1
            self._main.restore(taken[end:])
            taken, stays = taken[:end], stays[:end]
        again = taken[stays]
        self._uses[again] -= np.uint8(1)
        self._main.keep(again, self._newest)
        return taken[~stays], len(taken)
