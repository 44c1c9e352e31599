"""Pool and disks against a world whose bytes one can see: it may lose, it never lies."""

import random

import numpy as np
import pytest
from below_world import BelowMachine, StrictMachine
from cache_world import LEASE_S, PAGE, Who, drop_space, words
from hypothesis import settings

from trikv.core.blocks import ABSENT, DOOMED
from trikv.core.words import InstanceName, RequestId, SpaceId

BelowMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
StrictMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestBelow = BelowMachine.TestCase
TestStrict = StrictMachine.TestCase


OPERATIONS = [*["save"] * 2, *["ask"] * 3, *["read"] * 3, *["spill", "write"] * 2, "well"]


def walk(machine: BelowMachine, seed: int, steps: int) -> None:  # noqa: C901, PLR0912  # a mix
    """A long history in which much is fetched, written and evicted, as a busy host has it."""
    rng = random.Random(seed)
    nodes = [*range(1, 16), 31, 47, 63, 127, 255]
    machine.begin(rng.randint(1, 2), rng.random() < 0.5, seed)
    machine.check()

    def mask() -> int:
        return rng.choice([0] * 8 + [1, 2, 4, 63])

    def who() -> Who:
        return InstanceName("one"), RequestId(rng.choice("rstu"))

    for _ in range(steps):
        which = rng.randrange(100)
        what = rng.choice(OPERATIONS)
        if what in {"save", "ask"}:
            one = who()
            if rng.random() < 0.8:
                machine.release(one)
            if what == "save":
                machine.save(one, which, rng.choice(nodes), mask())
            else:
                machine.ask(one, which, rng.choice(nodes))
        elif what == "read" and machine.reads:
            machine.read(which, 0 if machine.is_strict else mask(), gives_up=rng.random() < 0.05)
        elif what == "spill":
            machine.spill(is_full=True, most=rng.choice([PAGE, 4 * PAGE, 100 * PAGE]))
        elif what == "write" and machine.writes:
            machine.write(which, mask())
        elif what == "well":
            machine.work_goes_well(which, 3)
        if rng.random() < 0.1:
            machine.time_passes(rng.randint(0, LEASE_S))
        if rng.random() < 0.3:
            machine.forget(1)
        if rng.random() < 0.05:
            machine.reset(which, kills=rng.random() < 0.3)
        if not machine.is_strict and rng.random() < 0.02:
            machine.killed(0)
        if not machine.is_strict and rng.random() < 0.1:
            machine.bit_flips(which)
        if not machine.is_strict and rng.random() < 0.003:
            machine.disk_fails(rng.randrange(3))
        machine.check()
    machine.teardown()


@pytest.mark.parametrize("seed", range(12))
def test_a_long_history_loses_but_never_lies(seed: int) -> None:
    walk(BelowMachine(), seed, 120)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 37])
def test_on_one_good_disk_no_block_outlives_its_parent(seed: int) -> None:
    machine = StrictMachine()
    walk(machine, seed, 150)


def test_what_stands_behind_a_gap_does_not_count_as_used() -> None:
    """The pool has lost a block, and did not get it again, between two that a disk holds."""
    machine = StrictMachine()
    machine.begin(1, through=False, seed=0)
    one, two = (InstanceName("one"), RequestId("r")), (InstanceName("one"), RequestId("s"))
    machine.save(one, 0, 4, 0)
    machine.work_goes_well(0, 3)
    machine.release(one)
    cache, lower = machine.cache, machine.lowers[0]
    middle = machine.in_pool(1, [2])
    cache.room.orders[cache.spaces[machine.number[1]].shape].forget(middle)
    cache.room._evict(middle)
    machine.save(two, 0, 8, failed=1)  # fresh are the middle one, which fails, and the last
    machine.work_goes_well(0, 3)
    assert (lower.find(SpaceId(0), words([8])) < 0).all()
    root, parent, child = lower.recency[lower.find(SpaceId(0), words([1, 2, 4]))].tolist()
    assert root > parent == child


def test_what_waits_to_be_written_when_it_is_reset_is_not_written() -> None:
    """The pool drops what was reset bit by bit; till then its requests are still known."""
    machine = BelowMachine()
    machine.begin(1, through=False, seed=0)
    machine.save((InstanceName("one"), RequestId("r")), 0, 4, 0)
    machine.cache.retire_space(machine.number[1])
    machine.below.retire_space(machine.number[1])
    assert len(machine.below.spills) == 1
    machine.spill(is_full=True, most=100 * PAGE)
    assert machine.writes == []
    assert machine.lowers[0].pages.used_bytes == 0


@pytest.mark.parametrize("is_reset", [False, True])
def test_what_a_hung_disk_holds_is_never_used_again(is_reset: bool) -> None:  # noqa: FBT001
    machine = BelowMachine()
    machine.begin(1, through=False, seed=0)
    machine.save((InstanceName("one"), RequestId("r")), 0, 4, 0)
    machine.spill(is_full=True, most=100 * PAGE)
    (part,) = machine.writes
    if is_reset:
        drop_space(machine.cache, machine.number[1])
        machine.below.retire_space(machine.number[1])
    held = np.array([True, False, True])
    machine.below.quarantine_spill(part, np.zeros(3, np.uint64), held)
    assert machine.below.quarantined_bytes == 2 * PAGE
    if not is_reset:
        drop_space(machine.cache, machine.number[1])
    cache = machine.cache
    assert cache.pages.used_bytes == 2 * PAGE
    assert cache.blocks.state[part.entries].tolist() == [DOOMED, ABSENT, DOOMED]
    assert machine.lowers[0].pages.used_bytes == 0
    cache.blocks.check()


@pytest.mark.parametrize("is_reset", [False, True])
def test_what_a_hung_read_may_fill_is_never_used_again(is_reset: bool) -> None:  # noqa: FBT001
    machine = BelowMachine()
    machine.begin(1, through=False, seed=0)
    one = InstanceName("one"), RequestId("r")
    machine.save(one, 0, 4, 0)
    machine.work_goes_well(0, 3)
    machine.start()  # a new daemon
    machine.ask(one, 0, 4)
    (part,) = machine.reads
    if is_reset:
        drop_space(machine.cache, machine.number[1])
    held, arrived = np.array([False, True, False]), np.array([True, False, False])
    machine.below.quarantine_read(part, arrived, held)
    cache = machine.cache
    assert machine.below.quarantined_bytes == PAGE
    assert not cache.transfers
    assert cache.landings.bytes == cache.filling_bytes == 0
    assert (machine.in_pool(1, [1, 2, 4]) >= 0).tolist() == [not is_reset, False, False]
    if not is_reset:
        drop_space(cache, machine.number[1])
    assert cache.pages.used_bytes == PAGE
    cache.blocks.check()
