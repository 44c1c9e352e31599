"""Being read by RDMA: the owner's ends of queue pairs, by peer, and their end.

Decided here: how many queue pairs a peer may have, and that a fence destroys them all. The NIC
serves reads without us: a queue pair is the only thing by which a peer can be kept out.
"""

from typing import Final

from trikv.core.errors import OverloadedError
from trikv.core.rails import Answer, PairFacts, Seat, pack_answer, read_offer
from trikv.core.words import PeerId
from trikv.tiers.pairs import NicError, QueuePair
from trikv.tiers.rails import Rails

PEERS_MAX: Final = 256
DEPTH: Final = 1
"""Of the owner's ends: they post nothing."""


class RdmaOwner:
    """The owner's ends.

    Bounds: `peers_max` peers, each with the seats of one offer; a seat that is offered again takes
    the place of the one before.
    """

    def __init__(self, rails: Rails, *, peers_max: int = PEERS_MAX) -> None:
        self._rails = rails
        self._peers_max = peers_max
        self._pairs: dict[PeerId, dict[int, QueuePair]] = {}

    def connect(self, peer: PeerId, offer: bytes) -> bytes:
        """Join a peer's queue pairs; answers what it needs to read.

        A seat whose rail cannot be joined is answered so, and costs no other rail.

        Args:
            peer: who has proved that it knows the cluster's secret.
            offer: as it came.

        Raises:
            ValueError: the offer cannot be; one line.
            OverloadedError: too many peers read here.
            NicError: a NIC keeps what the peer had before.
        """
        seats = read_offer(offer, rails=len(self._rails.rails))
        if peer not in self._pairs and len(self._pairs) >= self._peers_max:
            raise OverloadedError("too many peers read this pool")
        mine = self._pairs.setdefault(peer, {})
        ends: list[PairFacts | None] = []
        dead: set[tuple[int, bytes]] = set()  # ways: the kernel looks a second for each
        for seat in seats:
            if (old := mine.get(seat.number)) is not None:
                old.destroy()
                del mine[seat.number]
            way = seat.rail, seat.pair.gid
            end = None if way in dead else self._join(mine, seat)
            if end is None:
                dead.add(way)
            ends.append(end)
        return pack_answer(Answer(self._rails.reach, tuple(ends)))

    def _join(self, mine: dict[int, QueuePair], seat: Seat) -> PairFacts | None:
        try:
            pair = self._rails.rails[seat.rail].nic.new_pair(DEPTH)
            mine[seat.number] = pair
            pair.connect(seat.pair)
        except NicError:
            return None
        return pair.facts

    def fence(self, peer: PeerId) -> None:
        """When this returns no read of that peer is served any more; it may connect again.

        Raises:
            NicError: some may be. Nothing may be unpinned; ask again later.
        """
        mine = self._pairs.get(peer, {})
        failed: NicError | None = None
        for number, pair in list(mine.items()):
            try:
                pair.destroy()
            except NicError as error:
                failed = error
            else:
                del mine[number]
        if failed is not None:
            raise failed
        self._pairs.pop(peer, None)

    def close(self) -> None:
        """Fence all peers.

        Raises:
            NicError: as `fence`.
        """
        for peer in list(self._pairs):
            self.fence(peer)
