"""The life of a block, in columns.

Decided here: the states of a block and what each event does to it. Everything that touches a state
is in this file; it does not know keys, places, recency or who asks.

| state | event | becomes | effect |
| --- | --- | --- | --- |
| absent | reserved: all its pages are there | filling | |
| filling | claimed: a rank begins to write a page | filling | |
| filling | page filled, others missing | filling | |
| filling | last page filled | sealed | the block becomes visible |
| filling | writer lost or deadline, others still write | doomed | leaves the index |
| filling | writer lost or deadline, nobody writes | absent | leaves the index, pages freed |
| doomed | a writer ends, others still write | doomed | |
| doomed | the last writer ends | absent | pages freed |
| sealed | evicted or dropped, no pins | absent | leaves the index, pages freed |
| sealed | dropped, pinned | doomed | leaves the index |
| doomed | the last pin ends | absent | pages freed |

`NEXT` is the same table for one block; the column methods apply it to arrays, and a test drives
both with the same histories. Nothing else is ever done to a block, and a row that is missing is a
bug of ours.
"""

import enum
from collections.abc import Mapping
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from trikv.core.errors import IllegalEventError
from trikv.core.rows import is_all, rows_of
from trikv.core.words import Entries, SpaceId

PAGES_MAX: Final = 64


class Watcher(Protocol):
    """Told of all blocks that become or stop being sealed, at once and before anything else."""

    def sealed(self, entries: Entries) -> None:
        """These have just become visible."""

    def unsealed(self, entries: Entries) -> None:
        """These are about to stop being sealed; afterwards their places may be written again."""


class State(enum.IntEnum):
    """Where a block is in its life; the value is what the column holds."""

    ABSENT = 0
    FILLING = 1
    DOOMED = 2
    SEALED = 3


class Event(enum.Enum):
    """What can happen to one block; a *hold* is a writer's claim or a reader's pin."""

    RESERVED = "reserved"
    CLAIMED = "claimed"
    PAGE_FILLED = "page filled"
    LAST_PAGE_FILLED = "last page filled"
    LOST_WHILE_HELD = "writer lost, deadline or drop; somebody holds it"
    LOST = "writer lost, deadline or drop; nobody holds it"
    HOLD_ENDED = "a writer or reader ends, others go on"
    LAST_HOLD_ENDED = "the last writer or reader ends"
    EVICTED = "evicted"


NEXT: Final[Mapping[tuple[State, Event], State]] = {
    (State.ABSENT, Event.RESERVED): State.FILLING,
    (State.FILLING, Event.CLAIMED): State.FILLING,
    (State.FILLING, Event.PAGE_FILLED): State.FILLING,
    (State.FILLING, Event.LAST_PAGE_FILLED): State.SEALED,
    (State.FILLING, Event.LOST_WHILE_HELD): State.DOOMED,
    (State.FILLING, Event.LOST): State.ABSENT,
    (State.DOOMED, Event.HOLD_ENDED): State.DOOMED,
    (State.DOOMED, Event.LAST_HOLD_ENDED): State.ABSENT,
    (State.SEALED, Event.EVICTED): State.ABSENT,
    (State.SEALED, Event.LOST_WHILE_HELD): State.DOOMED,
    (State.SEALED, Event.LOST): State.ABSENT,
    (State.SEALED, Event.HOLD_ENDED): State.SEALED,
    (State.SEALED, Event.LAST_HOLD_ENDED): State.SEALED,
}

# What is compared with columns: numpy takes five times as long over an enum's member.
ABSENT: Final = int(State.ABSENT)
FILLING: Final = int(State.FILLING)
DOOMED: Final = int(State.DOOMED)
SEALED: Final = int(State.SEALED)


