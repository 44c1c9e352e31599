"""Shadow caches: what other orders of eviction would have given, measured live on a sample.

Decided here: how a small cache of sampled blocks stands for the pool. This file does not know the
pool, engines, or what is resident: a shadow holds names only.

All shadows see the same sample, so their differences say more than each of their rates.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from trikv.core.curve import RATE_ONE, levels_of
from trikv.core.eviction import NEVER
from trikv.core.index import Index
from trikv.core.policies import Ground, Maker
from trikv.core.words import Entries, SpaceId, Words

SHADOW_BLOCKS: Final = 4_096
SEEN_MAX: Final = 1_024  # blocks of one request that a shadow may see
EVICT_SHARE: Final = 64  # one part in so many of a shadow goes at once


class Shadow:
    """A cache of `blocks` blocks without bytes.

    At the bound: the order of eviction says who goes; a request with more new blocks than there is
    room for keeps its first ones.
    """

    def __init__(self, maker: Maker, blocks: int) -> None:
        self._index = Index(blocks, seed=3)
        recency = np.full(blocks, NEVER, np.int64)
        self._order = maker(Ground(recency, blocks, self._index.names_of))
        self._evictable = np.ones(blocks, np.bool_)
        self._unused = np.arange(blocks, dtype=np.int32)[::-1].copy()
        self._unused_count = self._blocks = blocks
        self._stamp = 0
        self.hits = 0.0

    def use(self, space: SpaceId, words: Words, *, is_ask: bool) -> None:
        """A request asks for blocks (counted), or saves them; afterwards they are in."""
        entries = self._index.find(space, words)
        found = entries[entries >= 0]
        if is_ask:
            self.hits += len(found) if len(found) == len(entries) else int(entries.argmin())
        self._order.used(found)
        absent = words[entries < 0]
        if len(absent) > self._unused_count:
            self._make_room(len(absent), found)
        absent = absent[: self._unused_count]
        self._unused_count -= len(absent)
        new = self._unused[self._unused_count : self._unused_count + len(absent)].copy()
        self._index.insert(space, absent, new)
        entries[np.flatnonzero(entries < 0)[: len(new)]] = new
        self._stamp += 1
        self._order.touch(entries[entries >= 0], self._stamp)

    def _make_room(self, count: int, kin: Entries) -> None:
        """As the cache does: a request's own blocks do not go for it."""
        missing = count - self._unused_count
        self._evictable[kin] = False
        gone = self._order.victims(max(missing, self._blocks // EVICT_SHARE), self._evictable)
        self._evictable[kin] = True
        self._order.unpark(kin)
        self._index.remove(gone)
        self._unused[self._unused_count : self._unused_count + len(gone)] = gone
        self._unused_count += len(gone)


class Shadows:
    """One shadow for each order of eviction, all of one sample of the blocks.

    At the bound: a shadow has at most `shadow_blocks` blocks; a larger pool is sampled at the rate
    at which it fits. Of one request a shadow sees at most `SEEN_MAX` blocks: when there are more,
    the shadows start again with a lower rate. Blocks of other sizes count as the first one.

    Cost: some 200 bytes a shadow block and order; 30 µs a sampled request and order.
    """

    def __init__(
        self, makers: Mapping[str, Maker], pool_bytes: int, *, shadow_blocks: int = SHADOW_BLOCKS
    ) -> None:
        self._makers = makers
        self._pool_bytes = pool_bytes
        self._shadow_blocks = shadow_blocks
        self._threshold = 0
        self._shadows: dict[str, Shadow] = {}
        self._asked = 0.0

    @property
    def rate(self) -> float:
        """The share of blocks that the shadows see; 0 before the first request."""
        return self._threshold / RATE_ONE

    def use(self, space: SpaceId, words: Words, block_bytes: int, *, is_ask: bool) -> None:
        """A request asks for these blocks, from its first on, or saves them."""
        if not self._shadows:
            self._begin(block_bytes, self._shadow_blocks)
        levels = levels_of(space, words)
        seen = words[levels < self._threshold]
        if len(seen) > SEEN_MAX:
            blocks = self._blocks_of(block_bytes)
            self._begin(block_bytes, int(blocks * self.rate * SEEN_MAX / len(seen)) // 2)
            seen = words[levels < self._threshold]
        if len(seen) == 0:
            return
        if is_ask:
            self._asked += len(seen)
        for shadow in self._shadows.values():
            shadow.use(space, seen, is_ask=is_ask)

    def _blocks_of(self, block_bytes: int) -> int:
        return max(1, self._pool_bytes // block_bytes)

    def _begin(self, block_bytes: int, blocks_max: int) -> None:
        """Start again with empty shadows of at most so many blocks."""
        blocks = self._blocks_of(block_bytes)
        size = max(1, min(blocks, blocks_max))
        self._threshold = RATE_ONE * size // blocks
        self._asked = 0.0
        self._shadows = {name: Shadow(maker, size) for name, maker in self._makers.items()}

    def halve(self) -> None:
        """Let all counts so far weigh half."""
        self._asked *= 0.5
        for shadow in self._shadows.values():
            shadow.hits *= 0.5

    def hit_rates(self) -> dict[str, float]:
        """What each order would have given; empty before the first request."""
        if self._asked == 0:
            return {}
        return {name: shadow.hits / self._asked for name, shadow in self._shadows.items()}
