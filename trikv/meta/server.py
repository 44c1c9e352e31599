"""Cap'n Proto at the metaserver's edge: who may call, and what each call answers.

Decided here: that nothing but `hello` is answered before the proof, and that a caller without one
is not kept. No capnp object leaves this file. What a call does is in `service.py`.
"""

import secrets
import socket
from collections.abc import Callable
from typing import Any, Final

import structlog

from trikv import __version__, wire
from trikv.core.errors import ConflictError, ForbiddenError, KvError, NotReadyError, OverloadedError
from trikv.core.proofs import NONCE_BYTES, Party, Secret, is_proven, prove
from trikv.meta import messages
from trikv.meta.messages import Greeting
from trikv.meta.service import MetaService, NodeSession
from trikv.meta.status import Facts, write_status
from trikv.process.accepting import Connection
from trikv.process.callers import peer_pid
from trikv.process.edges import read
from trikv.process.guards import at_once
from trikv.process.guest import Guest

log = structlog.get_logger()

SOFTWARE: Final = f"trikv-meta {__version__}"
PROVE_S: Final = 5.0
REFUSED_S: Final = 0.2
"""After a wrong proof: time in which the answer leaves."""
UNPROVEN_MAX: Final = 256
QUIET_S: Final = 10.0
"""Between two lines of the log about callers who were turned away."""


class Gate:
    """Who may call.

    At the bound: with `UNPROVEN_MAX` callers that have not proven themselves, further ones are
    closed at once, so that strangers take neither memory nor the places of nodes.
    """

    def __init__(self, secret: Secret | None, address: str) -> None:
        """Make one.

        Args:
            secret: None: every caller is let in.
            address: where this metaserver is reached, by its own words.
        """
        self.secret = secret
        self.address = address
        self.unproven_count = 0
        self._unsaid = 0
        self._quiet_until_s = 0.0

    def say_refused(self, what: str, address: str, *, now_s: float) -> None:
        """Log that somebody was turned away, but not everybody of a crowd."""
        self._unsaid += 1
        if now_s >= self._quiet_until_s:
            log.warning("proof.refused", reason=what, addr=address, count=self._unsaid)
            self._unsaid, self._quiet_until_s = 0, now_s + QUIET_S

    def greet(self) -> Greeting:
        """Our greeting to one caller."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Greeting(Party(messages.META, self.address, nonce), SOFTWARE)


class MetaConnection(Connection):
    """What the servants of one connection share."""

    def __init__(self, service: MetaService, guest: Guest, facts: Facts, gate: Gate) -> None:
        super().__init__(guest, facts.calls, service.counters)
        if gate.unproven_count >= UNPROVEN_MAX:
            reason = f"{UNPROVEN_MAX} callers have not proven themselves"
            gate.say_refused(reason, "", now_s=self.loop.time())
            raise OverloadedError(reason)
        self.service = service
        self.facts = facts
        self.gate = gate
        self.greetings: tuple[Greeting, Greeting] | None = None  # the caller's, ours
        self.session: NodeSession | None = None
        self.is_proven = self.is_refused = False
        gate.unproven_count += 1
        self._timer = self.loop.call_later(PROVE_S, self._refuse_silent)

    def make_bootstrap(self) -> Any:
        """The metaserver's `Meta`."""
        return MetaServant(self)

    def let_in(self) -> None:
        """The caller has proven itself."""
        self.is_proven = True
        self._timer.cancel()
        self.gate.unproven_count -= 1

    def turn_away(self) -> None:
        """The caller has not: it is told, and then hung up on."""
        self.service.counters.proof_refused_total += 1
        address = self.greetings[0].party.address if self.greetings else ""
        self.gate.say_refused("another secret", address, now_s=self.loop.time())
        self.greetings, self.is_refused = None, True
        self._timer.cancel()
        self._timer = self.loop.call_later(REFUSED_S, self.hang_up)

    def close(self) -> None:
        """The connection is gone: the node has a moment to come back."""
        self._timer.cancel()
        if not self.is_proven:
            self.gate.unproven_count -= 1
        session, self.session = self.session, None
        if session is not None:
            self.service.disconnected(session)

    def _refuse_silent(self) -> None:
        log.debug("connection.refused", reason=f"no proof within {PROVE_S} s")
        self.service.counters.connection_refused_total += 1
        self.hang_up()


