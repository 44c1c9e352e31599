"""Plans: every block once, from an owner; few segments; shared between equals."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trikv.core.routes import CHUNK_BLOCKS, SEGMENTS_MAX, Segment, covered, route

NODES = 6


def owned(*rows: tuple[int, ...]) -> NDArray[np.uint16]:
    made = np.zeros((len(rows), 4), np.uint16)
    for at, row in enumerate(rows):
        made[at, : len(row)] = row
    return made


def free() -> NDArray[np.float64]:
    return np.zeros(NODES + 1)


@given(
    rows=st.lists(st.lists(st.integers(0, NODES), max_size=4).map(tuple), max_size=40),
    costs=st.lists(st.integers(0, 30), min_size=NODES + 1, max_size=NODES + 1),
    turn=st.integers(0, 9),
)
def test_every_block_has_an_owner_of_its_own_until_the_first_gap(
    rows: list[tuple[int, ...]], costs: list[int], turn: int
) -> None:
    before = np.array(costs, float)
    after = before.copy()
    segments = route(owned(*rows), after, turn=turn)
    gap = next((at for at, row in enumerate(rows) if not any(row)), len(rows))
    assert covered(owned(*rows)) == gap
    blocks = [s.node for s in segments for _ in range(s.count)]
    assert len(blocks) == gap
    assert all(node in rows[at] for at, node in enumerate(blocks))
    assert all(a.node != b.node for a, b in itertools.pairwise(segments))
    given_out = np.bincount(np.array(blocks, int), minlength=NODES + 1)
    assert np.array_equal(after - before, given_out)


def test_the_cheapest_of_the_long_runs_wins() -> None:
    rows = [(1, 2, 3)] * 4 + [(1, 2)] * 4 + [(1,)] * 2
    costs = free()
    costs[1], costs[2] = 5, 3  # 3 is cheapest, and has less than half of the longest run
    assert route(owned(*rows), costs, turn=0)[0] == Segment(2, 0, 8)
    costs = free()
    costs[2] = 1
    assert route(owned(*rows), costs, turn=0) == [Segment(1, 0, 10)]


def test_equal_owners_share_a_long_prefix() -> None:
    segments = route(owned(*[(1, 2, 3)] * (6 * CHUNK_BLOCKS)), free(), turn=0)
    shares = {node: sum(s.count for s in segments if s.node == node) for node in (1, 2, 3)}
    assert shares == dict.fromkeys((1, 2, 3), 2 * CHUNK_BLOCKS)


def test_different_askers_begin_with_different_owners() -> None:
    first = {route(owned((1, 2, 3)), free(), turn=turn)[0].node for turn in range(NODES + 1)}
    assert first == {1, 2, 3}


def test_owners_in_another_order_are_the_same_owners() -> None:
    assert route(owned((1, 2), (2, 1), (0, 1)), free(), turn=0) == [Segment(1, 0, 3)]


def test_a_plan_ends_at_so_many_segments() -> None:
    rows = [(1 + at % 2,) for at in range(3 * SEGMENTS_MAX)]
    segments = route(owned(*rows), free(), turn=0)
    assert len(segments) == SEGMENTS_MAX
    assert sum(s.count for s in segments) == SEGMENTS_MAX


@pytest.mark.parametrize("count", [1, CHUNK_BLOCKS, CHUNK_BLOCKS + 1, 3 * CHUNK_BLOCKS])
def test_one_owner_is_one_segment(count: int) -> None:
    assert route(owned(*[(4,)] * count), free(), turn=0) == [Segment(4, 0, count)]
