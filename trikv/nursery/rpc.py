"""Cap'n Proto at the daemon's edge: connections, servants, and who may connect.

Decided here: that no capnp object leaves this file, that every refusal is a coded reply, and that a
connection's end closes its sessions. This file does not decide about blocks: it reads a message
with `wire`, calls the service, and writes the answer.
"""

import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from trikv import __version__, wire
from trikv.core.calls import Answer, Query, Saved
from trikv.core.errors import KvError, UnsupportedVersionError
from trikv.nursery.service import Service
from trikv.nursery.sessions import Session
from trikv.nursery.status import Facts, write_status
from trikv.process.accepting import Connection
from trikv.process.callers import peer_pid, watched
from trikv.process.edges import read
from trikv.process.guards import End, at_once, fatal, later
from trikv.process.guest import Guest
from trikv.tiers.copies import Process

log = structlog.get_logger()

SOFTWARE = f"trikv-daemon {__version__}"
ALTERED_BYTES_MAX = 64


class EngineConnection(Connection):
    """What all servants of one engine process's connection share."""

    def __init__(
        self,
        service: Service,
        guest: Guest,
        facts: Facts,
        open_process: Callable[[], Process | None],
    ) -> None:
        super().__init__(guest, facts.calls, service.store.cache.counters)
        self.service = service
        self.facts = facts
        self.open_process = open_process
        self.sessions: set[Session] = set()

    def make_bootstrap(self) -> Any:
        """The daemon's `Kv`."""
        return KvServant(self)

    def end_soon(self, session: Session) -> None:
        """A session's capability was freed, on whatever thread: end it on ours."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all sessions with it
            self.loop.call_soon_threadsafe(self._end, session)

    def _end(self, session: Session) -> None:
        self.sessions.discard(session)
        self._close(session, "released")

    def close(self) -> None:
        """The connection is gone, and with it everyone who spoke through it."""
        for session in list(self.sessions):
            self._close(session, "disconnected")

    def _close(self, session: Session, cause: str) -> None:
        try:
            self.service.sessions.close(session, cause)
        except Exception as error:  # noqa: BLE001  # a bug of ours: the daemon ends with its story
            self.guest.fail(error)

    def settle(self, announce: Callable[[], None]) -> None:
        """Do what a query has left for later; first of all have its load announced."""
        try:
            announce()
            self.service.store.settle()
        except Exception as error:
            self.guest.fail(error)
            raise


class SessionServant(wire.SCHEMA.Session.Server):
    """One session; its methods mirror the schema."""

    def __init__(self, connection: EngineConnection, session: Session) -> None:
        self.connection = connection
        self._session = session
        self._service = connection.service

    def __del__(self) -> None:  # capnp dropped the last reference: released, or disconnected
        self.connection.end_soon(self._session)

    @fatal
    async def declare_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            call = read(wire.read_declare, context.params.instance)
            named = await self.connection.guest.run(self._service.declare, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.namespace = named.namespace
        ok.notes = list(named.notes)
        return None

    @fatal
    async def register_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            call = read(wire.read_register, context.params.rank)
            named = await self.connection.guest.run(self._service.register, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.namespace = named.namespace
        ok.pageBytes = list(named.page_bytes)
        ok.notes = list(named.notes)
        ok.writers = list(named.writers)
        return None

    def query_context(self, context: Any) -> Any:
        """See the schema; answered without a hop, unless it is to wait for what is coming."""
        self.connection.hurry()
        if context.params.query.waitSeconds > 0 and self._service.tiers is not None:
            return self._query_late(context)
        return self._query_at_once(context)

    @at_once
    def _query_at_once(self, context: Any) -> None:
        reply = context.results.init("reply")
        try:
            call = read(wire.read_query, context.params.query)
            answer = self._service.query(self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        self._answer(reply.init("ok"), call, answer)
        return None

    @fatal
    async def _query_late(self, context: Any) -> None:
        reply = context.results.init("reply")
        try:
            call = read(wire.read_query, context.params.query)
            late = self._service.query_late
            answer = await self.connection.guest.run(late, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        self._answer(reply.init("ok"), call, answer)
        return None

    def _answer(self, ok: Any, call: Query, answer: Answer) -> None:
        ok.hitCount = answer.hit_count
        ok.lease = answer.lease
        ok.leaseSeconds = answer.lease_s
        ok.comingCount = answer.coming_count
        ok.comingSeconds = answer.coming_s
        self.connection.loop.call_soon(self._settle, call, answer)  # once this is answered

    def _settle(self, call: Query, answer: Answer) -> None:
        self.connection.settle(lambda: self._service.expect_load(self._session, call, answer))

    @later
    def save_context(self, context: Any, end: End) -> None:
        """See the schema."""
        reply = context.results.init("reply")

        def write(saved: Saved) -> None:
            ok = reply.init("ok")
            ok.savedCount = saved.saved_count
            ok.presentCount = saved.present_count
            ok.refusedCount = saved.refused_count

        try:
            call = read(wire.read_save, context.params.save)
            self._service.save(self._session, call, functools.partial(end, write))
        except KvError as error:
            end(self.connection.refuse, reply, error)
        self.connection.guest.kick()

    @later
    def load_context(self, context: Any, end: End) -> None:
        """See the schema."""
        reply = context.results.init("reply")

        def write(failed: NDArray[np.int32]) -> None:
            ok = reply.init("ok")
            if len(failed):
                ok.failed = wire.array_to_ids(failed)

        try:
            call = read(wire.read_load, context.params.load)
            self._service.load(self._session, call, functools.partial(end, write))
        except KvError as error:
            end(self.connection.refuse, reply, error)
        self.connection.guest.kick()

    @at_once
    def release_context(self, context: Any) -> None:
        """See the schema; a malformed list is ignored: there is nobody to tell."""
        try:
            self._service.release(self._session, read(wire.read_requests, context.params.requests))
        except KvError as error:
            log.debug("call.refused", code=error.code, reason=str(error))

    @at_once
    def heartbeat_context(self, context: Any) -> None:
        """See the schema; a session that has ended answers with a broken call."""
        del context
        self._service.heartbeat(self._session)

    @fatal
    async def reset_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            altered = read(_read_altered, context.params)
            dropped = await self.connection.guest.run(self._service.reset, self._session, altered)
        except KvError as error:
            return self.connection.refuse(reply, error)
        reply.init("ok").droppedCount = dropped
        return None


def _read_altered(params: Any) -> str:
    return wire.text(str(params.altered), "altered", bytes_max=ALTERED_BYTES_MAX, bytes_min=0)


class KvServant(wire.SCHEMA.Kv.Server):
    """The bootstrap capability of one connection."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection

    @at_once
    def hello_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            hello = context.params.hello
            _check_version(int(hello.protocol))
            software = read(
                lambda message: wire.text(message.software, "software", bytes_max=256, bytes_min=0),
                hello,
            )
            session = _open_session(connection, software)
        except KvError as error:
            return connection.refuse(reply, error)
        connection.sessions.add(session)
        ok = reply.init("ok")
        ok.protocol = wire.PROTOCOL
        ok.software = SOFTWARE
        ok.epoch = connection.facts.epoch
        ok.heartbeatSeconds = connection.service.sessions.silence_s
        ok.session = SessionServant(connection, session)
        return None

    @at_once
    def status_context(self, context: Any) -> None:
        """See the schema."""
        write_status(context.results.init("status"), self.connection.service, self.connection.facts)


def _check_version(theirs: int) -> None:
    if abs(theirs - wire.PROTOCOL) > 1:
        raise UnsupportedVersionError(
            f"this daemon speaks protocol {wire.PROTOCOL} ({SOFTWARE}), the caller {theirs}: "
            "upgrade the older one"
        )


def _open_session(connection: EngineConnection, software: str) -> Session:
    process = connection.open_process()
    try:
        return connection.service.hello(process, software)
    except KvError:
        if process is not None:
            process.close()
        raise


def opener(
    service: Service, guest: Guest, facts: Facts, open_process: Callable[[int], Process]
) -> Callable[[socket.socket], EngineConnection]:
    """What makes a connection of this user's processes."""

    def open_connection(sock: socket.socket) -> EngineConnection:
        held = functools.partial(watched, peer_pid(sock), open_process)
        return EngineConnection(service, guest, facts, held)

    return open_connection
