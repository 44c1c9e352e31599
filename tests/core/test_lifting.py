"""Blocks that are read from disks for other nodes: by chance, and by example."""

import random

import numpy as np
import pytest
from below_world import origin_of
from cache_world import PAGE, SLAB, TENANTS, new_cache, words
from hypothesis import settings
from lifting_world import LIFT_BYTES, LiftingMachine

from trikv.core import lifting as lifting_module
from trikv.core import room as room_module
from trikv.core.below import SSD
from trikv.core.lifting import Lift, Lifting
from trikv.core.plans import Key
from trikv.core.reading import REQUESTS
from trikv.core.shared import Shared
from trikv.core.words import InstanceName, PeerId, RequestId, SpaceId

LiftingMachine.TestCase.settings = settings(stateful_step_count=60, deadline=None)
TestLifting = LiftingMachine.TestCase

ME, PEER = InstanceName("one"), PeerId(1)
POOL_PAGES = 2 * SLAB // PAGE
NODES = [*range(1, 16), 31, 47, 63, 127, 255]


def step(machine: LiftingMachine, rng: random.Random) -> None:  # noqa: C901, PLR0912  # a mix
    which = rng.randrange(100)
    who, mask = (ME, RequestId(rng.choice("rstu"))), rng.choice([0] * 8 + [1, 2, 4, 63])
    what = rng.choice(
        ["save", "save", "ask", "read", "well", "borrow", "borrow", "lend", "lend", "give back"]
    )
    if what in {"save", "ask"}:
        if rng.random() < 0.8:
            machine.release(who)
        if what == "save":
            machine.save(who, which, rng.choice(NODES), mask)
        else:
            machine.ask(who, which, rng.choice(NODES))
    elif what == "read" and machine.reads:
        machine.read(which, mask, gives_up=rng.random() < 0.1)
    elif what == "well":
        machine.work_goes_well(which, 3)
    elif what == "borrow" and len(machine.borrowings) < 6:
        machine.borrow(PeerId(rng.choice([1, 2])), which, rng.choice(NODES), rng.randrange(3))
        while machine.reads and rng.random() < 0.8:
            machine.read(len(machine.reads) - 1, mask, gives_up=rng.random() < 0.1)
    elif what == "lend" and [one for one in machine.borrowings if one.loan is None]:
        machine.lend(which)
    elif what == "give back" and [one for one in machine.borrowings if one.loan is not None]:
        machine.give_back(which)
    if rng.random() < 0.02:
        machine.peer_is_lost(PEER, which)
    if rng.random() < 0.004:
        machine.reset(which, kills=False)
    if rng.random() < 0.1:
        machine.forget(2)
    if rng.random() < 0.08:
        machine.killed(0)
    if rng.random() < 0.1:
        machine.bit_flips(which)
    if rng.random() < 0.003:
        machine.disk_fails(rng.randrange(3))


def test_long_histories_tell_the_truth_and_leave_nothing_held() -> None:
    all_liftings: list[Lifting] = []
    for seed in range(12):
        machine, rng = LiftingMachine(), random.Random(seed)
        machine.begin(rng.randint(1, 2), rng.random() < 0.5, seed)
        for _ in range(150):
            if machine.lifting not in all_liftings:
                all_liftings.append(machine.lifting)
            step(machine, rng)
            machine.check()
            machine.check_others()
        machine.teardown()
    lent = sum(one.lent_blocks_total for one in all_liftings)
    refused = sum(one.refused_blocks_total for one in all_liftings)
    late = sum(one.late_blocks_total for one in all_liftings)
    assert min(lent, refused, late) > 0, (lent, refused, late)  # else nothing was tried


# -- by example


def spilled(nodes: int = 4, *, disks: int = 1) -> LiftingMachine:
    """A host whose pool is empty, and whose disk has the path to a node of space 1."""
    machine = LiftingMachine()
    machine.begin(disks, through=False, seed=0)
    machine.save((ME, RequestId("r")), 0, nodes, 0)
    machine.work_goes_well(0, 3)
    machine.start()
    assert set(machine.told.values()) == {True}
    return machine


def fill_pool(machine: LiftingMachine, first: int, count: int) -> None:
    """One block each, of space 1."""
    for node in range(first, first + count):
        who = ME, RequestId(f"r{node}")
        key = Key(*who, machine.number[1])
        plan = machine.cache.prepare_save(key, words([node]), rank=0, first=0, now_s=0.0)
        machine.put(plan.entries, 1, [machine.tag(1, node)] * len(plan.entries))
        machine.cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        machine.release(who)


def begun(machine: LiftingMachine, node: int = 4, peer: int = 1, first: int = 0) -> Lift:
    machine.borrow(PeerId(peer), 0, node, first)
    lift = machine.borrowings[-1].lift
    assert lift is not None
    return lift


