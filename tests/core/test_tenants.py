"""Quotas: floors hold against scans, shares give first, and rules change while blocks are there."""

from random import Random

import numpy as np
import pytest
from cache_world import PAGE, SLAB, save, words

from trikv.core.cache import Cache
from trikv.core.plans import Key, Limits
from trikv.core.policies import MAKERS
from trikv.core.tenants import OTHERS_NAME, TENANTS_MAX, Quota, Rules, Tenants
from trikv.core.words import InstanceName, RequestId, SpaceId

BLOCKS = 64
POOL = BLOCKS * PAGE


def cache_of(rules: Rules, *, policy: str = "leaf-first-lru", tenants: str = "abc") -> Cache:
    """Tenant number n has space n + 1; all blocks are of one page, but of the last tenant."""
    limits = Limits(filling_fraction=1.0, leased_fraction=1.0)
    cache = Cache(
        POOL,
        SLAB,
        entries_max=BLOCKS,
        seed=1,
        limits=limits,
        policy=MAKERS[policy],
        tenants=Tenants(POOL, rules),
    )
    for number, name in enumerate(tenants):
        cache.open_space(SpaceId(number + 1), (PAGE,), name)
    return cache


def key(name: str, request: str = "r") -> Key:
    return Key(InstanceName(name), RequestId(request), SpaceId("abc".index(name) + 1))


def put(cache: Cache, name: str, first: int, count: int) -> int:
    """A request of fresh blocks; returns how many found room."""
    nodes = list(range(first, first + count))
    plan = cache.prepare_save(key(name), words(nodes), rank=0, first=0, now_s=0.0)
    cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
    cache.release(InstanceName(name), RequestId("r"))
    return len(plan.entries)


