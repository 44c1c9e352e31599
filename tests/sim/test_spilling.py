"""Disks that are slow, hung or still being scanned beside one that is well."""

import random
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from tests.sim.fake_disk import DiskFaults, Medium
from tests.sim.month import PAGE, Host
from tests.sim.test_fetching import ORDER, save
from tests.sim.test_world import quiet
from trikv.nursery import spilling
from trikv.process.guest import TRIO

assert quiet  # the fixture is for this file too

GOOD = DiskFaults(byte_s=1 / PAGE, late_s_mean=1e-6)  # a block takes a second
SLOW = DiskFaults(byte_s=100 / PAGE, late_s_mean=1e-6)
HUNG = DiskFaults(hang_p=1.0)
CHAINS = [[1, 100 + at, 200 + at] for at in range(20)]  # one they share, and two of its own


def live(
    faults: list[DiskFaults], body: Callable[[Host], Awaitable[None]], *, runs: bool = True
) -> None:
    """A host with such disks, on which nothing is yet."""

    async def main() -> None:
        rng = random.Random(1)
        TRIO._r.seed(ORDER)
        mediums = [Medium(rng, 4, 512 << 10) for _ in faults]
        host = Host(rng, mediums, GOOD, [1])
        for fake, one in zip(host.fakes, faults, strict=True):
            fake._faults = one
        async with trio.open_nursery() as nursery:
            if runs:
                nursery.start_soon(host.spilling.run)
            await body(host)
            nursery.cancel_scope.cancel()
        host.audit()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def save_all(host: Host) -> int:
    """Blocks of prompts that share their first; the pool has room for all of them."""
    for number, nodes in enumerate(CHAINS):
        save(host, str(number), nodes)
    host.spilling.ring()
    return 1 + 2 * len(CHAINS)


async def fast_rate(host: Host) -> float:
    """Blocks a second that the first disk takes while there is something to write."""
    for tier in host.tiers:
        await tier.recover()
    begin_s = trio.current_time()
    total = save_all(host)
    while host.spilling._busy - {1} or len(host.below.spills):  # noqa: ASYNC110  # not told
        await trio.sleep(0.1)
    took_s = trio.current_time() - begin_s
    written = host.fakes[0].bytes_written // PAGE
    assert written > total // 2
    return written / took_s


@pytest.mark.parametrize("beside", [SLOW, HUNG])
def test_a_slow_or_hung_disk_leaves_the_others_their_speed(beside: DiskFaults) -> None:
    rates: list[float] = []

    async def body(host: Host) -> None:
        rates.append(await fast_rate(host))

    live([GOOD], body)
    live([GOOD, beside], body)
    alone, with_other = rates
    assert alone == pytest.approx(1.0, rel=0.1)
    assert with_other == pytest.approx(alone, rel=0.1)


def test_what_waits_when_the_daemon_ends_goes_to_the_disks_that_take_it() -> None:
    async def body(host: Host) -> None:
        for tier in host.tiers:
            await tier.recover()
        total = save_all(host)
        begin_s = trio.current_time()
        await host.spilling.drain()
        assert sum(fake.bytes_written for fake in host.fakes) == total * PAGE
        batch = host.spilling._batch_bytes // PAGE
        assert host.fakes[1].bytes_written <= batch * PAGE
        assert trio.current_time() - begin_s <= 100 * batch + 1

    live([GOOD, SLOW], body, runs=False)


def test_a_disk_that_is_scanned_for_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spilling, "SCAN_S", 7.0)

    async def body(host: Host) -> None:
        await host.tiers[0].recover()
        total = save_all(host)
        await trio.sleep(6.5)
        assert host.fakes[0].bytes_written == 0
        await trio.sleep(total + 10)
        assert host.fakes[0].bytes_written == total * PAGE
        await host.tiers[1].recover()
        assert host.fakes[1].bytes_written == 0

    live([GOOD, GOOD], body)


def test_with_all_disks_off_nothing_waits_for_ever() -> None:
    async def body(host: Host) -> None:
        for tier in host.tiers:
            await tier.recover()
            tier.lower.withhold("broken")
        save_all(host)
        await trio.sleep(1)
        assert len(host.below.spills) == 0

    live([GOOD, GOOD], body)
