"""What a lane asks a GPU for first, and what it leaves for later: on a double of CUDA."""

import math
import socket
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.tiers.cuda_double import Cuda, doubled
from tests.tiers.test_gpu_chunks import _lane, some
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.copier import Work
from trikv.tiers.frames import CopyOrder, Direction, Kind, pack_copy

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
        while lane._moving:
            lane.wait()
        for block, page in zip(landed.blocks.blocks, landed.blocks.offsets, strict=True):
            is_there = block in landed.blocks.blocks[:6]
            near, far = cuda.memory[64 << 10 :][page:], cuda.memory[(2 << 20) + (64 << 10) :]
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
            near = cuda.memory[(64 << 10) + int(blocks.offsets[0]) :][:4096]
            far = cuda.memory[(2 << 20) + (64 << 10) + 4096 * int(blocks.blocks[0]) :][:4096]
            assert np.array_equal(near, far)
            cuda.streams[cores].extend(reversed(second))
        lane.wait()
        for block, page in zip(blocks.blocks[:count], blocks.offsets[:count], strict=True):
            near, far = cuda.memory[(64 << 10) + page :], cuda.memory[(2 << 20) + (64 << 10) :]
            assert np.array_equal(near[:4096], far[4096 * block :][:4096])


def test_a_copy_is_reported_before_its_lane_takes_its_time() -> None:
    """More staging of a busy GPU may be 50 ms in coming."""
    with doubled() as (cuda, lane_module, device_module):
        lane, target, blocks = _lane(cuda, lane_module, device_module, into_engine=True)
        mapped = lane_module.GpuMemory((), (), (target,), 1 << 18, 0)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            work = Work(Direction.LOAD, None, theirs, {0: mapped}, threading.Lock())  # type: ignore[arg-type]
            order = CopyOrder(0, 0, Direction.LOAD, 0, blocks.blocks[:2], blocks.offsets[:2])
            work._obey(Kind.COPY, 1, pack_copy(order))
            rested = []
            lane.rest = lambda: rested.append(ours.recv(1 << 16, socket.MSG_DONTWAIT))
            while not rested:
                work._turn(lane)
            assert rested[0]
            assert not work._moving
