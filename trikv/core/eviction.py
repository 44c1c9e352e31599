"""Which blocks go when room is needed.

Decided here: the default order of eviction. This file does not know: keys, places, what a pin is
for, or how much room is needed; whether an entry may go now is a column that the caller hands in.

`LeafFirstLru` keeps a log of touches, oldest first; each touch appends its entries deepest first.

| entry | event | becomes |
| --- | --- | --- |
| any | touch | in the log, at its new end |
| in the log, returned | `victims` meets it evictable | absent: evicted |
| in the log, returned | `victims` meets it pinned | parked |
| parked | `unpark` | returned: goes before all of the log, in its old order |
| absent, just taken | `restore` | returned: goes before all others |
| any | `forget` | absent |

A touch leaves the entry's earlier place in the log behind as waste. `_sweep` moves live places
over the waste, a few with each call, so that neither the log nor any call grows without bound;
chunks of the log that hold only waste are skipped unread.
"""

import heapq
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.rows import is_all
from trikv.core.words import Entries, Stamp

NEVER: Final = -1
SLACK_ENTRIES: Final = 4096  # waste in the log that is not worth a sweep
SWEEP_RATE: Final = 8  # log places swept for each entry that a call touches or takes away
SWEEP_MIN: Final = 256  # places a sweep moves at least: less would not pay its fixed cost
SCAN_MIN: Final = 1024  # places read at once at least, for the same reason
IDLE_ROUNDS_MAX: Final = 256  # reads of pinned entries only, before `victims` gives up: some 3 ms
CHUNK_BITS: Final = 12  # live places are counted for each chunk of so many places of the log
CHUNKS_AHEAD: Final = 4096  # counts looked at in one go for the next chunk with a live place

TURNS_MIDDLE: Final = 1 << 61  # turns are positive, and grow in both directions from here

Bools = NDArray[np.bool_]
Places = NDArray[np.int32]
Rows = NDArray[np.int64]  # entries, as numpy likes to index by them
Turns = NDArray[np.int64]


