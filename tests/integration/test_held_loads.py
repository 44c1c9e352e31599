"""Loads with a signal and loads that the scheduler starts, through a copier with a fake GPU."""

import numpy as np
import pytest
import trio

from tests.integration import fake_gpu
from tests.integration.fake_gpu_daemon import Gpu, Rank, fill, running, until
from trikv.core.calls import Load, Start
from trikv.core.errors import BadRequestError, KvError
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


async def test_a_rank_joins_the_load_that_its_scheduler_has_started(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon, word_count=1)
        wanted = await saved(rank)
        _, lease = rank.query(NAMES)
        ids = np.array([5, 6, 7], np.int32)
        daemon.service.start(rank.session, Start(LeaseId(lease), 0, ids, 1, 9))
        await until(lambda: rank.words() == [9])  # nobody has asked yet
        assert [rank.block(one) for one in (5, 6, 7)] == wanted
        before = daemon.service.store.cache.counters.load_total
        failed = await rank.ask(load_of(rank, lease, [5, 6, 7], 1, 9))
        assert failed.tolist() == []
        assert daemon.service.store.cache.counters.load_total == before
        with pytest.raises(KvError):  # it was used up by the one
            await rank.ask(load_of(rank, lease, [5, 6, 7]))


async def test_another_load_than_the_one_that_was_started_is_refused_when_that_has_ended(
    gpu: Gpu,
) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        wanted = await saved(rank)
        _, lease = rank.query(NAMES)
        ids = np.array([5, 6, 7], np.int32)
        daemon.service.start(rank.session, Start(LeaseId(lease), 0, ids))
        with pytest.raises(BadRequestError, match="other blocks"):
            await rank.ask(load_of(rank, lease, [8, 9, 10]))
        assert [rank.block(one) for one in (5, 6, 7)] == wanted  # it is not written any more


async def test_what_cannot_be_started_is_left_to_the_rank(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)  # without words
        await saved(rank)
        _, lease = rank.query(NAMES)
        ids = np.array([5, 6, 7], np.int32)
        daemon.service.start(rank.session, Start(LeaseId(lease + 1), 0, ids, 1, 9))  # no such lease
        assert not rank.session.begun
        with pytest.raises(BadRequestError, match="signal 1 of 0"):
            await rank.ask(load_of(rank, lease, [5, 6, 7], 1, 9))
        assert (await rank.ask(load_of(rank, lease, [5, 6, 7]))).size == 0


async def test_loads_that_nobody_joins_are_forgotten_and_their_pins_end(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await saved(rank)
        for number in range(70):
            _, lease = rank.query(NAMES, f"q{number}")
            ids = np.array([5, 6, 7], np.int32)
            daemon.service.start(rank.session, Start(LeaseId(lease), 0, ids))
            await until(lambda: rank.session.copies == 0)
        assert len(rank.session.begun) == 64
        daemon.service.store.sweep()
        assert daemon.service.store.cache.counters.load_total == 70
