"""The owner's side of loans, with what takes time: sums, fences, and data streams.

Decided here: that disks are read before a loan is made, and in which order a loan ends. Released:
nothing is sent for its token any more, then its pins end. Expired, or its peer lost: streams are
cut and queue pairs destroyed, then its pins end. This file does not know capnp, or which blocks are
lent or read.
"""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.address import Address
from trikv.core import sums
from trikv.core.errors import ForbiddenError, OverloadedError
from trikv.core.grants import Fence
from trikv.core.lending import Lending, Loan
from trikv.core.lifting import Lift
from trikv.core.words import GrantId, PeerId, Words
from trikv.tiers.pairs import NicError
from trikv.tiers.rails import Rails
from trikv.tiers.rdmaowner import RdmaOwner
from trikv.tiers.tcp import Memory
from trikv.tiers.tcpowner import TcpOwner

log = structlog.get_logger()

SWEEP_S: Final = 0.1
AGAIN_S: Final = 1.0
"""After which a NIC that did not destroy a queue pair is asked again."""
SEND_THREADS: Final = 32
SUM_THREADS: Final = 2
PEERS_MAX: Final = 1_024
NAMES_MAX: Final = 4_096
"""Of addresses that are counted by themselves."""


class Reader(Protocol):
    """What reads from disks for loans; see `trikv.nursery.lifting.Lifter`."""

    async def lift(self, peer: PeerId, origin: bytes, words: Words, ttl_s: float) -> Lift | None:
        """Have disks read what a peer asks for."""

    def lent(self, lift: Lift, loan: Loan) -> None:
        """A loan was made with it."""

    def end(self, lift: Lift) -> None:
        """Its loan is over, or was not made."""


@dataclass(slots=True, eq=False)
class _Lent:
    loan: Loan
    token: bytes
    sums: NDArray[np.uint64]
    lift: Lift | None = None  # what was read for it from disks
    summed: trio.Event | None = None  # set once they are made


@dataclass(slots=True)
class Guest:
    """One peer that may borrow."""

    address: str


@dataclass(slots=True)
class PeerCounters:
    """Who was turned away at the door for peers."""

    connection_refused_total: int = 0
    error_total: int = 0
    proof_refused_total: int = 0


