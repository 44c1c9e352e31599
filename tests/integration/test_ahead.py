"""What copiers do before the order of a copy has come, on a fake GPU."""

from dataclasses import replace

import pytest

from tests.integration import fake_gpu
from tests.integration.daemons import hashes
from tests.integration.fake_gpu_daemon import PAGE, Gpu, Rank, fill, running, until
from trikv.core.calls import Query
from trikv.core.layout import Piece
from trikv.core.words import RequestId
from trikv.nursery.serve import Daemon
from trikv.wire import hashes_to_words

NAMES = list("abcdefgh")


async def saved(daemon: Daemon) -> Rank:
    """A rank whose blocks 0 to 7 are saved."""
    rank = Rank(daemon)
    await rank.attach()
    fill(rank)
    assert await rank.save(NAMES, range(8)) == 8
    return rank


async def test_a_copier_that_sleeps_is_told_of_what_comes(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        assert await rank.save(["a"], [1]) == 1  # a save is announced while it is planned
        for turn in range(100):  # not rehearsed where the copy has come as soon as the hint
            if gpu.control[fake_gpu.REHEARSALS]:
                break
            assert await rank.save([f"a{turn}"], [1]) == 1
        before = gpu.control[fake_gpu.REHEARSALS]
        assert before
        call = Query(RequestId("q"), 0, hashes_to_words(hashes("a"), 32))
        daemon.service.expect_load(rank.session, call, daemon.service.query(rank.session, call))
        await until(lambda: gpu.control[fake_gpu.REHEARSALS] == before + 1)
        assert await rank.load(["a"], [5]) == []
        assert rank.block(5) == rank.block(1)


async def test_a_load_is_begun_before_its_blocks_are_known(gpu: Gpu) -> None:
    """Of an engine that computes nothing else; all of it, or what is wanted of it."""
    async with running(gpu) as daemon:
        rank = await saved(daemon)
        for turn, first in enumerate((0, 3, 7), 1):
            hits, lease = rank.query(NAMES, f"q{turn}", is_alone=True)
            assert hits == 8
            await until(lambda: gpu.control[fake_gpu.BROUGHT] == turn)  # noqa: B023  # called now
            rank.query(NAMES, f"q{turn}", is_alone=True)  # renewed: not brought again
            targets = range(10 * turn + first, 10 * turn + 8)
            assert await rank.load_leased(lease, targets, first=first) == []
            assert [rank.block(one) for one in targets] == [rank.block(n) for n in range(first, 8)]
            assert gpu.control[fake_gpu.BROUGHT] == turn
            assert gpu.control[fake_gpu.LANDED] == min(turn, 2)  # of the last, none was brought


async def test_what_was_brought_for_a_lease_is_used_for_no_other(gpu: Gpu) -> None:
    """Its pages may have other bytes by then."""
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        assert await rank.save(["a", "b"], [0, 1]) == 2
        rank.query(["a"], "q1", is_alone=True)
        await until(lambda: gpu.control[fake_gpu.BROUGHT] == 1)
        assert await rank.load(["b"], [5], request="q2") == []
        assert rank.block(5) == rank.block(1)
        rank.query(["a"], "q3", is_alone=True)
        await until(lambda: gpu.control[fake_gpu.BROUGHT] == 2)
        daemon.service.release(rank.session, [RequestId(f"q{n}") for n in (1, 3)])
        pages = [daemon.service.store.cache.blocks.slot.copy()]
        await daemon.service.reset(rank.session, "")
        assert await rank.save(["b", "a"], [7, 8]) == 2  # into the same pages
        pages.append(daemon.service.store.cache.blocks.slot.copy())
        assert set(pages[0][pages[0] >= 0]) & set(pages[1][pages[1] >= 0])
        assert await rank.load(["a", "b"][::-1], [20, 21], request="q4") == []
        assert [rank.block(20), rank.block(21)] == [rank.block(7), rank.block(8)]
        assert gpu.control[fake_gpu.LANDED] == 0


async def test_a_rank_whose_loads_may_go_by_sections_is_only_told(gpu: Gpu) -> None:
    pieces = (Piece(0, 0, 4096, 4096), Piece(0, 4096 * 64, 4096, 4096))
    async with running(gpu) as daemon:
        rank = Rank(daemon, pieces=pieces, blocks=64, sections=(4096, 8192))
        await rank.attach()
        assert await rank.save(["a"], [0]) == 1
        before = gpu.control[fake_gpu.REHEARSALS]
        _, lease = rank.query(["a"], is_alone=True)
        await until(lambda: gpu.control[fake_gpu.REHEARSALS] == before + 1)
        assert await rank.load_leased(lease, [5]) == []
        assert gpu.control[fake_gpu.BROUGHT] == 0


async def test_the_last_pages_are_brought(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones an engine may have itself; and none while more is coming."""
    monkeypatch.setattr("trikv.nursery.ahead.AHEAD_BYTES", 3 * PAGE)
    async with running(gpu) as daemon:
        rank = await saved(daemon)
        _, lease = rank.query(NAMES, "q1", is_alone=True)
        await until(lambda: gpu.control[fake_gpu.BROUGHT] == 1)
        assert await rank.load_leased(lease, range(20, 25)) == []
        assert gpu.control[fake_gpu.LANDED] == 0
        _, lease = rank.query(NAMES, "q2", is_alone=True)
        await until(lambda: gpu.control[fake_gpu.BROUGHT] == 2)
        assert await rank.load_leased(lease, range(30, 33), first=5) == []
        assert gpu.control[fake_gpu.LANDED] == 1
        assert [rank.block(30 + n) for n in range(3)] == [rank.block(5 + n) for n in range(3)]
        call = Query(RequestId("q3"), 0, hashes_to_words(hashes(*NAMES), 32), is_alone=True)
        answer = daemon.service.query(rank.session, call)
        daemon.service.expect_load(rank.session, call, replace(answer, coming_count=1))
        assert await rank.load_leased(answer.lease, range(40, 48)) == []
        assert (gpu.control[fake_gpu.BROUGHT], gpu.control[fake_gpu.LANDED]) == (2, 1)
