"""A GPU's lane on a double of CUDA: which chunks it makes, when, and what it does ahead."""

import contextlib
import ctypes
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
from tests.tiers.test_gpu_lane import order_of
from trikv.core.chunks import Sorted, sort
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.frames import AttachOrder, Direction, GroupOrder

CHUNKS = 16


def a_lane(cuda: Cuda, lane_module: Any, device_module: Any, *, into_engine: bool) -> Any:
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


def busy_of(lane_module: Any) -> Any:
    """The module that decides whether its GPU is busy."""
    return sys.modules[lane_module.Busy.__module__]


def _busy_lane(cuda: Cuda, lane_module: Any, device_module: Any, *, into_engine: bool) -> Any:
    """The same, and what begins a chunk of one block."""
    lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=into_engine)
    return lane, lambda at: lane.start(target, blocks, slice(at, at + 1))


@pytest.mark.parametrize("into_engine", [False, True])
@pytest.mark.parametrize("tail", [(0, False), (3, True), (3, False)])
def test_a_busy_gpu_has_a_kernel_for_half_of_the_staging(
    *, into_engine: bool, tail: tuple[int, bool]
) -> None:
    """Each change between two processes costs the engine; the bus goes on while one is waited for.

    With the last of a load: a bridge of pieces, or a chunk whose bytes its kernel waits for on the
    GPU. All kernels come at once when no more is to come.
    """
    with doubled() as (cuda, lane_module, device_module):
        made = a_lane(cuda, lane_module, device_module, into_engine=into_engine)
        (lane, target, blocks), launch = made, cuda.launch
        lane.busy.until_s = math.inf
        lane_module.tail_blocks = lambda *_, **__: tail
        lane_module.TAIL_BYTES = 0 if tail[1] else tail[0] * PAGE_ALIGN
        rows: list[int] = []

        def count(*args: Any) -> None:
            if into_engine and len(rows) < 4:  # it does not wait for its bytes on the GPU
                pointers = (ctypes.c_uint64 * 8).from_address(args[-1])
                staging = ctypes.c_uint64.from_address(pointers[4]).value
                page = POOL + ctypes.c_int32.from_address(pointers[7]).value * 2 * PAGE_ALIGN
                assert np.array_equal(cuda.memory[staging:][:4096], cuda.memory[page:][:4096])
            rows.append(args[1][1])
            launch(*args)

        cuda.launch = count  # type: ignore[method-assign]
        lane.staging.make()
        started, parts, bunches = 0, [], []
        while started < CHUNKS:
            part = lane.next_part(target, started, CHUNKS, started)
            if not lane.start(target, blocks, part):
                before = len(rows)
                lane.wait()
                bunches.append(len(rows) - before)
                continue
            started = part.stop
            parts.append(part.stop - part.start)
        while lane._moving:
            before = len(rows)
            lane.wait()
            bunches.append(len(rows) - before)
        if into_engine:
            assert [one for one in bunches if one] == [1, 1, 3 if tail == (3, False) else 2]
            assert parts == [4, 4, 4, 1, 3] if tail[0] else [4, 4, 4, 4]
            assert rows == (parts[:4] if tail[1] else parts)
        else:
            assert rows == parts == [4, 4, 4, 4]


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
        lane.busy.until_s = math.inf  # then there is to be all that the staging can have
        for _ in range(3):
            lane.wait()
            lane.rest()
        assert [begin(at) for at in range(9)] == 8 * [True] + [False]
        for _ in range(8):
            lane.wait()
        lane.busy.until_s = -math.inf
        assert [begin(at) for at in range(4)] == [True, True, True, False]


def some(blocks: Sorted, which: slice) -> Sorted:
    """Of some pages, as they are announced."""
    nobody = np.zeros(len(blocks.offsets[which]), np.int32)
    return sort(nobody, blocks.offsets[which], page_bytes=PAGE_ALIGN, slab_bytes=SLAB)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("lease", [7, 8])
