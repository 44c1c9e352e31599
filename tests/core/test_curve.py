"""The miss-ratio curve against stacks as lists, and the shadow caches against the real cache."""

from random import Random

import numpy as np
import pytest

from trikv.cli.made import make_trace
from trikv.cli.rerun import Case, run
from trikv.cli.traces import Trace
from trikv.core import insight as module
from trikv.core.curve import Curve
from trikv.core.insight import Insight
from trikv.core.policies import MAKERS
from trikv.core.shadows import Shadows
from trikv.core.words import SpaceId, Words

SPACE = SpaceId(3)
BLOCK = 1 << 20


def words_of(ids: list[int]) -> Words:
    x = np.array(ids, np.uint64)[:, None] * np.uint64(4) + np.arange(4, dtype=np.uint64)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(29))


def walks(seed: int, count: int) -> list[list[int]]:
    """Paths from the root of a tree that grows."""
    random = Random(seed)
    children: dict[int, list[int]] = {}
    fresh, paths = 1, []
    for _ in range(count):
        node, path = 0, []
        for _ in range(random.randint(1, 12)):
            below = children.setdefault(node, [])
            if not below or random.random() < 0.2:
                below.append(fresh)
                fresh += 1
            node = random.choice(below)
            path.append(node)
        paths.append(path)
    return paths


def found_by_stack(paths: list[list[int]], capacity: int) -> float:
    """Leaf-first LRU with a list, newest first: a block is found when it is among the first."""
    stack: list[int] = []
    hits = 0
    for path in paths:
        near = set(stack[:capacity])
        hits += next((at for at, one in enumerate(path) if one not in near), len(path))
        stack = path + [one for one in stack if one not in set(path)]
    return hits / sum(map(len, paths))


@pytest.mark.parametrize("seed", range(3))
def test_with_all_blocks_followed_the_curve_is_exact(seed: int) -> None:
    paths = walks(seed, 300)
    curve = Curve(1 << 60, sample_blocks=2048)
    for path in paths:
        curve.use(SPACE, words_of(path), BLOCK, is_ask=True)
    assert curve.rate == 1.0
    sizes = [1, 2, 3, 5, 8, 13, 21, 34, 50, 2000]
    expected = [found_by_stack(paths, size) for size in sizes]
    assert curve.hit_rates([size * BLOCK for size in sizes]) == pytest.approx(expected)


def feed(curve: Curve, trace: Trace) -> None:
    words = trace.words()
    for row in range(len(trace)):
        mine = words[trace.starts[row] : trace.starts[row + 1]]
        curve.use(SPACE, mine, BLOCK, is_ask=True)


@pytest.mark.parametrize("name", ["made:agent:4", "made:conversation:4"])
def test_a_sample_is_within_two_hundredths_of_replay(name: str) -> None:
    """Not for caches that hold but one request of the longest, where requests cut each other."""
    trace = make_trace(name).take(np.arange(400))
    curve = Curve(1 << 60, sample_blocks=2048)
    feed(curve, trace)
    assert curve.rate < 0.5
    for share in (0.02, 0.05, 0.1, 0.2, 0.4, 1.0):
        blocks = round(share * trace.distinct)
        if blocks < 2 * np.diff(trace.starts).max():
            continue
        found = run(trace, Case(blocks, "leaf-first-lru")).hits.sum() / trace.asked
        assert curve.hit_rates([blocks * BLOCK])[0] == pytest.approx(found, abs=0.02), share


def test_what_never_returns_does_not_end_the_sampling() -> None:
    """New blocks for ever: the oldest are forgotten, once the stack reaches far enough."""
    curve = Curve(20_000 * BLOCK, sample_blocks=1024)
    hot = words_of(list(range(50)))
    for start in range(1000, 400_000, 400):
        curve.use(SPACE, hot, BLOCK, is_ask=True)
        curve.use(SPACE, words_of(list(range(start, start + 400))), BLOCK, is_ask=False)
    assert 0.02 < curve.rate < 0.1  # a thousand of twenty thousand, and an eighth of slack
    low, high = curve.hit_rates([100 * BLOCK, 1000 * BLOCK])
    assert low < 0.2
    assert high > 0.8
    assert curve.bytes_max < 200 * 1024


