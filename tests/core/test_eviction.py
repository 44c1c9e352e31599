"""Leaf-first LRU against a plain dict of (stamp, depth), and the invariant it exists for."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trikv.core import eviction
from trikv.core.eviction import NEVER, SWEEP_MIN, LeafFirstLru
from trikv.core.words import Entries

CHOICES = st.randoms(use_true_random=False)


def numbers(*entries: int) -> Entries:
    return np.array(entries, np.int32)


class LruMachine(RuleBasedStateMachine):
    """Entries are evicted in the order of (stamp, deepest first), whatever was pinned before."""

    CAPACITY = 24
    SLACK = 4

    def __init__(self) -> None:
        super().__init__()
        # Small rounds, so that batches end inside a record and sweeps are many and short.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(eviction, "SCAN_MIN", 2)
        self.patch.setattr(eviction, "SWEEP_MIN", 1)
        self.patch.setattr(eviction, "CHUNK_BITS", 1)
        self.patch.setattr(eviction, "CHUNKS_AHEAD", 3)
        self.recency = np.full(self.CAPACITY, NEVER, np.int64)
        self.policy = LeafFirstLru(self.recency, slack_entries=self.SLACK)
        self.evictable = np.ones(self.CAPACITY, np.bool_)
        self.model: dict[int, tuple[int, int]] = {}  # entry: place in the order, stamp
        self.stamp = 0
        self.first = self.last = 0  # places given at either end

    def teardown(self) -> None:
        self.patch.undo()

    def expected(self, count: int) -> list[int]:
        ordered = sorted(self.model, key=self.model.__getitem__)
        return [entry for entry in ordered if self.evictable[entry]][:count]

    @rule(entries=st.lists(st.integers(0, CAPACITY - 1), unique=True), step=st.integers(1, 3))
    def touch(self, entries: list[int], step: int) -> None:
        self.stamp += step
        self.policy.touch(numbers(*entries), self.stamp)
        self.append(entries[::-1])

    def append(self, entries: list[int]) -> None:
        for entry in entries:
            self.last += 1
            self.model[entry] = self.last, self.stamp

    @rule(count=st.integers(0, CAPACITY))
    def touch_everything_in_order(self, count: int) -> None:
        self.touch(sorted(self.model)[:count], 1)

    @rule(count=st.integers(0, CAPACITY))
    def evict(self, count: int) -> None:
        victims = self.policy.victims(count, self.evictable)
        assert victims.dtype == np.int32
        assert victims.tolist() == self.expected(count)
        for entry in victims.tolist():
            del self.model[entry]

    @rule(count=st.integers(0, CAPACITY), fates=st.lists(st.sampled_from("ekr"), min_size=CAPACITY))
    def take(self, count: int, fates: list[str]) -> None:
        """Of what is taken some go, some are kept as the newest, some are next again."""
        taken = self.policy.take(count, self.evictable).tolist()
        assert taken == self.expected(count)
        by = {fate: [e for e, f in zip(taken, fates, strict=False) if f == fate] for fate in "ekr"}
        self.policy.restore(numbers(*by["r"]))
        self.policy.keep(numbers(*by["k"]), self.stamp)
        self.policy.forget(numbers(*by["e"]))
        for entry in by["e"]:
            del self.model[entry]
        self.append(by["k"])
        self.first -= len(by["r"])
        for place, entry in enumerate(by["r"]):
            self.model[entry] = self.first + place, self.model[entry][1]

    @rule(choice=CHOICES, count=st.integers(0, 6))
    def forget(self, choice: Random, count: int) -> None:
        gone = choice.sample(range(self.CAPACITY), count)  # also unknown ones
        self.policy.forget(numbers(*gone))
        for entry in gone:
            self.model.pop(entry, None)

    @rule(choice=CHOICES, count=st.integers(0, 12))
    def pin(self, choice: Random, count: int) -> None:
        self.evictable[choice.sample(sorted(self.model), min(count, len(self.model)))] = False

    @rule(choice=CHOICES, count=st.integers(0, 12))
    def unpin(self, choice: Random, count: int) -> None:
        pinned = np.flatnonzero(~self.evictable).tolist()
        entries = choice.sample(pinned, min(count, len(pinned)))
        self.evictable[entries] = True
        self.policy.unpark(numbers(*entries))

    @rule(choice=CHOICES, rounds=st.integers(1, 20))
    def leases_come_and_go_at_the_old_end(self, choice: Random, rounds: int) -> None:
        """What is about to go gets pinned, met, and unpinned in pieces; some of it is used."""
        for _ in range(rounds):
            oldest = sorted(self.model, key=self.model.__getitem__)[:6]
            self.evictable[choice.sample(oldest, choice.randint(0, len(oldest)))] = False
            self.evict(choice.randint(0, 2))
            self.unpin(choice, choice.randint(0, 4))
            if choice.random() < 0.3:
                self.touch(choice.sample(range(self.CAPACITY), choice.randint(0, 3)), 1)

    @rule()
    def unpark_what_is_not_parked(self) -> None:
        known = [entry for entry in self.model if self.evictable[entry]]
        self.policy.unpark(numbers(*known))

    @invariant()
    def recency_and_size_are_the_models(self) -> None:
        stamps = [self.model.get(entry, (0, NEVER))[1] for entry in range(self.CAPACITY)]
        assert self.recency.tolist() == stamps
        assert len(self.policy) == len(self.model)

    @invariant()
    def coldest_is_not_newer_than_the_next_victim(self) -> None:
        coldest, victims = self.policy.coldest(), self.expected(1)
        if victims:
            assert coldest is not None
            assert coldest <= self.model[victims[0]][1]
        elif not self.model:
            assert coldest is None

    @invariant()
    def live_places_are_counted(self) -> None:
        places = self.policy._place[self.policy._place > 0] - 1
        assert len(set(places.tolist())) == len(places) == self.policy._logged
        assert np.array_equal(self.policy._ring[places], np.flatnonzero(self.policy._place))
        counts = np.bincount(places >> 1, minlength=len(self.policy._alive))
        assert self.policy._alive.tolist() == counts.tolist()

    @invariant()
    def the_log_is_bounded(self) -> None:
        assert self.policy.log_places <= 4 * len(self.policy) + self.SLACK
        assert sum(len(run) for _, run, _ in self.policy._runs) <= self.CAPACITY


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


class ForestMachine(RuleBasedStateMachine):
    """A forest of chains in a full cache: every use touches from the root, nothing is pinned."""

    CAPACITY = 16

    def __init__(self) -> None:
        super().__init__()
        self.recency = np.full(self.CAPACITY, NEVER, np.int64)
        self.policy = LeafFirstLru(self.recency, slack_entries=0)
        self.evictable = np.ones(self.CAPACITY, np.bool_)
        self.parent: dict[int, int | None] = {}
        self.unused = list(range(self.CAPACITY))
        self.stamp = 0

    def path(self, entry: int | None) -> list[int]:
        path = []
        while entry is not None:
            path.append(entry)
            entry = self.parent[entry]
        return path[::-1]

    def touch(self, entry: int) -> None:
        self.stamp += 1
        self.policy.touch(numbers(*self.path(entry)), self.stamp)

    @rule(choice=CHOICES, length=st.integers(1, 5), is_root=st.booleans())
    def save(self, choice: Random, length: int, *, is_root: bool) -> None:
        parent = None if is_root or not self.parent else choice.choice(sorted(self.parent))
        if parent is not None:
            self.touch(parent)  # the query before the save
        if len(self.unused) < length:
            self.evict(length - len(self.unused))
        if parent is not None and parent not in self.parent:
            return
        for _ in range(length):
            self.parent[entry := self.unused.pop()] = parent
            parent = entry
        self.touch(entry)

    @rule(choice=CHOICES)
    @precondition(lambda self: self.parent)
    def use(self, choice: Random) -> None:
        self.touch(choice.choice(sorted(self.parent)))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        for entry in self.policy.victims(count, self.evictable).tolist():
            assert entry not in self.parent.values(), "a parent went before its child"
            del self.parent[entry]
            self.unused.append(entry)

    @invariant()
    def no_parent_is_older_than_its_child(self) -> None:
        for entry, parent in self.parent.items():
            if parent is not None:
                assert parent in self.parent
                assert self.recency[parent] >= self.recency[entry]


TestForest = ForestMachine.TestCase
TestForest.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(seed=st.integers(0, 2**32), slack_entries=st.sampled_from([0, 1000]))
@settings(max_examples=15, deadline=None)
def test_large_batches_give_the_models_order(seed: int, slack_entries: int) -> None:
    """Records of hundreds, sweeps of their real size, the ring's end crossed many times."""
    random = np.random.default_rng(seed)
    capacity = 3000
    policy = LeafFirstLru(np.full(capacity, NEVER, np.int64), slack_entries=slack_entries)
    evictable = np.ones(capacity, np.bool_)
    model: dict[int, None] = {}  # in the order of eviction
    for stamp in range(1, 120):
        start, count = random.integers(0, capacity), random.integers(1, 700)
        entries = np.arange(start, min(start + count, capacity), dtype=np.int32)
        policy.touch(entries, stamp)
        for entry in reversed(entries.tolist()):
            model.pop(entry, None)
            model[entry] = None
        wanted = int(random.integers(0, 500)) if stamp % 3 == 0 else 0
        victims = policy.victims(wanted, evictable).tolist()
        assert victims == list(model)[:wanted]
        for entry in victims:
            del model[entry]
        assert policy.log_places <= 4 * len(model) + slack_entries + SWEEP_MIN
    assert policy.victims(capacity, evictable).tolist() == list(model)
    assert policy.coldest() is None


