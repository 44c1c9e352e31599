"""One connection: opened to a process that may be trusted, asked, closed in the one safe order.

Decided here: whom we talk to, how a failed call is classed, and that no capnp object and no
traceback that holds one leaves this file. This file does not know reconnecting or what the calls
mean.

Everything runs on the runner's thread. capnp ends the process when an open connection is left to
the collector, hence `close`; a raised error would carry the frames that hold its objects to other
threads, hence `ask` returns errors.
"""
# ruff: noqa: TID251  # capnp's loop is asyncio's

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import capnp

from trikv.address import Address
from trikv.connector import peers
from trikv.wire import NAME_BYTES_MAX, PROTOCOL, SCHEMA

CONNECT_S: Final = 2.0
HELLO_S: Final = 5.0
CLOSE_S: Final = 1.0
SOFTWARE_CHARS_MAX: Final = 100
HEARTBEAT_S_MIN: Final = 0.15
HEARTBEAT_S_MAX: Final = 30.0


class CallError(Exception):
    """A call without a result."""


class AbsentError(CallError):
    """Nothing was sent: no daemon is attached, or another one, or the call cannot be written."""


class RefusedError(CallError):
    """The daemon answered with an error: nothing was done."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class UnknownError(CallError):
    """Sent, but the answer is missing: whether it was done, or still is being done, is unknown."""


class LateError(UnknownError):
    """No answer within the deadline."""


class LostError(UnknownError):
    """The connection broke."""


class BrokenError(UnknownError):
    """The daemon raised, or its answer could not be read: a bug on one side."""


class Link:
    """A greeted connection.

    Attributes:
        lost: set once nothing more can come of it.
        probe: set to have the heartbeat sent now.
    """

    def __init__(self, sock: socket.socket, where: Address, peer: peers.Peer | None) -> None:
        self.where = where
        self.peer = peer
        self.watch = peers.watch(sock, peer) if peer is not None else None
        self.lost = asyncio.Event()
        self.probe = asyncio.Event()
        self.epoch = 0
        self.heartbeat_s = HEARTBEAT_S_MIN
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._stream: Any = None
        self._party: Any = None
        self._session: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[_Sent] = set()
        self._alarm: asyncio.TimerHandle | None = None  # at the first deadline of a call, or before

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that ends with the connection, maybe before its first line."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ask(
        self,
        method: str,
        params: Mapping[str, Any],
        read: Callable[[Any], Any],
        deadline_s: float | None,
        *,
        of: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """As `send`, for who can wait; returns the outcome."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def done(outcome: Any) -> None:  # noqa: ANN401
            if not answer.done():  # who waited may have been cancelled
                answer.set_result(outcome)

        self.send(method, params, read, deadline_s, done, of=of)
        return await answer

    def send(
        self,
        method: str,
        params: Mapping[str, Any],
        read: Callable[[Any], Any],
        deadline_s: float | None,
        done: Callable[[Any], None],
        *,
        of: Any = None,  # noqa: ANN401
    ) -> None:
        """Call the session, or another capability.

        Args:
            method: of the capability.
            params: plain Python.
            read: turns the response into plain Python.
            deadline_s: None: as long as the connection lives.
            done: gets what `read` made of the answer, or a CallError; called once, maybe at once.
            of: the capability.
        """
        capability = self._session if of is None else of
        until_s = self._loop.time() + deadline_s if deadline_s is not None else math.inf
        call = _Sent(method, read, done, self._calls, until_s)
        try:
            request = capability._request(method)  # noqa: SLF001  # so pycapnp names it
            _fill(request, params)
        except Exception as exc:  # noqa: BLE001  # a bug here, and no reason to doubt the daemon
            call.end(AbsentError(f"{method}: {type(exc).__name__}: {exc}"))
            return
        try:
            call.wait(request.send())
        except Exception as exc:  # noqa: BLE001  # whatever is wrong must not end the thread
            call.end(_failure(method, exc))
            return
        if deadline_s is not None and (self._alarm is None or until_s < self._alarm.when()):
            self._set_alarm(until_s)

    def _set_alarm(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at_s, self._end_late)

    def _end_late(self) -> None:
        """One timer for all calls: most are answered long before their deadlines."""
        self._alarm = None
        now_s = self._loop.time()
        for call in [call for call in self._calls if call.until_s <= now_s]:
            call.cancel(LateError(f"{call.method} was not answered in time"))
        next_s = min((call.until_s for call in self._calls), default=math.inf)
        if next_s < math.inf and self._alarm is None:
            self._set_alarm(next_s)

    async def start(self, software: str) -> str:
        """Speak capnp over the socket and say hello; returns what is wrong, or nothing."""
        of = capnp.AsyncIoStream
        create = of.create_unix_connection if self.where.is_unix else of.create_connection
        self._stream = await create(sock=self._sock)
        self._party = capnp.TwoPartyClient(self._stream)
        self.spawn(self._await_end())
        kv = self._party.bootstrap().cast_as(SCHEMA.Kv)
        hello = {"protocol": PROTOCOL, "software": software[:NAME_BYTES_MAX]}
        outcome = await self.ask("hello", {"hello": hello}, self._greeted, HELLO_S, of=kv)
        return str(outcome) if isinstance(outcome, CallError) else ""

    def _greeted(self, response: Any) -> None:  # noqa: ANN401
        ok = checked(response.reply)
        theirs = int(ok.protocol)
        if abs(theirs - PROTOCOL) > 1:
            raise RefusedError(
                "unsupported-version",
                f"the daemon speaks protocol {theirs} ({str(ok.software)[:SOFTWARE_CHARS_MAX]}),"
                f" this engine {PROTOCOL}: upgrade the older one",
            )
        self._session = ok.session
        self.epoch = int(ok.epoch)
        self.heartbeat_s = min(max(float(ok.heartbeatSeconds), HEARTBEAT_S_MIN), HEARTBEAT_S_MAX)

    async def _await_end(self) -> None:
        with contextlib.suppress(capnp.KjException):
            await self._party.on_disconnect()
        self.lost.set()

    async def close(self) -> None:
        """Cancel what is under way, then free stream and capabilities."""
        try:
            if self._alarm is not None:
                self._alarm.cancel()
            for call in list(self._calls):
                call.cancel(LostError("the connection was closed"))
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=CLOSE_S)
        finally:
            self._session = None
            if self._stream is not None:
                self._stream.close()
            if self._party is not None:
                self._party.close()
            self._party = self._stream = None
            self._sock.close()

    def leak(self) -> tuple[int, tuple[object, ...]]:
        """For a forked child: our copy of the socket, and what must never be freed there."""
        things = (self, self._stream, self._party, self._session, self._sock, *self._tasks)
        return self._sock.fileno(), things


