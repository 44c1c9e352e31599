"""What a lane asks a GPU for first, and what it leaves for later: on a double of CUDA."""

import contextlib
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_double import BLOCKS, ENGINE, POOL, SLAB, Cuda, Owner, doubled
from tests.tiers.test_gpu_ahead import some
from tests.tiers.test_gpu_chunks import a_lane
from trikv.core.chunks import Sorted
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.copier import Work
from trikv.tiers.frames import CopyOrder, Direction, Frames, GroupOrder, Kind, pack, pack_copy

FIRST_USE = """
from tests.tiers import test_gpu_turns as tests
tests.copy_all()
"""


def copy_all() -> None:
    """One copy in each direction, the load begun ahead; nothing is imported for it."""
    for into_engine in (False, True):
        with doubled() as (cuda, lane_module, device_module):
            lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=into_engine)
            device = device_module.GpuDevice(None, "GPU", {1: 1}, 0, 1 << 22, 1 << 18, 0, 0.0, 0)
            before = set(sys.modules)
            device.register_slabs(blocks.offsets)
            if into_engine:
                lane.bring((1, 0, 7), target, some(blocks, slice(12, 16)))
                blocks = lane.land((1, 0, 7), blocks).blocks
            assert lane.next_part(target, 4, 8, 4).start == 4
            assert lane.start(target, blocks, slice(4, 8))
            while lane._moving:
                lane.wait()
            lane.rest()
            assert set(sys.modules) == before


def test_a_first_copy_waits_for_no_import() -> None:
    """A module that numpy loads when one of its functions is first used took 50 ms of a load."""
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=60)


def are_equal(cuda: Cuda, blocks: Sorted, size: int = 4096) -> list[bool]:
    """Whether pool and engine have the same bytes of each block."""
    near, far = POOL + blocks.offsets, ENGINE + 4096 * blocks.blocks.astype(np.int64)
    pairs = zip(near.tolist(), far.tolist(), strict=True)
    return [np.array_equal(cuda.memory[a : a + size], cuda.memory[b : b + size]) for a, b in pairs]


@contextlib.contextmanager
def working(
    direction: Direction, mapped: Any, blocks: Sorted, events: tuple[int, int]
) -> Iterator[tuple[Work, socket.socket]]:
    """Two copies of three blocks each that wait, and the daemon's end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        work = Work(direction, None, theirs, {0: mapped}, threading.Lock())  # type: ignore[arg-type]
        for number, event in enumerate(events):
            part = slice(3 * number, 3 * number + 3)
            order = CopyOrder(0, 0, direction, event, blocks.blocks[part], blocks.offsets[part])
            work._obey(Kind.COPY, number, pack_copy(order))
        yield work, ours


def noted(cuda: Cuda, *names: str) -> list[str]:
    """The names of these calls, as they come."""
    calls: list[str] = []
    for name in names:
        call = getattr(cuda, name)

        def both(*args: Any, _name: str = name, _call: Any = call) -> Any:
            calls.append(_name)
            return _call(*args)

        setattr(cuda, name, both)
    return calls


@pytest.mark.parametrize("is_there", [False, True])
def test_the_bus_has_the_next_chunk_before_what_was_brought_is_scattered(*, is_there: bool) -> None:
    """Else it has nothing to do meanwhile. What has all come needs one kernel."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane_module.CHUNK_BYTES = 2 * PAGE_ALIGN
        lane.bring((1, 0, 7), target, some(blocks, slice(12, 16)))
        while is_there and any(cuda.streams):
            cuda.go_on()
        calls = noted(cuda, "copy", "launch")
        landed = lane.land((1, 0, 7), blocks)
        parts = len(landed.parts)
        assert (parts, calls) == (1 if is_there else 3, [])
        assert lane.start(target, landed.blocks, slice(4, 6))
        assert calls == ["copy", *(parts + 1) * ["launch"]]
        assert [one.kernel is not None for one in lane._moving] == [*parts * [False], True]
        while lane._moving:
            lane.wait()
        assert are_equal(cuda, landed.blocks) == 6 * [True] + 10 * [False]


