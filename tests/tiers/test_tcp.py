"""Fetches over TCP: bytes are right or runs have failed, and nothing is written afterwards."""

import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.tiers.peers import (
    LATER_S,
    MARK,
    MIB,
    PATIENCE_S,
    Memory,
    arrived_right,
    condition,
    fetch_of,
    is_untouched,
    landing_pool,
    owner_pool,
    rows,
    shuffled,
)
from trikv.address import Address
from trikv.core.chunks import Runs
from trikv.tiers import tcp, tcpframes, tcpowner
from trikv.tiers.peer import Outcome
from trikv.tiers.tcp import TcpTransport
from trikv.tiers.tcpowner import TcpOwner


@dataclass(eq=False)
class Rig:
    owner: TcpOwner
    source: Memory
    pool: Memory
    address: Address
    transport: TcpTransport
    made: list[TcpTransport] = field(default_factory=list)

    def reader(self, address: Address, **options: float) -> TcpTransport:
        made = TcpTransport(address, self.pool, limiter=trio.CapacityLimiter(8), **options)  # type: ignore[arg-type]
        self.made.append(made)
        return made

    def lend(self, runs: Runs) -> bytes:
        return self.owner.lend(runs[:, [0, 2]])


@asynccontextmanager
async def rig(size: int = 32 * MIB) -> AsyncIterator[Rig]:
    source, pool = owner_pool(size), landing_pool(size)
    owner = TcpOwner(source, limiter=trio.CapacityLimiter(8))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(owner.run, Address(host="127.0.0.1"))
        address = Address(host="127.0.0.1", port=port)
        transport = TcpTransport(address, pool, limiter=trio.CapacityLimiter(8))
        world = Rig(owner, source, pool, address, transport, [transport])
        try:
            yield world
        finally:
            for one in world.made:
                await one.aclose()
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 20 * MIB), (400, 64 << 10), (3, 5_001)])
async def test_runs_arrive(count: int, size: int) -> None:
    async with rig() as world:
        runs = shuffled(world.pool, count=count, size=size)
        for _ in range(2):  # over new streams, then over the same again
            world.pool.memory[:] = MARK
            fetch = fetch_of(runs, world.lend(runs))
            await world.transport.fetch(fetch)
            assert (fetch.outcome == Outcome.ARRIVED).all()
            assert all(arrived_right(fetch, world.source, world.pool))
            assert (world.pool.memory == MARK).sum() == len(world.pool.memory) - count * size
            await world.owner.withdraw(fetch.token)


async def test_streams_are_used_again_and_are_bounded() -> None:
    async with rig() as world:
        runs = shuffled(world.pool, count=32, size=MIB)
        token = world.lend(runs)
        fetches = [fetch_of(runs[n::4], token) for n in range(4)]
        async with trio.open_nursery() as nursery:
            for fetch in fetches:
                nursery.start_soon(world.transport.fetch, fetch)
        assert all((fetch.outcome == Outcome.ARRIVED).all() for fetch in fetches)
        assert all(all(arrived_right(one, world.source, world.pool)) for one in fetches)
        assert 0 < world.owner._connections <= 2 * tcp.STREAMS
        before = world.owner._connections
        await world.transport.fetch(again := fetch_of(runs, token))
        assert (again.outcome == Outcome.ARRIVED).all()
        assert world.owner._connections == before


@pytest.mark.parametrize("token", [b"", b"\x5a" * 16, bytes(16)])
async def test_without_the_right_token_nothing_comes(token: bytes) -> None:
    async with rig() as world:
        runs = shuffled(world.pool, count=4, size=MIB)
        world.lend(runs)
        fetch = fetch_of(runs, token.ljust(16, b"\0"))
        await world.transport.fetch(fetch)
        assert (fetch.outcome == Outcome.FAILED).all()
        assert is_untouched(fetch, world.pool)


@pytest.mark.parametrize(
    "reach", [(0, MIB + 1), (MIB - 1, 2), (MIB, 1), (5 * MIB, 8), (2 * MIB - 1, 1)]
)
async def test_a_token_covers_its_runs_and_no_byte_more(reach: tuple[int, int]) -> None:
    async with rig() as world:
        token = world.lend(np.array([(0, 0, MIB), (2 * MIB, 0, MIB), (3 * MIB, 0, MIB)]))
        begin, size = reach
        fetch = fetch_of(rows(world.pool, (begin, 0, size)), token)
        await world.transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert world.pool.memory[size - 1] == MARK  # the byte that is not lent
        both = fetch_of(rows(world.pool, (0, 0, MIB), (2 * MIB + 8, 2 * MIB, MIB)), token)
        await world.transport.fetch(both)  # neighbours that are lent are one
        assert (both.outcome == Outcome.ARRIVED).all()


