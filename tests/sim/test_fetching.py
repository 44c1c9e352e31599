"""Who waits for which read, in which order disks are read, and when waiting ends."""

import os
import random
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.sim.fake_disk import DiskFaults, Medium
from tests.sim.month import PAGE, Host, byte
from tests.sim.test_world import quiet
from trikv.core.calls import Query
from trikv.core.plans import Key
from trikv.core.words import InstanceName, RequestId, SpaceId, Words
from trikv.nursery import prefetching
from trikv.process.guest import TRIO

assert quiet  # the fixture is for this file too

ORDER = int(os.environ.get("TRIKV_ORDER", "1"))
"""From which Trio's order of tasks follows, so that a failure comes again."""
ONE = SpaceId(1)
ME = InstanceName("engine")
BYTE_S = 1 / PAGE  # a block takes a second
WHOLE = [1, 2, 4, 8, 16]


def words(nodes: list[int]) -> Words:
    return np.array([(node, 0, 0, 1) for node in nodes], np.uint64).reshape(-1, 4)


def live(body: Callable[[Host], Awaitable[None]], byte_s: float = BYTE_S) -> Host:
    """A host whose disk holds `WHOLE` and another path, with an empty pool."""

    async def main() -> Host:
        rng = random.Random(1)
        TRIO._r.seed(ORDER)
        mediums = [Medium(rng, 2, 512 << 10)]
        before = Host(rng, mediums, DiskFaults(), [1])
        async with trio.open_nursery() as nursery:
            await nursery.start(before.prefetching.run)
            await before.tiers[0].recover()
            for nodes in (WHOLE, [1, 3, 6]):
                save(before, str(nodes), nodes)
            await before.spilling.drain()
            nursery.cancel_scope.cancel()
        host = Host(rng, mediums, DiskFaults(byte_s=byte_s, late_s_mean=1e-6), [1])
        async with trio.open_nursery() as nursery:
            await nursery.start(host.prefetching.run)
            await host.tiers[0].recover()
            host.tiers[0].rate = 1 / byte_s
            await body(host)
            nursery.cancel_scope.cancel()
        assert host.audit() == 0
        return host

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def save(host: Host, request: str, nodes: list[int]) -> None:
    key = Key(ME, RequestId(request), ONE)
    plan = host.cache.prepare_save(key, words(nodes), rank=0, first=0, now_s=0.0)
    for offset, at in zip(plan.offsets.tolist(), plan.positions.tolist(), strict=True):
        host.pool[offset : offset + PAGE] = byte(1, nodes[at])
    host.cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
    host.cache.release(ME, RequestId(request))


def drop(host: Host, nodes: list[int]) -> None:
    """The pool has nobody's blocks any more."""
    host.cache.release_instance(ME)
    entries = host.cache.index.find(ONE, words(nodes))
    host.cache.room.orders[host.cache.spaces[ONE].shape].forget(entries)
    host.cache.room._evict(entries)


def ask(host: Host, request: str, nodes: list[int]) -> int:
    return host.query(Key(ME, RequestId(request), ONE), words(nodes))


async def wait(host: Host, nodes: list[int], wait_s: float) -> float:
    """How long it took."""
    begin_s = trio.current_time()
    call = Query(RequestId("any"), 0, words(nodes), wait_s)
    await host.prefetching.wait(call, lambda: (0, host.coming(ONE, words(nodes))))
    return trio.current_time() - begin_s


def test_one_read_for_all_who_want_it() -> None:
    async def body(host: Host) -> None:
        for request in "abc":
            assert ask(host, request, WHOLE) == 0
        took: list[float] = []

        async def one() -> None:
            took.append(await wait(host, WHOLE, 60.0))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        assert took == pytest.approx([5.0] * 3, abs=0.1)
        assert ask(host, "d", WHOLE) == 5

    assert live(body).fakes[0].bytes_read == 5 * PAGE


def test_a_wait_ends_with_its_time_and_what_has_come_is_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetching, "READ_BYTES_MAX", PAGE)

    async def body(host: Host) -> None:
        ask(host, "a", WHOLE)
        assert 2.0 <= await wait(host, WHOLE, 2.5) <= 2.5
        assert ask(host, "a", WHOLE) == 2

    live(body)


def test_several_reads_of_a_disk_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "READ_BYTES_MAX", PAGE)

    async def body(host: Host) -> None:
        for _ in range(2):  # also after all had nothing to do
            await trio.sleep(1.0)
            ask(host, "a", WHOLE)
            await trio.sleep(0.5)
            (queue,) = host.prefetching._queues
            assert len(queue.wanted) == len(WHOLE) - prefetching.READERS
            await trio.sleep(10.0)
            drop(host, WHOLE)

    live(body)


def test_waiting_in_vain_is_not_begun() -> None:
    async def body(host: Host) -> None:
        ask(host, "a", WHOLE)
        assert await wait(host, WHOLE, 1.0) == 0.0

    live(body)


def test_what_nobody_waits_for_any_more_is_read_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "READ_BYTES_MAX", PAGE)
    monkeypatch.setattr(prefetching, "READERS", 1)

    async def body(host: Host) -> None:
        ask(host, "a", WHOLE)
        await trio.sleep(0.5)  # its first block is being read
        host.prefetching.released(ME, [RequestId("a")])
        ask(host, "b", [1, 3, 6])
        assert await wait(host, [1, 3, 6], 60.0) == pytest.approx(2.5, abs=0.1)
        assert await wait(host, WHOLE, 60.0) == pytest.approx(4.0, abs=0.1)

    live(body)


def test_too_much_that_nobody_wants_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "READ_BYTES_MAX", PAGE)
    monkeypatch.setattr(prefetching, "READERS", 1)
    monkeypatch.setattr(prefetching, "UNWANTED_MAX", 1)

    async def body(host: Host) -> None:
        ask(host, "a", WHOLE)
        await trio.sleep(0.5)
        host.prefetching.released(ME, [RequestId("a")])
        assert host.prefetching.given_up_total == 3
        await trio.sleep(10)
        assert ask(host, "b", WHOLE) == 1
        assert await wait(host, WHOLE, 60.0) > 0

    live(body)


def test_one_too_many_and_the_end_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "WAITS_MAX", 1)

    async def body(host: Host) -> None:
        ask(host, "a", WHOLE)
        took: list[float] = []

        async def one() -> None:
            took.append(await wait(host, WHOLE, 60.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(1)
            assert await wait(host, WHOLE, 60.0) == 0.0
            host.prefetching.close()
        assert took == pytest.approx([1.0])
        ask(host, "b", [1, 3, 6])
        assert not host.below.begun
        await trio.sleep(10)

    live(body)