def test_what_is_brought_is_for_one_lease(*, is_over: bool, lease: int) -> None:
    """The pages of another one may have changed meanwhile."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.bring((1, 0, 7), target, some(blocks, slice(11, 16)))
        lane.bring((1, 0, 7), target, some(blocks, slice(11, 16)))  # it is there already
        lane.bring((2, 0, 9), target, some(blocks, slice(5)))  # comes after that one's load
        assert lane._bytes == 5 * PAGE_ALIGN
        if is_over:
            while any(cuda.streams):
                cuda.go_on()
            if lease == 8:
                cuda.memory[POOL:ENGINE] ^= 1
        before = cuda.memory.copy()
        landed = lane.land((1, 0, lease), blocks)
        count = 5 if lease == 7 else 0
        covered = [one for part in landed.parts for one in range(part.start, part.stop)]
        assert covered == [*range(count)]
        assert set(landed.blocks.offsets[:count]) == set(blocks.offsets[16 - count :])
        while count < CHUNKS:
            part = slice(count, count + 1)
            count += lane.start(target, landed.blocks, part) or bool(lane.wait())
        while lane._moving:
            lane.wait()
        for block, page in zip(blocks.blocks.tolist(), blocks.offsets.tolist(), strict=True):
            wanted = before[POOL + page :][:4096]
            assert np.array_equal(cuda.memory[ENGINE + 4096 * block :][:4096], wanted)
        assert (lane._bytes, len(lane.staging.ring._taken)) == (0, 0)
        idle = [*lane._events.idle[0], *lane._events.idle[1]]
        assert len({id(one) for one in idle}) == len(idle)


def test_a_page_that_the_load_does_not_want_goes_nowhere() -> None:
    """Not even before the engine's first block; nothing is launched where none is wanted."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.bring((1, 0, 7), target, some(blocks, slice(16)))
        before = cuda.memory[:FREE].copy()
        order = sort(
            blocks.blocks[6:7], blocks.offsets[6:7], page_bytes=PAGE_ALIGN, slab_bytes=SLAB
        )
        landed = lane.land((1, 0, 7), order)
        assert [part for part in landed.parts if part.start < part.stop] == [slice(0, 1)]
        while lane._moving:
            lane.wait()
        near, far = POOL + int(blocks.offsets[6]), ENGINE + 4096 * int(blocks.blocks[6])
        before[far : far + 4096] = before[near : near + 4096]
        assert np.array_equal(cuda.memory[:FREE], before)
        lane.bring((1, 0, 8), target, some(blocks, slice(6)))
        assert lane.land((1, 0, 8), order).parts == ()
        assert not lane._moving


