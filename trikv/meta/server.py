"""Cap'n Proto at the metaserver's edge: who may call, and what each call answers.

Decided here: who may join. No capnp object leaves this file. What a call does is in `service.py`.
"""

import socket
from collections.abc import Callable
from typing import Any, Final

import structlog

from trikv import __version__, wire
from trikv.core.errors import ConflictError, ForbiddenError, KvError, NotReadyError
from trikv.meta import messages
from trikv.meta.gate import Gate, GatedConnection, GateServant
from trikv.meta.service import MetaService, NodeSession
from trikv.meta.status import Facts, write_status
from trikv.process.callers import peer_pid
from trikv.process.edges import read
from trikv.process.guards import at_once
from trikv.process.guest import Guest

log = structlog.get_logger()

SOFTWARE: Final = f"trikv-meta {__version__}"


class MetaConnection(GatedConnection):
    """What the servants of one connection share."""

    def __init__(self, service: MetaService, guest: Guest, facts: Facts, gate: Gate) -> None:
        super().__init__(guest, facts.calls, service.counters, gate)
        self.service = service
        self.facts = facts
        self.session: NodeSession | None = None

    def make_bootstrap(self) -> Any:
        """The metaserver's `Meta`."""
        return MetaServant(self)

    def close(self) -> None:
        """The connection is gone: the node has a moment to come back."""
        super().close()
        session, self.session = self.session, None
        if session is not None:
            self.service.disconnected(session)


class MetaServant(GateServant, wire.SCHEMA.Meta.Server):
    """The bootstrap capability of one connection."""

    connection: MetaConnection

    def __init__(self, connection: MetaConnection) -> None:
        self.connection = connection

    @at_once
    def prove_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            proof = read(lambda message: bytes(message.proof), context.params)
            answer = connection.check(proof)
        except KvError as error:
            return connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.proof = answer
        ok.epoch = connection.facts.epoch
        ok.session = SessionServant(connection)
        ok.silenceSeconds = connection.service.state.silence_s
        return None


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
        party = connection.caller
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
