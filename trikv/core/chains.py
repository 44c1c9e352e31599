"""What each running request consists of: its blocks from the first on.

Decided here: how long a request's chain is remembered, so that a save deep inside a request can
touch all ancestors of what it saves. A chain is a hint about recency: forgetting one costs no
correctness.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Entries, InstanceName, RequestId, SpaceId

UNKNOWN = -1
HOLE_MAX = 65_536


@dataclass(slots=True)
class Chain:
    """Entry numbers of a request's blocks by position, each valid while its generation holds.

    Attributes:
        asked_blocks: how many blocks, from the first on, queries of the request have asked for.
        kin: a disk: rows of those of its blocks that were last seen there, and their generations.
    """

    space: SpaceId
    entries: Entries = field(default_factory=lambda: np.empty(0, np.int32))
    generations: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    length: int = 0
    asked_blocks: int = 0
    kin: dict[int, tuple[Entries, NDArray[np.uint32]]] = field(default_factory=dict)

    def put(self, first: int, entries: Entries, generations: NDArray[np.uint32]) -> None:
        """Remember which entries stand at `first` and after; -1 where none does.

        At the bound: what stands more than `HOLE_MAX` positions beyond all that is known is not
        remembered, so that memory grows with what was sent only.
        """
        if first > self.length + HOLE_MAX:
            return
        end = first + len(entries)
        if self.length == 0 and first == 0:
            self.entries, self.generations = entries.copy(), generations.copy()
            self.length = end
            return
        if end > len(self.entries):
            room = max(end, 2 * len(self.entries), 64)
            self.entries = _grown(self.entries, room, UNKNOWN)
            self.generations = _grown(self.generations, room, 0)
        self.entries[self.length : first] = UNKNOWN  # a hole the request never told us about
        self.entries[first:end] = entries
        self.generations[first:end] = generations
        self.length = max(self.length, end)


def _grown(column: NDArray[Any], size: int, fill: int) -> NDArray[Any]:
    grown = np.full(size, fill, dtype=column.dtype)
    grown[: len(column)] = column
    return grown


@dataclass(slots=True)
class Chains:
    """The chains of all running requests, one a space, least recently used first.

    At the bound: the least recently used chain is forgotten.
    """

    chains_max: int
    _by_request: OrderedDict[tuple[InstanceName, RequestId], dict[SpaceId, Chain]] = field(
        default_factory=OrderedDict
    )

    def __len__(self) -> int:
        return len(self._by_request)

    def of(self, instance: InstanceName, request: RequestId, space: SpaceId) -> Chain:
        """The chain of a request in a space, a new one if there is none."""
        key = (instance, request)
        chains = self._by_request.setdefault(key, {})
        self._by_request.move_to_end(key)
        while len(self._by_request) > self.chains_max:
            self._by_request.popitem(last=False)
        chain = chains.get(space)
        if chain is None:
            chain = chains[space] = Chain(space)
        return chain

    def forget(self, instance: InstanceName, request: RequestId) -> None:
        """The request has ended; unknown requests are fine."""
        self._by_request.pop((instance, request), None)

    def forget_instance(self, instance: InstanceName) -> None:
        """All requests of an engine have ended."""
        for key in [key for key in self._by_request if key[0] == instance]:
            del self._by_request[key]
