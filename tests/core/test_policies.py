"""Orders of eviction by name: what holds for all, and each against an obvious model of its own."""

from collections import OrderedDict
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trikv.core import frequency, queues
from trikv.core.eviction import NEVER
from trikv.core.frequency import Sketch, WindowTinyLfu
from trikv.core.policies import MAKERS, Ground
from trikv.core.queues import Ghosts, S3Fifo
from trikv.core.words import Entries, Names

CHOICES = st.randoms(use_true_random=False)
CAPACITY = 40


def numbers(*entries: int) -> Entries:
    return np.array(entries, np.int32)


def spread(keys: list[int]) -> Names:
    return np.array(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class AnyPolicyMachine(RuleBasedStateMachine):
    """Whoever goes was known and not pinned, and as many go as are wanted and may."""

    @initialize(name=st.sampled_from(sorted(MAKERS)))
    def begin(self, name: str) -> None:
        self.recency = np.full(CAPACITY, NEVER, np.int64)
        ground = Ground(self.recency, 20, lambda entries: spread(entries.tolist()))
        self.policy = MAKERS[name](ground)
        self.evictable = np.ones(CAPACITY, np.bool_)
        self.known: set[int] = set()
        self.stamp = 0

    @rule(entries=st.lists(st.integers(0, CAPACITY - 1), unique=True), is_use=st.booleans())
    def touch(self, entries: list[int], *, is_use: bool) -> None:
        self.stamp += 1
        if is_use:
            self.policy.used(numbers(*[one for one in entries if one in self.known]))
        self.policy.touch(numbers(*entries), self.stamp)
        self.known.update(entries)

    @rule(count=st.integers(0, CAPACITY))
    def evict(self, count: int) -> None:
        may = {entry for entry in self.known if self.evictable[entry]}
        coldest, stamps = self.policy.coldest(), self.recency.copy()
        victims = self.policy.victims(count, self.evictable)
        gone = set(victims.tolist())
        assert victims.dtype == np.int32
        assert gone <= may
        assert len(gone) == len(victims) == min(count, len(may))
        if gone:
            assert coldest is not None
            assert coldest <= stamps[victims[0]]
        self.known -= gone

    @rule(choice=CHOICES, count=st.integers(0, 8))
    def forget(self, choice: Random, count: int) -> None:
        gone = choice.sample(range(CAPACITY), count)
        self.policy.forget(numbers(*gone))
        self.known.difference_update(gone)

    @rule(choice=CHOICES, count=st.integers(0, 12))
    def pin(self, choice: Random, count: int) -> None:
        self.evictable[choice.sample(sorted(self.known), min(count, len(self.known)))] = False

    @rule(choice=CHOICES, count=st.integers(0, 12))
    def unpin(self, choice: Random, count: int) -> None:
        pinned = np.flatnonzero(~self.evictable).tolist()
        entries = choice.sample(pinned, min(count, len(pinned)))
        self.evictable[entries] = True
        self.policy.unpark(numbers(*entries))

    @invariant()
    def known_entries_have_a_stamp(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.known)
            assert set(np.flatnonzero(self.recency >= 0).tolist()) == self.known


TestAnyPolicy = AnyPolicyMachine.TestCase
TestAnyPolicy.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


class S3Model:
    """S3-FIFO of single blocks, as the paper tells it."""

    def __init__(self, ghosts: int) -> None:
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghosts: list[int] = []
        self.ghosts_max = ghosts

    def touch(self, key: int) -> None:
        for queue in (self.small, self.main):
            if key in queue:
                queue[key] = min(queue[key] + 1, 3)
                return
        (self.main if key in self.ghosts[-self.ghosts_max :] else self.small)[key] = 0

    def evict(self) -> int:
        while True:
            total = len(self.small) + len(self.main)
            if len(self.small) > total // 10 or not self.main:
                key, uses = self.small.popitem(last=False)
                if uses < 2:
                    self.ghosts.append(key)
                    return key
                self.main[key] = 0
            else:
                key, uses = self.main.popitem(last=False)
                if uses == 0:
                    return key
                self.main[key] = uses - 1


class TinyLfuModel:
    """A window and a main part in order of use, counts without an end."""

    def __init__(self) -> None:
        self.window: OrderedDict[int, None] = OrderedDict()
        self.main: OrderedDict[int, None] = OrderedDict()
        self.counts: dict[int, int] = {}
        self.is_full = False

    def touch(self, key: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1
        part = self.main if key in self.main else self.window
        part.pop(key, None)
        part[key] = None
        if not self.is_full and len(self.window) > 1:
            self.main[self.window.popitem(last=False)[0]] = None

    def evict(self) -> int:
        self.is_full = True
        if len(self.window) == 1:  # a hundredth of fewer than 200
            return self.main.popitem(last=False)[0]
        key, _ = self.window.popitem(last=False)
        rival = next(iter(self.main))
        if self.counts[key] <= self.counts[rival]:
            return key
        del self.main[rival]
        self.main[key] = None
        return rival


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["s3-fifo", "w-tinylfu"])
def test_one_by_one_each_is_its_model(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frequency, "PERIOD_USES", 1 << 30)
    monkeypatch.setattr(queues, "ROUND_MIN", 1 + seed % 5)
    random, size = Random(seed), 60
    key_of: dict[int, int] = {}
    recency = np.full(size, NEVER, np.int64)
    names = lambda entries: spread([key_of[entry] for entry in entries.tolist()])  # noqa: E731
    policy = MAKERS[name](Ground(recency, 4096, names))
    model = S3Model(4096) if name == "s3-fifo" else TinyLfuModel()
    unused, entry_of = list(range(size)), {}
    evictable = np.ones(size, np.bool_)
    for stamp in range(1, 3000):
        key = int(random.paretovariate(0.8)) % 400
        if key in entry_of:
            policy.used(numbers(entry_of[key]))
        else:
            if not unused:
                gone = policy.victims(1, evictable).item()
                assert key_of[gone] == model.evict()
                unused.append(entry_of.pop(key_of.pop(gone)))
            entry_of[key] = unused.pop()
            key_of[entry_of[key]] = key
        policy.touch(numbers(entry_of[key]), stamp)
        model.touch(key)


def test_a_loop_longer_than_the_cache_does_not_wash_out_what_is_used_often() -> None:
    """A scan passes; what LRU would lose stays with both others."""
    kept = {}
    for name, maker in MAKERS.items():
        size = 200
        recency = np.full(size, NEVER, np.int64)
        key_of = np.zeros(size, np.int64)
        policy = maker(Ground(recency, size, lambda one, k=key_of: spread(k[one].tolist())))
        evictable, unused, stamp = np.ones(size, np.bool_), list(range(size)), 0
        hot = numbers(*(unused.pop() for _ in range(50)))
        key_of[hot] = np.arange(50)
        for _ in range(5):
            stamp += 1
            policy.used(hot[recency[hot] >= 0])
            policy.touch(hot, stamp)
        for start in range(1000, 1800, 20):
            if len(unused) < 20:
                unused.extend(policy.victims(20, evictable).tolist())
            fresh = numbers(*(unused.pop() for _ in range(20)))
            key_of[fresh] = np.arange(start, start + 20)
            stamp += 1
            policy.touch(fresh, stamp)
        kept[name] = int(((key_of[hot] < 50) & (recency[hot] >= 0)).sum())
    assert kept.pop("w-tinylfu") >= 30  # the first batch meets an empty window
    assert kept == {"leaf-first-lru": 0, "root-first-lru": 0, "s3-fifo": 50}


def test_many_pinned_in_the_main_queue_do_not_stop_the_small_one() -> None:
    recency = np.full(20, NEVER, np.int64)
    policy = S3Fifo(recency, lambda one: spread(one.tolist()), ghosts=20)
    entries = np.arange(20, dtype=np.int32)
    policy.touch(entries, 1)
    for _ in range(2):
        policy.used(entries[2:])
    evictable = np.ones(20, np.bool_)
    assert len(policy.victims(2, evictable)) == 2  # 17 or so have moved to the main queue
    evictable[:] = False
    evictable[policy._queue == queues.SMALL] = True
    count = int(evictable.sum())
    assert set(policy.victims(20, evictable).tolist()) == set(np.flatnonzero(evictable).tolist())
    assert len(policy) == 18 - count


def test_second_chances_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "ROUNDS_MAX", 0)
    recency = np.full(20, NEVER, np.int64)
    policy = S3Fifo(recency, lambda one: spread(one.tolist()), ghosts=20)
    entries = np.arange(20, dtype=np.int32)
    policy.touch(entries, 1)
    for _ in range(3):
        policy.used(entries)
    assert len(policy.victims(5, np.ones(20, np.bool_))) == 5


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_ghosts_know_the_last_ones_only(seed: int) -> None:
    random = np.random.default_rng(seed)
    ghosts = Ghosts(64)
    names = random.integers(0, 2**63, 400).astype(np.uint64)
    assert not ghosts.has(names).any()
    assert not ghosts.has(np.zeros(1, np.uint64)).any()
    for start in range(0, 400, 20):
        ghosts.add(names[start : start + 20])
    found = ghosts.has(names)
    assert not found[:-64].any()
    assert found[-64:].sum() >= 55  # more than eight may want the same place
    assert found[-30:].sum() >= 29