def used(cache: Cache) -> dict[str, int]:
    assert cache.tenants is not None
    return {name: size // PAGE for name, size, _, _ in cache.tenants.rows()}


def held(cache: Cache, name: str, first: int, count: int) -> int:
    """How many of these a query finds, from the first on."""
    found = cache.index.find_prefix(key(name).space, words(list(range(first, first + count))))
    return len(found)


def scan(cache: Cache, name: str, *, blocks: int = 400) -> None:
    for first in range(100_000, 100_000 + blocks, 8):
        put(cache, name, first, 8)


@pytest.mark.parametrize("policy", sorted(MAKERS))
def test_a_scan_does_not_empty_anothers_floor(policy: str) -> None:
    cache = cache_of(Rules(named={"a": Quota(floor=0.25)}), policy=policy)
    put(cache, "a", 1, 40)
    scan(cache, "b")
    assert used(cache) == {"a": 16, "b": 48}
    if policy == "leaf-first-lru":
        assert held(cache, "a", 1, 40) == 16, "what is left of a prompt is its beginning"


def test_without_a_floor_the_scan_takes_all() -> None:
    cache = cache_of(Rules())
    put(cache, "a", 1, 40)
    scan(cache, "b")
    assert used(cache) == {"b": 64}


def test_a_tenant_below_its_floor_takes_from_those_above_theirs() -> None:
    cache = cache_of(Rules(named={"a": Quota(floor=0.5), "b": Quota(floor=0.25)}))
    scan(cache, "b")
    put(cache, "a", 1, 40)
    assert used(cache) == {"a": 40, "b": 24}
    assert put(cache, "a", 201, 16) == 16
    assert used(cache)["b"] == 16
    put(cache, "a", 301, 16)  # nothing is left but b's floor: its own blocks go
    assert used(cache) == {"a": 48, "b": 16}
    assert held(cache, "a", 301, 16) == 16


def test_when_all_the_rest_is_floors_a_newcomer_is_refused() -> None:
    cache = cache_of(Rules(named={"a": Quota(floor=0.5), "b": Quota(floor=0.5)}))
    put(cache, "a", 1, 32)
    put(cache, "b", 101, 32)
    assert put(cache, "c", 201, 8) == 0
    assert used(cache) == {"a": 32, "b": 32}


def test_who_is_above_its_share_gives_first_however_hot() -> None:
    cache = cache_of(Rules(named={"a": Quota(share=0.25)}))
    put(cache, "b", 101, 24)
    put(cache, "a", 1, 40)  # room was free: more than its share
    put(cache, "c", 201, 16)
    assert used(cache) == {"a": 24, "b": 24, "c": 16}
    put(cache, "c", 301, 16)
    assert used(cache) == {"a": 16, "b": 16, "c": 32}, "then the coldest gives"


def test_a_scan_above_its_share_feeds_on_itself() -> None:
    cache = cache_of(Rules(Quota(share=0.5)))
    put(cache, "a", 1, 32)
    scan(cache, "b")
    assert used(cache) == {"a": 32, "b": 32}


def test_rules_change_live() -> None:
    cache = cache_of(Rules(named={"a": Quota(floor=0.5)}))
    put(cache, "a", 1, 40)
    scan(cache, "b")
    assert used(cache)["a"] == 32
    assert cache.tenants is not None
    cache.tenants.rules = Rules(named={"a": Quota(floor=0.125)})
    scan(cache, "b")
    assert used(cache)["a"] == 8


def test_replicas_go_first() -> None:
    cache = cache_of(Rules())
    put(cache, "a", 1, 32)
    put(cache, "a", 101, 32)
    newer = cache.index.find(SpaceId(1), words(list(range(101, 133))))
    cache.blocks.replica[newer] = True
    cache.query(
        key("a"), words(list(range(101, 133))), now_s=0.0
    )  # a touch, as the peers' part does
    cache.release(InstanceName("a"), RequestId("r"))
    put(cache, "b", 201, 16)
    assert held(cache, "a", 1, 32) == 32
    assert held(cache, "a", 101, 32) == 16


def test_a_slab_of_another_shape_is_not_won_from_a_floor() -> None:
    cache = cache_of(Rules(named={"a": Quota(floor=0.5)}))
    cache.open_space(SpaceId(9), (2 * PAGE,), "z")
    put(cache, "a", 1, 64)
    big = Key(InstanceName("z"), RequestId("r"), SpaceId(9))
    for first in range(300, 400, 4):
        plan = cache.prepare_save(
            big, words(list(range(first, first + 4))), rank=0, first=0, now_s=0.0
        )
        cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        cache.release(InstanceName("z"), RequestId("r"))
    assert used(cache)["a"] >= 32
    assert used(cache)["z"] >= 24


def test_tenants_beyond_the_bound_are_one() -> None:
    tenants = Tenants(POOL, Rules())
    for number in range(TENANTS_MAX + 5):
        tenants.assign(SpaceId(number), f"t{number}")
    assert tenants.of(SpaceId(TENANTS_MAX - 2)) == TENANTS_MAX - 1
    assert {tenants.of(SpaceId(TENANTS_MAX + n)) for n in range(5)} == {0}
    assert tenants._names[0] == OTHERS_NAME
    tenants.forget(SpaceId(1))
    assert tenants.of(SpaceId(1)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_pushed_below_a_floor_by_another(seed: int) -> None:
    random = Random(seed)
    policy = random.choice(sorted(MAKERS))
    cache = cache_of(Rules(Quota(0.1, 0.5), {"a": Quota(0.4, 0.6)}), policy=policy)
    floors = {"a": 25, "b": 6, "c": 6}
    for step in range(400):
        name = random.choice("aabbbc")
        before = used(cache)
        first = random.choice([step * 50, random.randrange(5) * 50])
        nodes = list(range(first, first + random.randint(1, 30)))
        if random.random() < 0.5:
            cache.query(key(name), words(nodes), now_s=0.0)
            cache.release(InstanceName(name), RequestId("r"))
        else:
            save(cache, key(name, "s"), nodes)
            cache.release(InstanceName(name), RequestId("s"))
        after = used(cache)
        for other in set("abc") - {name}:
            assert after.get(other, 0) >= min(before.get(other, 0), floors[other]), (step, other)
        assert sum(map(len, cache.room.orders.values())) == sum(after.values())
