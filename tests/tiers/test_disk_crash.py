"""Power cuts at every kind of moment: what comes back is exact, or it does not come back."""

import os
import random
from collections.abc import Callable

import pytest
import trio

from tests.tiers.media import SHAPES, PowerCutError, World
from trikv.process.guest import TRIO
from trikv.tiers import scan, ssd
from trikv.tiers.ssd import Disk

SEEDS = int(os.environ.get("TRIKV_SEEDS", "100"))
AT_ONCE = 50


async def act(world: World, disk: Disk, rng: random.Random) -> None:
    """Something that happens to a disk."""
    what = rng.random()
    if what < 0.6:
        origins = rng.sample(range(4), rng.randrange(1, 4))
        async with trio.open_nursery() as nursery:
            for number in origins:
                shape, count = rng.choice(SHAPES), rng.randrange(1, 9)
                nursery.start_soon(world.write, disk, shape, count, number)
    elif what < 0.75:
        assert await world.read(disk, world.kept) == world.kept
    elif what < 0.9:
        world.evict()
    else:
        await world.void(disk, rng.randrange(4))


async def lives(world: World, rng: random.Random) -> None:
    was_clean = False
    for _ in range(rng.randrange(3, 8)):
        is_cut_off = rng.random() < 0.6
        try:
            disk = await world.open()
            was_clean |= disk.was_clean  # also when the power was cut before `close` had returned
            if is_cut_off and rng.random() < 0.2:
                world.ring.power = rng.randrange(1, 30)  # while it is scanned
            await world.recover(disk, was_clean=was_clean)
            was_clean = False
            if is_cut_off:
                world.ring.power = rng.randrange(1, 60)
            for _ in range(rng.randrange(1, 12)):
                await act(world, disk, rng)
            if rng.random() < 0.8:
                world.ring.power = world.ring.power and rng.randrange(1, 6)
                await disk.close()
                was_clean = True
        except* PowerCutError:
            was_clean = False
        if rng.random() < 0.8:  # or the daemon was killed: what it wrote may be on no medium yet
            world.media = world.media.after_power_cut(rng)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is a whole life: Trio's order of tasks follows from it too, and there are no threads.

    That Trio's tasks may be ordered is a switch that pytest-trio has turned.
    """

    async def in_thread(call: Callable[[], object], _limiter: trio.CapacityLimiter) -> object:
        for _ in range(TRIO._r.randrange(1, 5)):
            await trio.lowlevel.checkpoint()
        return call()

    monkeypatch.setattr(ssd, "in_thread", in_thread)
    monkeypatch.setattr(scan, "in_thread", in_thread)


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_power_cuts(first: int) -> None:
    found = 0
    for seed in range(first, first + AT_ONCE):
        rng = random.Random(seed)
        TRIO._r.seed(seed)
        world = World(rng)
        try:
            trio.run(lives, world, rng)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        found += world.found_count
    assert found > AT_ONCE  # or this shows nothing
