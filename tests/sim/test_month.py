"""A month in a second or two."""

import pytest
import trio
from trio._core import _run as scheduler
from trio.testing import MockClock

from tests.sim.fake_disk import DiskFaults
from tests.sim.month import WAIT_S, Month, month_of
from tests.sim.test_world import quiet

assert quiet  # the fixture is for this file too


def live(seed: int, faults: DiskFaults, *, restarts: bool, spaces: list[int]) -> Month:
    async def main() -> Month:
        return await month_of(seed, faults, restarts=restarts, spaces=spaces)

    scheduler._r.seed(seed)
    return trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("seed", range(2))
def test_a_month_with_restarts_and_a_bad_disk_leaks_nothing(seed: int) -> None:
    faults = DiskFaults(late_s_mean=0.1, fail_p=0.01, flip_p=0.01, tear_p=0.5)
    month = live(seed, faults, restarts=True, spaces=[1, 2])
    assert month.from_disk > 100
    assert month.hits > 0.2 * month.asked


@pytest.mark.parametrize("seed", range(2))
def test_on_one_good_disk_no_block_outlives_its_parent_for_a_month(seed: int) -> None:
    month = live(seed, DiskFaults(), restarts=False, spaces=[1])
    assert month.from_disk > 100
    assert month.orphans == 0


def test_writes_starve_no_read() -> None:
    """A disk on which a block takes a second: requests wait for the batch before them at most."""
    month = live(0, DiskFaults(byte_s=1 / 4096), restarts=False, spaces=[1])
    assert month.from_disk > 20
    assert month.waited_longest_s <= WAIT_S
