"""A GPU's lane on a double of CUDA: which chunks it makes, and when."""

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
    POOL,
    SLAB,
    WORD,
    Cuda,
    Owner,
    doubled,
)
from tests.tiers.test_gpu_lane import order_of
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.frames import GroupOrder

CHUNKS = 16


def a_lane(
    cuda: Cuda, lane_module: Any, device_module: Any, *, into_engine: bool, room: int = 8
) -> Any:
    """A lane whose staging has room for so many blocks, and sixteen of them to be moved."""
    cuda.memory[:] = np.random.default_rng(1).integers(0, 256, END, np.uint8)
    order = GroupOrder(BLOCKS, (Piece(0, 0, 4096, 4096),), ())
    group = device_module._map_group(order, [ENGINE], contextlib.ExitStack())
    mapped = lane_module.GpuMemory((), (), (group,), SLAB, WORD)
    places = [2 * PAGE_ALIGN * one for one in range(CHUNKS)]
    copy = order_of(range(CHUNKS), places, into_engine=into_engine, is_ordered=False)
    lane = lane_module.GpuLane(Owner(room * PAGE_ALIGN), into_engine=into_engine)
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


@pytest.mark.parametrize("has_word", [False, True])
@pytest.mark.parametrize("into_engine", [False, True])
def test_kernels_on_time_say_that_a_gpu_is_free_again(*, into_engine: bool, has_word: bool) -> None:
    """However soon copy follows copy; and one late one says that it is not.

    Also where a word is to show the end: then kernels do not wait for our turn.
    """
    with doubled() as (cuda, lane_module, device_module):
        now_s = [100.0]
        busy_of(lane_module).time = SimpleNamespace(perf_counter=lambda: now_s[0])
        busy_of(lane_module).TIMED_BYTES_MIN = 0
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=into_engine)
        most = busy_of(lane_module).ON_TIME_MAX

        def copy(kernel_s: float) -> None:
            cuda.kernel_s = kernel_s
            lane_module.time = SimpleNamespace(perf_counter=iter((0.0, kernel_s)).__next__)
            assert begin(0)
            assert begin(1)
            if has_word:
                lane.signal(SimpleNamespace(signals=WORD), 1, 1)
            now_s[0] += 0.9 * busy_of(lane_module).BUSY_S
            while lane._moving:
                lane.wait()

        copy(1e-5)
        for on_time in (0, most - 1):
            copy(1.0)
            for _ in range(on_time):
                assert lane.busy.is_now
                copy(1e-5)
            assert lane.busy.is_now
        copy(1e-5)
        assert not lane.busy.is_now
        copy(1e-5)
        assert not lane.busy.is_now


@pytest.mark.parametrize("is_late", [False, True])
def test_a_kernel_that_we_launch_late_says_nothing_of_the_gpu(*, is_late: bool) -> None:
    """As where it takes long to ask for the last pieces of a load: its bytes are there before."""
    with doubled() as (cuda, lane_module, device_module):
        lane, begin = _busy_lane(cuda, lane_module, device_module, into_engine=True)
        noted = list[float]()
        lane.busy.note = lambda took_s, _size: noted.append(took_s)
        lane.busy.until_s, cuda.kernel_s = math.inf, 1.0
        assert begin(0)
        while is_late and any(cuda.streams):
            cuda.go_on()
        lane.signal(SimpleNamespace(signals=WORD), 1, 1)
        lane.wait()
        assert noted == ([] if is_late else [1.0])


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
