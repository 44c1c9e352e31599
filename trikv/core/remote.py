"""The reader's side: which blocks of a request are looked for at other nodes, and fetched.

Decided here: when a request's blocks are looked for, what of the answer is fetched from whom, and
that a block which has come is a copy: it goes before blocks that nobody else has. This file does
not know metaservers, connections or clocks.

| a query's blocks behind those in the pool and on disks | then |
| --- | --- |
| nobody was asked yet | they are looked for, and count as coming until the answer |
| others have some | pages are claimed for these; they are coming until each has landed or failed |
| nobody has them, or the fetch failed | misses; the same request asks nobody again for a while |
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.ceiling import TIERS
from trikv.core.landing import Landing
from trikv.core.plans import Key
from trikv.core.shared import Shared
from trikv.core.words import InstanceName, RequestId, SpaceId, Words

PEER: Final = TIERS.index("peer")
SEARCHES_MAX: Final = 4_096
WAITING_MAX: Final = 256
"""Searches that wait to be carried out; a further request's blocks are misses."""
AGAIN_S: Final = 5.0
PART_BYTES_MAX: Final = 32 << 20
PART_BLOCKS_MAX: Final = 2_048
"""Of one loan: who waits is told when it has come."""
PART_PAGES_MAX: Final = 1 << 16
"""Likewise: places of pages are 8 bytes each, and a message has 1 MiB."""

Bools = NDArray[np.bool_]
_Request = tuple[InstanceName, RequestId]


@dataclass(slots=True, eq=False)
class Search:
    """Blocks of a request that are looked for.

    Attributes:
        words: of the request, from its first block on.
        first: those before are here, or come from a disk.
        end: what is known to be had, from `first` on; `first` while nothing is.
        is_open: nobody has answered yet.
    """

    key: Key
    origin: bytes
    words: Words
    first: int
    end: int
    asked_s: float
    is_open: bool = True
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class Source:
    """Consecutive blocks of a search that one node has: it, the first one, and how many."""

    address: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class FetchPart:
    """Blocks of one landing that one node is asked for at once.

    Attributes:
        rows: indices into the landing's columns.
        origin: what the node calls their space.
    """

    address: str
    origin: bytes
    landing: Landing
    rows: NDArray[np.int64]

    @property
    def words(self) -> Words:
        """Their hashes."""
        return self.landing.words[self.rows]

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        return len(self.rows) * sum(self.landing.lengths)


class Remote:
    """What one cache fetches from other nodes.

    Attributes:
        has_others: whether somebody can be asked, and there is anybody to have blocks.
        begun: searches that nobody has begun; whoever searches takes them.
        unfenced_bytes: of the pool, that a NIC may write at any time: never used again.

    At the bound: `WAITING_MAX` searches wait; the oldest of `SEARCHES_MAX` requests is forgotten,
    and may search again.
    """

    def __init__(self, cache: Cache, below: Below, shared: Shared) -> None:
        self.has_others: Callable[[], bool] = lambda: False
        self.begun: deque[Search] = deque()
        self.unfenced_bytes = 0
        self.searched_total = 0
        self.found_blocks_total = 0
        self._cache = cache
        self._below = below
        self._shared = shared
        self._searches: OrderedDict[_Request, dict[SpaceId, Search]] = OrderedDict()
        cache.room.prefers_copied = True

    def seek(self, key: Key, words: Words, first: int, *, now_s: float) -> int:
        """Have the blocks from `first` on looked for, if they were not yet.

        Returns:
            How many of them may be coming: all, while nobody has answered.
        """
        origin = self._shared.origin_of(key.space)
        if origin is None or not self.has_others() or first >= len(words):
            return 0
        before = self._search(key)
        if before is not None and (
            before.is_open or (first <= before.end and now_s < before.asked_s + AGAIN_S)
        ):
            return self.pending(key, words, first)
        if len(self.begun) >= WAITING_MAX:
            return 0
        search = Search(key, origin, words, first, first, now_s)
        mine = self._searches.setdefault((key.instance, key.request), {})
        mine[key.space] = search
        self._searches.move_to_end((key.instance, key.request))
        self.begun.append(search)
        self.searched_total += 1
        while len(self._searches) > SEARCHES_MAX:
            self._searches.popitem(last=False)
        return len(words) - first

    def pending(self, key: Key, words: Words, first: int) -> int:
        """How many blocks from `first` on are being looked for."""
        search = self._search(key)
        return max(0, len(words) - first) if search is not None and search.is_open else 0

    def ended(self, instance: InstanceName | None, requests: Iterable[RequestId]) -> None:
        """Requests have ended: what was not yet claimed for them is not fetched."""
        if instance is None:
            return
        for request in requests:
            for search in self._searches.pop((instance, request), {}).values():
                search.is_wanted = False

    def found(self, search: Search, sources: Sequence[Source]) -> list[FetchPart]:
        """A search was answered: claim pages for what is missing and can be had.

        Args:
            search: open so far.
            sources: in order and without a gap, the first one at the search's first block.

        Returns:
            Each row to be ended once, by `end` or in part by `quarantine`.
        """
        search.is_open = False
        space = search.key.space
        if (
            not search.is_wanted
            or not sources
            or self._shared.origin_of(space) is None
            or space not in self._cache.spaces
        ):
            return []
        search.end = search.first + sum(one.count for one in sources)
        words = search.words[: search.end]
        owner = np.full(len(words), -1, np.int64)
        for number, one in enumerate(sources):
            owner[search.first + one.first :][: one.count] = number
        wanted = (owner >= 0) & ~self._below.has(space, words)
        landing = self._cache.prepare_fetch(space, words, wanted, source=PEER)
        self.found_blocks_total += len(landing.positions)
        blocks_max = min(PART_BLOCKS_MAX, PART_PAGES_MAX // len(landing.lengths))
        step = min(blocks_max, max(1, PART_BYTES_MAX // sum(landing.lengths)))
        of = owner[landing.positions]
        parts = []
        for number, one in enumerate(sources):
            mine = np.flatnonzero(of == number)
            parts += [
                FetchPart(one.address, search.origin, landing, mine[at : at + step])
                for at in range(0, len(mine), step)
            ]
        return parts

    def end(self, part: FetchPart, arrived: Bools, unfenced: Bools) -> None:
        """A part is over.

        Args:
            part: from `found`.
            arrived: bool[len(part.rows)], whose bytes are right on all ranks.
            unfenced: likewise, whose pages may be written at any time; none of these has arrived.
        """
        cache, landing = self._cache, part.landing
        held = part.rows[unfenced]
        if len(held):
            cache.abandon_fetch(landing, held)
            self.unfenced_bytes += len(held) * sum(landing.lengths)
        entries = landing.entries[part.rows[arrived]]
        cache.blocks.replica[entries] = True  # before they are first touched
        cache.complete_fetch(landing, part.rows[~unfenced], arrived[~unfenced])

    def _search(self, key: Key) -> Search | None:
        return self._searches.get((key.instance, key.request), {}).get(key.space)
