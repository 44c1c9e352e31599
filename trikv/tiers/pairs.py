"""What the rest knows of RDMA: a NIC, its regions of memory, its queue pairs.

Decided here: what a binding must do, and with which values two ends are joined. No binding is
imported here.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from trikv.core.rails import NUMBER_24_MAX, PairFacts
from trikv.tiers.nics import NicFacts

SUCCESS: Final = 0
POLL_MAX: Final = 64
HOPS: Final = 64  # the wheel's own default of 1 crosses no router
TIMEOUT: Final = 14  # 67 ms, a code of the standard
RETRIES: Final = 6  # 7 is for ever to Soft-RoCE
RNR_RETRIES: Final = 7
RNR_TIMER: Final = 12
RD_ATOMIC_MAX: Final = 16  # reads of a pair under way at once; one would cost 90 % of the speed


class NicError(Exception):
    """A NIC, its driver or its library refused something; what it was used for is given up."""


Reads = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Columns of a chain: addresses there, keys there, addresses here, bytes, keys here."""


class Region(Protocol):
    """Memory that a NIC may use."""

    lkey: int
    rkey: int

    def close(self) -> None:
        """The NIC forgets it."""
        ...


class QueuePair(Protocol):
    """One end of a connection; it reads when asked, and lets the other end read.

    Attributes:
        fd: readable once something has ended after `arm`.
        facts: for the other end.
    """

    fd: int
    facts: PairFacts

    def connect(self, far: PairFacts) -> None:
        """Join it to the other end; once."""
        ...

    def post(self, first: int, reads: Reads) -> None:
        """Start a chain of reads numbered from `first`; the last one's end is told, and any error.

        The memory here is the NIC's until that end was polled or `destroy` has returned.
        """
        ...

    def poll(self) -> list[tuple[int, int]]:
        """What has ended: (number, status)."""
        ...

    def arm(self) -> None:
        """Make `fd` readable at the next end."""
        ...

    def drain(self) -> None:
        """Make `fd` not readable."""
        ...

    def destroy(self) -> None:
        """Afterwards nothing is written here or read there by it; once.

        Raises:
            NicError: it may still move bytes.
        """
        ...


class Nic(Protocol):
    """An open NIC."""

    facts: NicFacts

    def register(self, address: int, size: int) -> Region:
        """Let the NIC write here, and other hosts read, memory that stays mapped."""
        ...

    def new_pair(self, depth: int) -> QueuePair:
        """A queue pair for up to `depth` reads at once."""
        ...

    def close(self) -> None:
        """Give the NIC back, after its regions and pairs."""
        ...


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Errors of the bindings become ours: the wheel's are OSErrors, the other's their own."""
    try:
        yield
    except Exception as error:
        raise NicError(f"{what}: {error}") from error


def new_facts(qpn: int, nic: NicFacts, lid: int, mtu: int, rd_atomic: int) -> PairFacts:
    """What the other end needs; packets are numbered from anywhere."""
    psn = int.from_bytes(os.urandom(3), "little") & NUMBER_24_MAX
    return PairFacts(qpn, psn, lid, nic.gid.gid, mtu, rd_atomic)
