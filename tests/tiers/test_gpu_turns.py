"""What a lane asks a GPU for first, and what it leaves for later: on a double of CUDA."""

import contextlib
import math
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_double import BLOCKS, ENGINE, POOL, SLAB, Cuda, Owner, doubled
from tests.tiers.test_gpu_chunks import _lane, some
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
            lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=into_engine)
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


def test_the_bus_has_the_next_chunk_before_what_was_brought_is_scattered() -> None:
    """Else it has nothing to do meanwhile."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=True)
        lane_module.CHUNK_BYTES = 2 * PAGE_ALIGN
        lane.bring((1, 0, 7), target, some(blocks, slice(12, 16)))
        calls = noted(cuda, "copy", "launch")
        landed = lane.land((1, 0, 7), blocks)
        parts = len(landed.parts)
        assert (parts > 1, calls) == (True, [])
        assert lane.start(target, landed.blocks, slice(4, 6))
        assert calls == ["copy", *(parts + 1) * ["launch"]]
        assert [one.kernel is not None for one in lane._moving] == [*parts * [False], True]
        while lane._moving:
            lane.wait()
        for block, page in zip(landed.blocks.blocks, landed.blocks.offsets, strict=True):
            is_there = block in landed.blocks.blocks[:6]
            near, far = cuda.memory[POOL + page :], cuda.memory[ENGINE:]
            same = np.array_equal(near[:4096], far[4096 * block :][:4096])
            assert same is bool(is_there)


@pytest.mark.parametrize("count", [4, 5, 8])
def test_the_bus_has_the_head_of_a_large_save_while_the_rest_is_gathered(*, count: int) -> None:
    """Both kernels are asked for before any page: they have one turn of the GPU."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=False)
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
            near = cuda.memory[POOL + int(blocks.offsets[0]) :][:4096]
            far = cuda.memory[ENGINE + 4096 * int(blocks.blocks[0]) :][:4096]
            assert np.array_equal(near, far)
            cuda.streams[cores].extend(reversed(second))
        lane.wait()
        for block, page in zip(blocks.blocks[:count], blocks.offsets[:count], strict=True):
            near, far = cuda.memory[POOL + page :], cuda.memory[ENGINE:]
            assert np.array_equal(near[:4096], far[4096 * block :][:4096])


@pytest.mark.parametrize("room", [8, 1])
def test_a_lane_takes_its_time_when_all_copies_are_over_and_reported(room: int) -> None:
    """More staging of a busy GPU may be 50 ms in coming; with little of it chunks come singly."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=True)
        lane.staging = lane_module.Staging(Owner(room * PAGE_ALIGN), 8 * PAGE_ALIGN)
        lane_module.CHUNK_BYTES = PAGE_ALIGN
        mapped = lane_module.GpuMemory((), (), (target,), SLAB, 0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            work = Work(Direction.LOAD, None, theirs, {0: mapped}, threading.Lock())  # type: ignore[arg-type]
            for number, part in enumerate((slice(3), slice(3, 6))):
                order = CopyOrder(
                    0, 0, Direction.LOAD, 0, blocks.blocks[part], blocks.offsets[part]
                )
                work._obey(Kind.COPY, number, pack_copy(order))
            frames, ended, rested = Frames(), list[int](), list[int]()
            lane.rest = lambda: rested.append(len(ended))
            while not rested:
                work._turn(lane)
                theirs.sendall(pack(Kind.ALIVE, 0))
                frames.feed(
                    ours.recv(1 << 16),
                    lambda kind, number, _: ended.append(number) if kind is Kind.ENDED else None,
                )
            work._turn(lane)
            assert (sorted(ended), rested, len(work._moving)) == ([0, 1], [1], 0)


def test_a_save_that_waits_for_its_engine_does_not_hold_that_up() -> None:
    """A busy engine has one after the other of them."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=False)
        forward = cuda.new_event(is_timed=False)
        mapped = lane_module.GpuMemory((), (forward,), (target,), SLAB, 0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            work = Work(Direction.SAVE, None, theirs, {0: mapped}, threading.Lock())  # type: ignore[arg-type]
            for event in (0, 1):
                part = slice(3 * event, 3 * event + 3)
                order = CopyOrder(
                    0, 0, Direction.SAVE, event, blocks.blocks[part], blocks.offsets[part]
                )
                work._obey(Kind.COPY, event, pack_copy(order))
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
        _, _, blocks = _lane(cuda, lane_module, device_module, into_engine=True)
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
        for block, page in zip(blocks.blocks[:6], blocks.offsets[:6], strict=True):
            near, far = cuda.memory[POOL + page :], cuda.memory[ENGINE + 4096 * block :]
            assert np.array_equal(near[:page_bytes], far[:page_bytes])
