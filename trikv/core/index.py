"""From a block's key to its entry number.

Decided here: how keys are found. A chained hash table in numpy columns, allocated once and never
rehashed, so that no call ever pays for the growth of the table. This file does not know: what an
entry stands for, where its pages are, who hands out entry numbers, or what a space means.

All chains live in one array, `links`. Its first `buckets` places are the heads of the chains, and
place `buckets + entry` says what follows `entry`; the value is the place of the next entry. So
heads and entries are relinked by the same line. Every chain ends at an entry more, `capacity`,
which has no key: a search needs no test for the end before it reads.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.rows import is_all, rows_of
from trikv.core.words import Entries, Names, SpaceId, Words

ABSENT: Final = -1
HASH_WORDS: Final = 4
CAPACITY_MAX: Final = 2**29  # heads and entries are places of one array of int32

RUN_WINDOW_MIN: Final = 64  # keys compared at first when a run is guessed; then eight times more
RUN_WINDOW_MAX: Final = 4096
RUN_SHORT: Final = 64  # a run with fewer keys costs more than looking each of them up
SHORT_RUNS_MAX: Final = 1  # with more the entries are fragmented: look up the rest
LOOKUP_WINDOW: Final = 512  # keys looked up at once: bounds what a miss at the front wastes

WORD_MASK: Final = 2**64 - 1
SPACE_FACTOR: Final = 0xD6E8FEB86659FD93
BUCKET_FACTOR: Final = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads hashes that count up
ROW_EQUAL: Final = 0x01010101  # a row of four equal words, its four bools seen as one uint32

Places = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Index:
    """Finds entries by key, in batches; a key is a space and a block hash.

    At the bound: entry numbers are below `capacity`, so the caller's table of entries is full
    before this one is. There are at least two buckets an entry, so that a key is found in 1.25
    steps on average, and nothing is ever moved or rehashed.

    Cost: 48 to 56 bytes an entry, of which only the 8 to 16 of the buckets are resident before
    entries are used. Making an index writes the buckets: 0.1 s for 10 million entries.
    """

    def __init__(self, capacity: int, *, seed: int) -> None:
        assert 0 < capacity <= CAPACITY_MAX
        bits = (2 * capacity - 1).bit_length()
        self.capacity = capacity
        self._buckets = 1 << bits
        self._shift = np.uint64(64 - bits)
        self._seed = (seed * BUCKET_FACTOR + SPACE_FACTOR) & WORD_MASK
        self._end = self._buckets + capacity
        self._links = np.empty(self._end, np.int32)
        self._links[: self._buckets] = self._end
        self._keys = np.zeros((capacity + 1, HASH_WORDS), np.uint64)
        self._spaces = np.zeros(capacity + 1, np.int32)  # space + 1; 0: the entry is unused
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def bytes(self) -> int:
        """Memory of the columns."""
        return self._links.nbytes + self._keys.nbytes + self._spaces.nbytes

    def find(self, space: SpaceId, hashes: Words) -> Entries:
        """Look up each key for itself.

        Args:
            space: not negative.
            hashes: uint64[n, 4], in any order; may repeat.

        Returns:
            int32[n]: the entry of each key, -1 where it is absent.

        Cost: 0.1 to 0.2 µs a key when memory is cold.
        """
        places = self._links.take(self._bucket_of(hashes[:, 0], self._salt(space)))
        found = np.subtract(places, self._buckets, dtype=np.int64)
        rows = (found != self.capacity).nonzero()[0]  # whose chains go on
        while len(rows):
            wanted = hashes if len(rows) == len(hashes) else hashes.take(rows, axis=0)
            is_other = ~_rows_equal(self._keys.take(found.take(rows), axis=0), wanted)
            rows = rows[is_other]
            following = self._links.take(found.take(rows) + self._buckets)
            found[rows] = np.subtract(following, self._buckets, dtype=np.int64)
            rows = rows[following != self._end]
        found[found == self.capacity] = ABSENT
        # The same hash in another space is as good as never in the same chain: look only now.
        rows = (found >= 0).nonzero()[0]
        for row in rows[self._spaces.take(found.take(rows)) != space + 1]:
            found[row] = self._find_one(space, hashes[row])
        return found.astype(np.int32)

    def find_prefix(self, space: SpaceId, hashes: Words) -> Entries:
        """Find the longest run of leading keys that are all present.

        A prefix is usually saved in one go and then has consecutive entries: look up one key,
        guess that the next keys have the next entries, compare them all at once, and look up
        again where the guess breaks. Entries of which that is not true are looked up in bulk.

        Args:
            space: not negative.
            hashes: uint64[n, 4] in prefix order.

        Returns:
            int32[m], m <= n: entries of the first m keys.

        Cost: 10 µs and 0.03 µs a key for consecutive entries, as `find` for scattered ones.
        """
        runs: list[Entries] = []
        start = short_runs = 0
        while start < len(hashes):
            if short_runs > SHORT_RUNS_MAX:
                runs.append(self._look_up_prefix(space, hashes[start:]))
                break
            entry = self._find_one(space, hashes[start])
            if entry < 0:
                break
            length = self._run_length(space, entry, hashes[start:])
            runs.append(np.arange(entry, entry + length, dtype=np.int32))
            start += length
            short_runs += length < RUN_SHORT
        return runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int32), *runs])

    def insert(self, space: SpaceId, hashes: Words, entries: Entries) -> None:
        """Make keys known.

        Args:
            space: not negative.
            hashes: uint64[n, 4], distinct and absent (not checked: the caller has just asked).
            entries: int32[n], distinct and unused, below `capacity`; consecutive numbers in
                prefix order make `find_prefix` fast.

        Cost: 0.2 µs a key.
        """
        if len(entries) == 0:
            return
        assert len(hashes) == len(entries)
        assert space >= 0
        rows = rows_of(entries)
        assert not self._spaces[rows].any()
        self._spaces[rows] = space + 1
        self._keys[rows] = hashes
        buckets = self._bucket_of(hashes[:, 0], self._salt(space))
        places = np.add(entries, self._buckets, dtype=np.int64)
        marks = np.arange(len(places), dtype=np.int32)
        self._links[places] = marks
        assert is_all(self._links.take(places) == marks)  # an entry named twice would be a ring
        following = self._links.take(buckets)
        self._links[buckets] = places  # of those that share a bucket the last one stands
        if not is_all(self._links.take(buckets) == places):
            buckets, places, following = self._chain(buckets, places, following)
        self._links[places] = following
        self._count += len(places)

    def _chain(
        self, buckets: Places, places: Places, following: NDArray[np.int32]
    ) -> tuple[Places, Places, NDArray[np.int32]]:
        """Have new places that share a bucket follow each other; returns all in another order."""
        order = buckets.argsort(kind="stable")
        buckets, places, following = buckets[order], places[order], following[order]
        shared = (buckets[1:] == buckets[:-1]).nonzero()[0]
        following[shared] = places[shared + 1]
        is_head = np.ones(len(places), np.bool_)
        is_head[shared + 1] = False
        self._links[buckets[is_head]] = places[is_head]
        return buckets, places, following

    def remove(self, entries: Entries) -> None:
        """Forget the keys of entries, which may be used again at once.

        Args:
            entries: int32[n], distinct and in use.

        Cost: 0.3 µs an entry.
        """
        if len(entries) == 0:
            return
        rows = entries.astype(np.int64)
        spaces = self._spaces.take(rows)
        assert spaces.all()
        salts = spaces.astype(np.uint64) * np.uint64(SPACE_FACTOR) + np.uint64(self._seed)
        self._spaces[rows] = 0
        # Walk every affected chain from its head. Rows whose chains are one and the same move in
        # step and write the same values, so they need not be told apart.
        kept = self._bucket_of(self._keys[rows, 0], salts)
        places = self._links.take(kept).astype(np.int64)
        while len(places):
            following = self._links.take(places)
            unused = self._spaces.take(places - self._buckets) == 0
            self._links[kept[unused]] = following[unused]
            rest = (following != self._end).nonzero()[0]
            kept = np.where(unused, kept, places).take(rest)
            places = following.take(rest).astype(np.int64)
        self._count -= len(rows)

    def hashes_of(self, entries: Entries) -> Words:
        """The block hashes of entries in use: a copy, uint64[n, 4]."""
        return self._keys.take(entries, axis=0)

    def spaces_of(self, entries: Entries) -> NDArray[np.int32]:
        """The spaces of entries in use."""
        spaces: NDArray[np.int32] = self._spaces.take(entries) - 1
        return spaces

    def names_of(self, entries: Entries) -> Names:
        """Names of entries in use: the same whenever the same key is here, whatever its entry."""
        spaces = self._spaces.take(entries).astype(np.uint64)
        mixed = self._keys[entries, 0] ^ (spaces * np.uint64(SPACE_FACTOR) + np.uint64(self._seed))
        mixed *= np.uint64(BUCKET_FACTOR)
        names: Names = mixed ^ (mixed >> np.uint64(32))
        return names

    def _salt(self, space: int) -> np.uint64:
        return np.uint64(((space + 1) * SPACE_FACTOR + self._seed) & WORD_MASK)

    def _bucket_of(
        self, first_words: NDArray[np.uint64], salts: np.uint64 | NDArray[np.uint64]
    ) -> Places:
        mixed = (first_words ^ salts) * np.uint64(BUCKET_FACTOR)
        return (mixed >> self._shift).view(np.int64)

    def _find_one(self, space: int, block_hash: NDArray[np.uint64]) -> int:
        """As `find` for one key, without the fixed cost of array operations."""
        mixed = (int(block_hash[0]) ^ int(self._salt(space))) * BUCKET_FACTOR & WORD_MASK
        wanted = block_hash.tobytes()
        place = self._links.item(mixed >> int(self._shift))
        while place != self._end:
            entry = place - self._buckets
            if self._keys[entry].tobytes() == wanted and self._spaces.item(entry) == space + 1:
                return entry
            place = self._links.item(place)
        return ABSENT

    def _run_length(self, space: int, first: int, hashes: Words) -> int:
        """How many of the keys have the entries `first`, `first + 1` and so on."""
        limit = min(len(hashes), self.capacity - first)
        if limit > 1 and self._keys.item(first + 1, 0) != hashes.item(1, 0):
            return 1  # scattered entries: not worth array operations
        start, size = 0, RUN_WINDOW_MIN
        while start < limit:
            stop = min(start + size, limit)
            window = slice(first + start, first + stop)
            keys, wanted = self._keys[window], hashes[start:stop]
            is_ours = self._spaces[window] == space + 1
            if keys.tobytes() != wanted.tobytes() or not is_all(is_ours):
                return start + int((_rows_equal(keys, wanted) & is_ours).argmin())
            start, size = stop, min(8 * size, RUN_WINDOW_MAX)
        return limit

    def _look_up_prefix(self, space: SpaceId, hashes: Words) -> Entries:
        parts: list[Entries] = []
        for start in range(0, len(hashes), LOOKUP_WINDOW):
            found = self.find(space, hashes[start : start + LOOKUP_WINDOW])
            present = found >= 0
            if not is_all(present):
                parts.append(found[: int(present.argmin())])
                break
            parts.append(found)
        return np.concatenate(parts)


def _rows_equal(left: Words, right: Words) -> Bools:
    words_equal = np.ascontiguousarray(left == right)
    equal: Bools = words_equal.view(np.uint32).ravel() == ROW_EQUAL
    return equal
