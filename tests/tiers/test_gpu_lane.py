"""A GPU's lane on a double of CUDA: every byte of groups and sections, and when words change."""

import contextlib
import ctypes
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
    WORD,
    Cuda,
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
        lane_module.TALL_PAGES = 3
        bridge = data.draw(st.integers(0, len(pages)))
        lane_module.bridge_blocks = lambda *_, **__: bridge
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
        lane._busy_until_s = math.inf if is_busy else -math.inf
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
        side_by_side = list(range(lane_module.TALL_PAGES))
        places = [2 * PAGE_ALIGN * one for one in [*side_by_side, 20, 22]]
        copy = order_of(range(len(places)), places, into_engine=True, is_ordered=True)
        for target in mapped.targets(copy):
            assert lane.start(target, mapped.sort(copy), slice(0, len(places)))
        assert (cuda.rectangles, cuda.rows) == (2, 4)


CHUNKS = 16


def _lane(cuda: Cuda, lane_module: Any, device_module: Any, *, into_engine: bool) -> Any:
    """A lane whose staging has room for eight blocks, and sixteen of them to be moved."""
    cuda.memory[:] = np.random.default_rng(1).integers(0, 256, END, np.uint8)
    order = GroupOrder(BLOCKS, (Piece(0, 0, 4096, 4096),), ())
    group = device_module._map_group(order, [ENGINE], contextlib.ExitStack())
    mapped = lane_module.GpuMemory((), (), (group,), SLAB, WORD)
    places = [2 * PAGE_ALIGN * one for one in range(CHUNKS)]
    copy = order_of(range(CHUNKS), places, into_engine=into_engine, is_ordered=False)
    lane = lane_module.GpuLane(Owner(8 * PAGE_ALIGN), into_engine=into_engine)
    (target,) = mapped.targets(copy)
    blocks = mapped.sort(copy)
    return lane, target, blocks


def _busy_lane(cuda: Cuda, lane_module: Any, device_module: Any, *, into_engine: bool) -> Any:
    """The same, and what begins a chunk of one block."""
    lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=into_engine)
    return lane, lambda at: lane.start(target, blocks, slice(at, at + 1))


@pytest.mark.parametrize("into_engine", [False, True])
@pytest.mark.parametrize("bridge", [0, 3])
def test_a_busy_gpu_has_a_kernel_for_half_of_the_staging(*, into_engine: bool, bridge: int) -> None:
    """Each change between two processes costs the engine; the bus goes on while one is waited for.

    By a bridge of pieces: the first of a save or the last of a load.
    """
    with doubled() as (cuda, lane_module, device_module):
        made = _lane(cuda, lane_module, device_module, into_engine=into_engine)
        (lane, target, blocks), launch = made, cuda.launch
        lane._busy_until_s = math.inf
        lane_module.bridge_blocks = lambda *_, **__: bridge
        rows: list[int] = []

        def count(*args: Any) -> None:
            if into_engine:  # it does not wait for its bytes on the GPU
                pointers = (ctypes.c_uint64 * 8).from_address(args[-1])
                staging = ctypes.c_uint64.from_address(pointers[4]).value
                page = POOL + ctypes.c_int32.from_address(pointers[7]).value * 2 * PAGE_ALIGN
                assert np.array_equal(cuda.memory[staging:][:4096], cuda.memory[page:][:4096])
            rows.append(args[1][1])
            launch(*args)

        cuda.launch = count  # type: ignore[method-assign]
        lane.staging.make()
        started, parts = 0, []
        while started < CHUNKS:
            part = lane.next_part(target, started, CHUNKS, started)
            if not lane.start(target, blocks, part):
                lane.wait()
                continue
            started = part.stop
            parts.append(part.stop - part.start)
        while lane._moving:
            lane.wait()
        if bridge == 0:
            assert rows == parts == [4, 4, 4, 4]
        else:
            assert rows == [4, 4, 4, 1]
            assert parts == ([*rows, bridge] if into_engine else [bridge, *rows])


