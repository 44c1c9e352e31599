"""What an RDMA fetch reads: its pieces in chains, and the queue pairs that read them.

Decided here: which chain goes to which NIC, and that none is handed out once the time is over. This
file does not know how queue pairs come to be, or what an error means for a rail.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.rails import Reach
from trikv.core.stripes import Pieces
from trikv.tiers.nics import ANY_NODE
from trikv.tiers.pairs import QueuePair


@dataclass(slots=True, eq=False)
class Lane:
    """One queue pair that is joined to the owner's."""

    seat: int
    path: int
    node: int
    pair: QueuePair
    keys_here: list[int]
    keys_there: tuple[int, ...]
    reach: Reach
    is_busy: bool = False

    async def ended(self) -> list[tuple[int, int]]:
        """What has ended, at least one: (number, status)."""
        pair = self.pair
        while True:
            if found := pair.poll():
                return found
            pair.arm()
            if found := pair.poll():  # what ended before it was armed tells nobody
                return found
            await trio.lowlevel.wait_readable(pair.fd)
            pair.drain()


@dataclass(slots=True, eq=False)
class Job:
    """Pieces of one fetch, handed out in chains.

    Attributes:
        nodes: of each region here.
        arrived: bool[pieces].
        left: chains that wait.
        unfenced: bool[pieces], of queue pairs that could not be destroyed.
    """

    pieces: Pieces
    reach: Reach
    deadline_s: float
    there: list[int]
    here: list[int]
    sizes: list[int]
    regions_there: list[int]
    regions_here: list[int]
    nodes: tuple[int, ...]
    arrived: NDArray[np.bool_] = field(init=False)
    unfenced: NDArray[np.bool_] = field(init=False)
    left: int = 0
    _chains: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrived = np.zeros(len(self.pieces), np.bool_)
        self.unfenced = np.zeros(len(self.pieces), np.bool_)

    def take(self, node: int) -> tuple[int, int] | None:
        """The next chain to post, of memory near a NIC at `node` if there is any.

        None once the time is over, even if nobody had a turn since.
        """
        if not self.left or trio.current_time() >= self.deadline_s:
            return None
        chains = self._chains.get(node) or self._chains.get(ANY_NODE)
        if not chains:
            chains = next(one for one in self._chains.values() if one)
        self.left -= 1
        return chains.popleft()

    def give_back(self, first: int, last: int) -> None:
        """A chain that is to be read, for the first time or again."""
        node = self.nodes[self.regions_here[first]]
        self._chains.setdefault(node, deque()).append((first, last))
        self.left += 1

    def is_near(self, node: int) -> bool:
        """Whether a NIC at `node` is near memory that is still to be filled."""
        return node == ANY_NODE or bool(self._chains.get(node) or self._chains.get(ANY_NODE))

    def post(self, lane: Lane, first: int, last: int) -> None:
        """Start a chain: from here on its pages here are the NIC's."""
        part = slice(first, last)
        keys_there, keys_here = lane.keys_there, lane.keys_here
        reads = (
            self.there[part],
            [keys_there[number] for number in self.regions_there[part]],
            self.here[part],
            self.sizes[part],
            [keys_here[number] for number in self.regions_here[part]],
        )
        lane.pair.post(first, reads)
