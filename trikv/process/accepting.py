"""Accepting connections and serving capnp on each until it ends; the same for daemon and meta.

Decided here: the bound on connections, what happens when none can be accepted, and the order in
which a connection's parts are closed. This file does not know what is served.

pycapnp 2.2 crashes the process when an open connection is left to the cyclic collector or freed on
another thread: streams and servers are closed in `finally`, and everything here runs on one thread.
"""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol

import capnp
import structlog

from trikv import wire
from trikv.core.counters import OK, CallCounts
from trikv.core.errors import KvError, OverloadedError
from trikv.process.edges import first_line, open_stream
from trikv.process.guest import Guest
from trikv.streams import Loop

log = structlog.get_logger()

ACCEPT_BACKOFF_S: Final = 0.2
MESSAGE_CHARS_MAX: Final = 1_000


class Refusals(Protocol):
    """Where is counted what was turned away."""

    connection_refused_total: int
    error_total: int


class Connection:
    """What all servants of one connection share: how calls are counted and refused.

    Attributes:
        calls: calls that have ended.
        hang_up: ends the connection soon; set once it is served.
    """

    def __init__(self, guest: Guest, calls: CallCounts, counters: Refusals) -> None:
        self.guest = guest
        self.calls = calls
        self.hang_up: Callable[[], object] = lambda: None
        self.hurry: Callable[[], object] = lambda: None
        self.loop = asyncio.get_running_loop()
        self._counters = counters
        self._refused = OK

    def make_bootstrap(self) -> Any:
        """The servant that a caller meets first.

        Not kept here: a cycle through a servant would delay its end to the collector.
        """
        raise NotImplementedError

    def close(self) -> None:
        """The connection is gone, and with it everyone who spoke through it."""
        raise NotImplementedError

    def count(self, method: str) -> None:
        """A call has ended; were it refused, that was just now, with no checkpoint in between."""
        self.calls.note(method, self._refused)
        self._refused = OK

    def refuse(self, reply: Any, error: KvError) -> None:
        """Write an expected error into a reply's union."""
        self._counters.error_total += 1
        log.debug("call.refused", code=error.code, reason=str(error))
        self._refused = error.code
        refusal = reply.init("error")
        refusal.code = error.code
        refusal.message = str(error)[:MESSAGE_CHARS_MAX]


class Listener:
    """Accepts connections and serves each until it ends.

    Attributes:
        connections_max: at the bound further connections are closed at once.
    """

    def __init__(
        self,
        open_connection: Callable[[socket.socket], Connection],
        guest: Guest,
        counters: Refusals,
        *,
        connections_max: int,
        message_words_max: int = wire.MESSAGE_WORDS_MAX,
    ) -> None:
        """Make one.

        Args:
            open_connection: raises KvError or OSError for callers who are not served.
            guest: told of bugs.
            counters: count what was turned away.
            connections_max: see the class.
            message_words_max: longer messages are refused before they are read.
        """
        self._open_connection = open_connection
        self._guest = guest
        self._counters = counters
        self.connections_max = connections_max
        self._message_words_max = message_words_max
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listening: socket.socket) -> None:
        """Accept until cancelled.

        At the bound: further connections are closed at once. Out of descriptors: accepting pauses,
        those who are connected are served on.
        """
        loop = asyncio.get_running_loop()
        is_full = is_failing = False  # said once, and again when things were better meanwhile
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                self._counters.connection_refused_total += 1
                if not is_failing:
                    log.warning("accept.failed", reason=error.strerror)
                is_failing = True
                await asyncio.sleep(ACCEPT_BACKOFF_S)
                continue
            is_failing = False
            was_full, is_full = is_full, len(self._tasks) >= self.connections_max
            if not is_full:
                self._spawn(self._serve(sock))
                continue
            sock.close()
            self._counters.connection_refused_total += 1
            if not was_full:
                log.warning(
                    "connection.refused",
                    reason="too many connections",
                    count_max=self.connections_max,
                )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A connection is over; an error that nobody expected is a bug of ours."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._guest.fail(error)

    async def close(self) -> None:
        """End all connections; calls in flight are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            connection = self._open_connection(sock)
        except (KvError, OSError) as error:
            self._counters.connection_refused_total += 1
            said = log.debug if isinstance(error, OverloadedError) else log.warning
            said("connection.refused", reason=str(error))
            sock.close()
            return
        try:
            stream = await open_stream(sock)
        except OSError as error:  # gone again
            log.debug("connection.lost", reason=error.strerror)
            connection.close()
            sock.close()
            return
        server = None
        task = asyncio.current_task()
        assert task is not None
        connection.hang_up = task.cancel
        if isinstance(connection.loop, Loop):
            connection.hurry = partial(connection.loop.prefer, sock)
        try:
            server = capnp.TwoPartyServer(
                stream,
                bootstrap=connection.make_bootstrap(),
                traversal_limit_in_words=self._message_words_max,
            )
            await server.on_disconnect()
        except capnp.KjException as error:
            log.warning("connection.broken", reason=first_line(error.description))
        except OSError as error:
            log.warning("connection.broken", reason=error.strerror)
        finally:
            connection.close()
            stream.close()
            if server is not None:
                server.close()