class Blocks:
    """State columns of all entries; a row is one block.

    Attributes:
        state: uint8, a `State`.
        space: int32, the space the key is in.
        slot: int64, its place in the pool.
        depth: int32, position in its sequence.
        wanted, claimed, filled: uint64 masks of pages: all, begun or done, done.
        writers: int32, copies into the block that have not ended.
        pins: int32, leases and copies out of it.
        generation: uint32, grows when a row is reserved: tells reuse of the row.
        evictable: bool, sealed and not pinned; kept true by this class.
        replica: bool, other nodes hold it too, so it goes before others; whoever knows sets it.
        below: bool, a disk holds it too, as far as is known; whoever knows sets it.
        counts: rows by state.
        sealed_by_space: sealed rows by space, spaces without any left out.
        used_by_space: likewise, rows that are not absent.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state = np.zeros(capacity, np.uint8)
        self.space = np.zeros(capacity, np.int32)
        self.slot = np.zeros(capacity, np.int64)
        self.depth = np.zeros(capacity, np.int32)
        self.wanted = np.zeros(capacity, np.uint64)
        self.claimed = np.zeros(capacity, np.uint64)
        self.filled = np.zeros(capacity, np.uint64)
        self.writers = np.zeros(capacity, np.int32)
        self.pins = np.zeros(capacity, np.int32)
        self.generation = np.zeros(capacity, np.uint32)
        self.evictable = np.zeros(capacity, np.bool_)
        self.replica = np.zeros(capacity, np.bool_)
        self.below = np.zeros(capacity, np.bool_)
        self.counts = dict.fromkeys(map(int, State), 0)  # rows by state
        self.counts[ABSENT] = capacity
        self.sealed_by_space: dict[int, int] = {}
        self.used_by_space: dict[int, int] = {}
        self._unused = _Rows(capacity)
        self.watchers: tuple[Watcher, ...] = ()

    @property
    def unused_count(self) -> int:
        """Rows that `reserve` could still hand out."""
        return len(self._unused)

    @property
    def row_count(self) -> int:
        """Rows below this one are all that were ever in use."""
        return self._unused.fresh

    def reserve(
        self,
        slots: NDArray[np.int64],
        depths: NDArray[np.int32],
        *,
        space: SpaceId,
        page_count: int,
    ) -> Entries:
        """Absent to filling: give rows to blocks whose pages have been allocated.

        Returns:
            The rows, ascending, one a slot; at most `unused_count` may be asked for.
        """
        entries = self._unused.take(len(slots))
        self._expect(entries, ABSENT)
        self._set_state(entries, FILLING)
        rows = rows_of(entries)
        self.space[rows] = space
        self.slot[rows] = slots
        self.depth[rows] = depths
        self.wanted[rows] = _mask(page_count)
        self.claimed[rows] = 0
        self.filled[rows] = 0
        self.replica[rows] = False
        self.below[rows] = False
        self.generation[rows] += np.uint32(1)
        _add(self.used_by_space, space, len(entries))
        return entries

    def claim(self, entries: Entries, page: int) -> None:
        """A copy into the rows' pages of this number begins; nobody must have claimed them."""
        self._expect(entries, FILLING)
        rows, bit = rows_of(entries), np.uint64(1 << page)
        claimed = self.claimed[rows]
        assert not (claimed & bit).any()
        self.claimed[rows] = claimed | bit
        self.writers[rows] += 1

    def fill(self, entries: Entries, page: int) -> tuple[Entries, Entries]:
        """A copy into the rows' pages of this number has ended well.

        Returns:
            (sealed, freed): rows that became visible, and doomed rows that nobody holds any more.
        """
        self._end_writes(entries)
        is_live = self.state[rows_of(entries)] == FILLING
        doomed, live = _split(entries, is_live)
        rows = rows_of(live)
        filled = self.filled[rows] | np.uint64(1 << page)
        self.filled[rows] = filled
        _, sealed = _split(live, filled == self.wanted[rows])
        self._set_state(sealed, SEALED)
        rows = rows_of(sealed)
        self.evictable[rows] = self.pins[rows] == 0
        return sealed, self._free_unheld(doomed)

    def claim_whole(self, entries: Entries) -> None:
        """One writer begins to write all pages; nobody must have claimed any."""
        self._expect(entries, FILLING)
        assert not bool(self.claimed[entries].any())
        self.claimed[entries] = self.wanted[entries]
        self.writers[entries] += 1

    def fill_whole(self, entries: Entries) -> tuple[Entries, Entries]:
        """The writer of whole blocks has ended well; returns as `fill`."""
        self._end_writes(entries)
        is_live = self.state[entries] == FILLING
        doomed, live = entries[~is_live], entries[is_live]
        self.filled[live] = self.wanted[live]
        self._set_state(live, SEALED)
        self.evictable[live] = self.pins[live] == 0
        return live, self._free_unheld(doomed)

    def fail(self, entries: Entries) -> tuple[Entries, Entries]:
        """A copy into these rows has ended badly: none of their pages can be trusted.

        Returns:
            (lost, freed): filling rows that must leave the index now, and rows that nobody holds.
        """
        self._end_writes(entries)
        lost = entries[self.state[entries] == FILLING]
        self._set_state(lost, DOOMED)
        return lost, self._free_unheld(entries)

    def drop(self, entries: Entries) -> Entries:
        """Filling and sealed rows are given up; the caller has taken them out of the index.

        Returns:
            Rows that nobody holds and whose pages are to be freed; the others follow when their
            last writer or pin ends.
        """
        states = self.state[entries]
        if not bool(((states == FILLING) | (states == SEALED)).all()):
            raise IllegalEventError("only filling and sealed blocks can be dropped")
        self._set_state(entries, DOOMED)
        self.evictable[entries] = False
        return self._free_unheld(entries)

    def evict(self, entries: Entries) -> None:
        """Sealed to absent; every row must be evictable."""
        if not bool(self.evictable[entries].all()):
            raise IllegalEventError("a pinned or unsealed block cannot be evicted")
        self._retire(entries)

    def pin(self, entries: Entries) -> None:
        """One more reader of each sealed row."""
        rows = rows_of(entries)
        if not is_all(self.state[rows] == SEALED):
            self._expect(entries, SEALED)
        self.pins[rows] += 1
        self.evictable[rows] = False

    def unpin(self, entries: Entries) -> tuple[Entries, Entries]:
        """One reader less of each row.

        Returns:
            (evictable, freed): rows that became evictable again, and doomed rows that nobody holds.
        """
        rows = rows_of(entries)
        pins = self.pins[rows] - 1
        assert len(pins) == 0 or pins.min() >= 0
        self.pins[rows] = pins
        is_sealed = self.state[rows] == SEALED
        if len(pins) and is_all(is_sealed) and not np.count_nonzero(pins):  # as nearly always
            self.evictable[rows] = True
            return entries, entries[:0]
        is_evictable = is_sealed & (pins == 0)
        self.evictable[entries[is_evictable]] = True
        return entries[is_evictable], self._free_unheld(entries[~is_sealed])

    def check(self) -> None:
        """Invariants, for tests; costs a scan of all rows."""
        state = self.state
        assert bool(((self.claimed & self.filled) == self.filled)[state == FILLING].all())
        assert bool((self.filled == self.wanted)[state == SEALED].all())
        assert bool((self.writers == 0)[(state == SEALED) | (state == ABSENT)].all())
        assert bool((self.pins == 0)[(state == FILLING) | (state == ABSENT)].all())
        assert bool((self.writers + self.pins > 0)[state == DOOMED].all())
        assert bool((self.evictable == ((state == SEALED) & (self.pins == 0))).all())
        for one in State:
            assert self.counts[one] == int((state == one).sum())
        assert self.unused_count == self.counts[ABSENT]
        spaces, counts = np.unique(self.space[state == SEALED], return_counts=True)
        found = zip(spaces.tolist(), counts.tolist(), strict=True)
        assert self.sealed_by_space == dict(found)
        spaces, counts = np.unique(self.space[state != ABSENT], return_counts=True)
        assert self.used_by_space == dict(zip(spaces.tolist(), counts.tolist(), strict=True))

    def _end_writes(self, entries: Entries) -> None:
        rows = rows_of(entries)
        writers = self.writers[rows] - 1
        assert len(writers) == 0 or writers.min() >= 0
        self.writers[rows] = writers

    def _free_unheld(self, entries: Entries) -> Entries:
        if len(entries) == 0:
            return entries
        held = (self.writers[entries] > 0) | (self.pins[entries] > 0)
        free: Entries = entries[~held & (self.state[entries] == DOOMED)]
        self._retire(free)
        return free

    def _retire(self, entries: Entries) -> None:
        self._tally(self.used_by_space, entries, -1)
        self._set_state(entries, ABSENT)
        self.evictable[entries] = False
        self._unused.give_back(entries)

    def _set_state(self, entries: Entries, state: int) -> None:
        if len(entries) == 0:
            return
        rows = rows_of(entries)
        before = self.state[rows]
        counts = np.bincount(before, minlength=4).tolist()
        for value, count in enumerate(counts):
            self.counts[value] -= count
        self.counts[state] += len(entries)
        if counts[SEALED]:
            gone = entries[before == SEALED]
            self._tally(self.sealed_by_space, gone, -1)
            for watcher in self.watchers:
                watcher.unsealed(gone)
        self.state[rows] = state
        if state == SEALED:
            self._tally(self.sealed_by_space, entries, 1)
            for watcher in self.watchers:
                watcher.sealed(entries)

    def _tally(self, totals: dict[int, int], entries: Entries, sign: int) -> None:
        if len(entries) == 0:
            return
        of = self.space[rows_of(entries)]
        if is_all(of == of[0]):  # as nearly always
            _add(totals, of.item(0), sign * len(of))
            return
        spaces, counts = np.unique(of, return_counts=True)
        for space, count in zip(spaces.tolist(), counts.tolist(), strict=True):
            _add(totals, space, sign * count)

    def _expect(self, entries: Entries, state: int) -> None:
        if not is_all(self.state[rows_of(entries)] == state):
            found = set(self.state[entries].tolist())
            raise IllegalEventError(f"expected only {State(state).name} blocks, found {found}")


