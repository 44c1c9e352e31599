"""HTTP for operators: `/metrics`, `/health`, `/ready`, on a port of their own.

Decided here: who may hold how much of it. The pages are for one scraper and a few people; every
caller, friendly or not, gets the same small share of the daemon's one thread:

| what | bound |
| --- | --- |
| connections | `CONNECTIONS_MAX` at a time; further ones wait in the kernel, `BACKLOG` of them |
| requests | one a connection, whose place is free again no sooner than after `HOLD_S` seconds |
| a caller that sends or reads slowly | has `IDLE_S` seconds a step and `LIFE_S` in all |

Starlette's router answers, hypercorn's Trio worker speaks HTTP; its sends are shielded from
cancellation, so the stream that it is given bounds them itself. This file does not know what the
pages say.
"""

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router

from trikv import address as addresses
from trikv.process.listening import AddressError

log = structlog.get_logger()

DEFAULT: Final = "127.0.0.1:9091"
OFF: Final = "off"
CONNECTIONS_MAX: Final = 16
BACKLOG: Final = 32
HOLD_S: Final = 1.0
IDLE_S: Final = 5.0
LIFE_S: Final = 10.0
HEAD_BYTES_MAX: Final = 8_192
ACCEPT_BACKOFF_S: Final = 0.2
FAILED: Final = 500
UNAVAILABLE: Final = 503


Render = Callable[[], Awaitable[tuple[bytes, str]]]


@contextlib.contextmanager
def listen(given: str | None, usual: str = DEFAULT) -> Iterator[socket.socket | None]:
    """Listen on the given address, else on the usual one; None when there is to be no HTTP.

    Whoever names an address is told at once that it cannot be had. The usual one may be taken, by
    another daemon of this host for example: that is no reason not to serve engines.

    Raises:
        AddressError: the given address cannot be listened on.
    """
    if given == OFF:
        yield None
        return
    try:
        address = addresses.parse(given or usual)
        if address.is_unix:
            raise ValueError(f"{given!r} is no host:port")  # noqa: TRY301  # one refusal for both
    except ValueError as error:
        raise AddressError(f"--http-addr: {error}") from None
    with socket.socket(address.family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address.target)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if given:
                raise AddressError(f"--http-addr {address}: {reason}") from None
            log.warning("http.off", addr=str(address), reason=reason)
            yield None
            return
        sock.listen(BACKLOG)
        sock.setblocking(False)  # noqa: FBT003  # takes no keyword
        yield sock


def url_of(sock: socket.socket | None) -> str:
    """Where people find it; empty without HTTP."""
    if sock is None:
        return ""
    host, port = sock.getsockname()[:2]
    return f"http://{addresses.Address(host=host, port=port)}"


def _router(metrics: Render, state: Callable[[], str]) -> Router:
    """The pages."""

    async def show_metrics(_request: Request) -> Response:
        try:
            page, content_type = await metrics()
        except Exception:  # our bug, and none that an engine should suffer for
            log.exception("http.failed", path="/metrics")
            return PlainTextResponse("a bug: the daemon's log has the traceback\n", FAILED)
        return Response(page, headers={"content-type": content_type})

    async def show_health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def show_ready(_request: Request) -> Response:
        said = state()
        return PlainTextResponse(f"{said}\n", UNAVAILABLE if said == "draining" else 200)

    pages = {"/metrics": show_metrics, "/health": show_health, "/ready": show_ready}
    return Router([Route(path, page) for path, page in pages.items()], redirect_slashes=False)


class BoundedStream:
    """A connection whose sends end in time, whatever hypercorn shields them from."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self.socket = stream.socket

    async def send_all(self, data: bytes) -> None:
        """Send, or hang up.

        Raises:
            trio.BrokenResourceError: the caller does not read.
        """
        try:
            with trio.move_on_after(IDLE_S):
                await self._stream.send_all(data)
                return
        except trio.BusyResourceError:  # hypercorn is just closing it
            raise trio.BrokenResourceError("closed meanwhile") from None
        self.socket.close()
        raise trio.BrokenResourceError("the caller does not read")

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        """As the stream's."""
        return await self._stream.receive_some(max_bytes)

    async def send_eof(self) -> None:
        """As the stream's."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """As the stream's."""
        await self._stream.aclose()


def _settings() -> Config:
    made = Config()
    made.errorlog = made.accesslog = None
    made.keep_alive_timeout, made.read_timeout = IDLE_S, int(IDLE_S)
    made.keep_alive_max_requests = 1
    made.h11_max_incomplete_size = HEAD_BYTES_MAX
    made.h2_max_concurrent_streams, made.h2_max_header_list_size = 1, HEAD_BYTES_MAX
    made.include_server_header = False
    return made


@dataclass(slots=True)
class HttpServer:
    """Accepts connections and serves each once.

    Attributes:
        metrics: returns a page of metrics and its content type.
        state: returns the daemon's, as in `status`.
    """

    metrics: Render
    state: Callable[[], str]
    listening: socket.socket
    _places: trio.Semaphore = field(
        default_factory=lambda: trio.Semaphore(CONNECTIONS_MAX, max_value=CONNECTIONS_MAX)
    )
    _sockets: set[trio.socket.SocketType] = field(default_factory=set)
    _config: Config = field(default_factory=_settings)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Accept until cancelled; then open connections are cut off."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self.listening))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hang_up_at_the_end)
            task_status.started()
            while True:
                await self._places.acquire()
                stream = await self._accept(listener)
                nursery.start_soon(self._serve, stream)

    def _server(self, stream: trio.SocketStream) -> TCPServer:
        router = _router(self.metrics, self.state)
        return TCPServer(
            ASGIWrapper(router),  # type: ignore[arg-type]  # the same by another library
            self._config,
            WorkerContext(None),
            ConnectionState({}),
            BoundedStream(stream),  # type: ignore[arg-type]  # has what is used of a stream
        )

    async def _hang_up_at_the_end(self) -> None:
        """Close sockets under tasks whose sends are shielded: closing ends them."""
        try:
            await trio.sleep_forever()
        finally:
            for sock in self._sockets:
                sock.close()

    @staticmethod
    async def _accept(listener: trio.SocketListener) -> trio.SocketStream:
        is_failing = False  # said once, until somebody comes through
        while True:
            try:
                return await listener.accept()
            except OSError as error:
                if not is_failing:
                    log.warning("accept.failed", reason=error.strerror)
                is_failing = True
                await trio.sleep(ACCEPT_BACKOFF_S)

    async def _serve(self, stream: trio.SocketStream) -> None:
        free_s = trio.current_time() + HOLD_S
        self._sockets.add(stream.socket)
        try:
            with trio.move_on_after(LIFE_S):
                await self._server(stream).run()
        except Exception as error:  # noqa: BLE001  # of a caller's making: one connection's end
            log.warning("http.broken", reason=repr(error))
        finally:
            self._sockets.discard(stream.socket)
            stream.socket.close()
        await trio.sleep_until(free_s)
        self._places.release()
