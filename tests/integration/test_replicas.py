"""Ranks that hold the same bytes, on a fake GPU: stored once, saved in turns, loaded by all."""

from itertools import pairwise

import trio

from tests.integration.fake_gpu_daemon import PAGE, Gpu, Rank, fill, running, until
from trikv.core.blocks import State
from trikv.core.layout import Piece
from trikv.nursery.serve import Daemon

HALF = PAGE // 2
APART = (Piece(0, 0, HALF, HALF), Piece(0, 64 * HALF, HALF, HALF))  # all first halves, all second
NAMES = tuple(range(20))


async def engine(daemon: Daemon, ranks: int, name: str = "engine", replicas: int = 0) -> list[Rank]:
    """Ranks that hold the same bytes, each in memory of its own."""
    made = [
        Rank(daemon, name, APART, number=rank, ranks=ranks, replicas=replicas or ranks)
        for rank in range(ranks)
    ]
    for rank in made:
        await rank.attach()
        fill(rank)
    return made


def used_bytes(daemon: Daemon) -> int:
    return daemon.service.store.cache.pages.used_bytes


async def all_save(ranks: list[Rank], blocks: range) -> list[int]:
    return [await rank.save(NAMES, blocks) for rank in ranks]


async def check_all_load(ranks: list[Rank], wanted: list[bytes]) -> None:
    """Each rank, into other blocks and in another order."""
    targets = [63 - at for at in range(len(wanted))]
    for rank in ranks:
        rank.memory[:] = 0
    hits, lease = ranks[0].query(NAMES)
    assert hits == len(NAMES)
    for rank in ranks:
        assert await rank.load_leased(lease, targets) == []
        assert [rank.block(target) for target in targets] == wanted
        untouched = set(range(64)) - set(targets)
        assert not any(any(rank.block(number)) for number in untouched)


async def test_eight_ranks_are_stored_once_and_each_loads_everything(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        ranks = await engine(daemon, 8)
        wanted = [ranks[0].block(at) for at in range(20)]
        assert await all_save(ranks, range(20)) == [3, 3, 3, 3, 2, 2, 2, 2]
        assert used_bytes(daemon) == 20 * PAGE
        await check_all_load(ranks, wanted)
        four = await engine(daemon, 4, "of four")
        await check_all_load(four, wanted)
        assert used_bytes(daemon) == 20 * PAGE


async def test_two_pages_for_four_ranks_that_hold_the_same_in_pairs(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        ranks = await engine(daemon, 4, replicas=2)
        for rank in ranks[2:]:
            fill(rank, seed=1)
        wanted = [[rank.block(at) for at in range(20)] for rank in ranks]
        assert wanted[0] == wanted[1] != wanted[2] == wanted[3]
        assert await all_save(ranks, range(20)) == [10, 10, 10, 10]
        assert used_bytes(daemon) == 2 * 20 * PAGE
        hits, lease = ranks[0].query(NAMES)
        assert hits == 20
        for rank, own in zip(ranks, wanted, strict=True):
            rank.memory[:] = 0
            assert await rank.load_leased(lease, range(20)) == []
            assert [rank.block(at) for at in range(20)] == own


async def test_a_rank_lost_in_mid_save_costs_what_it_was_copying(gpu: Gpu) -> None:
    """Its blocks are never seen; those of the other rank stay, and the rest is saved again."""
    async with running(gpu) as daemon:
        blocks = daemon.service.store.cache.blocks
        ranks = await engine(daemon, 2)
        wanted = [ranks[0].block(at) for at in range(20)]
        saved: list[int] = []

        async def held() -> None:
            saved.append(await ranks[1].save(NAMES, range(20), event=1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(held)  # until its engine's work is over, which it never is
            await until(lambda: blocks.counts[State.FILLING] == 20)
            assert await ranks[0].save(NAMES, range(20)) == 10
            assert ranks[0].query(NAMES)[0] == 1, "the second block is the other rank's"
            assert used_bytes(daemon) == 20 * PAGE
            daemon.service.sessions.close(ranks[1].session, "process ended")
            await until(lambda: saved)
        assert saved == [0]
        assert (blocks.counts[State.FILLING], blocks.counts[State.DOOMED]) == (0, 0)
        assert used_bytes(daemon) == 10 * PAGE
        again = Rank(daemon, "engine", APART, number=1, ranks=2, replicas=2)
        await again.attach()
        fill(again)
        assert ranks[0].query(NAMES)[0] == 1
        assert await all_save([ranks[0], again], range(20)) == [0, 10]
        await check_all_load([ranks[0], again], wanted)


async def test_ranks_may_cut_a_request_into_messages_as_they_like(gpu: Gpu) -> None:
    cuts = ((0, 20), (0, 7, 8, 20), (0, 1, 9, 20))
    async with running(gpu) as daemon:
        ranks = await engine(daemon, 3)
        wanted = [ranks[0].block(at) for at in range(20)]
        for rank, cut in zip(ranks, cuts, strict=True):
            for first, end in pairwise(cut):
                await rank.save(NAMES[first:end], range(first, end), first=first)
        assert used_bytes(daemon) == 20 * PAGE
        assert daemon.service.store.cache.counters.save_blocks_total == 20
        await check_all_load(ranks, wanted)
