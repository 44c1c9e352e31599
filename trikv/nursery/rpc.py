"""Cap'n Proto at the daemon's edge: connections, servants, and who may connect.

Decided here: that no capnp object leaves this file, that every refusal is a coded reply, and that a
connection's end closes its sessions. This file does not decide about blocks: it reads a message
with `wire`, calls the service, and writes the answer.

pycapnp 2.2 crashes the process when an open connection is left to the cyclic collector or freed on
another thread: streams and servers are closed in `finally`, and everything here runs on one thread.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import capnp
import structlog

from trikv import __version__, wire
from trikv.core.counters import OK
from trikv.core.errors import BadRequestError, ForbiddenError, KvError, UnsupportedVersionError
from trikv.nursery.callers import peer_pid
from trikv.nursery.guards import at_once, fatal
from trikv.nursery.guest import Guest
from trikv.nursery.service import Service
from trikv.nursery.sessions import Session
from trikv.nursery.status import Facts, write_status
from trikv.tiers.copies import Process

log = structlog.get_logger()

SOFTWARE = f"trikv-daemon {__version__}"
ACCEPT_BACKOFF_S = 0.2
MESSAGE_CHARS_MAX = 1_000


class Connection:
    """What all servants of one connection share."""

    def __init__(
        self,
        service: Service,
        guest: Guest,
        facts: Facts,
        open_process: Callable[[], Process | None],
    ) -> None:
        self.service = service
        self.guest = guest
        self.facts = facts
        self.open_process = open_process
        self.sessions: set[Session] = set()
        self.loop = asyncio.get_running_loop()
        self._refused = OK

    def end_soon(self, session: Session) -> None:
        """A session's capability was freed, on whatever thread: end it on ours."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all sessions with it
            self.loop.call_soon_threadsafe(self._end, session)

    def _end(self, session: Session) -> None:
        self.sessions.discard(session)
        self.service.sessions.close(session, "released")

    def close(self) -> None:
        """The connection is gone, and with it everyone who spoke through it."""
        for session in list(self.sessions):
            self.service.sessions.close(session, "disconnected")

    def settle(self) -> None:
        """Do what queries have left for later."""
        try:
            self.service.store.settle()
        except Exception as error:
            self.guest.fail(error)
            raise

    def count(self, method: str) -> None:
        """A call has ended; were it refused, that was just now, with no checkpoint in between."""
        self.facts.calls.note(method, self._refused)
        self._refused = OK

    def refuse(self, reply: Any, error: KvError) -> None:
        """Write an expected error into a reply's union."""
        self.service.store.cache.counters.error_total += 1
        log.debug("call.refused", code=error.code, reason=str(error))
        self._refused = error.code
        refusal = reply.init("error")
        refusal.code = error.code
        refusal.message = str(error)[:MESSAGE_CHARS_MAX]


def _read(function: Callable[[Any], Any], message: Any) -> Any:
    """Read a message; what pycapnp cannot read is the sender's fault.

    Raises:
        BadRequestError: the message is malformed or breaks a bound.
    """
    try:
        return function(message)
    except (capnp.KjException, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise BadRequestError(f"unreadable message: {_first_line(str(error))}") from None


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:200]


