"""Windows against exact counts, and registers against the package that invented them."""

import hashlib

import numpy as np
import pytest
from hyperloglog import HyperLogLog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgpack import packb

from trikv.core import windows as module
from trikv.core.ceiling import Case, WindowFacts
from trikv.core.windows import (
    EVERYONE,
    MISSED,
    PENDING_BLOCKS_MAX,
    REGISTERS,
    SLOTS,
    StateError,
    Windows,
    estimate,
    mix,
    places,
    salt_of,
)
from trikv.core.words import Words

ERROR_RATE = 0.0058  # the package makes 2^15 registers of it
RMS_MAX = 0.0085
DAY = (900.0, 3600.0, 86400.0)


def words(first: int, count: int) -> Words:
    """Hashes named by numbers, uniform as those of an engine."""
    names = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    made = np.zeros((count, 4), np.uint64)
    made[:, 0] = mix(names, np.uint64(77))
    return made


def registers_of(mixed: np.ndarray) -> np.ndarray:
    registers = np.zeros(REGISTERS, np.int8)
    np.maximum.at(registers, *places(mixed))
    return registers


def everyone(windows: Windows, now_s: float) -> list[WindowFacts]:
    return [facts for facts in windows.read(now_s=now_s) if facts.namespace == EVERYONE]


# -- registers


def test_a_batch_fills_the_registers_as_the_package_does_one_by_one() -> None:
    oracle = HyperLogLog(ERROR_RATE)
    assert oracle.m == REGISTERS
    values = [f"block {number}" for number in range(3_000)]
    for value in values:
        oracle.add(value)
    sums = [hashlib.sha1(packb(value)).digest()[:8] for value in values]  # the package's own hash
    mixed = np.array([int.from_bytes(one, "big") for one in sums], np.uint64)
    assert np.array_equal(registers_of(mixed), oracle.M)


def test_the_rarest_hash_has_the_highest_value() -> None:
    register, value = places(np.array([0, 5, 2**64 - 1, 1 << 15], np.uint64))
    assert register.tolist() == [0, 5, REGISTERS - 1, 0]
    assert value.tolist() == [50, 50, 1, 49]


@pytest.mark.parametrize("count", [0, 1, 500, 20_000, 40_000, 90_000, 170_000, 400_000])
def test_the_estimate_is_the_package_s(count: int) -> None:
    oracle = HyperLogLog(ERROR_RATE)
    oracle.M = registers_of(mix(np.arange(count, dtype=np.uint64), np.uint64(3)))
    assert estimate(oracle.M) == pytest.approx(oracle.card(), rel=1e-12)


@pytest.mark.parametrize("count", [2_000, 30_000, 90_000, 200_000])
def test_the_error_keeps_its_bound_over_100_seeds(count: int) -> None:
    keys = words(0, count)[:, 0]
    errors = [estimate(registers_of(mix(keys, np.uint64(salt)))) / count - 1 for salt in range(100)]
    assert np.sqrt(np.mean(np.square(errors))) <= RMS_MAX


def test_a_day_s_window_takes_less_than_a_mebibyte() -> None:
    windows = Windows((86400.0,), now_s=0.0)
    assert windows.memory_bytes < 1 << 20


def test_equal_hashes_of_two_groups_are_two_blocks() -> None:
    windows = Windows((60.0,), now_s=0.0)
    for group in (0, 1):
        windows.record("a", salt_of(b"a", group, 0), words(0, 1_000), (0,), now_s=0.0)
    assert everyone(windows, 0.0)[0].distinct_blocks == pytest.approx(2_000, rel=0.02)


# -- windows against an exact model