def test_a_bridge_of_a_save_is_for_a_bus_with_nothing_to_do() -> None:
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=False)
        lane._busy_until_s = math.inf
        lane_module.bridge_blocks = lambda *_, **__: 3
        assert lane.start(target, blocks, slice(CHUNKS - 1, CHUNKS))
        assert lane.next_part(target, 0, CHUNKS, 0) == slice(0, 4)
        launched, launch = [0], cuda.launch
        cuda.launch = lambda *args: (launched.__setitem__(0, launched[0] + 1), launch(*args))  # type: ignore[method-assign]
        assert lane.start(target, blocks, slice(0, 3))
        assert launched == [1]


@pytest.mark.parametrize("into_engine", [False, True])
def test_no_more_is_under_way_on_a_free_gpu_than_a_small_copy_may_wait_for(
    *, into_engine: bool
) -> None:
    with doubled() as (cuda, lane_module, device_module):
        lane_module.WINDOW_BYTES = 3 * PAGE_ALIGN
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=into_engine)
        assert [begin(at) for at in range(4)] == [True, True, True, False]
        lane.wait()
        assert begin(3)
        lane._busy_until_s = math.inf  # then there is to be all that the staging can have
        for _ in range(3):
            lane.wait()
        assert [begin(at) for at in range(9)] == 8 * [True] + [False]
        for _ in range(8):
            lane.wait()
        lane._busy_until_s = -math.inf
        assert [begin(at) for at in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("into_engine", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_gpu_is_busy_where_a_kernel_is_late(*, into_engine: bool, is_late: bool) -> None:
    """And not where this thread is late, or the bus slow: only the GPU's own clock is asked."""
    with doubled() as (cuda, lane_module, device_module):
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=into_engine)
        cuda.kernel_s = 1.01 * lane_module.LATE_S if is_late else 0.99 * lane_module.LATE_S
        assert begin(0)
        lane.wait()
        assert lane._is_busy is is_late


def test_a_save_s_kernel_is_timed_while_the_bus_has_nothing_to_do() -> None:
    """Else the event before it comes behind other chunks' bytes, and says nothing."""
    with doubled() as (cuda, lane_module, device_module):
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=False)
        assert begin(0)
        assert begin(1)
        lane.wait()
        cuda.kernel_s = 1.0
        lane.wait()
        assert not lane._is_busy


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_staging_grows_after_a_copy_of_a_busy_gpu(*, is_busy: bool, is_given: bool) -> None:
    """Never within one; and what there is stays where the GPU has no more."""
    with doubled() as (cuda, lane_module, device_module):
        lane_module.WINDOW_BYTES = 2 * PAGE_ALIGN
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=True)
        lane._busy_until_s = math.inf if is_busy else -math.inf
        allocate, freed = cuda.allocate, []
        cuda.free = freed.append  # type: ignore[method-assign]
        assert begin(0)
        first = lane.staging.address
        assert begin(1)
        most = END if is_given else 2 * PAGE_ALIGN  # as much as there is already is no gain
        cuda.allocate = lambda n: allocate(n) if n <= most else None  # type: ignore[method-assign]
        lane.wait()
        assert lane.staging.ring.size == 2 * PAGE_ALIGN
        lane.wait()
        assert lane.staging.ring.size == (8 if is_busy and is_given else 2) * PAGE_ALIGN
        assert freed == ([first] if is_busy and is_given else [])
        assert lane.staging._is_short is (is_busy and not is_given)
        assert begin(2)  # goes on with what it has
        lane.wait()


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
        lane._busy_until_s = math.inf
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


def test_chunks_are_no_larger_than_a_small_staging_allows_and_no_smaller_than_direct_ones() -> None:
    with doubled() as (_, lane_module, device_module):
        order = GroupOrder(BLOCKS, (Piece(0, 0, 4096, 4096),), ())
        group = device_module._map_group(order, [ENGINE], contextlib.ExitStack())
        direct = lane_module.CHUNK_BYTES_DIRECT // PAGE_ALIGN
        for staging, wanted in ((8 * 4096, 2), (4095, direct)):
            lane = lane_module.GpuLane(Owner(staging), into_engine=True)
            lane.staging.make()
            assert lane.next_part(group, 5, 10**6, direct) == slice(5, 5 + wanted)
            assert lane.next_part(group, 5, 6, direct) == slice(5, 6)
