"""Cap'n Proto at a node's door for other nodes: what each call of a peer answers.

Decided here: every bound of a peer's messages, and that a peer is a node with an address. No capnp
object leaves this file. What a call does is in `owning.py`.
"""

import asyncio
import contextlib
import functools
import math
import socket
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from trikv import wire
from trikv.core.counters import CallCounts
from trikv.core.errors import BadRequestError, ForbiddenError, KvError, NotReadyError
from trikv.core.words import GrantId, PeerId, Words
from trikv.meta.gate import UNPROVEN_MAX, Gate, GatedConnection, GateServant
from trikv.meta.messages import MESSAGE_WORDS_MAX, NODE, read_origin
from trikv.nursery.owning import PEERS_MAX, Owner
from trikv.nursery.peerlink import HASHES_MAX
from trikv.nursery.tiers import Tiers
from trikv.process.accepting import Listener
from trikv.process.edges import read
from trikv.process.guards import at_once, fatal
from trikv.process.guest import Guest
from trikv.process.listening import bind_tcp
from trikv.tiers.pairs import NicError

log = structlog.get_logger()

PEER_CONNECTIONS: Final = 2_048
"""With other hosts, in either direction, beside those of engines: descriptors to provide for."""
OFFER_BYTES_MAX: Final = 1 << 16


class PeerConnection(GatedConnection):
    """What the servants of one connection share."""

    def __init__(
        self, owner: Owner, guest: Guest, gate: Gate, calls: CallCounts, epoch: int
    ) -> None:
        super().__init__(guest, calls, owner.counters, gate)
        self.owner = owner
        self.epoch = epoch
        self.peer: PeerId | None = None

    def make_bootstrap(self) -> Any:
        """The node's `Peer`."""
        return PeerServant(self)

    def close(self) -> None:
        """The connection is gone, and with it all that was lent over it."""
        super().close()
        peer, self.peer = self.peer, None
        if peer is not None:
            self.owner.leave(peer)


class PeerServant(GateServant, wire.SCHEMA.Peer.Server):
    """The bootstrap capability of one connection."""

    connection: PeerConnection

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection

    @at_once
    def prove_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            proof = read(lambda message: bytes(message.proof), context.params)
            answer = connection.check(proof)
            if connection.caller.role != NODE:
                raise ForbiddenError(f"a {connection.caller.role!r} is no node")
            connection.peer = connection.owner.enter(connection.caller.address)
        except KvError as error:
            return connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.proof = answer
        ok.epoch = connection.epoch
        ok.session = PeerSessionServant(connection)
        ok.dataPort = connection.owner.data_port
        ok.railCount = connection.owner.rail_count
        return None


class PeerSessionServant(wire.SCHEMA.PeerSession.Server):
    """A peer that has proven itself; its methods mirror the schema."""

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection

    @property
    def _peer(self) -> PeerId:
        if self.connection.peer is None:
            raise NotReadyError("the connection is over")
        return self.connection.peer

    @fatal
    async def lend_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            loan = context.params.loan
            words = read(_read_words, loan)
            origin = read(lambda message: read_origin(bytes(message.origin)), loan)
            seconds = read(_read_seconds, loan)
            wants_sums = bool(loan.wantsSums)
            lent = await connection.guest.run(
                _lend, connection.owner, self._peer, origin, words, seconds, wants_sums
            )
        except KvError as error:
            return connection.refuse(reply, error)
        ok = reply.init("ok")
        if lent is None:
            return None
        found, token, left_s = lent
        offsets = np.full((len(found.page_bytes), len(words)), -1, "<i8")
        offsets[:, found.positions] = found.offsets
        ok.grant, ok.seconds = found.grant.id, left_s
        ok.pageBytes = list(found.page_bytes)
        ok.offsets, ok.token = offsets.tobytes(), token
        return None

    @fatal
    async def release_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            grant = GrantId(int(context.params.grant))
            wants_sums = bool(context.params.wantsSums)
            was_valid, sums = await connection.guest.run(
                _release, connection.owner, self._peer, grant, wants_sums
            )
        except KvError as error:
            return connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.wasValid, ok.sums = was_valid, _blob(sums)
        return None

    @at_once
    def connect_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            offer = read(lambda message: bytes(message.offer), context.params)
            answer = self._connect(offer)
        except KvError as error:
            return connection.refuse(reply, error)
        reply.init("ok").answer = answer
        return None

    def _connect(self, offer: bytes) -> bytes:
        if len(offer) > OFFER_BYTES_MAX:
            raise BadRequestError(f"an offer has at most {OFFER_BYTES_MAX} bytes")
        try:
            return self.connection.owner.connect(self._peer, offer)
        except (ValueError, NicError) as error:
            raise BadRequestError(str(error)) from None


