"""Which sockets the loop looks at first, where many have something."""

import asyncio
import selectors
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import capnp
import pytest

from trikv.core.counters import CallCounts
from trikv.core.errors import BadRequestError
from trikv.nursery.rpc import SessionServant
from trikv.process.accepting import Connection, Listener
from trikv.streams import EVENTS_MAX, FewAtOnce, Loop
from trikv.wire import SCHEMA

COUNT = 3 * EVENTS_MAX + 1


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connected ones; the first of each has something to be read."""
    made = [socket.socketpair() for _ in range(COUNT)]
    for _, theirs in made:
        theirs.send(b"x")
    yield made
    for pair in made:
        for one in pair:
            one.close()


@pytest.fixture
def looks(pairs: list[tuple[socket.socket, socket.socket]]) -> Iterator[FewAtOnce]:
    selector = FewAtOnce()
    for ours, _ in pairs:
        selector.register(ours, selectors.EVENT_READ)
    yield selector
    selector.close()


def seen(looks: FewAtOnce) -> list[int]:
    return [key.fd for key, _ in looks.select(0)]


def test_a_burst_is_no_one_turn_and_nobody_is_left_out(
    looks: FewAtOnce, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    found: set[int] = set()
    for _ in range(COUNT):
        ready = seen(looks)
        assert len(set(ready)) == EVENTS_MAX
        found.update(ready)
    assert found == {ours.fileno() for ours, _ in pairs}
    for ours, _ in pairs[2:]:
        ours.recv(1)
    assert len(looks.select(0)) == 2


def test_who_asks_is_first_and_keeps_nobody_out(
    looks: FewAtOnce, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    """Not even those who ask without a pause."""
    askers = {ours.fileno() for ours, _ in pairs[-2:]}
    looks.askers |= askers
    found = set[int]()
    for _ in range(2 * COUNT):
        first, *others = seen(looks)
        assert first in askers
        found.update((first, *others))
    assert found == {ours.fileno() for ours, _ in pairs}
    for ours, _ in pairs[-2:]:
        ours.recv(1)
    assert len(set(seen(looks)) - askers) == EVENTS_MAX


def test_a_socket_that_is_not_watched_any_more_is_no_asker() -> None:
    """Its number may be that of another one soon."""
    loop = Loop()
    ours, theirs = socket.socketpair()
    try:
        loop.add_reader(ours, lambda: None)
        loop.prefer(ours)
        assert loop._looks.askers == {ours.fileno()}
        loop.remove_reader(ours)
        assert not loop._looks.askers
    finally:
        ours.close()
        theirs.close()
        asyncio.set_event_loop(None)
        loop.close()


class Door(Connection):
    """A connection to a session whose queries are refused."""

    def __init__(self) -> None:
        counters = SimpleNamespace(connection_refused_total=0, error_total=0)
        super().__init__(cast("Any", None), CallCounts(), counters)
        self.service = SimpleNamespace(tiers=None, query=refuse, heartbeat=lambda _: None)
        self.end_soon = lambda _: None

    def make_bootstrap(self) -> Any:
        return SessionServant(cast("Any", self), cast("Any", None))

    def close(self) -> None:
        pass


def refuse(*_: object) -> None:
    raise BadRequestError("not here")


@pytest.mark.parametrize("is_asking", [True, False])
def test_an_engine_that_has_asked_is_an_asker(*, is_asking: bool) -> None:
    """It waits for the answer of a query before it goes on; for those of saves it does not."""

    async def main() -> None:
        loop = cast("Loop", asyncio.get_running_loop())
        ours, theirs = socket.socketpair()
        for one in (ours, theirs):
            one.settimeout(0)
        async with capnp.kj_loop():
            listener = Listener(lambda _: Door(), cast("Any", None), Door(), connections_max=1)
            listener._spawn(listener._serve(ours))
            stream = await capnp.AsyncIoStream.create_unix_connection(sock=theirs)
            client = capnp.TwoPartyClient(stream)
            session = client.bootstrap().cast_as(SCHEMA.Session)
            await session.heartbeat()
            assert not loop._looks.askers
            if is_asking:
                answer = await session.query({"request": "r", "hashBytes": 32})
                assert answer.reply.error.message == "not here"
            await session.heartbeat()
            assert loop._looks.askers == ({ours.fileno()} if is_asking else set())
            stream.close()
            client.close()
            await listener.close()
            assert not loop._looks.askers

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(main())
