"""A GPU's lane on a double of CUDA: every byte of groups and sections, and when words change."""

import contextlib
import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers.cuda_double import (
    BLOCKS,
    END,
    ENGINE,
    FREE,
    POOL,
    SLAB,
    TALL_PAGES,
    WORD,
    Owner,
    doubled,
)
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.frames import AttachOrder, CopyOrder, Direction, GroupOrder


def expected(
    before: np.ndarray, pieces: list[Piece], order: CopyOrder, begin: int, end: int
) -> np.ndarray:
    """The memory when bytes `begin` to `end` of all pages have moved."""
    after = before.copy()
    into_engine = order.direction is Direction.LOAD
    for block, offset in zip(order.blocks.tolist(), order.offsets.tolist(), strict=True):
        at = 0
        for piece in pieces:
            first, last = max(at, begin), min(at + piece.bytes, end)
            if first < last:
                far = ENGINE + piece.offset + block * piece.stride + first - at
                near = POOL + offset + first
                to, of = (far, near) if into_engine else (near, far)
                after[to : to + last - first] = before[of : of + last - first]
            at += piece.bytes
    return after


def order_of(
    ids: Sequence[int], places: Sequence[int], *, into_engine: bool, is_ordered: bool
) -> CopyOrder:
    way = Direction.LOAD if into_engine else Direction.SAVE
    blocks, offsets = np.array(ids, np.int32), np.array(places, np.int64)
    return CopyOrder(0, 0, way, 0, blocks, offsets, is_ordered=is_ordered)


def pieces_of(lengths: list[int]) -> list[Piece]:
    """Rows with a gap, one piece's behind the other's."""
    ends = np.cumsum([BLOCKS * (size + 5) for size in lengths]).tolist()
    return [
        Piece(0, end - BLOCKS * (size + 5), size + 5, size)
        for end, size in zip(ends, lengths, strict=True)
    ]


