"""Loads with a signal and loads that the scheduler starts, through a copier with a fake GPU."""

import numpy as np
import pytest
import trio

from tests.integration import fake_gpu
from tests.integration.fake_gpu_daemon import Gpu, Rank, fill, running, until
from trikv.core.calls import Load
from trikv.core.errors import BadRequestError
from trikv.core.words import LeaseId

NAMES = ["a", "b", "c"]


async def saved(rank: Rank) -> list[bytes]:
    await rank.attach()
    fill(rank)
    assert await rank.save(NAMES, [1, 2, 3]) == 3
    return [rank.block(one) for one in (1, 2, 3)]


def load_of(rank: Rank, lease: int, ids: list[int], signal: int = 0, value: int = 0) -> Load:
    del rank
    return Load(0, LeaseId(lease), 0, np.array(ids, np.int32), 0.0, 0, signal, value)


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


async def test_a_word_that_was_not_registered_is_refused(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)  # without words
        await saved(rank)
        _, lease = rank.query(NAMES)
        with pytest.raises(BadRequestError, match="signal 1 of 0"):
            await rank.ask(load_of(rank, lease, [5, 6, 7], 1, 9))
        assert (await rank.ask(load_of(rank, lease, [5, 6, 7]))).size == 0