def _split(entries: Entries, claims: NDArray[np.bool_]) -> tuple[Entries, Entries]:
    """Those of which the claim does not hold, and those of which it does."""
    if is_all(claims):  # as nearly always
        return entries[:0], entries
    return entries[~claims], entries[claims]


def _add(totals: dict[int, int], space: int, count: int) -> None:
    total = totals.get(space, 0) + count
    if total:
        totals[space] = total
    else:
        totals.pop(space, None)


def _mask(page_count: int) -> np.uint64:
    assert 1 <= page_count <= PAGES_MAX
    return np.uint64((1 << page_count) - 1)


class _Rows:
    """A stack of unused row numbers: fresh ones counting up, returned ones last in, first out."""

    def __init__(self, capacity: int) -> None:
        self._stack = np.empty(capacity, np.int32)
        self._returned = 0
        self.fresh = 0
        self._capacity = capacity

    def __len__(self) -> int:
        return self._returned + self._capacity - self.fresh

    def take(self, count: int) -> Entries:
        """Distinct rows, ascending, so that a prefix is usually a run of consecutive rows."""
        assert count <= len(self)
        fresh = min(count, self._capacity - self.fresh)
        rest = count - fresh
        rows = np.empty(count, np.int32)
        rows[:fresh] = np.arange(self.fresh, self.fresh + fresh, dtype=np.int32)
        self.fresh += fresh
        rows[fresh:] = self._stack[self._returned - rest : self._returned]
        self._returned -= rest
        rows.sort()
        return rows

    def give_back(self, rows: Entries) -> None:
        self._stack[self._returned : self._returned + len(rows)] = rows
        self._returned += len(rows)
