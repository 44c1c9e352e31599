"""The queue of a node against the set that the other side ends up with."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trikv.core import adverts as module
from trikv.core.adverts import DIGEST_MASK, Adverts, Part, net
from trikv.core.words import Words

A, B = b"a" * 20, b"b" * 20
KEYS = st.lists(st.integers(0, 5), max_size=6)
KEYS_MAX = 16


def words(*numbers: int) -> Words:
    """Pairs of them share the first word."""
    made = np.zeros((len(numbers), 4), np.uint64)
    made[:, 0], made[:, 3] = [n // 2 for n in numbers], numbers
    return made


class AdvertsMachine(RuleBasedStateMachine):
    """A node, a meta that may take a portion whose answer is lost, and what each believes."""

    def __init__(self) -> None:
        super().__init__()
        self.adverts = Adverts(keys_max=KEYS_MAX)
        self.holds: dict[tuple[bytes, int], bool] = {}  # is it below?
        self.meta: dict[tuple[bytes, int], bool] = {}
        self.digest = 0
        self.is_announced = False

    @rule(
        origin=st.sampled_from([A, B]), numbers=KEYS, is_held=st.booleans(), is_below=st.booleans()
    )
    def change(self, origin: bytes, numbers: list[int], *, is_held: bool, is_below: bool) -> None:
        part = Part(origin, words(*numbers), is_held, is_held and is_below)
        self.holds = apply(self.holds, part)
        fits = len(self.adverts) + len(numbers) <= KEYS_MAX
        self.adverts.offer(part)
        assert self.adverts.is_lost or fits
        assert len(self.adverts) <= KEYS_MAX

    @rule()
    def announce(self) -> None:
        """In full; changes may come between beginning and end, here they do not."""
        self.adverts.begin()
        assert len(self.adverts) == 0
        assert not self.adverts.is_lost
        self.meta, self.digest, self.is_announced = dict(self.holds), 0, True
        self.adverts.finish()

    @precondition(lambda self: not self.adverts.is_lost)
    @rule(arrives=st.booleans(), is_answered=st.booleans())
    def tell(self, *, arrives: bool, is_answered: bool) -> None:
        portion = self.adverts.take()
        assert self.adverts.take() is portion
        if arrives:
            self.apply(portion)
        if arrives and is_answered:
            self.adverts.taken()
        else:  # whether it arrived is not known: the digest says
            assert self.adverts.agree(self.digest)

    @rule()
    def something_is_lost_on_the_way(self) -> None:
        self.digest = (self.digest + 1) & DIGEST_MASK
        if not self.adverts.is_lost:
            assert not self.adverts.agree(self.digest)
            self.adverts.lose()
        assert self.adverts.is_lost

    @invariant()
    def when_all_is_told_both_sides_believe_the_same(self) -> None:
        if not self.adverts.is_lost and not len(self.adverts) and not self.adverts._sent:
            assert self.meta == self.holds
            assert self.adverts.agree(self.digest)

    def apply(self, portion: list[Part]) -> None:
        told = 0
        for part in portion:
            assert len({int(n) for n in part.words[:, 3]}) == len(part.words)
            self.meta = apply(self.meta, part)
            told += part.digest
        self.digest = (self.digest + told) & DIGEST_MASK


def apply(held: dict[tuple[bytes, int], bool], part: Part) -> dict[tuple[bytes, int], bool]:
    keys = [(part.origin, int(n)) for n in part.words[:, 3]]
    left = {key: is_below for key, is_below in held.items() if key not in keys}
    return left | dict.fromkeys(keys, part.is_below) if part.is_held else left


TestAdverts = AdvertsMachine.TestCase
TestAdverts.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def told(parts: list[Part]) -> set[tuple[bytes, int, bool]]:
    return {(p.origin, int(n), p.is_held) for p in parts for n in p.words[:, 3]}


def test_only_the_last_change_of_a_block_is_told() -> None:
    parts = [
        Part(A, words(0, 1, 2), is_held=True),
        Part(A, words(1), is_held=False),
        Part(B, words(1), is_held=True),
        Part(A, words(2), is_held=False),
        Part(A, words(2), is_held=True),
    ]
    assert told(net(parts)) == {(A, 0, True), (A, 1, False), (A, 2, True), (B, 1, True)}
    assert sum(len(part.words) for part in net(parts)) == 4


def test_what_is_in_flight_is_not_told_yet() -> None:
    adverts = Adverts()
    adverts.begin()
    adverts.finish()
    adverts.offer(Part(A, words(1, 2), is_held=True))
    adverts.take()
    assert (len(adverts), adverts.untold) == (0, 2)
    adverts.offer(Part(A, words(3), is_held=True))
    assert adverts.untold == 3
    adverts.taken()
    assert adverts.untold == 1


def test_portions_are_bounded_in_keys_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PORTION_KEYS", 4)
    monkeypatch.setattr(module, "PORTION_PARTS_MAX", 4)
    adverts = Adverts()
    adverts.begin()
    adverts.finish()
    adverts.offer(Part(A, words(*range(6)), is_held=True, is_below=True))
    for origin in (A, B, A):
        adverts.offer(Part(origin, words(9), is_held=False))
    assert len(adverts) == 9
    seen = []
    while portion := adverts.take():
        assert all(part.is_below == part.is_held for part in portion)
        seen.append((len(portion), sum(len(part.words) for part in portion)))
        adverts.taken()
    assert seen == [(1, 4), (2, 3), (2, 2)]
    assert len(adverts) == 0


def test_at_the_bound_everything_is_announced_anew_and_what_went_is_counted() -> None:
    adverts = Adverts(keys_max=4)
    adverts.begin()
    adverts.offer(Part(A, words(1, 2, 3), is_held=True))
    adverts.offer(Part(A, words(4), is_held=True))
    assert not adverts.is_lost
    adverts.offer(Part(A, words(5), is_held=True))
    assert adverts.is_lost
    assert adverts.dropped_total == 5
    assert adverts.take() == []
    adverts.begin()
    assert not adverts.is_lost


def test_nothing_was_announced_at_first() -> None:
    assert Adverts().is_lost


@pytest.mark.parametrize("arrived", [True, False])
def test_a_portion_whose_answer_was_lost_is_told_again_only_if_it_did_not_arrive(
    *, arrived: bool
) -> None:
    adverts = Adverts()
    adverts.begin()
    adverts.finish()
    adverts.offer(Part(A, words(1, 2), is_held=True))
    portion = adverts.take()
    digest = sum(part.digest for part in portion) & DIGEST_MASK if arrived else 0
    assert adverts.agree(digest)
    assert adverts.take() == ([] if arrived else portion)
    assert adverts.told == digest
    assert not adverts.agree(digest + 1)
