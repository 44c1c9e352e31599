"""Loads with a signal and loads that the scheduler starts, through a copier with a fake GPU."""

from functools import partial

import numpy as np
import pytest
import trio

from tests.integration import fake_gpu
from tests.integration.fake_gpu_daemon import PAGE, Gpu, Rank, fill, running, until
from trikv.core.calls import Load
from trikv.core.errors import BadRequestError
from trikv.core.layout import Piece
from trikv.core.words import LeaseId

NAMES = ["a", "b", "c"]


async def saved(rank: Rank) -> list[bytes]:
    await rank.attach()
    fill(rank)
    assert await rank.save(NAMES, [1, 2, 3]) == 3
    return [rank.block(one) for one in (1, 2, 3)]


def load_of(
    rank: Rank,
    lease: int,
    ids: list[int],
    signal: int = 0,
    value: int = 0,
    *,
    is_ordered: bool = False,
) -> Load:
    del rank
    blocks = np.array(ids, np.int32)
    return Load(0, LeaseId(lease), 0, blocks, 0.0, 0, signal, value, is_ordered)


LAYERS = 4
LAYER = 3000  # two pieces of it, and no section ends at a multiple of anything
PIECES = tuple(
    Piece(0, (2 * layer + part) * 64 * LAYER // 2, LAYER // 2, LAYER // 2)
    for layer in range(LAYERS)
    for part in range(2)
)
SECTIONS = (2 * LAYER, 3 * LAYER, 4 * LAYER)


async def test_the_word_changes_after_the_last_byte(gpu: Gpu) -> None:
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon, word_count=4)
        wanted = await saved(rank)
        _, lease = rank.query(NAMES)
        gpu.control[fake_gpu.PAUSE_MS] = 200
        call = load_of(rank, lease, [5, 6, 7], signal=3, value=70_000)
        nursery.start_soon(rank.ask, call)
        await until(lambda: rank.words()[2] == 70_000)
        assert [rank.block(one) for one in (5, 6, 7)] == wanted
        assert rank.words() == [0, 0, 70_000, 0]
        gpu.control[fake_gpu.PAUSE_MS] = 0


async def test_a_load_that_is_stopped_leaves_the_word_alone(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon, word_count=1, blocks=64)
        await rank.attach()
        fill(rank)
        names = list(range(24))  # more than the lane takes at once
        assert await rank.save(names, list(range(24))) == 24
        _, lease = rank.query(names)
        gpu.control[fake_gpu.PAUSE_MS] = 100
        call = Load(0, LeaseId(lease), 0, np.arange(30, 54, dtype=np.int32), 0.15, 0, 1, 5)
        failed = await rank.ask(call)
        assert len(failed)
        assert rank.words() == [0]
        gpu.control[fake_gpu.PAUSE_MS] = 0


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("value", [70_000, 1])
async def test_a_section_is_shown_when_it_is_there(gpu: Gpu, *, is_early: bool, value: int) -> None:
    """Whatever value is seen: all blocks' bytes up to the end of that section are there."""
    count = 24
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon, word_count=4, pieces=PIECES, sections=SECTIONS)
        await rank.attach()
        fill(rank)
        names = list(range(count))
        assert await rank.save(names, names) == count
        wanted = [rank.block(one) for one in names]
        rank.memory.reshape(-1, 64, LAYER // 2)[:, count:] = 0
        _, lease = rank.query(names)
        gpu.control[fake_gpu.PAUSE_MS] = 5
        gpu.control[fake_gpu.EARLY] = is_early
        ids = list(range(count, 2 * count))
        before = {(value - 2 + s) % (1 << 32): SECTIONS[s] for s in range(3)} | {0: 0}
        nursery.start_soon(rank.ask, load_of(rank, lease, ids, 2, value, is_ordered=True))
        seen = []
        while not seen or seen[-1] != value:
            shown = rank.words()[1]  # first the word, then the bytes
            end = before[shown] if shown != value else SECTIONS[-1]
            assert [rank.block(one)[:end] for one in ids] == [one[:end] for one in wanted]
            seen += [shown] if shown not in seen else []
            await trio.sleep(0.001)
        assert len(seen) >= 3, "the load was over before it was looked at"
        assert rank.words() == [0, value, 0, 0]
        gpu.control[fake_gpu.PAUSE_MS] = gpu.control[fake_gpu.EARLY] = 0


async def test_a_load_that_is_stopped_never_shows_its_end(gpu: Gpu) -> None:
    """Some sections may have been there for all blocks; the blocks have failed all the same."""
    async with running(gpu) as daemon:
        rank = Rank(daemon, word_count=1, pieces=PIECES, sections=SECTIONS)
        await rank.attach()
        fill(rank)
        names = list(range(24))
        assert await rank.save(names, names) == 24
        _, lease = rank.query(names)
        gpu.control[fake_gpu.PAUSE_MS] = 11
        blocks = np.arange(30, 54, dtype=np.int32)
        call = Load(0, LeaseId(lease), 0, blocks, 0.22, 0, 1, 9, is_ordered=True)
        failed = await rank.ask(call)
        assert len(failed)
        assert rank.words()[0] in {0, 7, 8}
        whole = [one for one in range(24) if one not in failed]
        assert all(rank.block(one) == rank.block(30 + one) for one in whole)
        gpu.control[fake_gpu.PAUSE_MS] = 0


async def test_a_group_that_is_not_cut_is_shown_at_its_end(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon, word_count=1)
        wanted = await saved(rank)
        _, lease = rank.query(NAMES)
        call = load_of(rank, lease, [5, 6, 7], 1, 9, is_ordered=True)
        assert (await rank.ask(call)).size == 0
        assert [rank.block(one) for one in (5, 6, 7)] == wanted
        assert rank.words() == [9]


async def test_a_word_that_was_not_registered_is_refused(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)  # without words
        await saved(rank)
        _, lease = rank.query(NAMES)
        with pytest.raises(BadRequestError, match="signal 1 of 0"):
            await rank.ask(load_of(rank, lease, [5, 6, 7], 1, 9))
        with pytest.raises(BadRequestError, match="signal 1 of 0"):
            await rank.save(["other"], [9], shown=(1, 9))
        assert (await rank.ask(load_of(rank, lease, [5, 6, 7]))).size == 0


async def test_the_word_of_a_save_changes_when_its_blocks_have_been_read(gpu: Gpu) -> None:
    """Of the blocks that had to be copied; what is written there later is nobody's."""
    names = list("abcdefgh")
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon, word_count=4)
        await rank.attach()
        fill(rank)
        assert await rank.save(names[:2], [20, 21]) == 2
        wanted = [rank.block(one) for one in (20, 21, 2, 3, 4, 5, 6, 7)]
        gpu.control[fake_gpu.PAUSE_MS] = 50
        nursery.start_soon(partial(rank.save, names, range(8), shown=(2, 77)))
        await until(lambda: rank.words()[1])
        for one in range(8):
            rank.memory[one * PAGE : (one + 1) * PAGE] = 0
        assert rank.words() == [0, 77, 0, 0]
        await until(lambda: rank.query(names)[0] == len(names))
        gpu.control[fake_gpu.PAUSE_MS] = 0
        _, lease = rank.query(names)
        assert await rank.load_leased(lease, range(10, 18)) == []
        assert [rank.block(one) for one in range(10, 18)] == wanted
