"""Trio as asyncio's guest: without Trio's thread, and with it where Trio is not as we know it."""

import asyncio
import functools
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import capnp
import outcome
import pytest
import trio
import trio.lowlevel

from tests.conftest import PATIENCE_S
from trikv.process import edges, guest
from trikv.process.guest import TURNS_MAX, TURNS_S, Guest, Host
from trikv.streams import Loop


def in_guest(
    work: Callable[[Guest], Any],
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.SelectorEventLoop,
) -> Any:
    """Run `work` on asyncio beside a Trio run that takes calls until it returns."""

    async def main() -> Any:
        closing, here = trio.Event(), Guest()

        async def run_trio(open_calls: Callable[[trio.Nursery], None]) -> None:
            async with trio.open_nursery() as calls:
                open_calls(calls)
                await closing.wait()

        await here.start(run_trio)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(here)
        finally:
            here.close_calls()
            closing.set()
            (await here.ended).unwrap()

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def threads() -> set[str]:
    return {one.name for one in threading.enumerate() if "Trio" in one.name}


async def _all_kinds_of_waits(here: Guest) -> str:
    async def nap(seconds: float) -> float:
        await trio.sleep(seconds)
        return seconds

    async def by_thread() -> int:
        return await trio.to_thread.run_sync(lambda: 5)

    async def by_socket() -> bytes:
        one, two = trio.socket.socketpair()
        with one, two:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.send, b"x")
                return await two.recv(1)

    assert await here.run(nap, 0) == 0
    assert await here.run(nap, 0.05) == 0.05
    assert await here.run(by_thread) == 5
    assert await here.run(by_socket) == b"x"
    naps = [here.run(nap, 0.001 * at) for at in range(5 * TURNS_MAX)]
    assert len(await asyncio.gather(*naps)) == 5 * TURNS_MAX
    cancelled = asyncio.ensure_future(here.run(nap, 100))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    return "all"


def test_all_kinds_of_waits_end() -> None:
    assert in_guest(_all_kinds_of_waits) == "all"
    assert guest.TRIO.start_thread_soon is guest.THREADED


@pytest.mark.parametrize("by_event", [False, True], ids=["by a timer", "by an event"])
def test_an_answer_does_not_wait_for_what_else_trio_has_to_do(*, by_event: bool) -> None:
    order: list[str] = []

    async def use(here: Guest) -> None:
        loop = asyncio.get_running_loop()

        async def answer() -> None:
            one, two = trio.socket.socketpair()
            with one, two:
                if by_event:
                    loop.call_later(0.01, one._sock.send, b"x")
                    await two.recv(1)
                else:
                    await trio.sleep(0.01)
                loop.call_soon(loop.call_soon, order.append, "answer")
                for _ in range(3):
                    await trio.lowlevel.checkpoint()
                    order.append("Trio")

        await here.run(answer)

    in_guest(use, Loop)
    assert order == ["answer", *3 * ["Trio"]]


class LongTurns:
    """Turns of Trio that each take longer than all together may."""

    def __init__(self) -> None:
        self.count = 0

    async def take(self) -> None:
        while self.count < TURNS_MAX:
            self.count += 1
            until_s = time.perf_counter() + 2 * TURNS_S
            while time.perf_counter() < until_s:
                pass
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("factory", [asyncio.SelectorEventLoop, Loop])
def test_long_turns_of_trio_let_asyncio_have_its_own(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A call that comes in while Trio works for milliseconds is not the sixteenth to be served."""
    turns = LongTurns()

    async def work(here: Guest) -> int:
        seen = asyncio.get_running_loop().create_future()

        async def busy() -> None:
            loop.call_soon(lambda: seen.set_result(turns.count))
            await turns.take()

        loop = asyncio.get_running_loop()
        ended = asyncio.ensure_future(here.run(busy))
        at = await seen
        await ended
        return int(at)

    assert in_guest(work, factory) <= 2


def test_long_turns_of_trio_let_sockets_have_their_own() -> None:
    """The same, where an event has caused them and the call lies in a socket."""
    turns = LongTurns()

    async def work(here: Guest) -> int:
        loop = asyncio.get_running_loop()
        seen = loop.create_future()
        ours, theirs = socket.socketpair()
        loop.add_reader(ours, lambda: seen.done() or seen.set_result(turns.count))

        async def busy() -> None:
            await trio.sleep(0.02)  # so that an event ends the wait
            theirs.send(b"call")
            await turns.take()

        with ours, theirs:
            ended = asyncio.ensure_future(here.run(busy))
            at = await seen
            await ended
            loop.remove_reader(ours)
        return int(at)

    assert in_guest(work, Loop) <= 2


def test_they_end_where_trio_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "THREADED", None)
    assert in_guest(_all_kinds_of_waits) == "all"


def test_they_end_where_trio_waits_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function is asked with a callable that is not the one we know: the thread stays."""
    real = Host._wait

    def changed(self: Host, poll: Callable[[], Any], deliver: Any, *rest: Any) -> None:
        real(self, functools.partial(poll), deliver, *rest)

    monkeypatch.setattr(Host, "_wait", changed)
    assert in_guest(_all_kinds_of_waits) == "all"


def test_they_end_where_trio_s_names_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Host._wait

    def changed(self: Host, poll: Callable[[], Any], deliver: Any, *rest: Any) -> None:
        def look() -> Any:
            return poll()

        real(self, look, deliver, *rest)

    monkeypatch.setattr(Host, "_wait", changed)
    assert in_guest(_all_kinds_of_waits) == "all"


def test_what_the_main_task_raises_reaches_the_host() -> None:
    async def main() -> None:
        async def run_trio(open_calls: Callable[[trio.Nursery], None]) -> None:
            del open_calls
            await trio.lowlevel.checkpoint()
            raise KeyError("why")

        await Guest().start(run_trio)

    with pytest.raises(KeyError, match="why"):
        asyncio.run(main())
    assert outcome.capture(lambda: guest.TRIO.start_thread_soon).unwrap() is guest.THREADED


def test_both_ends_ask_whether_a_silent_host_is_there() -> None:
    """One without power says nothing: its connections would be kept until there is no room."""

    async def ends() -> None:
        async with capnp.kj_loop():
            with socket.create_server(("127.0.0.1", 0)) as server:
                sock = socket.create_connection(server.getsockname())
            sock.setblocking(False)  # noqa: FBT003  # positional only
            stream = await edges.open_stream(sock)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            wanted = [(socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)]
            wanted.append((socket.TCP_USER_TIMEOUT, 11_000))
            for option, value in wanted:
                assert sock.getsockopt(socket.IPPROTO_TCP, option) == value
            stream.close()

    asyncio.run(ends())