def policy_of(capacity: int) -> tuple[LeafFirstLru, np.ndarray]:
    policy = LeafFirstLru(np.full(capacity, NEVER, np.int64))
    return policy, np.ones(capacity, np.bool_)


def test_the_deepest_of_the_oldest_goes_first() -> None:
    policy, evictable = policy_of(8)
    policy.touch(numbers(0, 1, 2), 1)
    policy.touch(numbers(0, 1, 5, 6), 4)
    assert policy.coldest() == 1
    assert policy.victims(3, evictable).tolist() == [2, 6, 5]
    assert policy.coldest() == 4
    assert policy.victims(9, evictable).tolist() == [1, 0]
    assert policy.coldest() is None


def test_children_unparked_before_their_parents_still_go_first() -> None:
    policy, evictable = policy_of(8)
    policy.touch(numbers(0, 1, 2, 3), 1)
    evictable[:4] = False
    assert policy.victims(4, evictable).tolist() == []
    evictable[:4] = True
    policy.unpark(numbers(2, 3))  # the longer of two leases ends
    policy.unpark(numbers(0, 1))
    assert policy.victims(4, evictable).tolist() == [3, 2, 1, 0]


def test_the_coldest_is_found_behind_entries_that_were_unparked_and_used() -> None:
    policy, evictable = policy_of(4)
    for entry in range(4):
        policy.touch(numbers(entry), entry + 1)
    evictable[:] = False
    policy.victims(4, evictable)
    evictable[:] = True
    policy.unpark(numbers(0, 3))
    policy.unpark(numbers(1))
    policy.touch(numbers(0), 9)
    assert policy.coldest() == 2
    assert policy.victims(4, evictable).tolist() == [1, 3, 0]


