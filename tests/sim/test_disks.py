"""The real shell over disks that are late, failing, hung and torn, through crashes and restarts."""

import random

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio._core import _run as scheduler
from trio.testing import MockClock

from tests.sim.engine import Report
from tests.sim.fake_disk import DiskFaults, Medium
from tests.sim.fakes import Faults
from tests.sim.test_world import FAULTS, QUIET, quiet
from tests.sim.world import World

assert quiet  # the fixture is for this file too

DISK_FAULTS = st.builds(
    DiskFaults,
    byte_s=st.sampled_from([1e-9, 1e-7, 1e-5]),
    late_s_mean=st.sampled_from([0.001, 0.3]),
    fail_p=st.sampled_from([0.0, 0.0, 0.05]),
    flip_p=st.sampled_from([0.0, 0.0, 0.05]),
    hang_p=st.sampled_from([0.0, 0.0, 0.02]),
    tear_p=st.sampled_from([0.0, 0.5]),
)
WAIT_S = 2.0


def lives(
    seed: int, faults: Faults, disk: DiskFaults, *, disks: int = 1, runs: int = 3
) -> list[Report]:
    """Daemons one after another over the same disks."""
    rng = random.Random(seed)
    mediums = tuple(Medium(rng, 4, 256 << 10) for _ in range(disks))
    reports = []
    for run in range(runs):

        async def main(number: int = seed + run) -> Report:
            world = World(number, faults, slabs=3, mediums=mediums, disk_faults=disk)
            return await world.run(engines=3, requests=8)

        scheduler._r.seed(seed + run)
        reports.append(trio.run(main, clock=MockClock(autojump_threshold=0)))
        for medium in mediums:
            medium.crash(disk)
    return reports


@given(seed=st.integers(0, 2**32), faults=FAULTS, disk=DISK_FAULTS, disks=st.integers(1, 2))
@settings(QUIET, max_examples=10)
def test_disks_may_lose_and_never_lie(
    seed: int, faults: Faults, disk: DiskFaults, disks: int
) -> None:
    for report in lives(seed, faults, disk, disks=disks):
        assert report.loads_wrong == 0
        assert report.late_writes == 0
        assert all(count == 0 for count in report.left.values()), report.left
        assert report.waited_longest_s <= WAIT_S + 0.01


@given(seed=st.integers(0, 2**32))
@settings(QUIET, max_examples=2)
def test_a_good_disk_brings_up_what_the_pool_lost(seed: int) -> None:
    reports = lives(seed, Faults(copy_s_mean=0.001), DiskFaults())
    assert sum(report.from_disk for report in reports) > 10
    assert sum(report.blocks_failed for report in reports) == 0


@given(seed=st.integers(0, 2**32))
@settings(QUIET, max_examples=1)
def test_a_seed_replays_with_disks(seed: int) -> None:
    faults, disk = Faults(engine_death_p=0.1), DiskFaults(fail_p=0.05, flip_p=0.05, tear_p=0.5)
    assert lives(seed, faults, disk) == lives(seed, faults, disk)
