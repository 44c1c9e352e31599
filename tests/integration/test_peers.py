"""Engines on several hosts share one pool over TCP: real processes in network namespaces.

Every story ends in hits or misses: `load` compares all bytes that it is given, and `nothing_left`
waits until no block is lent, pinned or on its way. Figures are printed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import capnp
import pytest

from tests.conftest import Start
from tests.integration.daemons import IS_INSIDE, RunningDaemon, attached, status, wait_for
from tests.integration.disks import BLOCKS, engine_options, load, quiet, save
from tests.integration.hosts import (
    PATIENCE_S,
    Cluster,
    cluster,
    joined,
    nothing_left,
    under_way,
)

SHORT = "from trikv.nursery import neighbours\nneighbours.LOAN_S = 3.0\nneighbours.CALL_S = 2.0"
"""Loans that are over soon, so that a test need not wait long for their end."""
STORY_S = 100.0
DIALS = int(os.environ.get("TRIKV_TEST_DIALS", "1000"))
"""Of both together."""


@pytest.fixture
def hosts(start: Start, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(start, tmp_path) as made:
        yield made


async def saved(daemon: RunningDaemon, *names: object) -> None:
    async with attached(daemon.address, **engine_options()) as engine:
        for name in names:
            await save(engine, name)


async def loaded(daemon: RunningDaemon, name: object) -> int:
    async with attached(daemon.address, **engine_options()) as engine:
        return await load(engine, name)


async def hit(daemon: RunningDaemon, name: object) -> None:
    """Ask again and again, as engines do, until all of a prompt is hit."""
    async with asyncio.timeout(PATIENCE_S):
        while await loaded(daemon, name) < BLOCKS:  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.2)


def run(story: Coroutine[Any, Any, None]) -> None:
    async def told() -> None:
        async with asyncio.timeout(STORY_S), capnp.kj_loop():
            IS_INSIDE.set(True)
            await story

    asyncio.run(told())


def all_end_well(*daemons: RunningDaemon) -> None:
    for daemon in daemons:
        assert daemon.end() == 0
        assert "Traceback" not in daemon.log.read_text()


def test_what_one_host_saves_another_one_hits(hosts: Cluster) -> None:
    async def story() -> None:
        await saved(one, "a")
        await joined(one, two)
        began_s = time.monotonic()
        assert await loaded(two, "a") == BLOCKS
        print(f"{BLOCKS} blocks from another host in {time.monotonic() - began_s:.3f} s")
        facts = await status(two.address)
        assert facts["windows"][0]["hits"][2] == {"tier": "peer", "blocks": BLOCKS}
        (peer,) = facts["cluster"]["peers"]
        assert (peer["state"], peer["way"], peer["fetchedBlocks"]) == ("serving", "tcp", BLOCKS)
        await nothing_left(one, two)
        await joined(one, two)
        assert one.end(signal.SIGKILL) != 0  # the copy is announced too, and outlives its source
        assert await loaded(three, "a") == BLOCKS
        await nothing_left(two, three)

    hosts.meta()
    hosts.meta()
    one, two, three = (hosts.daemon() for _ in range(3))
    run(story())
    all_end_well(two, three)


def test_five_hosts_share_what_each_has_saved(hosts: Cluster) -> None:
    async def story() -> None:
        for number, daemon in enumerate(daemons):
            await saved(daemon, number)
        await joined(*daemons)
        began_s = time.monotonic()
        names = range(len(daemons))
        found = [await loaded(daemon, name) for daemon in daemons for name in names]
        assert found == [BLOCKS] * len(found)
        print(f"{len(found)} prompts on 5 hosts in {time.monotonic() - began_s:.2f} s")
        await nothing_left(*daemons)

    hosts.meta()
    hosts.meta()
    daemons = [hosts.daemon() for _ in range(5)]
    run(story())
    all_end_well(*daemons)


def test_an_owner_killed_in_mid_transfer_costs_its_blocks(hosts: Cluster) -> None:
    async def story() -> None:
        await saved(one, "a")
        await joined(one, two)
        hosts.host_of(one).slow()
        loading = asyncio.create_task(loaded(two, "a"))
        await under_way(two, one)
        one.end(signal.SIGKILL)
        began_s = time.monotonic()
        assert await loading < BLOCKS
        print(f"a miss {time.monotonic() - began_s:.2f} s after the owner's death")
        await nothing_left(two)
        hosts.host_of(one).fast()
        again = hosts.daemon(host=hosts.host_of(one))
        await saved(again, "a")
        await joined(again, two)
        await hit(two, "a")
        await nothing_left(again, two)

    hosts.meta()
    one, two = hosts.daemon(), hosts.daemon(before=SHORT)
    run(story())
    all_end_well(two)


def test_a_cut_cable_costs_a_miss_until_it_is_back(hosts: Cluster) -> None:
    async def story() -> None:
        await saved(one, "a")
        await joined(one, two)
        hosts.host_of(one).slow()
        loading = asyncio.create_task(loaded(two, "a"))
        await under_way(two, one)
        hosts.host_of(one).link("down")
        began_s = time.monotonic()
        assert await loading < BLOCKS
        print(f"a miss {time.monotonic() - began_s:.2f} s after the cable was cut")
        await nothing_left(one, two)
        hosts.host_of(one).link("up")
        hosts.host_of(one).fast()
        await hit(two, "a")
        await nothing_left(one, two)

    hosts.meta()
    one, two = hosts.daemon(), hosts.daemon(before=SHORT)
    run(story())
    all_end_well(one, two)


@pytest.mark.parametrize("frozen", ["owner", "reader"])
def test_a_frozen_host_ends_in_a_miss_and_no_wrong_byte(hosts: Cluster, frozen: str) -> None:
    async def story() -> None:
        await saved(one, "a")
        await joined(one, two)
        hosts.host_of(one).slow("4mbit")
        loading = asyncio.create_task(loaded(two, "a"))
        await under_way(two, one)
        other = one if frozen == "owner" else two
        other.process.send_signal(signal.SIGSTOP)
        try:
            if frozen == "reader":  # its grant ends, and its blocks make room for others
                await wait_for(one.address, is_returned, PATIENCE_S)
                await saved(one, *range(9))
            else:
                await asyncio.wait([loading])
        finally:
            other.process.send_signal(signal.SIGCONT)
        hosts.host_of(one).fast()
        assert await loading < BLOCKS
        await nothing_left(one, two)
        await saved(one, "b")
        await hit(two, "b")
        await nothing_left(one, two)

    def is_returned(facts: dict[str, dict[str, int]]) -> bool:
        return facts["cluster"]["grantCount"] == 0

    hosts.meta()
    one, two = hosts.daemon("--pool-size", "16mb"), hosts.daemon(before=SHORT)
    run(story())
    all_end_well(one, two)


def test_a_metaserver_that_was_killed_knows_everything_again(hosts: Cluster) -> None:
    async def story() -> None:
        await saved(one, "a", "b")
        await joined(one, two)
        assert await loaded(two, "a") == BLOCKS
        meta.end(signal.SIGKILL)
        assert await loaded(two, "a") == BLOCKS
        assert await loaded(two, "b") in {0, BLOCKS}
        hosts.meta(hosts.hosts[0])
        began_s = time.monotonic()
        await hit(three, "b")
        print(f"hits again {time.monotonic() - began_s:.2f} s after the metaserver")
        await nothing_left(one, two, three)

    meta = hosts.meta()
    one, two, three = (hosts.daemon() for _ in range(3))
    run(story())
    all_end_well(one, two, three)


def test_what_was_computed_by_altered_weights_is_nobody_elses(hosts: Cluster, folder: Path) -> None:
    """Weights changed in place: other hosts have what their name promises, before and after."""
    kept = ("--persist", str(folder), *("--ssd-cache-path", str(hosts.folder / "disk")))
    kept = (*kept, "--ssd-cache-capacity", "64mb", "--ssd-write-through")

    async def story() -> None:
        nonlocal one
        fields = {"model": "m"}
        altered = fields | {"altered": "token"}
        async with attached(one.address, **engine_options(fields=fields)) as engine:
            await save(engine, "before")
            await joined(one, two)
            assert await loaded(two, "before") == BLOCKS  # from the one host, of the same weights
            assert (await engine.session.reset(altered="token")).reply.ok.droppedCount == BLOCKS
            assert await load(engine, "before") == 0  # though the other host has them
            await save(engine, "after")
            assert await load(engine, "after") == BLOCKS
        await joined(one, two)
        assert await loaded(two, "after") == 0
        await quiet(one)
        one.end(signal.SIGKILL)
        one = hosts.daemon(*kept, host=hosts.hosts[1])
        async with attached(one.address, **engine_options(fields=altered)) as engine:
            await joined(one, two)
            assert await load(engine, "after") == BLOCKS  # its own
            assert await load(engine, "before") == 0
        async with attached(one.address, **engine_options(fields=fields, name="new")) as engine:
            await joined(one, two)
            assert await load(engine, "after") == 0  # it has loaded its weights anew
            assert await load(engine, "before") == BLOCKS  # from the other host
        assert await loaded(two, "after") == 0
        await nothing_left(one, two)

    hosts.meta()
    one = hosts.daemon(*kept)
    two = hosts.daemon()
    run(story())
    all_end_well(one, two)


def test_two_hosts_dial_each_other_again_and_again(hosts: Cluster) -> None:
    """Each host asks for a longer and longer part of the other's prompt, over a new connection."""
    options = engine_options(page_bytes=4096, block_count=2 * DIALS)
    half = DIALS // 2

    async def saves(daemon: RunningDaemon, name: str) -> None:
        async with attached(daemon.address, **options) as engine:
            await save(engine, name, half)

    async def fetches(daemon: RunningDaemon, name: str) -> int:
        async with attached(daemon.address, **options) as engine:
            return sum([await load(engine, name, at + 1) == at + 1 for at in range(half)])

    async def story() -> None:
        await asyncio.gather(saves(one, "a"), saves(two, "b"))
        await joined(one, two)
        began_s = time.monotonic()
        assert await asyncio.gather(fetches(one, "b"), fetches(two, "a")) == [half, half]
        print(f"{DIALS} times dialled in {time.monotonic() - began_s:.1f} s")
        await nothing_left(one, two)
        for daemon in (one, two):
            facts = await status(daemon.address)
            assert facts["state"] == "serving"
            assert facts["cluster"]["peers"][0]["fetchedBlocks"] == half

    hosts.meta()
    anew = (
        "from trikv.nursery.neighbours import Neighbour\n"
        "part = Neighbour._part\n"
        "async def end(self, joined):\n    joined.is_over = True\n    await part(self, joined)\n"
        "Neighbour._part = end"
    )
    one, two = (hosts.daemon(before=anew) for _ in range(2))
    run(story())
    all_end_well(one, two)