class RollingWindows(RuleBasedStateMachine):
    """Against a list of all that was ever asked. Slots are 1, 5 and 24 seconds: whole numbers."""

    LENGTHS = (12.0, 60.0, 288.0)
    NAMES = ("a", "b", "c")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, str, int, int, int]] = []  # second, name, first, count, hits
        self.now = self.offset = 0

    @initialize(now=st.integers(-50, 10**6))
    def begin(self, now: int) -> None:
        self.now = now
        self.windows = Windows(self.LENGTHS, now_s=now, namespaces_max=len(self.NAMES))

    @rule(
        name=st.sampled_from(NAMES),
        first=st.integers(0, 5).map(lambda one: 40 * one),
        count=st.integers(0, 200),
        hit=st.sampled_from([0, 0.5, 0.99, 1]),
        pauses=st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=3),
    )
    def ask(self, name: str, first: int, count: int, hit: float, pauses: list[int]) -> None:
        for pause in pauses:
            self.now += pause
            hits = int(count * hit)
            salt = salt_of(name.encode(), 0, 0)
            self.windows.record(name, salt, words(first, count), (hits,), now_s=self.now)
            self.asked.append((self.now + self.offset, name, first, count, hits))

    @rule(step=st.one_of(st.integers(1, 30), st.sampled_from([11, 12, 55, 60, 264, 288, 10**5])))
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(slot=st.sampled_from([1, 5, 24]), early=st.sampled_from([0, 0, 1]))
    def time_passes_to_an_edge(self, slot: int, early: int) -> None:
        edge = ((self.now + self.offset) // slot + 1) * slot - early - self.offset
        self.now = max(self.now, edge)

    @rule()
    def tend(self) -> None:
        self.windows.tend(now_s=self.now)

    @rule(
        idle=st.sampled_from([0, 1, 13, 61, 300, -100]),
        now=st.integers(-50, 10**6),
    )
    def restart(self, idle: int, now: int) -> None:
        """Another process on another clock; the time of day may have gone back."""
        saved = b"".join(self.windows.dump(now_s=self.now, wall_s=5_000.0))
        self.offset += self.now + max(0, idle) - now
        self.now = now
        self.windows = Windows(self.LENGTHS, now_s=now, namespaces_max=len(self.NAMES))
        self.windows.load(saved, now_s=now, wall_s=5_000.0 + idle)

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "windows"):
            return
        facts = self.windows.read(now_s=self.now)
        names = list(dict.fromkeys(one.namespace for one in facts))
        assert names[0] == EVERYONE
        for one in facts:
            self.check_window(one)
        for absent in set(self.NAMES) - set(names):
            assert sum(count for *_, count, _ in self.inside(288.0, absent)) == 0

    def inside(self, length_s: float, name: str) -> list[tuple[int, str, int, int, int]]:
        slot = int(length_s) // SLOTS
        oldest = (self.now + self.offset) // slot - SLOTS + 1
        rows = [row for row in self.asked if row[0] // slot >= oldest]
        return [row for row in rows if name in {EVERYONE, row[1]}]

    def check_window(self, facts: WindowFacts) -> None:
        rows = self.inside(facts.length_s, facts.namespace)
        asked = sum(count for *_, count, _ in rows)
        hits = sum(hits for *_, hits in rows)
        assert (facts.asked_blocks, facts.hit_blocks) == (asked, (hits, 0, 0))
        distinct = {(name, key) for _, name, at, n, _ in rows for key in range(at, at + n)}
        missed = {(name, key) for _, name, at, n, h in rows for key in range(at + h, at + n)}
        for estimated, exact in (
            (facts.distinct_blocks, len(distinct)),
            (facts.distinct_missed_blocks, len(missed)),
        ):
            assert abs(estimated - exact) <= 2 + 0.02 * exact
        assert facts.measured <= facts.reachable <= 1
        assert 0 <= facts.fresh <= facts.reachable
        assert 0 <= facts.covered_s <= facts.length_s


TestRollingWindows = RollingWindows.TestCase


@pytest.mark.parametrize("seed", range(20))
def test_an_old_cache_never_exceeds_the_reachable_ceiling(seed: int) -> None:
    """A cache of any age and size: what it holds at the start was saved before the window."""
    rng = np.random.default_rng(seed)
    universe = 100_000
    held = np.zeros(universe, np.bool_)
    held[rng.integers(0, universe, rng.integers(0, universe))] = True
    windows = Windows((60.0,), now_s=0.0)
    asked = missed = 0
    for _ in range(200):
        first, count = int(rng.zipf(1.3)) % (universe - 600), int(rng.integers(1, 600))
        here = held[first : first + count]
        hits = count if here.all() else int(np.argmin(here))
        windows.record("a", 1, words(first, count), (hits,), now_s=0.0)
        asked, missed = asked + count, missed + count - hits
        held[first : first + count] = True
        held[rng.integers(0, universe, 300)] = False
    (facts,) = everyone(windows, 0.0)
    assert facts.measured == pytest.approx(1 - missed / asked)
    assert facts.measured <= facts.reachable


# -- bounds


def test_a_message_larger_than_what_may_wait_is_filled_in_at_once() -> None:
    windows = Windows((60.0,), now_s=0.0)
    count = 3 * PENDING_BLOCKS_MAX
    windows.record("a", 1, words(0, count), (count // 3,), now_s=0.0)
    assert not windows._pending
    (facts,) = everyone(windows, 0.0)
    assert facts.distinct_missed_blocks == pytest.approx(count * 2 / 3, rel=0.03)


def test_many_small_messages_do_not_wait_for_ever() -> None:
    windows = Windows((60.0,), now_s=0.0)
    for _ in range(module.PENDING_BATCHES_MAX):
        windows.record("a", 1, words(0, 1), (1,), now_s=0.0)
    assert not windows._pending


def test_what_waits_keeps_no_message_alive() -> None:
    windows = Windows((60.0,), now_s=0.0)
    message = words(0, 10)
    windows.record("a", 1, message, (0,), now_s=0.0)
    assert not np.shares_memory(windows._pending[0].keys, message)


def test_the_busiest_namespaces_have_windows_of_their_own() -> None:
    windows = Windows((60.0, 600.0), now_s=0.0, namespaces_max=2)

    def ask(name: str, count: int, now_s: float) -> None:
        windows.record(name, 1, words(0, count), (0,), now_s=now_s)

    def names(now_s: float) -> list[str]:
        return list(dict.fromkeys(one.namespace for one in windows.read(now_s=now_s)))

    ask("a", 900, 1.0)
    ask("b", 500, 1.0)
    ask("c", 800, 1.0)
    assert names(1.0) == [EVERYONE, "a", "b"]
    assert names(6.0) == [EVERYONE, "a", "b"]  # less than twice as busy
    ask("c", 900, 6.0)
    assert names(11.0) == [EVERYONE, "c", "a"]
    ask("c", 100, 12.0)
    own = [one for one in windows.read(now_s=12.0) if one.namespace == "c"]
    assert [one.asked_blocks for one in own] == [100, 100]
    assert [one.covered_s for one in own] == [1.0, 1.0]
    assert names(700.0) == [EVERYONE]  # nobody asked in the longest window


def test_names_of_the_busy_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_MAX", 8)
    windows = Windows((60.0,), now_s=0.0)
    for number in range(50):
        windows.record(f"n{number}", 1, words(0, 2 + number), (0,), now_s=0.0)
        windows.tend(now_s=0.0)
    assert len(windows._busy) == 8
    assert "n49" in windows._busy


# -- cases


def test_the_three_cases() -> None:
    def case(asked: int, hits: int, distinct_missed: int) -> Case:
        return WindowFacts(60.0, 60.0, "", asked, (hits,), distinct_missed, distinct_missed).case

    assert case(0, 0, 0) is Case.IDLE
    assert case(1000, 100, 850) is Case.LOW_CEILING
    assert case(1000, 600, 380) is Case.AT_CEILING
    assert case(1000, 600, 100) is Case.FAR_BELOW


# -- a restart


def saved(windows: Windows) -> bytes:
    return b"".join(windows.dump(now_s=1.0, wall_s=1.0))


def test_saved_windows_of_another_kind_are_refused_and_nothing_changes() -> None:
    windows = Windows((60.0,), now_s=0.0)
    windows.record("a", 1, words(0, 100), (7,), now_s=1.0)
    whole = saved(windows)
    head, _, body = whole.partition(b"\n")
    wrong = [
        b"",
        b"{}\n",
        b"[]\n",
        b"\xff\n",
        head + b"\n" + body[:-1],
        head + b"\n" + body + b"\0",
        head.replace(b"windows 1", b"windows 2") + b"\n" + body,
        head.replace(b'"pinned"', b'"tape"') + b"\n" + body,
        head.replace(b'"at_s": 1.0', b'"at_s": "x"') + b"\n" + body,
        saved(Windows((61.0,), now_s=0.0)),
    ]
    before = windows.read(now_s=1.0)
    for one in wrong:
        with pytest.raises(StateError) as caught:
            windows.load(one, now_s=1.0, wall_s=1.0)
        assert "\n" not in str(caught.value)
        assert windows.read(now_s=1.0) == before
    windows.load(whole, now_s=50.0, wall_s=1.0)
    assert [one.asked_blocks for one in windows.read(now_s=50.0)] == [100, 100]


def test_windows_say_whether_there_is_something_new_to_save() -> None:
    windows = Windows(DAY, now_s=0.0)
    assert not windows.has_changed
    windows.record("a", 1, words(0, 10), (0,), now_s=1.0)
    windows.tend(now_s=2.0)
    assert windows.has_changed
    saved(windows)
    assert not windows.has_changed


def test_the_first_block_after_the_hits_is_the_first_miss() -> None:
    windows = Windows((60.0,), now_s=0.0)
    windows.record("a", 1, words(0, 100), (99,), now_s=0.0)
    windows.record("a", 1, words(200, 50), (49,), now_s=0.0)
    assert everyone(windows, 0.0)[0].distinct_missed_blocks == 2


def test_misses_alone_fill_the_registers_of_the_missed() -> None:
    windows = Windows((60.0,), now_s=0.0)
    windows.record("a", 1, words(0, 100), (100,), now_s=0.0)
    windows.tend(now_s=0.0)
    assert not windows._scopes[EVERYONE].registers[:, MISSED].any()