class MetaServant(wire.SCHEMA.Meta.Server):
    """The bootstrap capability of one connection."""

    def __init__(self, connection: MetaConnection) -> None:
        self.connection = connection

    @at_once
    def hello_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            if connection.is_proven or connection.is_refused:
                raise ConflictError("hello comes first, and once")
            theirs = read(messages.read_greeting, context.params.greeting)
        except KvError as error:
            return connection.refuse(reply, error)
        ours = connection.gate.greet()
        connection.greetings = (theirs, ours)
        ok = reply.init("ok")
        messages.write_greeting(ok.init("greeting"), ours)
        ok.needsProof = connection.gate.secret is not None
        return None

    @at_once
    def prove_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            proof = read(lambda message: bytes(message.proof), context.params)
            answer = self._check(proof)
        except KvError as error:
            return connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.proof = answer
        ok.epoch = connection.facts.epoch
        ok.session = SessionServant(connection)
        ok.silenceSeconds = connection.service.state.silence_s
        return None

    def _check(self, proof: bytes) -> bytes:
        """Let the caller in; returns our own proof.

        Raises:
            ConflictError: not now.
            ForbiddenError: it does not know the secret.
        """
        connection, secret = self.connection, self.connection.gate.secret
        if connection.is_proven or connection.greetings is None:
            raise ConflictError("prove comes once, after hello")
        theirs, ours = (greeting.party for greeting in connection.greetings)
        if secret is None:
            connection.let_in()
            return b""
        if not is_proven(secret, theirs, ours, proof, is_dialer=True):
            connection.turn_away()
            raise ForbiddenError("not the secret of this cluster: see --cluster-secret-file")
        connection.let_in()
        return prove(secret, theirs, ours, is_dialer=False)


class SessionServant(wire.SCHEMA.MetaSession.Server):
    """A caller that has proven itself; its methods mirror the schema."""

    def __init__(self, connection: MetaConnection) -> None:
        self.connection = connection
        self._service = connection.service

    @at_once
    def join_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            rails = read(messages.read_rails, context.params.rails)
            session = self._join(int(context.params.epoch), rails)
        except KvError as error:
            return connection.refuse(reply, error)
        reply.init("ok").isComplete = session.node.is_complete
        return None

    def _join(self, epoch: int, rails: list[str]) -> NodeSession:
        connection = self.connection
        assert connection.greetings is not None
        party = connection.greetings[0].party
        if party.role != messages.NODE:
            raise ForbiddenError(f"a {party.role!r} is no node, and cannot join")
        if connection.session is not None:
            raise ConflictError("this connection has joined already")
        connection.session = self._service.join(party.address, epoch, rails)
        return connection.session

    @at_once
    def begin_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            self._service.begin(self.connection.session)
        except KvError as error:
            return self.connection.refuse(reply, error)
        reply.ok = None
        return None

    @at_once
    def announce_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            parts = read(messages.read_adverts, context.params.adverts)
            taken = self._service.announce(self.connection.session, parts)
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.declinedCount, ok.crowdedCount = taken.declined_count, taken.crowded_count
        return None

    @at_once
    def finish_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            self._service.finish(self.connection.session)
        except KvError as error:
            return self.connection.refuse(reply, error)
        reply.ok = None
        return None

    @at_once
    def locate_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            origin, words = read(messages.read_locate, context.params)
            plan = self._service.locate(self.connection.session, origin, words)
        except KvError as error:
            return self.connection.refuse(reply, error)
        messages.write_plan(reply.init("ok"), plan)
        return None

    @at_once
    def heartbeat_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            lent = int(context.params.lentBlocks)
            beat = self._service.heartbeat(self.connection.session, lent)
        except KvError as error:
            return self.connection.refuse(reply, error)
        messages.write_beat(reply.init("ok"), beat)
        return None

    @at_once
    def leave_context(self, context: Any) -> None:
        """See the schema; who has not joined has nothing to leave."""
        del context
        session, self.connection.session = self.connection.session, None
        try:
            self._service.leave(session)
        except (NotReadyError, ConflictError) as error:
            log.debug("call.refused", code=error.code, reason=str(error))

    @at_once
    def status_context(self, context: Any) -> None:
        """See the schema."""
        write_status(context.results.init("status"), self._service, self.connection.facts)


def opener(
    service: MetaService, guest: Guest, facts: Facts, gate: Gate, *, checks_user: bool
) -> Callable[[socket.socket], MetaConnection]:
    """What makes a connection.

    Args:
        service: what is served.
        guest: told of bugs.
        facts: for `status`.
        gate: who may call.
        checks_user: only this user's processes may: without a secret, on loopback.
    """

    def open_connection(sock: socket.socket) -> MetaConnection:
        if checks_user:
            peer_pid(sock)
        return MetaConnection(service, guest, facts, gate)

    return open_connection