class LeafFirstLru:
    """Evicts what was touched longest ago; of one touch the deepest block first.

    When every touch covers a block's whole chain from the root, no parent goes before its child
    (unless the child is pinned and the parent is not).

    At the bound: the log never has more than 3 places an entry of capacity, and at most about 3
    times the live ones; a call that adds waste sweeps `SWEEP_RATE` places for each entry.

    Cost: 24 bytes an entry, 8 of them only for entries that were ever parked.
    """

    def __init__(self, recency: NDArray[np.int64], *, slack_entries: int = SLACK_ENTRIES) -> None:
        """Order entries below `len(recency)`.

        Args:
            recency: the last touch's stamp of each entry, -1 for none; the caller's column,
                written here for the entries that are touched, evicted or forgotten here.
            slack_entries: waste below which the log is left alone.
        """
        capacity = len(recency)
        self._recency = recency
        self._slack = slack_entries
        # A ring. Positions count up for ever; position p is at p % len. Live places are in
        # head..write and read..tail; write..read is the gap that the sweep has cleared.
        chunk_count = (3 * capacity + slack_entries + SWEEP_MIN >> CHUNK_BITS) + 1
        self._ring = np.zeros(chunk_count << CHUNK_BITS, np.int32)
        self._alive = np.zeros(chunk_count, np.int32)  # live places of each chunk of the ring
        self._place = np.zeros(capacity, np.int32)  # 1 + index in the ring; 0: not in the log
        self._head = self._write = self._read = self._tail = 0
        self._logged = 0  # entries in the log
        # Parked entries have left the log. Each keeps its turn: +turn parked, -turn returned.
        self._turn = np.zeros(capacity, np.int64)
        self._turns = self._front = TURNS_MIDDLE  # the last turn given at either end
        self._parked = 0
        self._returned = 0
        self._runs: list[tuple[int, Turns, Entries]] = []  # a heap of returned, by first turn
        self._newest = NEVER
        self._floor = NEVER  # not newer than anything in the log

    def __len__(self) -> int:
        return self._logged + self._parked + self._returned

    @property
    def log_places(self) -> int:
        """Places the log spans, waste included."""
        return self._tail - self._head

    def used(self, entries: Entries) -> None:
        """Uses are not counted: `touch` says all that matters here."""

    def touch(self, entries: Entries, stamp: int) -> None:
        """Make entries the last to be evicted.

        Args:
            entries: int32[n], distinct, root first; new ones become known.
            stamp: greater than that of any touch before.

        Cost: 10 µs and 0.02 µs an entry; a sweep of `SWEEP_RATE` places an entry while more than
        half of the log is waste.
        """
        assert stamp > self._newest
        if len(entries) == 0:
            return
        self._newest = stamp
        rows = entries.astype(np.int64)  # numpy scatters by int64 several times faster
        self._detach(rows)
        self._append(rows[::-1], stamp)

    def victims(self, count: int, evictable: Bools) -> Entries:
        """Take out the entries to evict next; they are forgotten here.

        Entries that are not evictable are passed over once and parked: the caller says `unpark`
        when that has changed.

        Args:
            count: how many are wanted.
            evictable: bool of all entries.

        Returns:
            int32[m], m <= count; fewer when there are no more.

        At the bound: when the oldest `IDLE_ROUNDS_MAX * SCAN_MIN` entries are all pinned, the
        call ends with what it has, maybe nothing; the next one goes on behind them.

        Cost: 20 µs and 0.05 µs an entry taken or parked, or wasted in the same chunk.
        """
        gone = self.take(count, evictable)
        self._recency[gone] = NEVER
        return gone

    def take(self, count: int, evictable: Bools) -> Entries:
        """As `victims`, but the stamps stay: each must be evicted, restored or kept by the caller.

        For orders that are made of several of these.
        """
        found: list[Rows] = [np.empty(0, np.int64)]
        missing, idle_rounds, logged = count, 0, self._logged
        while missing > 0 and self._returned + self._logged > 0 and idle_rounds < IDLE_ROUNDS_MAX:
            take = self._take_returned if self._returned else self._take_logged
            taken = take(missing, evictable)
            found.append(taken)
            missing -= len(taken)
            idle_rounds += len(taken) == 0
        self._pay(logged - self._logged)
        return np.concatenate(found).astype(np.int32)

    def restore(self, entries: Entries) -> None:
        """Entries that `take` has given are not evicted: they are the next to go, in this order."""
        if len(entries) == 0:
            return
        self._front -= len(entries)
        turns = np.arange(self._front, self._front + len(entries))
        self._turn[entries] = -turns
        self._returned += len(entries)
        heapq.heappush(self._runs, (turns.item(0), turns, entries))

    def keep(self, entries: Entries, stamp: int) -> None:
        """Entries that `take` has given become the last to go, in this order.

        Args:
            entries: int32[n], distinct, absent here.
            stamp: not smaller than that of any touch before.
        """
        assert stamp >= self._newest
        if len(entries):
            self._newest = stamp
            self._append(entries.astype(np.int64), stamp)

    def unpark(self, entries: Entries) -> None:
        """Put those entries that are parked back to where they were: they are the next to go."""
        if self._parked == 0:
            return
        turns = self._turn[entries]
        entries, turns = entries[turns > 0], turns[turns > 0]
        if len(entries) == 0:
            return
        order = np.argsort(turns)
        entries, turns = entries[order], turns[order]
        self._turn[entries] = -turns
        self._parked -= len(entries)
        self._returned += len(entries)
        heapq.heappush(self._runs, (turns.item(0), turns, entries))

    def forget(self, entries: Entries) -> None:
        """Entries are gone for another reason; those not known here are fine.

        Args:
            entries: int32[n], distinct.
        """
        rows = entries.astype(np.int64)
        self._detach(rows)
        self._place[rows] = 0
        self._recency[rows] = NEVER
        self._pay(len(rows))

    def coldest(self) -> Stamp | None:
        """A stamp not newer than the next victim's, None if there can be no victim.

        Cost: reads a few entries; skips waste at the old end for good.
        """
        if self._returned:
            return Stamp(self._recency.item(self._first_returned()))
        if self._logged:
            self._trim(SCAN_MIN)
            return Stamp(self._floor)
        return None

    # -- the log

    def _append(self, rows: Rows, stamp: int) -> None:
        """Write entries, those to evict first in front, at the new end."""
        while self.log_places + len(rows) > len(self._ring):  # not met: see "At the bound"
            self._sweep(self.log_places)
        self._recency[rows] = stamp
        self._put(self._tail, rows)
        self._tail += len(rows)
        self._pay(len(rows))

    def _put(self, position: int, rows: Rows) -> None:
        """Write entries at a position and after; they must have left their earlier places."""
        self._logged += len(rows)
        while len(rows):  # twice at the ring's end
            at = position % len(self._ring)
            fit = len(self._ring) - at
            part, rows = rows[:fit], rows[fit:]
            end = at + len(part)
            self._ring[at:end] = part
            self._place[part] = np.arange(at + 1, end + 1, dtype=np.int32)
            for chunk in range(at >> CHUNK_BITS, (end - 1 >> CHUNK_BITS) + 1):
                first = max(at, chunk << CHUNK_BITS)
                self._alive[chunk] += min(end, (chunk + 1) << CHUNK_BITS) - first
            position += len(part)

    def _leave(self, places: Places) -> None:
        """Places that were live are waste now."""
        if len(places) == 0:
            return
        chunks = places - np.int32(1) >> CHUNK_BITS
        first = chunks.item(0)
        if first == chunks.item(-1) and is_all(chunks == first):
            self._alive[first] -= len(chunks)
        else:
            np.subtract.at(self._alive, chunks.astype(np.int64), np.ones(len(chunks), np.int32))
        self._logged -= len(places)

    def _peek(self, position: int, limit: int) -> tuple[Entries, Places, Bools]:
        """Entries from a position on, as many as are in one piece; where, and which are live."""
        start = position % len(self._ring)
        entries = self._ring[start : start + limit]
        places = np.arange(start + 1, start + 1 + len(entries), dtype=np.int32)
        live: Bools = self._place.take(entries) == places
        return entries, places, live

    def _peek_oldest(self, limit: int) -> tuple[Entries, Places, Bools]:
        """As `_peek` at the old end; skips chunks of waste for good."""
        self._head = self._skip_waste(self._head, self._oldest_end())
        self._skip_gap()
        return self._peek(self._head, min(limit, self._oldest_end() - self._head))

    def _oldest_end(self) -> int:
        return self._write if self._head < self._write else self._tail

    def _skip_waste(self, position: int, end: int) -> int:
        """The first position from `position` to `end` that is in a chunk with live places."""
        while position < end:
            chunk = position % len(self._ring) >> CHUNK_BITS
            if self._alive.item(chunk):
                return position
            ahead = self._alive[chunk : chunk + CHUNKS_AHEAD]
            filled = np.flatnonzero(ahead)
            skipped = filled.item(0) if len(filled) else len(ahead)
            position = ((position >> CHUNK_BITS) + skipped) << CHUNK_BITS
        return end

    def _drop_oldest(self, count: int) -> None:
        """Give up places at the old end, no more than `_peek_oldest` has shown."""
        self._head += count
        self._skip_gap()

    def _skip_gap(self) -> None:
        if self._head == self._write:
            self._head = self._write = self._read
        elif self._head > self._write:  # there was no gap to end at
            self._write = self._read = self._head

    def _take_logged(self, missing: int, evictable: Bools) -> Rows:
        self._runs.clear()  # only stale ones are left
        entries, places, live = self._peek_oldest(max(2 * missing, SCAN_MIN))
        chosen, passed, seen = _split(entries, live, evictable, missing)
        self._leave(places[:seen][live[:seen]])
        self._place[chosen] = 0
        if len(passed):
            self._place[passed] = 0
            self._turn[passed] = np.arange(self._turns + 1, self._turns + 1 + len(passed))
            self._turns += len(passed)
            self._parked += len(passed)
        self._drop_oldest(seen)
        return chosen

    def _trim(self, limit: int) -> None:
        """Skip waste at the old end, at most `limit` places."""
        entries, _, live = self._peek_oldest(limit)
        ahead = np.flatnonzero(live)[:1]
        if len(ahead):
            self._floor = self._recency.item(entries.item(ahead.item()))
        self._drop_oldest(ahead.item() if len(ahead) else len(entries))

    def _pay(self, count: int) -> None:
        """Sweep in proportion to what a call has done, if there is much waste."""
        if self.log_places > 2 * self._logged + self._slack:
            budget = max(SWEEP_RATE * count, SWEEP_MIN)
            self._trim(budget)
            self._sweep(budget)

    def _sweep(self, count: int) -> None:
        """Move live places over waste: the next `count` places, in rounds over the whole log."""
        while count > 0 and self._head < self._tail:
            self._read = self._skip_waste(self._read, self._tail)
            entries, places, live = self._peek(self._read, min(count, self._tail - self._read))
            kept = entries[live].astype(np.int64)
            self._leave(places[live])
            self._put(self._write, kept)
            self._write += len(kept)
            self._read += len(entries)
            count -= len(entries)
            if self._read == self._tail:  # the gap is at the new end: give it up, start again
                self._tail = self._write
                self._write = self._read = self._head
        self._skip_gap()

    # -- those that were passed over

    def _detach(self, rows: Rows) -> None:
        """Entries leave the place they have, whichever it is; `_place` is for the caller."""
        places = self._place.take(rows)
        logged = int(np.count_nonzero(places))
        self._leave(places if logged == len(places) else places[places > 0])
        if self._parked + self._returned:
            turns = self._turn.take(rows)
            self._parked -= int(np.count_nonzero(turns > 0))
            self._returned -= int(np.count_nonzero(turns < 0))
            self._turn[rows[turns != 0]] = 0

    def _first_returned(self) -> int:
        """The returned entry whose turn is next; drops stale ones before it."""
        while True:
            _, turns, entries = self._runs[0]
            live = self._turn[entries] == -turns
            first = int(live.argmax())
            if live[0]:
                return entries.item(0)
            heapq.heappop(self._runs)  # what is left of it may not be the first any more
            self._push_rest(turns, entries, first if live[first] else len(turns))

    def _take_returned(self, missing: int, evictable: Bools) -> Rows:
        _, turns, entries = heapq.heappop(self._runs)
        limit = int(np.searchsorted(turns, self._runs[0][0])) if self._runs else len(turns)
        live = self._turn[entries[:limit]] == -turns[:limit]
        chosen, passed, seen = _split(entries[:limit], live, evictable, missing)
        self._turn[chosen] = 0
        self._turn[passed] *= -1
        self._returned -= len(chosen) + len(passed)
        self._parked += len(passed)
        self._push_rest(turns, entries, seen)
        return chosen

    def _push_rest(self, turns: Turns, entries: Entries, start: int) -> None:
        if start < len(turns):
            heapq.heappush(self._runs, (turns.item(start), turns[start:], entries[start:]))


def _split(entries: Entries, live: Bools, evictable: Bools, count: int) -> tuple[Rows, Rows, int]:
    """The first `count` live evictable entries, the live others before them, and how many seen."""
    rows = entries.astype(np.int64)
    wanted = live & evictable.take(rows)
    first = np.flatnonzero(wanted)[:count]
    seen = first.item(-1) + 1 if len(first) == count else len(rows)
    passed = (live & ~wanted)[:seen]
    return rows.take(first), rows[:seen][passed], seen
