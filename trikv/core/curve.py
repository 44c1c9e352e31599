"""The miss-ratio curve: what the hit rate would be with a smaller or a larger cache, measured live.

Decided here: which blocks are sampled, and how distances in a stack of uses become hit rates. This
file does not know pools, engines or what is resident.

Spatial sampling: a block is followed when its name is below a threshold, so all uses of a block are
seen or none. The followed blocks stand in a stack by last use, as leaf-first LRU would hold them. A
block is found by a cache of as many bytes as stand above it and itself, divided by the sampling
rate; a prefix is found as far as its farthest block (hits end at the first gap).

When the sample is full, either the oldest are forgotten, once the stack reaches as far as anybody
asks (`reach_bytes`), or the threshold falls and an eighth is given up. Counts are weighted by the
rate at which they were taken, so they stay right when it falls.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.index import Index
from trikv.core.words import Entries, SpaceId, Words

SAMPLE_BLOCKS: Final = 16_384
FOLLOWED_MAX: Final = 1_024  # of one request; with more the rate falls: no call is long
GIVE_UP: Final = 8  # when full, one block in so many is given up
CHUNK_BITS: Final = 6  # bytes are summed for each chunk of so many places of the stack
STACK_PLACES: Final = 4  # places of the stack for each block of the sample
BINS_PER_OCTAVE: Final = 64  # capacities are told apart to a hundredth
OCTAVES: Final = 60
RATE_ONE: Final = 1 << 32
MIX: Final = 0x9FB21C651E98DF25

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def levels_of(space: SpaceId, words: Words) -> Places:
    """A number below `RATE_ONE` for each block, spread evenly: what sampling goes by."""
    mixed = (words[:, 0] ^ (words[:, 1] >> np.uint64(7)) ^ np.uint64(space)) * np.uint64(MIX)
    return (mixed >> np.uint64(32)).view(np.int64)


class Curve:
    """Hit rate as a function of capacity in bytes, from what engines ask for and save.

    At the bound: `sample_blocks` blocks are followed, and `FOLLOWED_MAX` of one request; more lower
    the rate or push out the oldest.

    Cost: `bytes_max`; 10 µs a request and 0.01 µs a block; 150 µs more with a followed block.
    """

    def __init__(self, reach_bytes: int, *, sample_blocks: int = SAMPLE_BLOCKS) -> None:
        """Follow up to `sample_blocks` blocks, for capacities up to `reach_bytes`."""
        self._reach_bytes = reach_bytes
        self._sample_blocks = sample_blocks
        self._threshold = RATE_ONE
        self._index = Index(sample_blocks, seed=2)
        self._unused = np.arange(sample_blocks, dtype=np.int32)[::-1].copy()
        self._unused_count = sample_blocks
        self._place = np.zeros(sample_blocks, np.int64)
        self._level = np.zeros(sample_blocks, np.int64)  # a block's name, as compared with a rate
        chunks = (STACK_PLACES * sample_blocks >> CHUNK_BITS) + 2
        self._at = np.full(chunks << CHUNK_BITS, -1, np.int32)  # the entry at a place
        self._bytes = np.zeros(chunks << CHUNK_BITS, np.int64)  # its bytes; 0: nothing there
        self._sums = np.zeros(chunks, np.int64)
        self._tail = 0
        self._found = np.zeros(OCTAVES * BINS_PER_OCTAVE)  # weight of uses by distance
        self._sampled = 0.0
        self._asked = 0.0

    @property
    def rate(self) -> float:
        """The share of blocks that are followed now."""
        return self._threshold / RATE_ONE

    @property
    def asked_count(self) -> float:
        """Blocks that the curve rests on, older ones counting less."""
        return self._asked

    @property
    def bytes_max(self) -> int:
        """Memory of the columns; they are allocated once."""
        columns = (self._place, self._level, self._at, self._bytes, self._sums, self._found)
        return sum(one.nbytes for one in columns) + self._unused.nbytes + self._index.bytes

    # -- what happens

    def use(self, space: SpaceId, words: Words, block_bytes: int, *, is_ask: bool) -> None:
        """A request asks for blocks, from its first on and once; or saves some: not counted."""
        if is_ask:
            self._asked += len(words)
        levels = levels_of(space, words)
        followed = levels < self._threshold
        self._use(space, words[followed], levels[followed], block_bytes, is_ask=is_ask)

    def halve(self) -> None:
        """Let all counts so far weigh half: call it at regular times, and the curve is of late."""
        self._found *= 0.5
        self._sampled *= 0.5
        self._asked *= 0.5

    # -- what follows from it

    def hit_rates(self, capacities_bytes: Sequence[int]) -> list[float]:
        """The hit rate with each capacity; capacities beyond `reach_bytes` count as that.

        The sampled uses never add up to all uses: what is missing, or too much, is taken to be of
        the nearest distance, where few popular blocks make most of the difference.
        """
        if self._asked == 0:
            return [0.0] * len(capacities_bytes)
        total = np.cumsum(self._found) + (self._asked - self._sampled)
        marks = np.array([max(one, 1) for one in capacities_bytes], np.float64)
        bins = (np.log2(marks) * BINS_PER_OCTAVE).astype(np.int64)
        found = total[np.minimum(bins, len(total) - 1)]
        return [min(max(float(one / self._asked), 0.0), 1.0) for one in found]

    # -- inside

    def _use(
        self, space: SpaceId, words: Words, levels: Places, block_bytes: int, *, is_ask: bool
    ) -> None:
        """Count the distances of a request's followed blocks, and put them on top of the stack."""
        if len(words) == 0:
            return
        if len(words) > min(FOLLOWED_MAX, self._sample_blocks // 2):
            keep = min(FOLLOWED_MAX, self._sample_blocks // 2) // 2
            self._lower(int(np.partition(levels, keep)[keep]))
            still = levels < self._threshold
            words, levels = words[still], levels[still]
        entries = self._index.find(space, words)
        if is_ask:
            self._count(entries, RATE_ONE / self._threshold)
        fresh = np.flatnonzero(entries < 0)
        if len(fresh) > self._unused_count:
            self._give_up()
            # Some of these may be gone now, and the rate lower: look again.
            still = levels < self._threshold
            self._use(space, words[still], levels[still], block_bytes, is_ask=False)
            return
        self._unused_count -= len(fresh)
        new = self._unused[self._unused_count : self._unused_count + len(fresh)].copy()
        entries[fresh] = new
        self._index.insert(space, words[fresh], new)
        self._level[new] = levels[fresh]
        known = np.ones(len(entries), np.bool_)
        known[fresh] = False
        self._lift(self._place[entries[known]])
        self._stack(entries[::-1], block_bytes)

    def _count(self, entries: Entries, weight: float) -> None:
        self._sampled += weight * len(entries)
        unknown = np.flatnonzero(entries < 0)[:1]
        leading = entries[: unknown.item()] if len(unknown) else entries
        if len(leading) == 0:
            return
        distances = np.maximum.accumulate(self._bytes_above(self._place[leading])) * weight
        bins = (np.log2(distances) * BINS_PER_OCTAVE).astype(np.int64)
        np.add.at(self._found, np.minimum(bins, len(self._found) - 1), weight)

    def _bytes_above(self, places: Places) -> Floats:
        """Bytes at these places of the stack and above."""
        above = np.cumsum(self._sums[::-1])[::-1]  # of each chunk and the later ones
        chunks = places >> CHUNK_BITS
        inside = places & ((1 << CHUNK_BITS) - 1)
        rows = self._bytes.reshape(-1, 1 << CHUNK_BITS)[chunks]
        below = np.where(np.arange(1 << CHUNK_BITS) < inside[:, None], rows, 0).sum(axis=1)
        found: Floats = (above[chunks] - below).astype(np.float64)
        return found

    def _lift(self, places: Places) -> None:
        """Take what is at these places off the stack."""
        np.subtract.at(self._sums, places >> CHUNK_BITS, self._bytes[places])
        self._bytes[places] = 0
        self._at[places] = -1

    def _stack(self, entries: Entries, block_bytes: int) -> None:
        """Put entries on top, the last one topmost."""
        if self._tail + len(entries) > len(self._at):
            self._close_ranks()
        places = np.arange(self._tail, self._tail + len(entries))
        self._tail += len(entries)
        self._at[places] = entries
        self._bytes[places] = block_bytes
        self._place[entries] = places
        np.add.at(self._sums, places >> CHUNK_BITS, block_bytes)

    def _close_ranks(self) -> None:
        """Move all that is on the stack down over the empty places."""
        live = np.flatnonzero(self._at >= 0)
        entries, sizes = self._at[live], self._bytes[live]
        self._at[:], self._bytes[:] = -1, 0
        self._tail = len(entries)
        self._at[: self._tail], self._bytes[: self._tail] = entries, sizes
        self._place[entries] = np.arange(self._tail)
        self._sums[:] = self._bytes.reshape(-1, 1 << CHUNK_BITS).sum(axis=1)

    def _give_up(self) -> None:
        """Make room in the sample: the oldest go if the stack reaches far enough, else the rate."""
        self._close_ranks()
        entries = self._at[: self._tail]
        reached = int(self._sums.sum()) * RATE_ONE // self._threshold
        count = max(1, self._sample_blocks // GIVE_UP)
        if reached > self._reach_bytes:
            self._forget(entries[:count].copy())
        else:
            self._lower(int(np.partition(self._level[entries], -count)[-count]))

    def _lower(self, threshold: int) -> None:
        """Follow fewer blocks from now on."""
        self._threshold = max(threshold, 1)
        entries = self._at[self._at >= 0]
        self._forget(entries[self._level[entries] >= self._threshold])

    def _forget(self, gone: Entries) -> None:
        self._index.remove(gone)
        self._lift(self._place[gone])
        self._unused[self._unused_count : self._unused_count + len(gone)] = gone
        self._unused_count += len(gone)
