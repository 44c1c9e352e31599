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
HEARTBEAT_S_MIN: Final = 0.15
HEARTBEAT_S_MAX: Final = 30.0


class CallError(Exception):
    """A call without a result."""


class AbsentError(CallError):
    """Nothing was sent: no daemon is attached, or not the one that was meant."""


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
        self._stream: Any = None
        self._party: Any = None
        self._session: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends with the connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ask(
        self,
        method: str,
        params: Mapping[str, Any],
        read: Callable[[Any], Any],
        deadline_s: float | None,
    ) -> Any:  # noqa: ANN401
        """Call the session; returns what `read` made of the answer, or a CallError."""
        return await _ask(self._session, method, params, read, deadline_s)

    async def start(self, software: str) -> str:
        """Speak capnp over the socket and say hello; returns what is wrong, or nothing."""
        of = capnp.AsyncIoStream
        create = of.create_unix_connection if self.where.is_unix else of.create_connection
        self._stream = await create(sock=self._sock)
        self._party = capnp.TwoPartyClient(self._stream)
        self.spawn(self._await_end())
        kv = self._party.bootstrap().cast_as(SCHEMA.Kv)
        hello = {"protocol": PROTOCOL, "software": software[:NAME_BYTES_MAX]}
        outcome = await _ask(kv, "hello", {"hello": hello}, self._greeted, HELLO_S)
        return str(outcome) if isinstance(outcome, CallError) else ""

    def _greeted(self, response: Any) -> None:  # noqa: ANN401
        ok = checked(response.reply)
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
    sock = socket.socket(where.family, socket.SOCK_STREAM)
    sock.setblocking(False)  # noqa: FBT003
    link: Link | None = None
    try:
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


async def _ask(
    capability: Any,  # noqa: ANN401
    method: str,
    params: Mapping[str, Any],
    read: Callable[[Any], Any],
    deadline_s: float | None,
) -> Any:  # noqa: ANN401
    failure: CallError
    try:
        async with asyncio.timeout(deadline_s):
            return read(await capability._send(method, **params))  # noqa: SLF001  # so pycapnp names it
    except TimeoutError:
        failure = LateError(f"{method} was not answered within {deadline_s} s")
    except RefusedError as exc:
        failure = RefusedError(exc.code, exc.message)
    except capnp.KjException as exc:
        text = str(exc.description).strip().splitlines() or [""]
        kind = LostError if exc.type == "DISCONNECTED" else BrokenError
        failure = kind(f"{method}: {text[-1]}")
    except Exception as exc:  # noqa: BLE001  # whatever the answer holds must not end the thread
        failure = BrokenError(f"{method}: {type(exc).__name__}: {exc}")
    return failure


def checked(reply: Any) -> Any:  # noqa: ANN401
    """The `ok` group of a reply.

    Raises:
        RefusedError: it is an error.
    """
    if reply.which() == "error":
        raise RefusedError(str(reply.error.code), str(reply.error.message))
    return reply.ok