def test_a_page_that_several_blocks_want_is_not_landed() -> None:
    """An engine may name a block twice; a row of the staging goes to one place."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        ids, pages = blocks.blocks[:3], blocks.offsets[[0, 1, 0]]
        lane.bring((1, 0, 7), target, some(blocks, slice(2)))
        twice = sort(ids, pages, page_bytes=PAGE_ALIGN, slab_bytes=SLAB)
        landed = lane.land((1, 0, 7), twice)
        assert landed.parts == ()
        assert lane.start(target, landed.blocks, slice(0, 3))
        lane.wait()
        for block, page in zip(ids.tolist(), pages.tolist(), strict=True):
            near, far = cuda.memory[POOL + page :], cuda.memory[ENGINE + 4096 * block :]
            assert np.array_equal(near[:4096], far[:4096])


def test_a_kernel_that_moves_nothing_sets_no_best_time() -> None:
    with doubled() as (cuda, lane_module, device_module):
        busy_of(lane_module).TIMED_BYTES_MIN = 2 * PAGE_ALIGN
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        for first, is_known in ((7, False), (6, True)):
            lane.bring((1, 0, first), target, some(blocks, slice(8)))
            ids, pages = blocks.blocks[first:8], blocks.offsets[first:8]
            wanted = sort(ids, pages, page_bytes=PAGE_ALIGN, slab_bytes=SLAB)
            cuda.kernel_s = 1e-6
            assert lane.land((1, 0, first), wanted).parts
            while lane._moving:
                lane.wait()
            assert math.isinf(lane.busy.byte_s) is not is_known
            assert not lane.busy.is_now


def test_an_old_announcement_gives_way_to_a_new_one() -> None:
    with doubled() as (cuda, lane_module, device_module):
        lane_module.KEEP_AHEAD_S = 0.0
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.bring((1, 0, 7), target, some(blocks, slice(4)))
        lane.bring((1, 0, 8), target, some(blocks, slice(2)))
        assert lane._bytes == 2 * PAGE_ALIGN
        assert lane.land((1, 0, 7), blocks).parts == ()
        assert (lane._bytes, len(lane.staging.ring._taken)) == (0, 0)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("chosen", [0, -1])
def test_the_kernels_of_what_was_brought_say_whether_the_gpu_is_busy(
    *, is_over: bool, chosen: int
) -> None:
    with doubled() as (cuda, lane_module, device_module):
        cuda.choose = lambda count: chosen % count
        busy_of(lane_module).TIMED_BYTES_MIN = 0
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        ids, pages = blocks.blocks[:8], blocks.offsets[:8]
        wanted = sort(ids, pages, page_bytes=PAGE_ALIGN, slab_bytes=SLAB)
        for turn, cuda.kernel_s in enumerate((1e-5, 1.0)):
            lane.bring((1, 0, turn), target, some(blocks, slice(8)))
            while is_over and any(cuda.streams):
                cuda.go_on()
            assert lane.land((1, 0, turn), wanted).parts
            while lane._moving:
                assert not lane.busy.is_now
                lane.wait()
        assert lane.busy.is_now


def test_nothing_is_brought_to_a_busy_gpu_nor_without_staging() -> None:
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.busy.until_s = math.inf
        lane.bring((1, 0, 7), target, blocks)
        small = lane_module.GpuLane(Owner(PAGE_ALIGN - 1), into_engine=True)
        small.bring((1, 0, 7), target, blocks)
        assert not any(cuda.streams)
        assert small.land((1, 0, 7), blocks) == lane.land((1, 0, 7), blocks) == (blocks, (), 0, 0)


def test_the_last_rank_takes_what_was_brought_along() -> None:
    with doubled() as (cuda, _, device_module):
        facts = (POOL, 1 << 20, SLAB, 64 * PAGE_ALIGN, 0.0, 0)
        device = device_module.GpuDevice(None, "GPU", {16: 16}, *facts)
        device.prepare_pool(lambda _: None)
        group = GroupOrder(BLOCKS, (Piece(0, 0, 4096, 4096),), ())
        mapped = device.attach(AttachOrder((bytes(64),), (), (group,), None))
        lane = device.lane(Direction.LOAD)
        order = order_of([0, 1], [0, 8192], into_engine=True, is_ordered=False)
        lane.bring((1, 0, 7), mapped.targets(order)[0], mapped.sort(order))
        assert any(cuda.streams)
        freed = []
        cuda.free = lambda at: freed.append((at, any(cuda.streams)))  # type: ignore[method-assign]
        address = lane.staging.address
        device.detach(mapped)
        assert (address, False) in freed, "given back while bytes were on their way"


@pytest.mark.parametrize("into_engine", [False, True])
def test_a_gpu_is_busy_where_a_kernel_is_late(*, into_engine: bool) -> None:
    """And not where this thread is late, or the bus slow: only the GPU's own clock is asked."""
    with doubled() as (cuda, lane_module, device_module):
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=into_engine)
        busy_of(lane_module).TIMED_BYTES_MIN = 0
        cuda.kernel_s = best_s = 1e-5
        late_s = busy_of(lane_module).LATE_S + 2 * best_s
        for cuda.kernel_s, is_busy in (
            (best_s, False),
            (0.99 * late_s, False),
            (1.01 * late_s, True),
        ):
            assert begin(0)
            lane.wait()
            assert lane.busy.is_now is is_busy


