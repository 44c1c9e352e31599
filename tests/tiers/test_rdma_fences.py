"""Fences of RDMA on the double: what is over is never written again, at either end."""

from pathlib import Path

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from tests.tiers.double import Double, ends
from tests.tiers.peers import (
    LATER_S,
    MARK,
    MIB,
    Memory,
    arrived_right,
    check,
    condition,
    fetch_of,
    is_untouched,
    rows,
    shuffled,
)
from trikv.core.rails import PAIRS_A_PATH
from trikv.tiers import rdma
from trikv.tiers.pairs import NicError
from trikv.tiers.peer import Fetch, Outcome

pytestmark = pytest.mark.usefixtures("small_regions")


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
async def test_a_fetch_that_is_over_is_never_written_again(
    double: Double, sysfs: Path, how: str, mock_clock: MockClock
) -> None:
    """The landing pages go to others at once; reads that are late would write over those."""
    mock_clock.rate = 1
    async with ends(sysfs) as both:
        await both.transport.fetch(fetch_of(rows(both.pool, (0, 0, MIB))))  # dials
        both.pool.memory[:] = MARK
        for number in range(2):
            double.set(number, mute=1)
        posts = double.get("posts")
        runs = shuffled(both.pool, count=300, size=64 << 10)
        fetch = fetch_of(runs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.transport.fetch, fetch)
            await condition(lambda: double.get("posts") >= posts + 4)  # on both devices
            if how == "cancelled":
                nursery.cancel_scope.cancel()
            else:
                mock_clock.jump(LATER_S)
        assert (fetch.outcome == Outcome.FAILED).all()
        for number in range(2):
            double.set(number, mute=0)
        await trio.sleep(0.2)
        assert is_untouched(fetch, both.pool)
        again = fetch_of(fetch.runs)
        await both.transport.fetch(again)
        check(again, both.source, both.pool)


async def test_a_deadline_keeps_what_has_come(
    double: Double, sysfs: Path, mock_clock: MockClock
) -> None:
    mock_clock.rate = 1
    async with ends(sysfs) as both:
        first = fetch_of(rows(both.pool, (0, 0, MIB)))
        await both.transport.fetch(first)
        both.pool.memory[:] = MARK
        double.set(0, delay_us=2_000)
        double.set(1, mute=1)
        fetch = fetch_of(shuffled(both.pool, count=16, size=2 * MIB))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.transport.fetch, fetch)
            await condition(lambda: any(arrived_right(fetch, both.source, both.pool)))
            await trio.sleep(0.5)  # until that is known
            mock_clock.jump(LATER_S)
        arrived = fetch.outcome == Outcome.ARRIVED
        assert arrived.any()
        assert not arrived.all()
        check(fetch, both.source, both.pool, all_arrived=False)
        both.pool.memory[:] = MARK
        double.set(1, mute=0)
        await trio.sleep(0.2)
        assert (both.pool.memory == MARK).all()


async def test_after_its_deadline_a_fetch_posts_nothing(double: Double, sysfs: Path) -> None:
    """A process that was frozen goes on in the midst of a turn: the owner's pages are others'."""
    async with ends(sysfs) as both:
        await both.transport.fetch(fetch_of(rows(both.pool, (0, 0, MIB))))
        posts = double.get("posts")
        fetch = fetch_of(rows(both.pool, (0, 0, MIB)), seconds=-1)
        job = both.transport._job(fetch, both.transport._reach)  # type: ignore[arg-type]
        assert job.left > 0
        assert job.take(-1) is None
        await both.transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert double.get("posts") == posts


async def test_the_owner_fences_a_peer(double: Double, sysfs: Path) -> None:
    """Its grant is over: reads under way fail, and none sees pages that are used again."""
    async with ends(sysfs, pause_s=0) as both:
        runs = rows(both.pool, (0, 0, 32 * MIB))
        await both.transport.fetch(fetch_of(runs))
        for number in range(2):
            double.set(number, mute=1)
        both.pool.memory[:] = MARK
        fetch = fetch_of(runs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.transport.fetch, fetch)
            await condition(lambda: double.get("waiting", 0) and double.get("waiting", 1))
            both.owner.fence(both.peer)
            both.is_lost = True
            kept = both.source.memory.copy()
            both.source.memory[:] = MARK + 1
            for number in range(2):
                double.set(number, mute=0)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert not (both.pool.memory == MARK + 1).any()
        both.source.memory[:] = kept
        both.is_lost = False
        await both.transport.fetch(again := fetch_of(runs))
        check(again, both.source, both.pool)