def read_all(machine: LiftingMachine) -> None:
    while machine.reads:
        machine.read(0, 0, gives_up=False)


def test_blocks_on_a_disk_are_told_as_such_and_withdrawn_with_their_slots() -> None:
    machine = LiftingMachine()
    machine.begin(1, through=False, seed=0)
    machine.save((ME, RequestId("r")), 0, 4, 0)
    machine.work_goes_well(0, 3)
    name = origin_of(1)[:20]
    assert machine.told == {(name, node): False for node in (1, 2, 4)}
    machine.release((ME, RequestId("r")))
    fill_pool(machine, 100, POOL_PAGES)
    assert [machine.told[name, node] for node in (1, 2, 4)] == [True] * 3
    lower = machine.lowers[0]
    lower._room.make(lower._shapes[SpaceId(0)], 10, batch=10, space=SpaceId(0))
    assert not {(name, node) for node in (1, 2, 4)} & machine.told.keys()
    machine.check_others()


def test_what_was_found_before_an_engine_came_is_announced_with_it() -> None:
    machine = spilled()
    again = Shared(machine.cache, machine.below, lift_bytes_max=PAGE)
    told: list[int] = []
    again.announce_anew = lambda: told.append(1)
    again.open_space(machine.number[1], origin_of(1))
    assert told == [1]
    assert [(part.is_below, len(part.words)) for part in again.snapshot()] == [(True, 3)]
    again.close_space(machine.number[1])  # nobody could read them up for others any more
    assert told == [1, 1]
    assert list(again.snapshot()) == []


def test_blocks_larger_than_the_budget_are_not_told() -> None:
    machine = spilled()
    for limit in (0, PAGE - 1):
        again = Shared(machine.cache, machine.below, lift_bytes_max=limit)
        again.open_space(machine.number[1], origin_of(1))
        assert list(again.snapshot()) == []
        lost: list[bool] = []
        again.tell = lambda part, lost=lost: lost.append(part.is_held)
        again.tell_lost(origin_of(1)[:20], words([1]))
        assert lost == [False]


def test_a_second_peer_and_a_request_share_the_read() -> None:
    machine = spilled()
    one, two = begun(machine), begun(machine, peer=2)
    assert len(one.parts) == 1
    assert two.parts == ()
    assert two.waits.tolist() == one.waits.tolist()
    (part,) = one.parts
    assert not machine.below.reading.is_wanted(part.pool_entries)
    machine.ask((ME, RequestId("s")), 0, 4)
    assert machine.below.reading.has_promoted
    assert machine.below.reading.is_wanted(part.pool_entries)
    assert set(machine.below.reading.marks[one.waits].tolist()) == {REQUESTS}
    assert machine.below.reading.peer_rows == 0
    assert machine.lowers[0].blocks.pins.sum() == 3  # one read each
    assert machine.lifting.is_waiting(two)
    read_all(machine)
    assert not machine.lifting.is_waiting(one)
    assert not machine.lifting.is_waiting(two)
    machine.lend(0)
    machine.lend(0)
    assert machine.lifting.lent_blocks_total == 3  # those of the one for whom they were read
    machine.check_others()
    machine.teardown()


def test_what_a_request_reads_is_waited_for_and_not_charged() -> None:
    machine = spilled()
    machine.ask((ME, RequestId("s")), 0, 4)
    lift = begun(machine)
    assert lift.parts == ()
    assert len(lift.waits) == 3
    assert machine.lifting.bytes == 0
    read_all(machine)
    machine.lend(0)
    assert machine.lifting.lent_bytes_total == 0
    machine.teardown()


def test_over_the_budget_only_the_front_is_read() -> None:
    machine = spilled(255)  # eight blocks
    lift = begun(machine, 255)
    assert machine.lifting.bytes == LIFT_BYTES == 6 * PAGE
    assert len(lift.waits) == 6
    assert machine.lifting.refused_blocks_total == 2
    machine.borrow(PeerId(2), 0, 255, 6)  # the rest: not now
    assert machine.borrowings[-1].lift is None
    read_all(machine)
    for _ in range(2):
        machine.lend(0)
    assert machine.lifting.bytes == LIFT_BYTES  # while it is lent
    machine.give_back(0)
    assert machine.lifting.bytes == 0
    machine.teardown()