async def test_a_token_withdrawn_sends_no_further_byte() -> None:
    """The owner's pages are overwritten the moment `withdraw` returns: none of that may come."""
    async with rig() as world:
        token = world.lend(np.array([(0, 0, 32 * MIB)]))
        async with await trio.open_tcp_stream(world.address.host, world.address.port) as stream:
            for number in range(2):
                piece = np.array([(number * 16 * MIB, 16 * MIB)], np.int64)
                await stream.send_all(tcpframes.pack_request(number, token, piece))
            await condition(lambda: bool(world.owner._lent[token].lines))
            got = await exactly(stream, MIB)  # it sends, and waits for us in the midst of it
            with trio.fail_after(PATIENCE_S):
                await world.owner.withdraw(token)
            world.source.memory[:] = MARK + 1
            with contextlib.suppress(trio.BrokenResourceError):
                while data := await stream.receive_some(MIB):
                    got += data
        assert MIB <= len(got) < 16 * MIB
        sent = np.frombuffer(got, np.uint8)[tcpframes.REPLY_BYTES :]
        assert not (sent == MARK + 1).any()
        fetch = fetch_of(rows(world.pool, (0, 0, MIB)), token)
        await world.transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]


async def test_a_fetch_does_not_return_before_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is held up writes when it goes on: until then its pages are not given back."""
    is_in, may_go, returned = threading.Event(), threading.Event(), []
    receive = tcp.Stream._receive

    def slow(self: tcp.Stream, work: tcp.Work, number: int, first: int, last: int) -> None:
        is_in.set()
        may_go.wait(PATIENCE_S)
        receive(self, work, number, first, last)

    monkeypatch.setattr(tcp.Stream, "_receive", slow)
    async with rig(MIB) as world:
        runs = rows(world.pool, (0, 0, MIB))
        fetch = fetch_of(runs, world.lend(runs))
        scope = trio.CancelScope()

        async def run() -> None:
            with scope:
                await world.transport.fetch(fetch)
            returned.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await condition(is_in.is_set)
            scope.cancel()
            await trio.sleep(0.1)
            assert not returned
            may_go.set()
        assert returned
        world.pool.memory[:] = MARK
        await trio.sleep(0.1)
        assert is_untouched(fetch, world.pool)


async def test_a_fetch_cancelled_writes_nothing_afterwards() -> None:
    async with trickling_owner() as (address, source):
        pool = landing_pool()
        transport = TcpTransport(address, pool, limiter=trio.CapacityLimiter(8))
        fetch = fetch_of(rows(pool, (0, 0, 32 * MIB)), bytes(16))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.fetch, fetch)
            await condition(lambda: bool((pool.memory != MARK).any()))
            nursery.cancel_scope.cancel()
        assert (fetch.outcome == Outcome.FAILED).all()
        source.hurry = True  # all that may still be on its way comes at once
        pool.memory[:] = MARK
        await trio.sleep(0.3)
        assert is_untouched(fetch, pool)
        await transport.aclose()


async def test_a_deadline_keeps_what_has_come_and_ends_the_rest(
    monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1
    monkeypatch.setattr(tcp, "FRAME_BYTES", 4 * MIB)
    async with trickling_owner(whole_frames=2) as (address, source):
        pool = landing_pool()
        transport = TcpTransport(address, pool, limiter=trio.CapacityLimiter(8), streams=1)
        runs = rows(pool, *[(n * MIB, (31 - n) * MIB, MIB) for n in range(32)])
        fetch = fetch_of(runs, bytes(16))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transport.fetch, fetch)
            await condition(lambda: any(arrived_right(fetch, source.pool, pool)))
            await trio.sleep(0.5)  # until that is known
            mock_clock.jump(LATER_S)
        arrived = fetch.outcome == Outcome.ARRIVED
        assert 0 < arrived.sum() < 32
        right = np.array(arrived_right(fetch, source.pool, pool))
        assert right[arrived].all()
        source.hurry = True
        late = fetch_of(runs[~arrived])
        pool.memory[:] = MARK
        await trio.sleep(0.3)
        assert is_untouched(late, pool)
        await transport.aclose()


@dataclass(eq=False)
class Trickle:
    """An owner that speaks rightly, but slowly."""

    pool: Memory
    whole_frames: int
    hurry: bool = False

    async def serve(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            for done in range(1_000):
                head = await exactly(stream, tcpframes.REQUEST_BYTES)
                request = tcpframes.read_request(head)
                body = await exactly(stream, tcpframes.body_bytes(request))
                pieces = tcpframes.read_pieces(request, body)
                size = int(pieces[:, 1].sum())
                await stream.send_all(
                    tcpframes.pack_reply(request.number, tcpframes.Status.OK, size)
                )
                data = b"".join(self.pool.memory[a : a + n].tobytes() for a, n in pieces.tolist())
                step = size if done < self.whole_frames else 64 << 10
                for at in range(0, size, step):
                    await stream.send_all(data[at : at + step])
                    if not self.hurry and done >= self.whole_frames:
                        await trio.sleep(0.05)


async def exactly(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        got = await stream.receive_some(size - len(data))
        if not got:
            raise trio.ClosedResourceError
        data += got
    return data


@asynccontextmanager
async def trickling_owner(whole_frames: int = 0) -> AsyncIterator[tuple[Address, Trickle]]:
    source = Trickle(owner_pool(), whole_frames)
    async with listening(source.serve) as address:
        yield address, source


@asynccontextmanager
async def listening(
    serve: Callable[[trio.SocketStream], object],
) -> AsyncIterator[Address]:
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        yield Address(host="127.0.0.1", port=port)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("lie", ["noise", "silence", "close", "length", "number", "sum", "status"])
async def test_an_owner_that_lies_costs_a_miss(lie: str) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            head = tcpframes.read_request(await exactly(stream, tcpframes.REQUEST_BYTES))
            pieces = tcpframes.read_pieces(head, await exactly(stream, tcpframes.body_bytes(head)))
            size = int(pieces[:, 1].sum())
            ok = tcpframes.Status.OK
            if lie == "close":
                return
            if lie == "silence":
                await trio.sleep_forever()
            reply = {
                "noise": os.urandom(tcpframes.REPLY_BYTES),
                "length": tcpframes.pack_reply(head.number, ok, size + 1),
                "number": tcpframes.pack_reply(head.number + 1, ok, size),
                "sum": tcpframes.pack_reply(head.number, ok, size)[:-1] + b"\0",
                "status": tcpframes.pack_reply(head.number, 9, 0),  # type: ignore[arg-type]
            }[lie]
            await stream.send_all(reply + bytes(size))

    async with listening(serve) as address:
        pool = landing_pool()
        transport = TcpTransport(
            address, pool, limiter=trio.CapacityLimiter(8), streams=1, stall_s=1
        )
        fetch = fetch_of(rows(pool, (0, 0, 4_096)), bytes(16))
        with trio.fail_after(PATIENCE_S):
            await transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert is_untouched(fetch, pool)
        await transport.aclose()


async def test_an_owner_that_breaks_off_is_asked_again() -> None:
    """Streams that died while they were idle, all of them, cost nothing but new ones."""
    async with rig() as world:
        runs = shuffled(world.pool, count=16, size=MIB)
        token = world.lend(runs)
        for stream in [await world.transport._connect() for _ in range(2 * tcp.STREAMS)]:
            assert stream is not None
            stream._sock.shutdown(socket.SHUT_RDWR)
            world.transport._idle.append(stream)
        world.pool.memory[:] = MARK
        fetch = fetch_of(runs, token)
        await world.transport.fetch(fetch)
        assert (fetch.outcome == Outcome.ARRIVED).all()
        assert all(arrived_right(fetch, world.source, world.pool))


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = Address(host="127.0.0.1", port=taken.getsockname()[1])
        pool = landing_pool()
        transport = TcpTransport(address, pool, limiter=trio.CapacityLimiter(8))
        fetch = fetch_of(rows(pool, (0, 0, MIB)), bytes(16))
        with trio.fail_after(PATIENCE_S):
            await transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]


async def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpowner, "STALL_S", 2.0)
    async with rig() as world:
        token = world.lend(np.array([(0, 0, 32 * MIB)]))
        with socket.create_connection((world.address.host, world.address.port)) as sock:
            for number in range(2):
                piece = np.array([(0, 16 * MIB)], np.int64)
                sock.sendall(tcpframes.pack_request(number, token, piece))
            await condition(lambda: bool(world.owner._lent[token].lines))
            await condition(lambda: world.owner._connections == 0)
        assert not world.owner._lent[token].lines


async def test_connections_beyond_the_bound_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcpowner, "CONNECTIONS_MAX", 2)
    async with rig() as world:
        held = [trio.socket.socket() for _ in range(3)]
        for sock in held:
            await sock.connect((world.address.host, world.address.port))
        with trio.fail_after(PATIENCE_S):
            assert await held[2].recv(1) == b""
        assert world.owner._connections == 2
        for sock in held:
            sock.close()
        await condition(lambda: world.owner._connections == 0)
        runs = shuffled(world.pool, count=4, size=MIB)
        fetch = fetch_of(runs, world.lend(runs))
        await world.transport.fetch(fetch)
        assert (fetch.outcome == Outcome.ARRIVED).all()


@given(noise=st.binary(min_size=1, max_size=120), at=st.integers(0, 80))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_owner_survives_any_bytes(noise: bytes, at: int) -> None:
    async def main() -> None:
        async with rig(MIB) as world:
            token = world.lend(np.array([(0, 0, MIB)]))
            data = bytearray(tcpframes.pack_request(0, token, np.array([(0, 4_096)], np.int64)))
            data[at : at + len(noise)] = noise
            stream = await trio.open_tcp_stream(world.address.host, world.address.port)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(bytes(data))
            await stream.aclose()
            fetch = fetch_of(rows(world.pool, (0, 0, 4_096)), token)
            await world.transport.fetch(fetch)
            assert fetch.outcome.tolist() == [Outcome.ARRIVED]

    trio.run(main)
