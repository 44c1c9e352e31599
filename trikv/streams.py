"""The loop under capnp, and the socket between the two: what every call passes through.

Decided here: that a message is sent in one go, that a socket is not forgotten between two messages,
and that a call answered at once becomes no task. This file does not know the schema, who calls, or
capnp itself: it gives pycapnp what asyncio's loop would, in fewer steps.
"""
# ruff: noqa: TID251, ANN401  # capnp's loop is asyncio's, whose methods take anything

import asyncio
import contextvars
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import islice
from typing import Any, Final

EVENTS_MAX: Final = 2
PIECES_MAX: Final = 64  # sent at once; the system's own limit is 1,024
STEPS_MAX: Final = 16
STEPS_S: Final = 0.00025
WORD_BYTES: Final = 8


class FewAtOnce(selectors.DefaultSelector):
    """Reports at most `EVENTS_MAX` sockets a look, and others at the next.

    Each may carry a call of a millisecond: a burst of forty engines must not be one turn of the
    loop, with every timer behind it.

    Attributes:
        askers: descriptors by which calls come that somebody waits for; one of them is first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.askers: set[int] = set()
        self._turn = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the standard library's."""
        ready = super().select(timeout)
        if len(ready) <= EVENTS_MAX:
            return ready
        self._turn += 1
        first = self._turn % len(ready)
        ready = ready[first:] + ready[:first]
        asking = [one for one in ready if one[0].fd in self.askers][:1]
        return asking + [one for one in ready if one not in asking][: EVENTS_MAX - len(asking)]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """As the standard library's."""
        key = super().unregister(fileobj)
        self.askers.discard(key.fd)
        return key


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop with our transport, and with calls that end where they begin."""

    def __init__(self) -> None:
        self._looks = FewAtOnce()
        super().__init__(self._looks)
        self._last: deque[Callable[[], None]] = deque()

    async def create_unix_connection(
        self, protocol_factory: Any, *args: Any, **options: Any
    ) -> Any:
        """As asyncio's; a socket that is connected already gets our transport."""
        sock = options.get("sock")
        if sock is None:
            return await super().create_unix_connection(protocol_factory, *args, **options)
        return self._attach(protocol_factory, sock)

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        """As asyncio's; a socket that is connected already gets our transport."""
        sock = options.get("sock")
        if sock is None:
            return await super().create_connection(protocol_factory, *args, **options)
        return self._attach(protocol_factory, sock)

    def _attach(
        self, protocol_factory: Callable[[], asyncio.BufferedProtocol], sock: socket.socket
    ) -> tuple[asyncio.Transport, asyncio.BufferedProtocol]:
        protocol = protocol_factory()
        transport = _Transport(self, sock, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    _soon: deque[asyncio.Handle] | None = None  # what `run_on` has yet to run

    def call_soon(  # type: ignore[override]  # less exact, as to what the arguments are
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's; inside `run_on` it runs before that returns."""
        if self._soon is None:
            return super().call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        self._soon.append(handle)
        return handle

    def prefer(self, sock: socket.socket) -> None:
        """Look at it first while it is watched: somebody waits for what comes by it."""
        self._looks.askers.add(sock.fileno())

    @property
    def has_soon(self) -> bool:
        """Something is to be run before `run_on` returns."""
        return bool(self._soon)

    def call_last(self, callback: Callable[[], None]) -> None:
        """Run it after all that is to be run soon, as an answer is, and after what sockets have."""
        if self._soon is None:
            self.call_later(0, callback)  # asyncio looks at its timers last
        else:
            self._last.append(callback)

    def run_on(self, work: Callable[[], None]) -> None:
        """Run work that an event has caused, and at once what it wants to be run soon.

        A call takes two or three steps on each side; asyncio looks at all sockets before each.

        At the bound: after `STEPS_MAX` steps, or when what comes last would begin after `STEPS_S`,
        the sockets have their turn.
        """
        assert self._soon is None
        soon = self._soon = deque()
        until_s = time.perf_counter() + STEPS_S
        try:
            work()
            for _ in range(STEPS_MAX):
                if soon:
                    _run(soon.popleft())
                elif self._last and time.perf_counter() < until_s:
                    self._last.popleft()()
                else:
                    break
        finally:
            self._soon = None
            for handle in soon:
                self.call_soon(_run, handle)
            while self._last:
                self.call_later(0, self._last.popleft())

    def create_task(self, coro: Any, **options: Any) -> Any:
        """As asyncio's; what needs no task is its own."""
        return coro if isinstance(coro, (Answered, Later)) else super().create_task(coro, **options)


class Answered(Coroutine[Any, Any, None]):
    """A servant's call that was answered before it returned.

    pycapnp wants a coroutine, makes a task of it, and waits for that: three turns of the loop. On
    our loop this is coroutine and ended task in one; on any other it is a coroutine that ends at
    once.
    """

    def send(self, _value: Any) -> Any:
        """It has ended."""
        raise StopIteration

    def close(self) -> None:
        """It has ended."""

    def throw(self, *_error: Any) -> Any:
        """It has ended."""
        raise StopIteration

    def __await__(self) -> Any:
        return iter(())

    def add_done_callback(self, callback: Callable[["Answered"], None]) -> None:
        """At once: it has ended."""
        callback(self)

    def cancel(self) -> bool:
        """It has ended."""
        return False

    def cancelled(self) -> bool:
        """It has ended well."""
        return False

    def exception(self) -> None:
        """It has ended well."""

    def result(self) -> None:
        """There is none."""


class Later(asyncio.Future[None]):
    """A servant's call that somebody ends later, by a plain call: coroutine and task in one.

    pycapnp cancels a call that nobody waits for any more; whoever carries it out need not hear of
    that.
    """

    def end(self, error: Exception | None = None) -> None:
        """The call has ended, well or not; once."""
        if self.done():  # cancelled
            return
        if error is None:
            self.set_result(None)
        else:  # its traceback may lead back to us and to capnp's objects: a cycle
            self.set_exception(error.with_traceback(None))

    def send(self, _value: Any) -> Any:
        """As a coroutine that waits for us, on a loop that makes a task of it."""
        if not self.done():
            self._asyncio_future_blocking = True
            return self
        self.result()
        raise StopIteration

    def close(self) -> None:
        """There is nothing to unwind."""

    def throw(self, *error: Any) -> Any:
        """Likewise."""
        raise error[-1]


Coroutine.register(Later)


class _Transport(asyncio.Transport):
    """A connected socket of a loop, for the one protocol that pycapnp brings.

    asyncio's own watches a socket anew for each message and sends each piece of one by itself, so
    that the other side wakes up twice.

    At the bound: what the system does not take waits here, and the protocol brings no more until it
    is gone. Closing drops it.
    """

    def __init__(self, loop: Loop, sock: socket.socket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__({"socket": sock})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._is_wanted = False  # the protocol has a buffer to read into
        self._is_watched = False  # the loop says when there is something to read
        self._is_closing = False
        self._is_full = False
        self._ends = False
        self._unsent: deque[bytes | memoryview] = deque()
        self._missing_bytes = 0  # of the message whose first pieces are in `_unsent`

    # -- reading

    def resume_reading(self) -> None:
        """The protocol has a buffer."""
        self._is_wanted = True
        if not self._is_watched and not self._is_closing:
            self._is_watched = True
            self._loop.add_reader(self._sock, self._loop.run_on, self._read)

    def pause_reading(self) -> None:
        """The protocol has none; usually it has another one soon, so the socket stays watched."""
        self._is_wanted = False

    def _read(self) -> None:
        if not self._is_wanted:
            self._unwatch()
            return
        try:
            count = self._sock.recv_into(self._protocol.get_buffer(-1))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._close(error)
            return
        if count:
            self._protocol.buffer_updated(count)
        else:
            self._protocol.eof_received()
            self.close()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._sock)

    # -- writing

    def write(self, data: Any) -> None:
        """Take a piece of a message; the last one sends it."""
        if self._is_closing or not data:
            return
        self._unsent.append(data)
        if self._missing_bytes <= 0:
            self._missing_bytes = _message_bytes(data)
        self._missing_bytes -= len(data)
        if self._missing_bytes <= 0:
            self._send()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._drop(self._sock.sendmsg(islice(self._unsent, PIECES_MAX)))
        except (BlockingIOError, InterruptedError):
            if not self._is_full:
                self._is_full = True
                self._loop.add_writer(self._sock, self._send)
                self._protocol.pause_writing()
            return
        except OSError as error:
            self._close(error)
            return
        if self._is_full:
            self._is_full = False
            self._loop.remove_writer(self._sock)
            self._protocol.resume_writing()
        if self._ends:
            self.write_eof()

    def _drop(self, count: int) -> None:
        """So many bytes were sent."""
        while count:
            piece = self._unsent.popleft()
            if count < len(piece):
                self._unsent.appendleft(memoryview(piece)[count:])
                return
            count -= len(piece)

    def can_write_eof(self) -> bool:
        """Sockets can."""
        return True

    def write_eof(self) -> None:
        """Nothing comes after what was written."""
        self._ends = True
        if not self._unsent and not self._is_closing:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:  # gone already
                self._close(error)

    # -- the end

    def is_closing(self) -> bool:
        """True from `close` on."""
        return self._is_closing

    def close(self) -> None:
        """End the connection; the protocol hears of it soon."""
        self._close(None)

    def abort(self) -> None:
        """Likewise."""
        self._close(None)

    def _close(self, error: OSError | None) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._unwatch()
        if self._is_full:
            self._loop.remove_writer(self._sock)
        self._unsent.clear()
        self._loop.call_soon(self._end, error)

    def _end(self, error: OSError | None) -> None:
        self._protocol.connection_lost(error)
        self._sock.close()


def _run(handle: asyncio.Handle) -> None:
    if not handle.cancelled():
        handle._run()  # noqa: SLF001  # as every loop does: it hands errors to the loop's handler


def _message_bytes(table: bytes) -> int:
    """Length of a message from its first piece: number of segments less one, words of each."""
    words = memoryview(table).cast("I")
    return len(table) + WORD_BYTES * sum(words[1 : words[0] + 2])
