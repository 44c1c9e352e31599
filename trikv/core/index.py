"""From a block's key to its entry number.

Decided here: how keys are found. A chained hash table in numpy columns, allocated once and never
rehashed, so that no call ever pays for the growth of the table. This file does not know: what an
entry stands for, where its pages are, who hands out entry numbers, or what a space means.

All chains live in one array, `links`. Its first `buckets` places are the heads of the chains, and
place `buckets + entry` says what follows `entry`; the value is the place of the next entry, 0 at
the end. So heads and entries are relinked by the same line.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Entries, SpaceId, Words

HASH_WORDS: Final = 4
CAPACITY_MAX: Final = 2**29  # heads and entries are places of one array of int32

RUN_WINDOW: Final = 512  # keys compared at once while a run is guessed
RUN_SHORT: Final = 32  # a run with fewer keys costs more than looking each of them up
SHORT_RUNS_MAX: Final = 2  # after so many the entries are fragmented: look up the rest
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
    before this one is. There are at least as many buckets as entries: a chain that holds the
    wanted key is walked for 1.5 steps on average, and nothing is ever moved or rehashed.

    Cost: 44 to 48 bytes an entry; memory of entries that were never used is not resident.
    """

    def __init__(self, capacity: int, *, seed: int) -> None:
        assert 0 < capacity <= CAPACITY_MAX
        bits = max(1, (capacity - 1).bit_length())
        self.capacity = capacity
        self._buckets = 1 << bits
        self._shift = np.uint64(64 - bits)
        self._seed = (seed * BUCKET_FACTOR + SPACE_FACTOR) & WORD_MASK
        self._links = np.zeros(self._buckets + capacity, np.int32)
        self._keys = np.zeros((capacity, HASH_WORDS), np.uint64)
        self._spaces = np.zeros(capacity, np.int32)  # space + 1; 0: the entry is unused
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, space: SpaceId, hashes: Words) -> Entries:
        """Look up each key for itself.

        Args:
            space: not negative.
            hashes: uint64[n, 4], in any order; may repeat.

        Returns:
            int32[n]: the entry of each key, -1 where it is absent.

        Cost: 0.1 to 0.2 µs a key when memory is cold.
        """
        found = np.full(len(hashes), -1, np.int32)
        places = self._links.take(self._bucket_of(hashes[:, 0], self._salt(space)))
        rows = np.flatnonzero(places)
        while len(rows):
            places = places[rows] if len(rows) < len(places) else places
            entries = places - np.int32(self._buckets)
            same = _rows_equal(self._keys.take(entries, axis=0), hashes[rows])
            same &= self._spaces.take(entries) == space + 1
            found[rows[same]] = entries[same]
            following = self._links.take(places)
            following[same] = 0
            rest = np.flatnonzero(following)
            rows, places = rows[rest], following[rest]
        return found

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
        assert not self._spaces.take(entries).any()
        self._keys[entries] = hashes
        self._spaces[entries] = space + 1
        buckets = self._bucket_of(hashes[:, 0], self._salt(space))
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        places = entries[order] + np.int32(self._buckets)
        is_last = np.append(buckets[1:] != buckets[:-1], True)  # of those in the same bucket
        following = np.append(places[1:], np.int32(0))
        following[is_last] = self._links[buckets[is_last]]
        self._links[places] = following
        is_first = np.append(True, is_last[:-1])
        self._links[buckets[is_first]] = places[is_first]
        self._count += len(entries)

    def remove(self, entries: Entries) -> None:
        """Forget the keys of entries, which may be used again at once.

        Args:
            entries: int32[n], distinct and in use.

        Cost: 0.3 µs an entry.
        """
        if len(entries) == 0:
            return
        spaces = self._spaces.take(entries)
        assert spaces.all()
        salts = spaces.astype(np.uint64) * np.uint64(SPACE_FACTOR) + np.uint64(self._seed)
        self._spaces[entries] = 0
        # Walk every affected chain from its head. Rows whose chains are one and the same move in
        # step and write the same values, so they need not be told apart.
        kept = self._bucket_of(self._keys[entries, 0], salts)
        places = self._links.take(kept)
        while len(places):
            following = self._links.take(places)
            unused = self._spaces.take(places - np.int32(self._buckets)) == 0
            self._links[kept[unused]] = following[unused]
            kept = np.where(unused, kept, places)
            rest = np.flatnonzero(following)
            kept, places = kept[rest], following[rest]
        self._count -= len(entries)

    def hashes_of(self, entries: Entries) -> Words:
        """The block hashes of entries in use: a copy, uint64[n, 4]."""
        return self._keys.take(entries, axis=0)

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
        while place:
            entry = place - self._buckets
            if self._keys[entry].tobytes() == wanted and self._spaces.item(entry) == space + 1:
                return entry
            place = self._links.item(place)
        return -1

    def _run_length(self, space: int, first: int, hashes: Words) -> int:
        """How many of the keys have the entries `first`, `first + 1` and so on."""
        limit = min(len(hashes), self.capacity - first)
        start = 0
        while start < limit:
            stop = min(start + RUN_WINDOW, limit)
            window = slice(first + start, first + stop)
            same = _rows_equal(self._keys[window], hashes[start:stop])
            same &= self._spaces[window] == space + 1
            if not same.all():
                return start + int(same.argmin())
            start = stop
        return limit

    def _look_up_prefix(self, space: SpaceId, hashes: Words) -> Entries:
        parts: list[Entries] = []
        for start in range(0, len(hashes), LOOKUP_WINDOW):
            found = self.find(space, hashes[start : start + LOOKUP_WINDOW])
            present = found >= 0
            if not present.all():
                parts.append(found[: int(present.argmin())])
                break
            parts.append(found)
        return np.concatenate(parts)


def _rows_equal(left: Words, right: Words) -> Bools:
    words_equal = np.ascontiguousarray(left == right)
    equal: Bools = words_equal.view(np.uint32)[:, 0] == ROW_EQUAL
    return equal
