"""Fetching from one peer's pool, whichever way the bytes come.

Decided here: what a transport promises, and that a run which one transport could not bring is asked
of the next. This file does not know NICs, sockets or blocks.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.chunks import Runs


class PeerLostError(Exception):
    """The peer cannot be asked now: what was wanted of it is a miss."""


class Outcome(enum.IntEnum):
    """What became of a run."""

    FAILED = 0  # nothing is written there any more; the bytes there are nobody's
    ARRIVED = 1
    UNFENCED = 2  # a NIC may write there at any time: the pages are never reused


@dataclass(slots=True, eq=False)
class Fetch:
    """Runs of a peer's pool that shall come to addresses of this process.

    Ownership: the target bytes belong to the transports from the first call until `fetch` returns
    or raises; then `outcome` says whose they are, after a cancellation too.

    Attributes:
        runs: (offset in the peer's pool, address here, bytes), targets distinct.
        deadline_s: on Trio's clock; what has not come by then has failed. Earlier than the end of
            the peer's grant, so that it is over here first.
        token: by which the peer knows the grant where bytes come over TCP.
        outcome: int8[runs], an `Outcome` each.
    """

    runs: Runs
    deadline_s: float
    token: bytes = b""
    outcome: NDArray[np.int8] = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = np.full(len(self.runs), Outcome.FAILED, np.int8)


class Transport(Protocol):
    """One way to one peer."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    async def fetch(self, fetch: Fetch) -> None:
        """Bring runs until all have come or failed, at the latest at the deadline.

        A peer that cannot be reached, answers wrongly or is slow makes runs fail, and never raises.
        Cancellation: acts within milliseconds, and returns when nothing is written any more.
        """
        ...

    async def aclose(self) -> None:
        """Give connections back; no fetch is under way."""
        ...


class Ways:
    """Several transports to one peer, best first; a `Transport` itself."""

    name = "ways"

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.transports = tuple(transports)

    async def fetch(self, fetch: Fetch) -> None:
        """See `Transport`; what a way could not bring is asked of the next while there is time."""
        for transport in self.transports:
            left = np.flatnonzero(fetch.outcome == Outcome.FAILED)
            if len(left) == 0 or trio.current_time() >= fetch.deadline_s:
                return
            part = Fetch(fetch.runs[left], fetch.deadline_s, fetch.token)
            try:
                await transport.fetch(part)
            finally:
                fetch.outcome[left] = part.outcome

    async def aclose(self) -> None:
        """See `Transport`."""
        for transport in self.transports:
            await transport.aclose()