async def open_link(where: Address) -> Link | str:
    """Connect; returns why that is not possible, empty if simply nobody listens."""
    link: Link | None = None
    try:
        sock = socket.socket(where.family, socket.SOCK_STREAM)
    except OSError as exc:  # no descriptor is free, or no such family here
        return str(exc.strerror)
    try:
        sock.setblocking(False)  # noqa: FBT003
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, where.target)
        peer = peers.peer_of(sock) if where.is_unix else None
        if peer is not None and not peer.is_trusted:
            return f"it belongs to uid {peer.uid}, neither ours nor root, and is not used"
        if not where.is_unix:
            # asyncio leaves sockets made by hand alone, and each call would wait 40 ms.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = Link(sock, where, peer)
    except TimeoutError:
        return f"no connection within {CONNECT_S} s"
    except PermissionError:
        return "this user may not open it"
    except OSError:
        return ""
    finally:
        if link is None:
            sock.close()
    return link


class _Sent:
    """A call that is out; ends once, and then keeps nothing of capnp alive."""

    __slots__ = ("_answer", "_calls", "_done", "_read", "method", "until_s")

    def __init__(
        self,
        method: str,
        read: Callable[[Any], Any],
        done: Callable[[Any], None],
        calls: set["_Sent"],
        until_s: float,
    ) -> None:
        self.method = method
        self.until_s = until_s
        self._read = read
        self._done = done
        self._calls = calls
        self._answer: asyncio.Future[Any] | None = None

    def wait(self, promise: Any) -> None:  # noqa: ANN401
        """Be called back by the promise."""
        # The first step of waiting for a promise is a future: no task is made to wait for that.
        answer: asyncio.Future[Any] = next(promise.__await__())
        self._answer = answer
        self._calls.add(self)
        answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Any]) -> None:
        if answer is not self._answer:
            return
        if answer.cancelled():  # with the loop, before the connection was closed
            self.end(LostError(f"{self.method}: cancelled"))
            return
        error = answer.exception()  # raised, its traceback would lead back to the future
        try:
            outcome = self._read(answer.result()) if error is None else _failure(self.method, error)
        except Exception as exc:  # noqa: BLE001  # whatever the answer holds must not end the thread
            outcome = _failure(self.method, exc)
        self.end(outcome)

    def cancel(self, why: CallError) -> None:
        """Wait no longer; the daemon is told."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.cancel()
            self.end(why)

    def end(self, outcome: Any) -> None:  # noqa: ANN401
        """Pass the outcome on."""
        self._answer = None
        self._calls.discard(self)
        self._done(outcome)


def _fill(builder: Any, values: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Set fields, structs in place: pycapnp's own way takes twice as long."""
    for name, value in values.items():
        if isinstance(value, dict):
            _fill(builder.init(name), value)
        else:
            setattr(builder, name, value)


def _failure(method: str, exc: BaseException) -> CallError:
    """What a raised error means, without its traceback and what that holds."""
    if isinstance(exc, RefusedError):
        return RefusedError(exc.code, exc.message)
    if isinstance(exc, capnp.KjException):
        text = str(exc.description).strip().splitlines() or [""]
        kind = LostError if exc.type == "DISCONNECTED" else BrokenError
        return kind(f"{method}: {text[-1]}")
    return BrokenError(f"{method}: {type(exc).__name__}: {exc}")


def checked(reply: Any) -> Any:  # noqa: ANN401
    """The `ok` group of a reply.

    Raises:
        RefusedError: it is an error.
    """
    if reply.which() == "error":
        raise RefusedError(str(reply.error.code), str(reply.error.message))
    return reply.ok


def read_nothing(_response: Any) -> None:  # noqa: ANN401
    """Of a call whose answer says only that it was done."""