async def _lend(
    owner: Owner,
    peer: PeerId,
    origin: bytes,
    words: Words,
    ttl_s: float,
    wants_sums: bool,  # noqa: FBT001  # passed on by position
) -> Any:
    return await owner.lend(peer, origin, words, ttl_s=ttl_s, wants_sums=wants_sums)


async def _release(
    owner: Owner,
    peer: PeerId,
    grant: GrantId,
    wants_sums: bool,  # noqa: FBT001  # passed on by position
) -> tuple[bool, NDArray[np.uint64]]:
    return await owner.release(peer, grant, wants_sums=wants_sums)


def _read_words(message: Any) -> Words:
    words = wire.hashes_to_words(bytes(message.hashes), int(message.hashBytes))
    if not 0 < len(words) <= HASHES_MAX:
        raise BadRequestError(f"a loan is of 1 to {HASHES_MAX} hashes, not {len(words)}")
    return words


def _read_seconds(message: Any) -> float:
    seconds = float(message.seconds)
    if not math.isfinite(seconds) or seconds <= 0:
        raise BadRequestError("a loan is for more than 0 seconds")
    return seconds


def _blob(sums: NDArray[np.uint64]) -> bytes:
    return np.ascontiguousarray(sums, "<u8").tobytes()


class Door:
    """The listening socket for other nodes; without one it does nothing."""

    def __init__(self, tiers: Tiers | None, listening: socket.socket | None) -> None:
        self._peering = tiers.peering if tiers is not None else None
        self._listening = listening
        self._listener: Listener | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def open(self, guest: Guest) -> None:
        """Serve nodes, and dial them; capnp's loop runs."""
        peering = self._peering
        if peering is None or self._listening is None:
            return

        def open_connection(_sock: socket.socket) -> PeerConnection:
            return PeerConnection(peering.owner, guest, peering.gate, peering.calls, peering.epoch)

        self._listener = Listener(
            open_connection,
            guest,
            peering.owner.counters,
            connections_max=PEERS_MAX + UNPROVEN_MAX,
            message_words_max=MESSAGE_WORDS_MAX,
        )
        self._accepting = asyncio.create_task(self._listener.run(self._listening))
        self._accepting.add_done_callback(functools.partial(_check, guest))
        await guest.run(peering.open)
        log.info(
            "peers.ready",
            addr=str(peering.plan.address),
            data_port=peering.owner.data_port,
            rails=peering.owner.rail_count,
            secure=peering.plan.secret is not None,
        )

    async def close(self) -> None:
        """Serve nobody any more: what was lent is over, and is fenced while Trio ends."""
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await self._listener.close()


def _check(guest: Guest, task: asyncio.Task[None]) -> None:
    """Accepting ends by being cancelled; all else is a bug of ours."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, Exception):
        guest.fail(error)


@contextlib.contextmanager
def peering_door(tiers: Tiers | None) -> Iterator[Door]:
    """Listen for other nodes, where the settings make this one.

    Raises:
        AddressError: the address is taken, or not this host's.
    """
    if tiers is None or tiers.peering is None:
        yield Door(None, None)
        return
    with bind_tcp(tiers.peering.plan.address, reaches_others=True) as listening:
        yield Door(tiers, listening)
