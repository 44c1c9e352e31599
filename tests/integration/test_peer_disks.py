"""Blocks that only the SSD of another host holds: real processes, files and network namespaces.

As in `test_peers.py`, `load` compares all bytes that it is given.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.integration.daemons import RunningDaemon, attached, wait_for
from tests.integration.disks import BLOCKS, PAGE, Faults, engine_options, load, places, quiet, shown
from tests.integration.hosts import PATIENCE_S, Cluster, cluster, joined, nothing_left
from tests.integration.test_peers import SHORT, all_end_well, hit, loaded, run, saved

POOL = ("--pool-size", "16mb", "--slab-size", "1mb")
OTHERS = range(9)  # prompts that overrun it
ALL = BLOCKS * PAGE


@pytest.fixture
def hosts(start: Start, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(start, tmp_path) as made:
        yield made


def owner(hosts: Cluster, *arguments: str, fraction: str = "0.25", **more: Any) -> RunningDaemon:
    """A daemon with a small pool over a disk."""
    host = more.pop("host", None) or hosts.host()
    (disk,) = places(host.folder)
    disks = ("--ssd-cache-path", str(disk), "--ssd-cache-capacity", "64mb", "--ssd-write-through")
    share = ("--peer-ssd-fraction", fraction)
    return hosts.daemon(*POOL, *disks, *share, *arguments, host=host, **more)


async def overrun(daemon: RunningDaemon) -> None:
    """Of prompt `a` nothing is left but what the disk has."""
    await saved(daemon, "a")
    await quiet(daemon)
    for name in OTHERS:
        await saved(daemon, name)
        await quiet(daemon)


async def lifted(daemon: RunningDaemon) -> int:
    """Bytes that it has lent from its disk; nothing of the pool is held for that any more."""
    facts = await wait_for(
        daemon.address, lambda one: one["cluster"]["liftedBytes"] == 0, PATIENCE_S
    )
    return int(facts["cluster"]["liftedLentBytes"])


def test_what_only_a_disk_of_another_host_has_is_hit(hosts: Cluster) -> None:
    async def story() -> None:
        await overrun(one)
        await joined(one, two)
        began_s = time.monotonic()
        assert await loaded(two, "a") == BLOCKS
        print(f"{BLOCKS} blocks from another host's SSD in {time.monotonic() - began_s:.3f} s")
        assert await lifted(one) == ALL
        assert "          2.0 MiB lent from SSDs" in await asyncio.to_thread(shown, one)
        await nothing_left(one, two)
        await joined(one, two)
        assert await loaded(three, "a") == BLOCKS  # from the pool of whoever has it there now
        assert await lifted(one) == ALL
        await nothing_left(one, two, three)

    hosts.meta()
    one = owner(hosts)
    two, three = hosts.daemon(), hosts.daemon()
    run(story())
    all_end_well(one, two, three)


def test_what_a_disk_holds_after_a_restart_is_hit_elsewhere(hosts: Cluster) -> None:
    async def story() -> None:
        await saved(one, "a")
        await quiet(one)
        assert one.end(signal.SIGKILL) != 0
        again = owner(hosts, host=hosts.host_of(one))
        daemons.append(again)
        async with attached(again.address, **engine_options()):  # it says what the blocks are
            await joined(again, two)
        began_s = time.monotonic()
        await hit(two, "a")
        print(f"hits {time.monotonic() - began_s:.2f} s after the owner's restart")
        assert await lifted(again) == ALL
        await nothing_left(again, two)

    hosts.meta()
    one, two = owner(hosts), hosts.daemon()
    daemons = [two]
    run(story())
    all_end_well(*daemons)


@pytest.mark.parametrize(("fraction", "wanted"), [("0.03125", 8), ("0", 0)])
def test_over_the_budget_a_prefix_comes_and_the_rest_is_a_miss(
    hosts: Cluster, fraction: str, wanted: int
) -> None:
    async def story() -> None:
        await overrun(one)
        await joined(one, two)
        assert await loaded(two, "a") == wanted
        assert await lifted(one) == wanted * PAGE
        assert await loaded(one, "a") == BLOCKS  # for its own engines there is no budget
        await saved(two, "b")
        assert await loaded(two, "b") == BLOCKS
        await nothing_left(one, two)

    hosts.meta()
    one, two = owner(hosts, fraction=fraction), hosts.daemon()
    run(story())
    all_end_well(one, two)


@pytest.mark.parametrize("fault", ["hang", "eio-read"])
def test_a_disk_that_fails_while_it_reads_for_others_costs_a_miss(
    hosts: Cluster, fault: str
) -> None:
    async def story() -> None:
        await overrun(one)
        await joined(one, two)
        faults.set(fault)
        began_s = time.monotonic()
        assert await loaded(two, "a") == 0
        print(f"a miss {time.monotonic() - began_s:.2f} s after the disk's fault: {fault}")
        assert await lifted(one) == 0
        await nothing_left(one, two)
        await wait_for(one.address, lambda now: "off" in now["disks"][0]["state"], PATIENCE_S)
        async with attached(one.address, **engine_options()) as engine:  # its own go on
            assert await load(engine, OTHERS[-1]) == BLOCKS
        await hit(two, OTHERS[-1])  # and what is in its pool is lent
        await nothing_left(one, two)

    hosts.meta()
    host = hosts.host()
    faults = Faults(host.folder)
    one = owner(hosts, "--ssd-ring", "threads", host=host, before=faults.before)
    two = hosts.daemon(before=SHORT)
    run(story())
    for daemon in (one, two):
        daemon.end()
        assert "Traceback" not in daemon.log.read_text()