class Owner:
    """All loans of one daemon.

    At the bound: with `PEERS_MAX` peers a further one is refused. Sums of lent blocks are made by
    `SUM_THREADS` threads; a release waits for its own.

    Attributes:
        data_port: where bytes are sent from, once it runs.
        guests: who is connected.
        lent_bytes: by address, since the start; of those beyond `NAMES_MAX` together.
        lifter: reads from disks for loans; None: only what is in the pool is lent.
    """

    def __init__(self, lending: Lending, pool: Memory, now_s: Callable[[], float]) -> None:
        self.lending = lending
        self.data_port = 0
        self.rail_count = 0
        self.guests: dict[PeerId, Guest] = {}
        self.lent_bytes: dict[str, int] = {}
        self.counters = PeerCounters()
        self.lifter: Reader | None = None
        self._pool = pool
        self._now_s = now_s
        self._tcp = TcpOwner(pool, limiter=trio.CapacityLimiter(SEND_THREADS))
        self._rdma: RdmaOwner | None = None
        self._summing = trio.CapacityLimiter(SUM_THREADS)
        self._lent: dict[GrantId, _Lent] = {}
        self._lost: deque[PeerId] = deque()
        self._numbers = itertools.count(1)
        self._nursery: trio.Nursery | None = None

    # -- by the door, at once

    def enter(self, address: str) -> PeerId:
        """A peer has proven itself.

        Raises:
            OverloadedError: there are too many.
        """
        if len(self.guests) >= PEERS_MAX:
            raise OverloadedError(f"{PEERS_MAX} peers are connected")
        peer = PeerId(next(self._numbers))
        self.guests[peer] = Guest(address)
        return peer

    def leave(self, peer: PeerId) -> None:
        """Its connection is gone: all it holds is over, within `SWEEP_S` and the fence."""
        if self.guests.pop(peer, None) is not None:
            self._lost.append(peer)

    def connect(self, peer: PeerId, offer: bytes) -> bytes:
        """Join a peer's queue pairs.

        Raises:
            ValueError, NicError, OverloadedError, ForbiddenError: refused.
        """
        if self._rdma is None or peer not in self.guests:
            raise ForbiddenError("this node lends over TCP only")
        return self._rdma.connect(peer, offer)

    def grants_of(self, address: str) -> int:
        """How many grants the peers at an address hold."""
        peers = (peer for peer, guest in self.guests.items() if guest.address == address)
        return sum(self.lending.grants.held(peer) for peer in peers)

    # -- loans

    async def lend(
        self, peer: PeerId, origin: bytes, words: Words, *, ttl_s: float, wants_sums: bool
    ) -> tuple[Loan, bytes, float] | None:
        """Lend what is here, once disks have brought up what they can in time.

        Returns:
            The loan, its token and its seconds; None when nothing is here.

        Cancellation: while disks are read; then nothing is lent.
        """
        self._check_guest(peer)
        lift = None
        if self.lifter is not None:
            lift = await self.lifter.lift(peer, origin, words, ttl_s)
        lent = None
        try:
            nursery = self._check_guest(peer)  # it may have left meanwhile
            now_s = self._now_s()
            loan = self.lending.lend(peer, origin, words, ttl_s=ttl_s, now_s=now_s)
            if loan is None:
                return None
            token = self._tcp.lend(loan.runs)
            lent = _Lent(loan, token, np.zeros(len(loan.positions), np.uint64), lift)
            self._lent[loan.grant.id] = lent
        finally:
            if lent is None:
                self._end_lift(lift)
        if lift is not None and self.lifter is not None:
            self.lifter.lent(lift, loan)
        if wants_sums:
            self._begin_sums(lent, nursery)
        self._note(self.guests[peer].address, int(loan.runs[:, 1].sum()))
        return loan, token, loan.grant.deadline_s - now_s

    def _check_guest(self, peer: PeerId) -> trio.Nursery:
        if peer not in self.guests or self._nursery is None:
            raise ForbiddenError("this connection is over")
        return self._nursery

    def _end_lift(self, lift: Lift | None) -> None:
        if lift is not None and self.lifter is not None:
            self.lifter.end(lift)

    async def release(
        self, peer: PeerId, grant_id: GrantId, *, wants_sums: bool
    ) -> tuple[bool, NDArray[np.uint64]]:
        """A peer reads no more: was its grant valid, and what are the sums of its blocks?

        Cancellation: while sums are made; then the grant lives until its time or its peer is over.
        """
        lent = self._lent.get(grant_id)
        is_its_own = lent is not None and lent.loan.grant.peer == peer
        if lent is not None and is_its_own and wants_sums and self._nursery is not None:
            # Of pages that are pinned: when they are not any more, the release is not valid.
            await self._begin_sums(lent, self._nursery).wait()
        was_valid, grant = self.lending.release(peer, grant_id)
        if grant is None or lent is None:
            return False, np.empty(0, np.uint64)
        self._lent.pop(grant_id, None)
        try:
            with trio.CancelScope(shield=True):
                await self._tcp.withdraw(lent.token)
        finally:
            self.lending.unpin(grant)
            self._end_lift(lent.lift)
        return was_valid, lent.sums if was_valid and wants_sums else np.empty(0, np.uint64)

    async def run(
        self,
        address: Address,
        rails: Rails | None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve data and end what is over, until cancelled.

        Args:
            address: of the data port.
            rails: open NICs; closed by the caller when this has returned.
            task_status: told when loans can be made.

        Raises:
            OSError: the data port cannot be had.
        """
        if rails is not None and rails.rails:
            self._rdma, self.rail_count = RdmaOwner(rails), len(rails.rails)
        try:
            async with trio.open_nursery() as nursery:
                self.data_port = await nursery.start(self._tcp.run, address)
                self._nursery = nursery
                task_status.started()
                while True:
                    await trio.sleep(SWEEP_S)
                    self._sweep(nursery)
        finally:
            self._nursery = None
            if self._rdma is not None:
                self._rdma.close()

    # -- inside

    def _sweep(self, nursery: trio.Nursery) -> None:
        for fence in self.lending.expire(now_s=self._now_s()):
            for grant in fence.grants:
                log.info("grant.expired", peer=self._name(fence.peer), blocks=len(grant.entries))
            nursery.start_soon(self._fence, fence.peer, fence)
        while self._lost:
            peer = self._lost.popleft()
            nursery.start_soon(self._fence, peer, self.lending.lose(peer))

    async def _fence(self, peer: PeerId, fence: Fence | None) -> None:
        """End every way by which a peer reads, and only then let go of what it had."""
        grants = fence.grants if fence is not None else ()
        lent = [self._lent.pop(grant.id) for grant in grants]
        async with trio.open_nursery() as nursery:
            for one in lent:
                nursery.start_soon(self._tcp.withdraw, one.token)
        while not self._cut(peer):  # noqa: ASYNC110  # a NIC tells nobody
            await trio.sleep(AGAIN_S)
        if fence is not None:
            self.lending.fenced(fence)
        for one in lent:
            self._end_lift(one.lift)

    def _cut(self, peer: PeerId) -> bool:
        """Destroy a peer's queue pairs; False: the NIC has not, so nothing may be let go of."""
        try:
            if self._rdma is not None:
                self._rdma.fence(peer)
        except NicError as error:
            log.error("fence.failed", peer=self._name(peer), reason=str(error))  # noqa: TRY400  # no bug of ours
            return False
        return True

    def _begin_sums(self, lent: _Lent, nursery: trio.Nursery) -> trio.Event:
        if lent.summed is None:
            lent.summed = trio.Event()
            nursery.start_soon(self._sum, lent, lent.summed)
        return lent.summed

    async def _sum(self, lent: _Lent, summed: trio.Event) -> None:
        lent.sums = await trio.to_thread.run_sync(
            sums_of, self._pool, lent.loan.offsets, lent.loan.page_bytes, limiter=self._summing
        )
        summed.set()

    def _note(self, address: str, size: int) -> None:
        if len(self.lent_bytes) >= NAMES_MAX and address not in self.lent_bytes:
            address = "others"
        self.lent_bytes[address] = self.lent_bytes.get(address, 0) + size

    def _name(self, peer: PeerId) -> str:
        guest = self.guests.get(peer)
        return guest.address if guest is not None else str(peer)


def sums_of(
    pool: Memory, offsets: NDArray[np.int64], page_bytes: tuple[int, ...]
) -> NDArray[np.uint64]:
    """The XXH3-64 sum of each block's pages, rank by rank; in a thread.

    Args:
        pool: where they are.
        offsets: int64[ranks, n].
        page_bytes: of each rank.
    """
    memory = pool.memory.data
    found = np.zeros(offsets.shape[1], np.uint64)
    for at, places in enumerate(offsets.T.tolist()):
        parts = (memory[a : a + n] for a, n in zip(places, page_bytes, strict=True))
        found[at] = sums.of_parts(parts)
    return found
