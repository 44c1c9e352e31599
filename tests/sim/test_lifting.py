"""Reads for other nodes beside those of engines: in which order, for how long, and what is left."""

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.lowlevel

from tests.sim.month import PAGE, Host
from tests.sim.test_fetching import BYTE_S, ME, ONE, WHOLE, ask, live, save, wait, words
from tests.sim.test_world import quiet
from trikv.core.lending import Lending
from trikv.core.lifting import Lift, Lifting
from trikv.core.shared import Shared
from trikv.core.words import PeerId, RequestId
from trikv.nursery import lifting as module
from trikv.nursery import prefetching
from trikv.nursery.lifting import Lifter

assert quiet  # the fixture is for this file too

ORIGIN = bytes([1]) * 20
LOAN_S = 1_000.0
SECOND = [1, 3, 6]


@pytest.fixture(autouse=True)
def pages_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "READ_BYTES_MAX", PAGE)
    monkeypatch.setattr(prefetching, "LIFT_BYTES_MAX", PAGE)
    monkeypatch.setattr(prefetching, "READERS", 1)
    monkeypatch.setattr(module, "LIFT_S", 100.0)


class Owner:
    """The host's side of loans, without streams."""

    def __init__(self, host: Host, bytes_max: int = 100 * PAGE) -> None:
        self.host = host
        shared = Shared(host.cache, host.below, lift_bytes_max=bytes_max)
        shared.open_space(ONE, ORIGIN)
        self.lending = Lending(host.cache, shared)
        self.lifting = Lifting(host.cache, host.below, shared, self.lending, bytes_max)
        self.lifter = Lifter(self.lifting, host.prefetching)
        self.took: dict[str, float] = {}

    async def lift(self, nodes: list[int], ttl_s: float = LOAN_S) -> Lift | None:
        return await self.lifter.lift(PeerId(1), ORIGIN, words(nodes), ttl_s)

    async def lend(self, name: str, nodes: list[int], ttl_s: float = LOAN_S) -> None:
        """A whole loan; which blocks it was of is told in `took`, with when it was made."""
        lift = await self.lift(nodes, ttl_s)
        loan = self.lending.lend(
            PeerId(1), ORIGIN, words(nodes), ttl_s=ttl_s, now_s=trio.current_time()
        )
        self.took[f"{name}: {0 if loan is None else len(loan.positions)}"] = trio.current_time()
        if loan is not None:
            grant = self.lending.release(PeerId(1), loan.grant.id)[1]
            assert grant is not None
            self.lending.unpin(grant)
        if lift is not None:
            self.lifter.end(lift)

    def check(self) -> None:
        assert self.lifting.bytes == self.lifting.count == 0
        assert not self.lifting._lifts
        assert not self.host.cache.blocks.pins.any()
        assert not self.host.below.reading.marks.any()
        (queue,) = self.host.prefetching._queues
        assert queue.lifting == queue.bytes == len(queue.lifts) == 0


def run(body: Callable[[Owner], Awaitable[None]], bytes_max: int = 100 * PAGE) -> Host:
    async def lived(host: Host) -> None:
        owner = Owner(host, bytes_max)
        await body(owner)
        owner.check()

    return live(lived)


def test_what_an_engine_waits_for_is_read_before_what_a_peer_asks_for() -> None:
    async def body(owner: Owner) -> None:
        begin_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.lend, "a", WHOLE)
            await trio.sleep(0.5)  # the first block, which both want, is being read
            ask(owner.host, "b", SECOND)
            took_s = await wait(owner.host, SECOND, 60.0)
            assert took_s == pytest.approx(2.5, abs=0.1)
        assert owner.took["a: 5"] - begin_s == pytest.approx(7.0, abs=0.1)

    run(body)


def test_an_engine_that_wants_what_is_read_for_a_peer_waits_in_its_own_turn() -> None:
    async def body(owner: Owner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.lend, "a", WHOLE)
            await trio.sleep(0.5)
            nursery.start_soon(owner.lend, "b", SECOND)
            await trio.lowlevel.checkpoint()
            assert owner.host.prefetching.seconds() == 0.0  # peers' reads hold up nobody
            ask(owner.host, "c", SECOND)
            assert 1 < owner.host.prefetching.seconds() <= 2
            assert await wait(owner.host, SECOND, 60.0) == pytest.approx(2.5, abs=0.1)
            assert ask(owner.host, "d", SECOND) == 3
            owner.host.cache.release_instance(ME)
        assert set(owner.took) == {"a: 5", "b: 3"}

    host = run(body)
    assert host.fakes[0].bytes_read == 7 * PAGE  # each block once


def test_a_loan_waits_no_longer_than_its_time_and_what_was_not_begun_is_not_read() -> None:
    async def body(owner: Owner) -> None:
        begin_s = trio.current_time()
        await owner.lend("a", WHOLE, ttl_s=10.0)  # a quarter of which is for reading
        assert owner.took == {"a: 2": pytest.approx(begin_s + 2.5)}
        await trio.sleep(10)
        owner.check()
        await owner.lend("b", WHOLE)  # the third block had been begun
        assert owner.took["b: 5"] == pytest.approx(begin_s + 14.5, abs=0.1)

    host = run(body)
    assert host.fakes[0].bytes_read == 5 * PAGE


def test_an_engine_gets_what_a_peer_does_not_wait_for_any_more() -> None:
    async def body(owner: Owner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.lend, "a", WHOLE, 6.0)
            await trio.sleep(0.5)
            ask(owner.host, "b", WHOLE)
            assert await wait(owner.host, WHOLE, 60.0) == pytest.approx(4.5, abs=0.1)
            assert ask(owner.host, "b", WHOLE) == 5
            owner.host.cache.release_instance(ME)
        assert set(owner.took) == {"a: 1"}

    run(body)


def test_only_some_of_the_readers_read_for_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "READERS", 4)

    async def body(owner: Owner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.lend, "a", WHOLE)
            await trio.sleep(0.5)
            (queue,) = owner.host.prefetching._queues
            assert (queue.lifting, len(queue.lifts)) == (2, 3)

    run(body)


def test_a_call_that_is_cancelled_leaves_nothing_held() -> None:
    async def body(owner: Owner) -> None:
        with trio.move_on_after(1.5) as scope:
            await owner.lift(WHOLE)
        assert scope.cancelled_caught
        assert owner.lifting.count == 0
        await trio.sleep(5)
        owner.check()

    host = run(body)
    assert host.fakes[0].bytes_read == 2 * PAGE


def test_when_the_daemon_ends_nothing_more_is_begun() -> None:
    async def body(owner: Owner) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owner.lend, "a", SECOND)
            await trio.sleep(1.5)
            owner.host.prefetching.close()
            await owner.lend("late", [2, 4, 8])
        assert set(owner.took) == {"a: 3", "late: 0"}

    run(body)


def test_without_a_budget_nothing_is_read_for_others() -> None:
    async def body(owner: Owner) -> None:
        assert await owner.lift(WHOLE) is None
        save(owner.host, "c", [100])
        await owner.lend("c", [100])
        assert set(owner.took) == {"c: 1"}
        owner.host.cache.release(ME, RequestId("c"))

    host = run(body, bytes_max=0)
    assert host.fakes[0].bytes_read == 0


assert BYTE_S * PAGE == 1.0  # a block takes a second: the times above