def test_a_busy_gpu_counts_as_busy_as_long_as_chunks_follow_each_other() -> None:
    """Not all of them are timed then; but not for ever, and not once there was a pause."""
    with doubled() as (cuda, lane_module, device_module):
        now_s = [100.0]
        busy_of(lane_module).time = SimpleNamespace(perf_counter=lambda: now_s[0])
        busy_of(lane_module).TIMED_BYTES_MIN = 0
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=False)
        cuda.kernel_s = 1e-5
        assert begin(0)
        lane.wait()
        cuda.kernel_s = 1.0
        assert begin(1)
        assert begin(2)
        lane.wait()
        cuda.kernel_s = 1e-5
        for _ in range(100):
            if lane.busy.is_now:
                assert begin(3)
                now_s[0] += 0.9 * busy_of(lane_module).BUSY_S
                lane.wait()
        assert 0 <= now_s[0] - 100 - busy_of(lane_module).BUSY_S_MAX <= busy_of(lane_module).BUSY_S
        lane.wait()
        lane.busy.late_at_s, lane.busy.until_s = now_s[0], now_s[0] + busy_of(lane_module).BUSY_S
        now_s[0] += 1.1 * busy_of(lane_module).BUSY_S
        assert begin(4)
        assert begin(5)
        lane.wait()
        assert not lane.busy.is_now


def test_a_save_that_fits_needs_one_kernel_of_a_busy_gpu() -> None:
    for into_engine in (False, True):
        with doubled() as (cuda, lane_module, device_module):
            lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=into_engine)
            lane.busy.until_s = math.inf
            lane_module.tail_blocks = lambda *_, **__: (0, False)
            lane.staging.make()
            assert lane.next_part(target, 0, 8, 0) == slice(0, 4 if into_engine else 8)
            assert lane.next_part(target, 0, 9, 0) == slice(0, 4)
            assert lane.start(target, blocks, slice(8, 9))
            assert lane.next_part(target, 0, 8, 0) == slice(0, 4)


def test_a_save_s_kernel_is_timed_while_the_bus_has_nothing_to_do() -> None:
    """Else the event before it comes behind other chunks' bytes, and says nothing."""
    with doubled() as (cuda, lane_module, device_module):
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=False)
        busy_of(lane_module).TIMED_BYTES_MIN = 0
        cuda.kernel_s = 1e-5
        assert begin(0)
        assert begin(1)
        lane.wait()
        cuda.kernel_s = 1.0
        lane.wait()
        assert not lane.busy.is_now


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_staging_grows_after_a_copy_of_a_busy_gpu(*, is_busy: bool, is_given: bool) -> None:
    """Never within one; and what there is stays where the GPU has no more."""
    with doubled() as (cuda, lane_module, device_module):
        lane_module.WINDOW_BYTES = 2 * PAGE_ALIGN
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=True)
        lane.busy.until_s = math.inf if is_busy else -math.inf
        allocate, freed = cuda.allocate, []
        cuda.free = freed.append  # type: ignore[method-assign]
        assert begin(0)
        first = lane.staging.address
        assert begin(1)
        most = END if is_given else 2 * PAGE_ALIGN  # as much as there is already is no gain
        cuda.allocate = lambda n: allocate(n) if n <= most else None  # type: ignore[method-assign]
        lane.wait()
        lane.rest()  # a chunk is under way
        lane.wait()
        assert lane.staging.ring.size == 2 * PAGE_ALIGN
        lane.rest()
        assert lane.staging.ring.size == (8 if is_busy and is_given else 2) * PAGE_ALIGN
        assert freed == ([first] if is_busy and is_given else [])
        assert lane.staging._is_short is (is_busy and not is_given)
        assert begin(2)  # goes on with what it has
        lane.wait()


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
