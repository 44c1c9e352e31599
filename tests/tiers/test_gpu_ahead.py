"""What a GPU's lane brings for a load that has not come, on a double of CUDA."""

import math

import numpy as np
import pytest

from tests.tiers.cuda_double import BLOCKS, ENGINE, FREE, POOL, SLAB, Owner, doubled
from tests.tiers.test_gpu_chunks import CHUNKS, a_lane, busy_of
from tests.tiers.test_gpu_lane import order_of
from trikv.core.chunks import Sorted, sort
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.frames import AttachOrder, Direction, GroupOrder

ROOMY = {"into_engine": True, "room": 16}


def some(blocks: Sorted, which: slice) -> Sorted:
    """Of some pages, as they are announced."""
    nobody = np.zeros(len(blocks.offsets[which]), np.int32)
    return sort(nobody, blocks.offsets[which], page_bytes=PAGE_ALIGN, slab_bytes=SLAB)


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("lease", [7, 8])
def test_what_is_brought_is_for_one_lease(*, is_over: bool, lease: int) -> None:
    """The pages of another one may have changed meanwhile."""
    with doubled() as (cuda, lane_module, device_module):
        lane_module.KEEP_AHEAD_S = math.inf
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
        lane.bring((1, 0, 7), target, some(blocks, slice(8)))
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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
        lane, target, blocks = a_lane(cuda, lane_module, device_module, **ROOMY)
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


def test_the_bus_goes_on_while_what_was_brought_is_awaited() -> None:
    """It has no more than half of the staging."""
    with doubled() as (cuda, lane_module, device_module):
        lane_module.CHUNK_BYTES = 2 * PAGE_ALIGN
        lane, target, blocks = a_lane(cuda, lane_module, device_module, into_engine=True)
        lane.bring((1, 0, 7), target, some(blocks, slice(CHUNKS)))
        assert lane._bytes == 4 * PAGE_ALIGN
        landed = lane.land((1, 0, 7), blocks)
        assert len(landed.parts) == 3
        begun = 4
        while lane.start(target, landed.blocks, slice(begun, begun + 1)):
            begun += 1
        assert begun == 8
        for _ in landed.parts:
            lane.wait()
        assert lane.start(target, landed.blocks, slice(8, 12)), "it makes room with its last part"
        while lane._moving:
            lane.wait()
        assert lane.staging.ring.size == 8 * PAGE_ALIGN