def test_a_parked_entry_that_is_used_again_is_not_next() -> None:
    policy, evictable = policy_of(4)
    policy.touch(numbers(0), 1)
    evictable[0] = False
    assert policy.victims(1, evictable).tolist() == []
    policy.touch(numbers(1), 2)
    policy.touch(numbers(0), 3)
    evictable[0] = True
    policy.unpark(numbers(0))
    assert policy.victims(2, evictable).tolist() == [1, 0]


def test_entries_used_after_they_were_unparked_leave_nothing_behind() -> None:
    policy, evictable = policy_of(2)
    for stamp in range(1, 50):
        policy.touch(numbers(0), stamp)
        evictable[0] = False
        assert policy.victims(1, evictable).tolist() == []
        evictable[0] = True
        policy.unpark(numbers(0))
    assert len(policy._runs) == 1


def test_a_parked_entry_that_is_forgotten_does_not_come_back() -> None:
    policy, evictable = policy_of(4)
    policy.touch(numbers(0, 1), 1)
    evictable[:] = False
    policy.victims(2, evictable)
    policy.forget(numbers(0))
    policy.unpark(numbers(0, 1))
    evictable[:] = True
    assert policy.victims(2, evictable).tolist() == [1]
    assert len(policy) == 0


def test_capacity_one_and_empty_batches() -> None:
    policy, evictable = policy_of(1)
    assert policy.coldest() is None
    assert policy.victims(3, evictable).tolist() == []
    policy.touch(numbers(), 1)
    policy.unpark(numbers())
    policy.forget(numbers())
    for stamp in range(2, 2000):
        policy.touch(numbers(0), stamp)
    assert policy.victims(0, evictable).tolist() == []
    assert policy.victims(3, evictable).tolist() == [0]


def test_stamps_must_grow() -> None:
    policy, _ = policy_of(2)
    policy.touch(numbers(0), 5)
    with pytest.raises(AssertionError):
        policy.touch(numbers(1), 5)


def test_a_call_gives_up_after_many_pinned_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction, "SCAN_MIN", 1)
    monkeypatch.setattr(eviction, "IDLE_ROUNDS_MAX", 3)
    policy, evictable = policy_of(10)
    policy.touch(np.arange(10, dtype=np.int32)[::-1], 1)
    evictable[:8] = False
    assert policy.victims(1, evictable).tolist() == []
    assert policy.coldest() == 1
    assert policy.victims(1, evictable).tolist() == [8]


def test_two_orders_share_a_column_of_recency() -> None:
    recency = np.full(4, NEVER, np.int64)
    left, right = LeafFirstLru(recency), LeafFirstLru(recency)
    left.touch(numbers(0, 1), 1)
    right.touch(numbers(2, 3), 2)
    left.touch(numbers(0), 3)
    assert recency.tolist() == [3, 1, 2, 2]
    evictable = np.ones(4, np.bool_)
    assert left.victims(4, evictable).tolist() == [1, 0]
    assert right.victims(4, evictable).tolist() == [3, 2]
