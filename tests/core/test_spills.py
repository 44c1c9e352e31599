"""Which requests' blocks are written, in which order, and how much a day."""

import numpy as np
import pytest

from trikv.core.asked import Asked
from trikv.core.chains import Chain
from trikv.core.plans import Hit, Key
from trikv.core.spills import DAY_S, Budget, Spills
from trikv.core.words import InstanceName, RequestId, SpaceId

ONE = SpaceId(1)


def chains(count: int, length: int = 1) -> list[Chain]:
    made = [Chain(ONE) for _ in range(count)]
    for one in made:
        one.length = length
    return made


def order(spills: Spills, *, is_full: bool = True) -> list[Chain]:
    found = []
    while (waiting := spills.next(is_full=is_full, now_s=0.0)) is not None:
        found.append(waiting.chain)
    return found


def test_what_is_used_again_comes_first_and_what_was_saved_only_when_the_pool_fills_up() -> None:
    a, b, c = chains(3)
    spills = Spills(Budget(None))
    spills.saved(a)
    spills.saved(b)
    spills.used(c)
    spills.used(b)
    spills.saved(b)
    assert order(spills, is_full=False) == [c, b]
    assert order(spills) == [a]
    assert len(spills) == 0


def test_write_through_waits_for_nothing() -> None:
    (a,) = chains(1)
    spills = Spills(Budget(None), write_through=True)
    spills.saved(a)
    assert order(spills, is_full=False) == [a]


def test_what_is_put_back_goes_on_first() -> None:
    a, b = chains(2)
    spills = Spills(Budget(None))
    for one in (a, b):
        spills.saved(one)
    first = spills.next(is_full=True, now_s=0.0)
    assert first is not None
    spills.saved(a)  # more of it meanwhile
    spills.put_back(first)
    assert order(spills) == [a, b]


def test_the_oldest_is_dropped_and_counted_cold_before_hot() -> None:
    a, b, c, d = chains(4)
    spills = Spills(Budget(None), chains_max=2)
    spills.used(a)
    spills.saved(b)
    spills.saved(c)
    assert spills.dropped_total == 1
    spills.used(d)
    assert spills.dropped_total == 2
    assert order(spills) == [a, d]


def test_long_requests_are_bounded_by_their_blocks() -> None:
    many = chains(5, length=1 << 20)
    spills = Spills(Budget(None))
    for one in many:
        spills.saved(one)
    assert order(spills) == many[1:]
    spills.saved(many[0])
    assert order(spills) == [many[0]]


def test_a_budget_is_for_a_day_with_an_eighth_at_once() -> None:
    budget = Budget(int(8 * DAY_S))  # 8 bytes a second
    assert budget.left(now_s=0.0) == pytest.approx(DAY_S)
    budget.spend(int(DAY_S))
    assert budget.left(now_s=10.0) == pytest.approx(80)
    budget.spend(100)
    assert budget.left(now_s=11.0) == pytest.approx(-12)
    assert budget.left(now_s=1e9) == pytest.approx(DAY_S)
    assert Budget(None).left(now_s=0.0) == float("inf")


def test_nothing_is_taken_without_a_budget() -> None:
    (a,) = chains(1)
    spills = Spills(Budget(80))
    spills.saved(a)
    spills.budget.spend(10)
    assert spills.next(is_full=True, now_s=0.0) is None
    assert order(spills) == []
    assert spills.next(is_full=True, now_s=DAY_S) is not None


def key(request: str = "r", instance: str = "i") -> Key:
    return Key(InstanceName(instance), RequestId(request), ONE)


def counted(found: object) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(one.first, one.end, one.by_tier) for one in found]  # type: ignore[attr-defined]


def hit(count: int, *, before: int = 0, landed: int = 0, coming: int = 0) -> Hit:
    return Hit(count, None, before, (landed,), coming)


WORDS = np.zeros((10, 4), np.uint64)


def test_what_is_coming_counts_when_it_is_asked_for_again() -> None:
    asked = Asked()
    assert counted(asked.answered(key(), WORDS, hit(2, coming=5))) == [(0, 2, (2, 0))]
    assert counted(asked.answered(key(), WORDS, hit(4, before=10, landed=2, coming=3))) == [
        (2, 4, (0, 2))
    ]
    assert counted(asked.answered(key(), WORDS, hit(7, before=10, landed=2))) == [(4, 10, (1, 2))]
    assert counted(asked.answered(key(), WORDS, hit(7, before=10))) == []


def test_what_is_not_asked_for_again_was_missed() -> None:
    asked = Asked()
    for request in ("r", "s"):
        assert counted(asked.answered(key(request), WORDS, hit(0, coming=5))) == []
    assert counted(asked.ended(InstanceName("other"))) == []
    assert counted(asked.ended(InstanceName("i"), RequestId("r"))) == [(0, 10, ())]
    assert counted(asked.ended(InstanceName("i"))) == [(0, 10, ())]
    assert counted(asked.ended(InstanceName("i"))) == []


def test_open_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trikv.core.asked.BLOCKS_MAX", 15)
    asked = Asked()
    assert counted(asked.answered(key("r"), WORDS, hit(0, coming=5))) == []
    assert counted(asked.answered(key("s"), WORDS, hit(1, coming=5))) == [
        (0, 1, (1, 0)),
        (0, 10, ()),
    ]
    assert counted(asked.ended(InstanceName("i"))) == [(1, 10, ())]