def test_only_the_leading_run_is_found() -> None:
    curve = Curve(1 << 60, sample_blocks=64)
    curve.use(SPACE, words_of([1, 2, 3, 4]), BLOCK, is_ask=True)
    curve.use(SPACE, words_of([1, 9, 3, 4]), BLOCK, is_ask=True)
    assert curve.hit_rates([BLOCK << 20]) == [1 / 8]
    curve.use(SpaceId(4), words_of([1, 9, 3, 4]), BLOCK, is_ask=True)
    assert curve.hit_rates([BLOCK << 20]) == [1 / 12]


def test_old_uses_fade() -> None:
    curve = Curve(1 << 60, sample_blocks=64)
    for _ in range(2):
        curve.use(SPACE, words_of([1]), BLOCK, is_ask=True)
    for _ in range(8):
        curve.halve()
    for one in range(10, 20):
        curve.use(SPACE, words_of([one]), BLOCK, is_ask=True)
    assert curve.hit_rates([1 << 50])[0] < 0.01


def test_a_request_larger_than_the_sample() -> None:
    curve = Curve(1 << 60, sample_blocks=64)
    for _ in range(3):
        curve.use(SPACE, words_of(list(range(500))), BLOCK, is_ask=True)
    assert curve.rate < 0.1
    assert 0 <= curve.hit_rates([1 << 50])[0] <= 1


def test_shadows_tell_the_policies_apart() -> None:
    trace = make_trace("made:conversation:2").take(np.arange(300))
    blocks = trace.distinct // 10
    shadows = Shadows(MAKERS, blocks * BLOCK, shadow_blocks=blocks // 2)
    words = trace.words()
    for row in range(len(trace)):
        mine = words[trace.starts[row] : trace.starts[row + 1]]
        shadows.use(SPACE, mine, BLOCK, is_ask=True)
    assert shadows.rate == pytest.approx(0.5, abs=0.01)
    told = shadows.hit_rates()
    for name in ("leaf-first-lru", "s3-fifo"):
        found = run(trace, Case(blocks, name)).hits.sum() / trace.asked
        assert told[name] == pytest.approx(found, abs=0.05), name


def test_calls_wait_and_at_the_bound_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 3)
    insight = Insight(100 * BLOCK)
    assert insight.points() == []
    for _ in range(5):
        insight.note(SPACE, words_of([1, 2]), BLOCK, is_ask=True)
    assert insight.skipped_total == 2
    assert insight.digest(2, now_s=1.0)
    assert not insight.digest(2, now_s=1.0)
    assert insight.curve.asked_count == 6
    rates = dict(insight.points())
    assert rates[100 * BLOCK] == pytest.approx(4 / 6)
    assert insight.shadows.hit_rates()["leaf-first-lru"] == pytest.approx(4 / 6)
    insight.digest(0, now_s=3601.0)
    assert insight.curve.asked_count == 3


def test_a_request_of_which_too_much_is_seen_lowers_the_rate() -> None:
    shadows = Shadows(MAKERS, 4000 * BLOCK)
    curve = Curve(1 << 60)
    for _ in range(3):
        shadows.use(SPACE, words_of(list(range(3000))), BLOCK, is_ask=True)
        curve.use(SPACE, words_of(list(range(3000))), BLOCK, is_ask=True)
    assert 0.1 < shadows.rate < 0.2
    assert 0.1 < curve.rate < 0.2
    told = shadows.hit_rates()
    assert told["leaf-first-lru"] == pytest.approx(2 / 3)  # what was before it began again is gone
    assert curve.hit_rates([4000 * BLOCK])[0] == pytest.approx(2 / 3, abs=0.03)


def test_a_block_is_found_no_nearer_than_what_stands_before_it() -> None:
    curve = Curve(1 << 60, sample_blocks=64)
    curve.use(SPACE, words_of([1, 2]), BLOCK, is_ask=False)
    curve.use(SPACE, words_of([3, 4, 5]), BLOCK, is_ask=False)
    curve.use(SPACE, words_of([2]), BLOCK, is_ask=False)  # nearer than its parent now
    curve.use(SPACE, words_of([1, 2]), BLOCK, is_ask=True)
    assert curve.hit_rates([4 * BLOCK, 5 * BLOCK]) == [0.0, 1.0]