async def _open_stream(sock: socket.socket) -> Any:
    if sock.family == socket.AF_UNIX:
        return await capnp.AsyncIoStream.create_unix_connection(sock=sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await capnp.AsyncIoStream.create_connection(sock=sock)


class SessionServant(wire.SCHEMA.Session.Server):
    """One session; its methods mirror the schema."""

    def __init__(self, connection: Connection, session: Session) -> None:
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
            call = _read(wire.read_declare, context.params.instance)
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
            call = _read(wire.read_register, context.params.rank)
            named = await self.connection.guest.run(self._service.register, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.namespace = named.namespace
        ok.pageBytes = list(named.page_bytes)
        ok.notes = list(named.notes)
        ok.writers = list(named.writers)
        return None

    @at_once
    def query_context(self, context: Any) -> None:
        """See the schema; answered without a hop."""
        reply = context.results.init("reply")
        try:
            answer = self._service.query(
                self._session, _read(wire.read_query, context.params.query)
            )
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.hitCount = answer.hit_count
        ok.lease = answer.lease
        ok.leaseSeconds = answer.lease_s
        self.connection.loop.call_soon(self.connection.settle)  # once this is answered
        return None

    @fatal
    async def save_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            call = _read(wire.read_save, context.params.save)
            saved = await self.connection.guest.run(self._service.save, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        ok = reply.init("ok")
        ok.savedCount = saved.saved_count
        ok.presentCount = saved.present_count
        ok.refusedCount = saved.refused_count
        return None

    @fatal
    async def load_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            call = _read(wire.read_load, context.params.load)
            failed = await self.connection.guest.run(self._service.load, self._session, call)
        except KvError as error:
            return self.connection.refuse(reply, error)
        reply.init("ok").failed = wire.array_to_ids(failed)
        return None

    @at_once
    def release_context(self, context: Any) -> None:
        """See the schema; a malformed list is ignored: there is nobody to tell."""
        try:
            self._service.release(self._session, _read(wire.read_requests, context.params.requests))
        except KvError as error:
            log.debug("call.refused", code=error.code, reason=str(error))

    @at_once
    def heartbeat_context(self, context: Any) -> None:
        """See the schema; a session that has ended answers with a broken call."""
        del context
        self._service.heartbeat(self._session)

    @at_once
    def reset_context(self, context: Any) -> None:
        """See the schema."""
        reply = context.results.init("reply")
        try:
            dropped = self._service.reset(self._session)
        except KvError as error:
            return self.connection.refuse(reply, error)
        reply.init("ok").droppedCount = dropped
        return None


class KvServant(wire.SCHEMA.Kv.Server):
    """The bootstrap capability of one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @at_once
    def hello_context(self, context: Any) -> None:
        """See the schema."""
        connection = self.connection
        reply = context.results.init("reply")
        try:
            hello = context.params.hello
            _check_version(int(hello.protocol))
            software = _read(
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


def _open_session(connection: Connection, software: str) -> Session:
    process = connection.open_process()
    try:
        return connection.service.hello(process, software)
    except KvError:
        if process is not None:
            process.close()
        raise


class Listener:
    """Accepts connections of this user's processes and serves each until it ends."""

    def __init__(
        self,
        service: Service,
        guest: Guest,
        facts: Facts,
        open_process: Callable[[int], Process],
        *,
        connections_max: int,
    ) -> None:
        self._service = service
        self._guest = guest
        self._facts = facts
        self._open_process = open_process
        self.connections_max = connections_max
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listening: socket.socket) -> None:
        """Accept until cancelled.

        At the bound: further connections are closed at once. Out of descriptors: accepting pauses.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("accept.failed", reason=error.strerror)
                await asyncio.sleep(ACCEPT_BACKOFF_S)
                continue
            if len(self._tasks) >= self.connections_max:
                log.warning(
                    "connection.refused",
                    reason="too many connections",
                    count_max=self.connections_max,
                )
                sock.close()
                continue
            self._spawn(self._serve(sock))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections; calls in flight are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            pid = peer_pid(sock)
        except (KvError, OSError) as error:
            log.warning("connection.refused", reason=str(error))
            sock.close()
            return

        def open_process() -> Process | None:
            try:
                return self._open_process(pid) if pid is not None else None
            except OSError as error:
                raise ForbiddenError(f"process {pid} cannot be watched: {error.strerror}") from None

        connection = Connection(self._service, self._guest, self._facts, open_process)
        try:
            stream = await _open_stream(sock)
        except OSError as error:  # gone again
            log.debug("connection.lost", reason=error.strerror)
            sock.close()
            return
        server = capnp.TwoPartyServer(
            stream, bootstrap=KvServant(connection), traversal_limit_in_words=wire.MESSAGE_WORDS_MAX
        )
        try:
            await server.on_disconnect()
        except capnp.KjException as error:
            log.warning("connection.broken", reason=_first_line(error.description))
        finally:
            connection.close()
            stream.close()
            server.close()