def begin_all(lane: Any, target: Any, blocks: Any, step: int) -> int:
    """Begin a section's chunks; returns how many more are under way now."""
    more, count = 0, len(blocks.blocks)
    for begin in range(0, count, step):
        while not lane.start(target, blocks, slice(begin, min(begin + step, count))):
            lane.wait()
            more -= 1
        more += 1
    return more


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 3, 16, 48, 1000, 4096, 6144]), min_size=1, max_size=6),
    percents=st.sets(st.integers(1, 99), max_size=3),
    pages=st.sets(st.integers(0, 30), min_size=1, max_size=20),
    into_engine=st.booleans(),
    staging_bytes=st.sampled_from([0, 256 << 10, 1 << 20]),
    is_busy=st.booleans(),
    data=st.data(),
)
def test_every_byte_of_groups_and_sections(
    *,
    lengths: list[int],
    percents: set[int],
    pages: set[int],
    into_engine: bool,
    staging_bytes: int,
    is_busy: bool,
    data: st.DataObject,
) -> None:
    """Against numpy; where a section has a word, it is written behind its bytes."""
    page, pieces = sum(lengths), pieces_of(lengths)
    cuts = (*sorted({page * one // 100 for one in percents} - {0}), page)
    pitch = -(-page // PAGE_ALIGN) * PAGE_ALIGN
    slab = SLAB // pitch
    places = [one // slab * SLAB + one % slab * pitch for one in pages]
    ids = data.draw(st.permutations(range(BLOCKS)))[: len(pages)]
    is_ordered = data.draw(st.sampled_from([True, True, False]))
    order = order_of(ids, places, into_engine=into_engine, is_ordered=is_ordered)
    with doubled() as (cuda, lane_module, device_module):
        tail = data.draw(st.integers(0, len(pages))), data.draw(st.booleans())
        lane_module.tail_blocks = lambda *_, **__: tail
        lane_module.TAIL_BYTES = data.draw(st.sampled_from([0, pitch, math.inf]))
        lane_module.HEAD_BYTES = data.draw(st.sampled_from([0, pitch, 3 * pitch]))
        cuda.choose = lambda count: data.draw(st.integers(0, count - 1))
        cuda.memory[:] = np.random.default_rng(len(pages)).integers(0, 256, END, np.uint8)
        cuda.memory[WORD : WORD + 4] = 0
        for place in places:  # padding moves with a whole page, and is nobody's
            cuda.memory[POOL + place + page : POOL + place + pitch] = 0
        before = cuda.memory.copy()
        group = device_module._map_group(
            GroupOrder(BLOCKS, tuple(pieces), cuts), [ENGINE], contextlib.ExitStack()
        )
        mapped = lane_module.GpuMemory((), (), (group,), SLAB, WORD)
        lane = lane_module.GpuLane(Owner(staging_bytes), into_engine=into_engine)
        lane.busy.until_s = math.inf if is_busy else -math.inf
        blocks, targets = mapped.sort(order), mapped.targets(order)
        assert len(targets) == (len(cuts) if order.is_ordered else 1)
        moving = 0
        is_late = data.draw(st.booleans())  # words are asked for when all is under way
        for number, target in enumerate(targets):
            moving += begin_all(lane, target, blocks, data.draw(st.integers(1, 20)))
            if is_late and number + 1 < len(targets):
                continue
            lane.signal(mapped, 1, number + 1)
            while int(cuda.memory[WORD : WORD + 4].view(np.uint32)[0]) <= number:
                cuda.go_on()
            end = cuts[number] if order.is_ordered else page
            got = cuda.memory.copy()
            for place in places if not into_engine else ():
                got[POOL + place + page : POOL + place + pitch] = 0
            assert np.array_equal(got[:WORD], expected(before, pieces, order, 0, end)[:WORD])
        for _ in range(moving):
            lane.wait()
        assert not lane._moving
        assert not lane._landing


def test_pages_side_by_side_are_a_rectangle_and_others_are_rows() -> None:
    pieces = (Piece(0, 0, 4096, 4096), Piece(0, 1 << 18, 4096, 4096))
    with doubled() as (cuda, lane_module, device_module):
        order = GroupOrder(BLOCKS, pieces, (4096, 8192))
        group = device_module._map_group(order, [ENGINE], contextlib.ExitStack())
        mapped = lane_module.GpuMemory((), (), (group,), SLAB, WORD)
        lane = lane_module.GpuLane(Owner(256 << 10), into_engine=True)
        side_by_side = list(range(TALL_PAGES))
        places = [2 * PAGE_ALIGN * one for one in [*side_by_side, 20, 22]]
        copy = order_of(range(len(places)), places, into_engine=True, is_ordered=True)
        for target in mapped.targets(copy):
            assert lane.start(target, mapped.sort(copy), slice(0, len(places)))
        assert (cuda.rectangles, cuda.rows) == (2, 4)


@pytest.mark.parametrize("has_words", [False, True])
@pytest.mark.parametrize("is_early", [False, True])
def test_staging_is_there_before_a_stream_can_wait_for_a_load(
    *, has_words: bool, is_early: bool
) -> None:
    """Whether the lanes' threads have begun by then or not; and it goes with the last rank."""
    with doubled() as (_, lane_module, device_module):
        lane_module.WINDOW_BYTES = 3 * PAGE_ALIGN
        facts = (POOL, 1 << 20, SLAB, 8 * PAGE_ALIGN, 0.0, 0)
        device = device_module.GpuDevice(None, "GPU", {1: 1}, *facts)
        group = GroupOrder(BLOCKS, (Piece(0, 0, 4096, 4096),), ())
        order = AttachOrder((bytes(64),), (), (group,), (0, WORD) if has_words else None)
        lanes = [device.lane(one) for one in Direction] if is_early else []
        mapped = device.attach(order)
        lanes = lanes or [device.lane(one) for one in Direction]
        assert [one.staging.ring.size for one in lanes] == 2 * [3 * PAGE_ALIGN * has_words]
        device.detach(mapped)
        assert [one.staging.ring.size for one in lanes] == [0, 0]


@pytest.mark.parametrize("into_engine", [False, True])
def test_a_rehearsal_goes_the_whole_way_and_touches_nobody_s_memory(*, into_engine: bool) -> None:
    with doubled() as (cuda, lane_module, _):
        rehearsals = import_module("trikv.tiers.rehearsals")
        cuda.memory[:] = np.random.default_rng(1).integers(0, 256, END, np.uint8)
        before = cuda.memory[:FREE].copy()  # the pool, and the engine's
        owner = Owner(256 << 10)
        rehearsal = rehearsals.Rehearsal(owner.kernels, SLAB, into_engine=into_engine)
        lane = lane_module.GpuLane(owner, into_engine=into_engine)
        lane.practise = rehearsal.run
        launched, launch = [0], cuda.launch
        cuda.launch = lambda *args: (launched.__setitem__(0, launched[0] + 1), launch(*args))  # type: ignore[method-assign]
        for turn in range(1, 4):
            lane.rehearse()
            lane.rehearse()  # the one before has not ended: nothing is begun
            assert launched == [turn]
            assert cuda.rows == turn * rehearsals.PAGES
            while any(cuda.streams):
                cuda.go_on()
        assert np.array_equal(cuda.memory[:FREE], before)
        lane.busy.until_s = math.inf
        lane.rehearse()
        assert launched == [3]
        assert not lane._moving


def test_a_gpu_without_memory_has_no_rehearsals_and_copies_all_the_same() -> None:
    with doubled() as (cuda, lane_module, _):
        rehearsals = import_module("trikv.tiers.rehearsals")
        allocate, cuda.allocate = cuda.allocate, lambda _: None  # type: ignore[method-assign]
        cuda.allocate_host = allocate  # type: ignore[method-assign]
        with pytest.raises(cuda.CudaError, match="no memory"):
            rehearsals.Rehearsal(Owner(0).kernels, SLAB, into_engine=True)
        lane_module.GpuLane(Owner(0), into_engine=True).rehearse()
        assert not any(cuda.streams)
