"""The socket and the loop under capnp, without capnp but in the last test."""

import asyncio
import contextlib
import math
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import capnp
import pytest

from trikv import streams
from trikv.streams import STEPS_MAX, Answered, Later, Loop
from trikv.wire import SCHEMA

BUFFER = 1 << 16


class Protocol(asyncio.BufferedProtocol):
    """As pycapnp's: wants bytes only when told so."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.buffer = bytearray(BUFFER)
        self.read = bytearray()
        self.events: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.pause_reading()

    def get_buffer(self, sizehint: int) -> bytearray:
        del sizehint
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.read += self.buffer[:nbytes]
        self.transport.pause_reading()

    def eof_received(self) -> None:
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append(f"lost {exc}" if exc else "lost")

    def pause_writing(self) -> None:
        self.events.append("full")

    def resume_writing(self) -> None:
        self.events.append("empty")


def message(*segments: bytes) -> list[bytes]:
    """A message as capnp hands it over: the table of its segments, then each."""
    count = len(segments)
    table = struct.pack(f"<{count + 1}I", count - 1, *(len(one) // 8 for one in segments))
    return [table + b"\0" * (-len(table) % 8), *segments]


def run(main: Callable[[Protocol, socket.socket], Awaitable[None]], kind: int) -> Protocol:
    """Run with a protocol on our transport at one end and a plain socket at the other."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.settimeout(0)

    async def with_ends() -> Protocol:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(Protocol, sock=ours)
        await main(protocol, theirs)
        protocol.transport.close()
        await turns()
        return protocol

    with theirs, asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(with_ends())


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_message_is_sent_in_one_go() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        pieces = message(b"12345678", b"abcdefgh" * 3)
        for piece in [*pieces, *message(b"second..")]:
            protocol.transport.write(piece)
        assert theirs.recv(BUFFER) == b"".join(pieces)
        assert theirs.recv(BUFFER) == b"".join(message(b"second.."))

    run(main, socket.SOCK_SEQPACKET)  # where each `recv` gets what one `send` has sent


def test_what_the_system_does_not_take_waits_and_is_sent_in_order() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        sent = b""
        for byte in b"abc":
            pieces = message(bytes([byte]) * (1 << 20), bytes([byte - 32]) * 8)
            sent += b"".join(pieces)
            for piece in pieces:
                protocol.transport.write(piece)
        assert protocol.events == ["full"]
        got = b""
        while len(got) < len(sent):
            got += theirs.recv(1 << 20)
            await turns()
        assert got == sent
        assert protocol.events == ["full", "empty"]

    run(main, socket.SOCK_STREAM)


def test_nothing_is_read_before_the_protocol_has_a_buffer() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        for part in (b"one", b"two"):
            theirs.send(part)
            await turns()
            assert protocol.read == b""
            protocol.transport.resume_reading()
            await turns()
            assert protocol.read == part
            protocol.read.clear()

    run(main, socket.SOCK_STREAM)


def test_the_other_sides_end_is_told_once_and_after_its_bytes() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        theirs.send(b"last")
        theirs.shutdown(socket.SHUT_WR)
        protocol.transport.resume_reading()
        await turns()
        assert (protocol.read, protocol.events) == (b"last", [])
        protocol.transport.resume_reading()
        await turns()

    assert run(main, socket.SOCK_STREAM).events == ["eof", "lost"]


def test_writing_to_nobody_ends_the_connection() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        theirs.close()
        for piece in message(b"12345678"):
            protocol.transport.write(piece)
        assert protocol.transport.is_closing()

    protocol = run(main, socket.SOCK_STREAM)
    assert len(protocol.events) == 1
    assert "Broken pipe" in protocol.events[0]


def test_closing_forgets_what_was_not_sent() -> None:
    async def main(protocol: Protocol, theirs: socket.socket) -> None:
        for piece in message(b"x" * (1 << 22)):
            protocol.transport.write(piece)
        protocol.transport.close()
        await turns()
        with contextlib.suppress(BlockingIOError):
            theirs.settimeout(0)
            while theirs.recv(1 << 20):
                pass  # what the system had taken, then the end

    assert run(main, socket.SOCK_STREAM).events == ["full", "lost"]


def test_what_is_wanted_soon_runs_before_the_sockets_are_looked_at() -> None:
    ran: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.set_exception_handler(lambda _loop, _context: ran.append(-1))

        def work() -> None:
            loop.call_soon(ran.append, 1)
            loop.call_soon(ran.append, 2).cancel()
            loop.call_soon(lambda: loop.call_soon(ran.append, 3))
            assert ran == []

        loop.run_on(work)
        assert ran == [1, 3]

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


