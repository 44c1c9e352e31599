"""A small pool, four spaces, and blocks as the tests of the cache remember them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from trikv.core.blocks import State
from trikv.core.cache import Cache
from trikv.core.plans import Key, Limits, LoadPlan, SavePlan
from trikv.core.policies import DEFAULT, MAKERS
from trikv.core.tenants import Quota, Rules, Tenants
from trikv.core.words import InstanceName, LeaseId, RequestId, SpaceId, Words

TENANTS = "tenants"  # the default order, with quotas
PAGE = 4096
SLAB = 8 * PAGE
POOL = 4 * SLAB
PAGES = {1: (1,), 2: (2, 1, 1), 3: (1,), 4: (1, 1)}  # a space: units of each page of a block
REPLICAS = {"two": 2}  # ranks of an instance that hold the same page; of others each its own
LEASE_S, FILL_S = 4, 5
Who = tuple[InstanceName, RequestId]
WHO = st.tuples(
    st.sampled_from(["one", "two"]).map(InstanceName), st.sampled_from(["r", "s"]).map(RequestId)
)
SPACES = st.sampled_from(sorted(PAGES)).map(SpaceId)
WHICH = st.integers(0, 29)
TREE = [*range(1, 16), 31, 47, 63]  # node n's parent is n // 2
NODES = st.sampled_from(TREE)


def path_to(node: int) -> list[int]:
    """A prompt: the hashes from the root to `node`."""
    return [node >> up for up in reversed(range(node.bit_length()))]


def words(nodes: list[int]) -> Words:
    return np.array([(node, 0, 0, node) for node in nodes], np.uint64).reshape(-1, 4)


def new_cache(
    entries_max: int = 64,
    *,
    pool: int = POOL,
    policy: str = DEFAULT,
    **limits: Any,  # noqa: ANN401
) -> Cache:
    cache = Cache(
        pool,
        SLAB,
        entries_max=entries_max,
        seed=1,
        limits=Limits(**limits),
        policy=MAKERS[DEFAULT if policy == TENANTS else policy],
        tenants=Tenants(pool, Rules(Quota(0.1, 0.4))) if policy == TENANTS else None,
    )
    for space, pages in PAGES.items():
        page_bytes = tuple(PAGE * count - 7 for count in pages)
        cache.open_space(SpaceId(space), page_bytes, f"tenant {space % 2}")
    return cache


def rows_in(order: Any) -> tuple[set[int], set[int]]:  # noqa: ANN401
    """Rows that an order of any kind knows, and those of them that it has passed over."""
    names = ("_small", "_window", "_main")
    parts = [getattr(order, name) for name in names if hasattr(order, name)]
    parts += getattr(order, "_orders", {}).values()
    known: list[int] = []
    parked: set[int] = set()
    for part in parts if parts or hasattr(order, "_orders") else [order]:
        known += np.flatnonzero((part._place > 0) | (part._turn != 0)).tolist()
        parked.update(np.flatnonzero(part._turn > 0).tolist())
    assert len(set(known)) == len(known) == len(order)
    return set(known), parked


def has_row(cache: Cache, space: SpaceId, node: int) -> bool:
    return int(cache.index.find(space, words([node]))[0]) >= 0


def drop_space(cache: Cache, space: SpaceId) -> int:
    """Forget all blocks of a space; returns how many left the index."""
    before = cache.counters.dropped_blocks_total
    cache.retire_space(space)
    while cache.drop_retired():
        pass
    return cache.counters.dropped_blocks_total - before


@dataclass(eq=False)
class Life:
    """A block from its reservation until its pages are free."""

    space: SpaceId
    node: int
    row: int
    pages: list[list[int]]  # a page: the pool's 4 KiB units
    deadline_s: int
    state: State = State.FILLING
    claimed: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    writers: int = 0
    pins: int = 0

    @property
    def bytes(self) -> int:
        return PAGE * sum(PAGES[self.space])

    def tags(self, page: int) -> dict[int, object]:
        """What the units of a page hold when the copy was whole."""
        return {unit: (self.space, self.node, page, i) for i, unit in enumerate(self.pages[page])}


Saves = list[tuple[SavePlan, list[Life]]]  # under way
Loads = list[tuple[LoadPlan, list[Life], int]]  # with the page that is read


@dataclass(eq=False)
class Promise:
    id: LeaseId
    lives: list[Life]
    ranks: range
    deadline_s: int
    left: set[int] = field(default_factory=set)  # ranks that have not loaded

    def __post_init__(self) -> None:
        self.left = set(self.ranks)

    @property
    def is_whole(self) -> bool:
        return self.left == set(self.ranks)


class Model:
    """Blocks and promises as they must be."""

    policy = DEFAULT
    memory: dict[int, object]  # the pool: what each 4 KiB unit holds
    lives: dict[tuple[SpaceId, int], Life]  # those that the index knows
    doomed: set[Life]
    leases: dict[Who, Promise]

    def sum_of(self, *states: State) -> int:
        return sum(life.bytes for life in self.all() if life.state in states)

    def all(self) -> list[Life]:
        return [*self.lives.values(), *self.doomed]

    def leased_bytes(self) -> int:
        return sum(life.bytes for one in self.leases.values() for life in one.lives)

    def assert_readable(self, lives: list[Life], page: int) -> None:
        for life in lives:
            for unit, tag in life.tags(page).items():
                assert self.memory[unit] == tag

    def assert_full(self, space: SpaceId, own: set[int]) -> None:
        """Refused only when nothing but the request's own blocks could have gone."""
        for life in self.lives.values():
            if PAGES[life.space] == PAGES[space] and life.state is State.SEALED:
                assert life.pins or life.row in own

    def lose(self, life: Life) -> None:
        del self.lives[life.space, life.node]
        life.state = State.DOOMED
        self.doomed.add(life)
        self.let_go(life)

    def let_go(self, life: Life) -> None:
        if life.state is State.DOOMED and life.writers + life.pins == 0:
            self.doomed.remove(life)

    def unpin(self, lives: list[Life]) -> None:
        for life in lives:
            life.pins -= 1
            self.let_go(life)

    def dropped(self, cache: Cache, space: SpaceId) -> int:
        return drop_space(cache, space)

    def end(self, who: Who) -> None:
        self.unpin(self.leases.pop(who).lives)


ONE = SpaceId(1)


def key_of(who: Who, space: SpaceId) -> Key:
    return Key(*who, space, replicas=REPLICAS.get(who[0], 1))


def ranks_of(who: Key) -> range:
    return range(len(PAGES[who.space]) * who.replicas)


def is_turn(who: Key, rank: int, position: int) -> bool:
    """Whether a block is this rank's to save; said otherwise than in the core."""
    return (position - rank) % who.replicas == 0


def key(request: str, space: SpaceId = ONE, instance: str = "one") -> Key:
    return Key(InstanceName(instance), RequestId(request), space)


def save(
    cache: Cache, who: Key, nodes: list[int], *, first: int = 0, now_s: float = 0.0
) -> list[SavePlan]:
    """All ranks save, and nothing goes wrong."""
    plans = []
    for rank in ranks_of(who):
        plan = cache.prepare_save(who, words(nodes), rank=rank, first=first, now_s=now_s)
        cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        plans.append(plan)
    return plans


def ask(cache: Cache, who: Key, nodes: list[int], *, now_s: float = 0.0) -> int:
    """A query whose lease is given back at once: how many blocks are there."""
    count = cache.query(who, words(nodes), now_s=now_s).count
    cache.release(who.instance, who.request)
    return count