def test_a_sketch_counts_too_much_seldom_and_too_little_never() -> None:
    random = np.random.default_rng(3)
    sketch = Sketch(2000)
    names = random.integers(0, 2**63, 1500).astype(np.uint64)
    true = np.zeros(1500, np.int64)
    for _ in range(100):  # a whole generation
        some = random.choice(1500, 80, replace=False)
        sketch.add(names[some])
        true[some] += 1
    counts = sketch.count(names)
    assert (counts >= true).all()
    assert (counts <= true + 1).mean() > 0.99
    sketch.add(spread([1]))
    halves = sketch.count(names)
    assert (halves >= true // 2).all()
    assert (halves <= true // 2 + 1).mean() > 0.99
    assert sketch.bytes <= 32 * 2000


def test_a_sketch_forgets_and_does_not_overflow() -> None:
    sketch = Sketch(100)
    name = spread([7])
    for _ in range(399):
        sketch.add(name)
    assert sketch.count(name)[0] == 255
    for start in range(0, 200 * frequency.PERIOD_USES + 100, 100):
        sketch.add(spread(list(range(10_000 + start, 10_100 + start))))
    assert sketch.count(name)[0] < 12


def test_with_room_nothing_is_refused() -> None:
    """The filter is asked only by `victims`: new blocks are always in, however cold."""
    recency = np.full(100, NEVER, np.int64)
    policy = WindowTinyLfu(recency, lambda one: spread(one.tolist()), blocks=100)
    for entry in range(100):
        policy.touch(numbers(entry), entry + 1)
    assert len(policy) == 100