@pytest.mark.parametrize("is_late", [False, True])
def test_pages_of_a_loan_that_is_over_are_the_first_to_go(*, is_late: bool) -> None:
    machine = spilled()
    fill_pool(machine, 100, POOL_PAGES - 3)
    begun(machine)
    if is_late:  # nothing has come when its time is over
        machine.lend(0)
        read_all(machine)
    else:
        read_all(machine)
        machine.lend(0)
        machine.give_back(0)
    assert machine.lifting.bytes == 0
    assert (machine.in_pool(1, [1, 2, 4]) >= 0).all()
    fill_pool(machine, 200, 3)
    assert (machine.in_pool(1, [1, 2, 4]) < 0).all()
    assert (machine.in_pool(1, list(range(100, 100 + POOL_PAGES - 3))) >= 0).all()
    machine.check_others()
    machine.teardown()


def test_what_is_lent_while_room_is_made_is_the_first_to_go_afterwards() -> None:
    machine = spilled()
    lift = begun(machine, first=1)
    read_all(machine)
    assert machine.cache.blocks.depth[lift.held].tolist() == [1, 2]  # as they were saved
    fill_pool(machine, 100, POOL_PAGES - 1)  # one more than fits beside them
    assert (machine.in_pool(1, [2, 4]) >= 0).all()
    machine.lend(0)
    machine.give_back(0)
    fill_pool(machine, 200, 3)
    assert (machine.in_pool(1, [2, 4]) < 0).all()
    machine.teardown()


def test_what_a_request_has_used_since_is_no_spare() -> None:
    machine = spilled()
    begun(machine)
    read_all(machine)
    fill_pool(machine, 100, POOL_PAGES - 3)
    machine.ask((ME, RequestId("s")), 0, 4)
    machine.cache.settle()
    machine.release((ME, RequestId("s")))
    machine.lend(0)
    machine.give_back(0)
    fill_pool(machine, 200, 3)
    assert (machine.in_pool(1, [1, 2, 4]) >= 0).all()
    machine.teardown()


def test_too_many_spare_reads_go_at_once_but_for_those_that_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_module, "SPARES_MAX", 1)
    machine = spilled(7)
    for first, node in enumerate((1, 3, 7)):
        begun(machine, node, first=first)
        read_all(machine)
        if node == 1:
            machine.lend(0)
            machine.give_back(0)
    assert (machine.in_pool(1, [1, 3, 7]) >= 0).tolist() == [False, True, True]
    assert len(machine.cache.room.orders[machine.cache.spaces[machine.number[1]].shape]) == 1
    machine.teardown()


def test_a_hung_disk_holds_no_budget_and_no_pin() -> None:
    machine = spilled()
    lift = begun(machine)
    machine.reads.clear()
    (part,) = lift.parts
    held, arrived = np.array([False, True, False]), np.array([True, False, False])
    machine.below.quarantine_read(part, arrived, held)
    assert not machine.lifting.is_waiting(lift)
    assert machine.lifting.bytes == PAGE  # what has come is held for the loan
    machine.lend(0)
    (one,) = machine.borrowings
    assert one.loan is not None
    assert one.loan.positions.tolist() == [0]
    machine.give_back(0)
    assert machine.lifting.bytes == machine.lifting.count == 0
    assert not machine.lifting._lifts
    assert not machine.cache.blocks.pins.any()
    assert not machine.below.reading.marks.any()


def test_a_lift_that_is_reset_meanwhile_is_nobodys() -> None:
    machine = spilled()
    begun(machine)
    machine.reset(0, kills=False)
    read_all(machine)
    machine.lend(0)
    machine.forget(9)
    assert machine.lifting.bytes == 0
    assert machine.cache.pages.used_bytes == 0
    assert not machine.told
    machine.teardown()


def test_only_so_many_loans_wait_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifting_module, "LIFTS_MAX", 1)
    machine = spilled()
    begun(machine)
    machine.borrow(PeerId(2), 0, 4, 0)
    assert machine.borrowings[-1].lift is None
    machine.teardown()


def test_spare_blocks_are_in_no_tenants_account() -> None:
    cache = new_cache(policy=TENANTS, filling_fraction_many_ranks=0.9)
    count = 4 * SLAB // PAGE  # all of the pool
    spares = words(list(range(100, 100 + count)))
    wanted = np.ones(count, np.bool_)
    while len(cache.index.find_prefix(SpaceId(1), spares)) < count:
        landing = cache.prepare_fetch(SpaceId(1), spares, wanted, source=SSD, is_spare=True)
        rows = np.arange(len(landing.entries))
        cache.complete_fetch(landing, rows, np.ones(len(rows), np.bool_))
    assert cache.tenants is not None
    assert sum(cache.tenants.used_bytes()) == 0
    plan = cache.prepare_save(  # of another shape: it needs whole slabs
        Key(ME, RequestId("r"), SpaceId(2)), words([1, 2, 4]), rank=0, first=0, now_s=0.0
    )
    assert len(plan.entries) == 3
    assert cache.counters.reclaimed_slabs_total > 0
