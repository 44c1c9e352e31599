"""Long random histories of the cache, denser than the machine's own: most steps do something."""

from collections.abc import Callable
from random import Random

import pytest
from cache_world import LEASE_S, PAGES, TENANTS, TREE, Who
from hypothesis import settings
from test_cache import CacheMachine

from trikv.core.policies import MAKERS
from trikv.core.words import InstanceName, RequestId, SpaceId

STEPS = 250
SEEDS = range(settings().max_examples // 5)


def who(random: Random) -> Who:
    return InstanceName(random.choice(["one", "two"])), RequestId(random.choice(["r", "s"]))


def space(random: Random) -> SpaceId:
    return SpaceId(random.choice(sorted(PAGES)))


def save_whole(machine: CacheMachine, random: Random) -> None:
    machine.save_whole(who(random), space(random), random.choice(TREE))


def prepare_save(machine: CacheMachine, random: Random) -> None:
    machine.prepare_save(
        who(random),
        space(random),
        random.choice(TREE),
        random.randrange(6),
        random.randrange(3),
        random.choice([0, 0, 0, 1, 2]),
    )


def complete_save(machine: CacheMachine, random: Random) -> None:
    if machine.saves:
        machine.complete_save(random.randrange(30), random.choice([0, 0, 0, 0, 1, 5, 63]))


def ask(machine: CacheMachine, random: Random) -> None:
    machine.ask(who(random), space(random), random.choice(TREE), random.randrange(30))


def load(machine: CacheMachine, random: Random) -> None:
    if machine.leases:
        thief = random.choice([None, None, None, "one", "two"])
        rank = random.choice([None, None, 0, 1, 2])
        machine.load(random.randrange(30), thief, rank, random.randrange(3), random.randrange(4))


def complete_load(machine: CacheMachine, random: Random) -> None:
    if machine.loads:
        machine.complete_load(random.randrange(30), random.randrange(4))


def time_passes(machine: CacheMachine, random: Random) -> None:
    machine.time_passes(random.randrange(LEASE_S))


def sweep(machine: CacheMachine, random: Random) -> None:
    machine.sweep(random.choice(["leases", "fills"]))


def something_ends(machine: CacheMachine, random: Random) -> None:
    machine.something_ends(random.randrange(30), random.choice(["request", "engine", "space"]))


WEIGHTS: dict[Callable[[CacheMachine, Random], None], int] = {
    save_whole: 4,
    prepare_save: 4,
    complete_save: 5,
    ask: 8,
    load: 5,
    complete_load: 3,
    time_passes: 2,
    sweep: 2,
    something_ends: 1,
}


@pytest.mark.parametrize("policy", [*MAKERS, TENANTS])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_long_walk_ends_as_it_began(seed: int, policy: str) -> None:
    random = Random(seed)
    machine = CacheMachine()
    machine.policy = policy
    machine.begin(
        entries_max=random.choice([5, 12, 64]),
        batch=random.choice([1, 2, 256]),
        chains_max=random.choice([1, 64]),
        leases_max=random.choice([1, 3, 64]),
        leased=random.choice([0.1, 0.5]),
    )
    try:
        for step in random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=STEPS):
            step(machine, random)
            machine.columns_and_sums_are_the_models()
            machine.promised_and_read_pages_hold_their_own_bytes()
            machine.each_sealed_block_is_in_the_order_of_its_shape_alone()
        machine.everything_old_can_be_evicted()
    finally:
        machine.patch.undo()