async def test_a_fence_that_the_nic_refuses_is_told(double: Double, sysfs: Path) -> None:
    async with ends(sysfs) as both:
        await both.transport.fetch(fetch_of(rows(both.pool, (0, 0, MIB))))
        alive = double.get("pairs")
        double.set(0, destroy_fails=1)
        with pytest.raises(NicError):
            both.owner.fence(both.peer)
        assert double.get("pairs") == alive - 2 * PAIRS_A_PATH + 1  # all but that one
        both.owner.fence(both.peer)  # now it can
        assert double.get("pairs") == alive - 2 * PAIRS_A_PATH


async def test_pages_that_a_nic_keeps_are_told(
    double: Double, sysfs: Path, mock_clock: MockClock
) -> None:
    """A queue pair that cannot be destroyed may write for ever: nobody may reuse its targets."""
    mock_clock.rate = 1
    async with ends(sysfs) as both:
        await both.transport.fetch(fetch_of(rows(both.pool, (0, 0, MIB))))  # dials
        both.pool.memory[:] = MARK
        for number in range(2):
            double.set(number, mute=1)
        fetch = fetch_of(shuffled(both.pool, count=200, size=64 << 10))
        double.set(0, destroy_fails=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(both.transport.fetch, fetch)
            await condition(lambda: double.get("waiting", 0) and double.get("waiting", 1))
            mock_clock.jump(LATER_S)
        kept = fetch.outcome == Outcome.UNFENCED
        assert kept.any()
        assert not kept.all()
        for number in range(2):
            double.set(number, mute=0)
        await condition(lambda: not double.get("waiting", 0) and not double.get("waiting", 1))
        late = np.array(
            [(both.pool.memory[b : b + n] != MARK).any() for b, n in places(both.pool, fetch)]
        )
        assert late.any()
        assert not late[~kept].any()  # exactly those that were told may be written
        for pair in both.transport._quarantine:
            pair.destroy()


async def test_a_fetch_that_is_cancelled_costs_no_other(double: Double, sysfs: Path) -> None:
    """Each queue pair serves one fetch: to destroy it is nobody else's business."""
    async with ends(sysfs) as both:
        await both.transport.fetch(fetch_of(rows(both.pool, (0, 0, MIB))))
        for number in range(2):
            double.set(number, mute=1)
        both.pool.memory[:] = MARK
        doomed = fetch_of(rows(both.pool, (0, 0, MIB)))
        other = fetch_of(rows(both.pool, (8 * MIB, 8 * MIB, 2 * MIB)))
        scope = trio.CancelScope()

        async def doomed_fetch() -> None:
            with scope:
                await both.transport.fetch(doomed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(doomed_fetch)
            await condition(lambda: double.get("waiting", 0) + double.get("waiting", 1) == 1)
            nursery.start_soon(both.transport.fetch, other)
            await condition(lambda: double.get("waiting", 0) + double.get("waiting", 1) == 3)
            scope.cancel()
            await condition(lambda: double.get("waiting", 0) + double.get("waiting", 1) == 2)
            for number in range(2):
                double.set(number, mute=0)
        check(other, both.source, both.pool)
        assert is_untouched(doomed, both.pool)


async def test_a_dial_that_is_cancelled_leaves_nothing(double: Double, sysfs: Path) -> None:
    async with ends(sysfs) as both:
        never = trio.Event()

        async def dial(offer: bytes) -> bytes:
            await never.wait()
            return offer

        transport = rdma.RdmaTransport(both.near, 2, dial)
        fetch = fetch_of(rows(both.pool, (0, 0, MIB)), seconds=0.2)
        await transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert double.get("pairs") == 0


def places(pool: Memory, fetch: Fetch) -> list[tuple[int, int]]:
    return [(near - pool.address, size) for _, near, size in fetch.runs.tolist()]