def test_what_is_to_run_last_waits_for_all_that_is_to_run_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "STEPS_S", math.inf)
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)

        def work() -> None:
            loop.call_last(lambda: order.append("last"))
            loop.call_soon(loop.call_soon, order.append, "soon too")
            loop.call_soon(order.append, "soon")
            assert loop.has_soon

        loop.run_on(work)
        assert order == ["soon", "soon too", "last"]
        assert not loop.has_soon
        for _ in range(STEPS_MAX + 2):
            loop.call_last(lambda: order.append("late"))
        await turns(STEPS_MAX + 4)
        assert order[3:] == (STEPS_MAX + 2) * ["late"]

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("is_inside", [False, True])
def test_what_comes_last_comes_after_sockets(
    monkeypatch: pytest.MonkeyPatch, *, is_inside: bool
) -> None:
    monkeypatch.setattr(streams, "STEPS_S", math.inf)
    order: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop.add_reader(ours, lambda: (order.append("call"), loop.remove_reader(ours)))

            def work() -> None:
                theirs.send(b"call")
                for _ in range(STEPS_MAX + 1 if is_inside else 1):
                    loop.call_last(lambda: order.append("last"))

            if is_inside:
                loop.run_on(work)
                order.clear()
            else:
                work()
            await turns(3)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
    assert order == ["call", "last"]


def test_work_without_end_leaves_others_their_turn() -> None:
    ran = 0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)

        def again() -> None:
            nonlocal ran
            ran += 1
            if ran < 10 * STEPS_MAX:
                loop.call_soon(again)

        loop.run_on(again)
        assert ran == STEPS_MAX + 1
        await turns(10 * STEPS_MAX)
        assert ran == 10 * STEPS_MAX

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())


class Servant(SCHEMA.Session.Server):
    """Answers before it returns, or when the test wants it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Later]] = []

    def load_context(self, context: Any) -> Later:
        self.calls.append((context.results.init("reply"), Later()))
        return self.calls[-1][1]

    def heartbeat_context(self, context: Any) -> Answered:
        del context
        return Answered()

    def reset_context(self, context: Any) -> Answered:
        context.results.init("reply").init("ok").droppedCount = 7
        return Answered()

    def release_context(self, context: Any) -> Answered:
        del context
        raise RuntimeError("a bug")


@contextlib.asynccontextmanager
async def session_with(servant: Servant) -> AsyncIterator[Any]:
    """A session of it, over a socket."""
    ends = socket.socketpair()
    async with capnp.kj_loop():
        streams = []
        for one in ends:
            one.settimeout(0)
            streams.append(await capnp.AsyncIoStream.create_unix_connection(sock=one))
        server = capnp.TwoPartyServer(streams[0], bootstrap=servant)
        client = capnp.TwoPartyClient(streams[1])
        try:
            yield client.bootstrap().cast_as(SCHEMA.Session)
        finally:
            for stream in streams:
                stream.close()
            client.close()
            server.close()


def on_both_loops(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for factory in (Loop, asyncio.SelectorEventLoop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())


async def error_of(call: Any) -> str:
    try:
        await call
    except capnp.KjException as exc:
        return str(exc)
    raise AssertionError("no error")


def test_a_call_that_was_answered_at_once_is_right_on_any_loop() -> None:
    async def main() -> None:
        async with session_with(Servant()) as session:
            await session.heartbeat()
            assert (await session.reset()).reply.ok.droppedCount == 7
            assert "a bug" in await error_of(session.release(["r"]))
            await session.heartbeat()

    on_both_loops(main)


def test_a_call_that_is_answered_later_is_right_on_any_loop() -> None:
    async def main() -> None:
        servant = Servant()
        async with session_with(servant) as session:
            first, second = session.load({}), session.load({})
            await session.heartbeat()
            (one, to_end), (_, to_fail) = servant.calls
            one.init("ok").failed = b"1234"
            to_end.end()
            to_fail.end(RuntimeError("a bug"))
            assert bytes((await first).reply.ok.failed) == b"1234"
            assert "a bug" in await error_of(second)

            given_up = session.load({})
            await session.heartbeat()
            assert len(servant.calls) == 3
            given_up.cancel()
            await session.heartbeat()
            assert servant.calls[2][1].cancelled()
            servant.calls[2][1].end()

            left = session.load({})  # to the end of the connection
            await session.heartbeat()
        assert servant.calls[3][1].cancelled()
        servant.calls[3][1].end(RuntimeError("too late"))
        del left

    on_both_loops(main)
