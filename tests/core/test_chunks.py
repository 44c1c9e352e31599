"""How copies to a GPU are cut, ordered and given staging, against models that walk byte by byte."""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trikv.core.chunks import (
    AGING_BYTES_S,
    Ring,
    chunk_blocks,
    cut,
    next_copy,
    page_runs,
    piece_runs,
    put_first,
    sort,
    tail_blocks,
    tall_runs,
)

PAGE = 16
SLAB = 5 * PAGE


@given(pages=st.lists(st.integers(0, 60), min_size=1, max_size=60, unique=True))
def test_blocks_move_in_the_pool_s_order(pages: list[int]) -> None:
    offsets = np.array(pages, np.int64) * PAGE
    blocks = np.array(pages, np.int32) + 1000
    got = sort(blocks, offsets, page_bytes=PAGE, slab_bytes=SLAB)
    assert got.offsets.tolist() == sorted(offsets.tolist())
    assert got.blocks.tolist() == [offset // PAGE + 1000 for offset in got.offsets.tolist()]
    assert blocks[got.order].tolist() == got.blocks.tolist()


@given(pages=st.sets(st.integers(0, 40), min_size=1), first=st.sets(st.integers(0, 50), min_size=1))
def test_some_pages_are_put_first_and_runs_do_not_reach_over_the_seam(
    pages: set[int], first: set[int]
) -> None:
    places = np.array(sorted(pages, key=lambda one: one * 7 % 41), np.int64) * PAGE
    before = sort(np.arange(len(places), dtype=np.int32), places, page_bytes=PAGE, slab_bytes=SLAB)
    after, count = put_first(before, np.array(sorted(first), np.int64) * PAGE)
    assert [*after.offsets // PAGE] == [*sorted(pages & first), *sorted(pages - first)]
    assert count == len(pages & first)
    assert [*places[after.order]] == [*after.offsets]
    assert [*after.blocks] == [*after.order]
    runs = page_runs(after.offsets, after.heads, page_bytes=PAGE)
    moved = [at + n for _, at, size in runs.tolist() for n in range(0, size, PAGE)]
    assert moved == [*after.offsets]


@pytest.mark.parametrize(
    ("count", "page_bytes", "pieces", "wanted"),
    [
        (500, 72 << 15, 72, (2048 // 72, True)),  # Qwen3-8B, K and V apart: pieces of 32 KiB
        (500, 61 * 73_728, 61, ((64 << 20) // (61 * 73_728), True)),  # MLA: 72 KiB
        (9, 72 << 15, 72, (2, True)),  # of a small copy a quarter
        (500, 72 << 13, 72, (28, True)),
        (500, (72 << 13) - 1, 72, ((32 << 20) // ((72 << 13) - 1), False)),  # small for the bus
        (500, 61 * 64 * 1152, 61 * 64, (7, False)),  # MLA with padded rows
        (9, 61 * 64 * 1152, 61 * 64, (2, False)),
        (500, 64 << 20, 1, (1, True)),
        (500, (64 << 20) + 1, 1, (0, True)),
    ],
)
def test_a_load_s_tail_is_what_the_bus_moves_while_kernels_wait(
    *, count: int, page_bytes: int, pieces: int, wanted: tuple[int, bool]
) -> None:
    assert tail_blocks(count, page_bytes=page_bytes, pieces=pieces) == wanted


@given(count=st.integers(1, 500), chunk_pages=st.integers(0, 40))
def test_chunks_are_never_empty_nor_too_large(count: int, chunk_pages: int) -> None:
    started, sizes = 0, []
    while started < count:
        left, most = count - started, chunk_pages * PAGE
        sizes.append(chunk_blocks(started, left, page_bytes=PAGE, chunk_bytes=most))
        started += sizes[-1]
    least = -(-max(1, chunk_pages) // 4)
    assert started == count
    assert min(sizes) >= min(least, count)
    assert max(sizes[:-1], default=1) <= max(1, chunk_pages)
    assert sizes[-1] <= max(1, chunk_pages) + least - 1
    assert sizes[:-1] == sorted(sizes[:-1])


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (80, [4, 4, 8, 16, 16, 16, 16]),
        (83, [4, 4, 8, 16, 16, 16, 19]),
        (84, [4, 4, 8, 16, 16, 16, 16, 4]),
        (8, [4, 4]),
        (7, [7]),
    ],
)
def test_the_first_chunks_are_smaller_and_the_last_one_is_not(
    count: int, wanted: list[int]
) -> None:
    started, sizes = 0, []
    while started < count:
        left = count - started
        sizes.append(chunk_blocks(started, left, page_bytes=PAGE, chunk_bytes=16 * PAGE))
        started += sizes[-1]
    assert sizes == wanted


@given(
    pages=st.lists(st.integers(0, 60), min_size=1, max_size=60, unique=True), cut=st.integers(0, 60)
)
def test_page_runs_cover_the_pages_and_stay_in_their_slab(pages: list[int], cut: int) -> None:
    whole = np.array(sorted(pages), np.int64) * PAGE
    heads = sort(whole.astype(np.int32), whole, page_bytes=PAGE, slab_bytes=SLAB).heads
    for part in (slice(0, cut), slice(cut, None)):
        offsets = whole[part]
        if not len(offsets):
            continue
        runs = page_runs(offsets, heads[part], page_bytes=PAGE).tolist()
        covered = [
            (before // PAGE + n, start + n * PAGE)
            for before, start, size in runs
            for n in range(size // PAGE)
        ]
        assert covered == list(enumerate(offsets.tolist()))
        assert all(start // SLAB == (start + size - 1) // SLAB for _, start, size in runs)
        joints = [(a[1] + a[2], b[1]) for a, b in pairwise(runs)]
        assert all(end != begin or begin % SLAB == 0 for end, begin in joints), "neighbours meet"


@given(
    pages=st.lists(st.integers(0, 60), min_size=1, max_size=60, unique=True),
    least=st.integers(1, 6),
)
def test_tall_runs_and_the_rest_are_all_pages_once(pages: list[int], least: int) -> None:
    offsets = np.array(sorted(pages), np.int64) * PAGE
    heads = sort(offsets.astype(np.int32), offsets, page_bytes=PAGE, slab_bytes=SLAB).heads
    runs, rest = tall_runs(offsets, heads, least=least)
    covered = {at: int(offsets[at]) for at in rest.tolist()}
    for first, start, height in runs.tolist():
        assert height >= least
        assert start // SLAB == (start + height * PAGE - 1) // SLAB
        assert not covered.keys() & set(range(first, first + height))
        covered |= {first + n: start + n * PAGE for n in range(height)}
    assert covered == dict(enumerate(offsets.tolist()))
    assert least > 1 or not len(rest)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    ends=st.sets(st.integers(1, 72), max_size=5),
)
def test_parts_of_a_page_have_all_of_its_bytes_in_order(lengths: list[int], ends: set[int]) -> None:
    size = np.array(lengths, np.int64)
    page = int(size.sum())
    cuts = sorted({0, page} | {one for one in ends if one < page})
    found = []
    for begin, end in pairwise(cuts):
        which, skip, count = (one.tolist() for one in cut(size, begin, end))
        part = [(w, s + n) for w, s, c in zip(which, skip, count, strict=True) for n in range(c)]
        assert len(part) == end - begin
        found += part
    assert found == [(which, n) for which, one in enumerate(lengths) for n in range(one)]


@given(
    pages=st.lists(st.integers(0, 40), min_size=1, max_size=30, unique=True),
    blocks=st.permutations(range(41)),
    lengths=st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3),
    apart=st.booleans(),
)
def test_piece_runs_move_the_same_bytes_as_piece_by_piece(
    *, pages: list[int], blocks: list[int], lengths: list[int], apart: bool
) -> None:
    size = np.array(lengths, np.int64)
    page = int(size.sum())
    pitch = PAGE * 2  # a page has padding
    offsets = np.array(sorted(pages), np.int64) * pitch
    ids = np.array(blocks[: len(pages)], np.int64)
    first = np.cumsum(size) - size
    base = np.arange(len(size)) * 10_000 if apart else first
    stride = size if apart else np.full(len(size), page)
    addresses = base + ids[:, None] * stride
    runs = piece_runs(addresses, offsets, size, slab_bytes=5 * pitch).tolist()
    moved = {(a + n, o + n) for a, o, count in runs for n in range(count)}
    wanted = {
        (int(addresses[b, p]) + n, int(offsets[b] + first[p]) + n)
        for b in range(len(pages))
        for p in range(len(lengths))
        for n in range(lengths[p])
    }
    assert moved == wanted
    assert sum(count for _, _, count in runs) == len(pages) * page
    assert all(o // (5 * pitch) == (o + count - 1) // (5 * pitch) for _, o, count in runs)


def test_neighbours_at_both_ends_become_one_run() -> None:
    addresses = np.array([[100], [108], [116], [200]], np.int64)
    offsets = np.array([0, 8, 16, 24], np.int64)
    runs = piece_runs(addresses, offsets, np.array([8], np.int64), slab_bytes=1 << 20)
    assert runs.tolist() == [[100, 0, 24], [200, 24, 8]]


@dataclass
class One:
    bytes_left: int
    since_s: float


def test_a_small_copy_goes_before_a_large_one_and_the_large_one_does_not_wait_for_ever() -> None:
    large, small = One(AGING_BYTES_S, 0.0), One(1 << 20, 0.5)
    assert next_copy([large, small], now_s=0.5) == 1
    late = One(1 << 20, 1.5)
    assert next_copy([large, late], now_s=1.5) == 0
    assert next_copy([late, large], now_s=1.5) == 1


@given(st.lists(st.tuples(st.integers(1, 10**10), st.integers(0, 10)), min_size=1, max_size=8))
def test_what_is_chosen_had_the_least_left_of_those_that_came_no_later(
    facts: list[tuple[int, int]],
) -> None:
    waiting = [One(left, float(since)) for left, since in facts]
    chosen = waiting[next_copy(waiting, now_s=10.0)]
    assert all(
        one.bytes_left >= chosen.bytes_left for one in waiting if one.since_s <= chosen.since_s
    )


class RingMachine(RuleBasedStateMachine):
    """Against the bytes themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(16)
        self.model: deque[tuple[int, int]] = deque()

    def free(self) -> set[int]:
        return set(range(16)) - {at for begin, end in self.model for at in range(begin, end)}

    @rule(count=st.integers(1, 16))
    def take(self, count: int) -> None:
        begin = self.ring.take(count)
        if begin is None:
            after = self.model[-1][1]
            room = [set(range(after, after + count)), set(range(count))]
            assert not any(one <= self.free() for one in room), "there was room"
        else:
            assert set(range(begin, begin + count)) <= self.free()
            self.model.append((begin, begin + count))

    @precondition(lambda self: self.model)
    @rule()
    def give_back(self) -> None:
        self.ring.give_back()
        self.model.popleft()

    @invariant()
    def an_empty_ring_takes_all(self) -> None:
        if not self.model:
            assert self.ring.take(16) == 0
            self.ring.give_back()


TestRing = RingMachine.TestCase