@pytest.mark.parametrize("count", [4, 5, 8])
def test_the_bus_has_the_head_of_a_large_save_while_the_rest_is_gathered(*, count: int) -> None:
    """Both kernels are asked for before any page: they have one turn of the GPU."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=False)
        lane_module.HEAD_BYTES = 2 * PAGE_ALIGN
        lane.busy.until_s = math.inf
        calls = noted(cuda, "copy", "launch")
        assert lane.start(target, blocks, slice(0, count))
        assert calls == (["launch", "copy"] if count == 4 else [*2 * ["launch"], *2 * ["copy"]])
        if count > 4:  # the first kernel's bytes cross although the second has not run
            cores = lane._cores
            cuda.choose = lambda _: 0
            second = [cuda.streams[cores].pop() for _ in range(2)]
            while any(stream and stream[0]() and (stream.popleft(), 1) for stream in cuda.streams):
                pass
            assert are_equal(cuda, blocks)[0]
            cuda.streams[cores].extend(reversed(second))
        lane.wait()
        assert all(are_equal(cuda, blocks)[:count])


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_bus_has_some_pages_of_a_large_chunk_while_it_is_asked_for_the_rest(
    *, is_busy: bool
) -> None:
    """Of a load's first: the others are asked for while it has those before."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane_module.FIRST_PAGES = 3
        lane.busy.until_s = math.inf if is_busy else -math.inf
        asked, copy = list[int](), cuda.copy
        cuda.copy = lambda *args: (asked.append(len(args[0])), copy(*args))  # type: ignore[method-assign, func-returns-value]
        for part in (slice(0, 4), slice(4, 8)):
            assert lane.start(target, blocks, part)
        assert asked == ([3, 1, 4] if is_busy else [4, 4])
        while lane._moving:
            lane.wait()
        assert are_equal(cuda, blocks) == 8 * [True] + 8 * [False]


@pytest.mark.parametrize("room", [8, 1])
def test_a_lane_takes_its_time_when_all_copies_are_over_and_reported(room: int) -> None:
    """More staging of a busy GPU may be 50 ms in coming; with little of it chunks come singly."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.staging = lane_module.Staging(Owner(room * PAGE_ALIGN), 8 * PAGE_ALIGN)
        lane_module.CHUNK_BYTES = PAGE_ALIGN
        mapped = lane_module.GpuMemory((), (), (target,), SLAB, 0)
        with working(Direction.LOAD, mapped, blocks, (0, 0)) as (work, ours):
            frames, ended, rested = Frames(), list[int](), list[int]()
            lane.rest = lambda: rested.append(len(ended))
            while not rested:
                work._turn(lane)
                work._sock.sendall(pack(Kind.ALIVE, 0))
                frames.feed(
                    ours.recv(1 << 16),
                    lambda kind, number, _: ended.append(number) if kind is Kind.ENDED else None,
                )
            work._turn(lane)
            assert (sorted(ended), rested, len(work._moving)) == ([0, 1], [1], 0)


def test_a_save_that_waits_for_its_engine_does_not_hold_that_up() -> None:
    """A busy engine has one after the other of them."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=False)
        forward = cuda.new_event(is_timed=False)
        mapped = lane_module.GpuMemory((), (forward,), (target,), SLAB, 0)
        with working(Direction.SAVE, mapped, blocks, (0, 1)) as (work, _):
            forward[0] = 1  # recorded, and has not come
            rested = list[int]()
            lane.rest = lambda: rested.append(len(work._waiting))
            for _ in range(9):
                work._turn(lane)
            assert rested == [1]


def test_staging_that_grows_while_the_last_rank_goes_is_given_back_once() -> None:
    """A copy was reported before it grew, so its engine may be gone by then."""
    with doubled() as (cuda, lane_module, _):
        staging = lane_module.Staging(Owner(8 * PAGE_ALIGN), 2 * PAGE_ALIGN)
        assert staging.make()
        first, allocate, freed = staging.address, cuda.allocate, list[int]()
        cuda.free = freed.append  # type: ignore[method-assign]
        dropping = threading.Thread(target=staging.drop)

        def slow(size: int) -> int | None:
            dropping.start()
            dropping.join(0.05)
            return allocate(size)

        cuda.allocate = slow  # type: ignore[method-assign]
        staging.grow()
        second = staging.address or freed[-1]
        dropping.join()
        assert (freed, staging.address) == ([first, second], 0)
        staging.grow()
        assert staging.address == 0


@pytest.mark.parametrize("page_bytes", [3000, 4096])
def test_a_tail_s_kernel_waits_on_the_gpu_for_its_bytes(page_bytes: int) -> None:
    """Also where pages are padded in the pool."""
    with doubled() as (cuda, lane_module, device_module):
        _, _, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        order = GroupOrder(BLOCKS, (Piece(0, 0, 4096, page_bytes),), ())
        group = device_module._map_group(order, [ENGINE], contextlib.ExitStack())
        lane = lane_module.GpuLane(Owner(8 * PAGE_ALIGN), into_engine=True)
        lane_module.TAIL_BYTES, lane.busy.until_s = 2 * page_bytes, math.inf
        for part in (slice(0, 4), slice(4, 6)):
            assert lane.start(group, blocks, part)
        cuda.choose = lambda count: count - 1  # kernels before bytes, where they may
        lane.wait()
        assert cuda.streams[lane._bus]
        while lane._moving:
            lane.wait()
        assert all(are_equal(cuda, blocks, page_bytes)[:6])
