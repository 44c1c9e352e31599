"""What all fetches of one node share, and what becomes of each.

Decided here: nothing; these are records, and one that counts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.proofs import Secret
from trikv.tiers.peer import Fetch, Outcome, Transport
from trikv.tiers.rails import Rails
from trikv.tiers.tcp import Memory


@dataclass(frozen=True, slots=True)
class Local:
    """What all neighbours of this node share.

    Attributes:
        verify_every: of so many loans over RDMA one has its sums compared; 0: none.
    """

    address: str
    secret: Secret | None
    pool: Memory
    receiving: trio.CapacityLimiter
    checking: trio.CapacityLimiter
    rails: Callable[[], Rails | None]
    verify_every: int = 0


@dataclass(slots=True, eq=False)
class Result:
    """What became of the blocks of one part.

    Attributes:
        arrived: bool[n], whose bytes are right.
        unfenced: bool[n], whose pages may still be written; for ever.
    """

    arrived: NDArray[np.bool_]
    unfenced: NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class Moved:
    """Bytes that came from one node by each way, believed or not, and the last of these ways."""

    by_way: dict[str, int] = field(default_factory=dict)
    last: str = ""

    def note(self, way: str, size: int) -> None:
        """So many more."""
        if size:
            self.by_way[way] = self.by_way.get(way, 0) + size
            self.last = way


@dataclass(slots=True, eq=False)
class Counted:
    """A transport that counts: `count` its fetches, `moved` what it brought."""

    inner: Transport
    moved: Moved
    count: int = 0

    @property
    def name(self) -> str:
        """See `Transport`."""
        return self.inner.name

    async def fetch(self, fetch: Fetch) -> None:
        """See `Transport`."""
        self.count += 1
        try:
            await self.inner.fetch(fetch)
        finally:
            came = fetch.outcome == Outcome.ARRIVED
            self.moved.note(self.name, int(fetch.runs[came, 2].sum()))

    async def aclose(self) -> None:
        """See `Transport`."""
        await self.inner.aclose()
