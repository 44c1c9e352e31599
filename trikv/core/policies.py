"""Orders of eviction: what the cache asks of one, and the names under which they can be chosen.

Decided here: the interface, and which classes stand behind which name. This file does not know how
an order comes about.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from trikv.core.eviction import LeafFirstLru
from trikv.core.frequency import WindowTinyLfu
from trikv.core.queues import S3Fifo
from trikv.core.words import Entries, Names, Stamp

Bools = NDArray[np.bool_]


class Policy(Protocol):
    """An order of eviction of the blocks of one shape. Never asked while there is room."""

    def __len__(self) -> int:
        """Entries that are known."""

    def used(self, entries: Entries) -> None:
        """A request that has not been counted yet found these entries; `touch` follows.

        Orders by frequency count it; an engine that asks again, or saves step by step, is one use.
        """

    def touch(self, entries: Entries, stamp: int) -> None:
        """Entries, root first, are wanted now or are new; `stamp` grows with each call."""

    def victims(self, count: int, evictable: Bools) -> Entries:
        """Take out up to `count` entries that are `evictable`, those to evict first in front."""

    def unpark(self, entries: Entries) -> None:
        """Entries that may have been passed over have become evictable."""

    def forget(self, entries: Entries) -> None:
        """Entries are gone; unknown ones are fine."""

    def coldest(self) -> Stamp | None:
        """A stamp not newer than the next victim's; None when there is none."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What an order stands on.

    Attributes:
        recency: the last touch's stamp of each entry; written by the order.
        blocks: how many blocks of the shape the pool can hold: sizes of sketches and ghosts.
        names: names of entries that are in the index, the same when a block comes back.
    """

    recency: NDArray[np.int64]
    blocks: int
    names: Callable[[Entries], Names]


Maker = Callable[[Ground], Policy]


class RootFirstLru(LeafFirstLru):
    """LRU that touches a prefix from its root, as other caches do: here for comparison."""

    def touch(self, entries: Entries, stamp: int) -> None:
        """As in LeafFirstLru, but of one touch the root goes first."""
        super().touch(entries[::-1], stamp)


def leaf_first_lru(ground: Ground) -> Policy:
    """The default."""
    return LeafFirstLru(ground.recency)


def root_first_lru(ground: Ground) -> Policy:
    """What others do."""
    return RootFirstLru(ground.recency)


def s3_fifo(ground: Ground) -> Policy:
    """Three queues."""
    return S3Fifo(ground.recency, ground.names, ghosts=ground.blocks)


def w_tiny_lfu(ground: Ground) -> Policy:
    """The default behind a window and a frequency filter."""
    return WindowTinyLfu(ground.recency, ground.names, blocks=ground.blocks)


DEFAULT: Final = "leaf-first-lru"
ADMISSION: Final = "w-tinylfu"
MAKERS: Final[Mapping[str, Maker]] = {
    DEFAULT: leaf_first_lru,
    "s3-fifo": s3_fifo,
    ADMISSION: w_tiny_lfu,
    "root-first-lru": root_first_lru,
}
