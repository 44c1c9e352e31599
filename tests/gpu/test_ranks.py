"""On a real GPU: an engine of two tensor-parallel ranks, on two GPUs where there are as many."""

from collections.abc import Sequence

import pytest
import torch

from bench.gpu_engine import GpuEngine, Tensors, gpu_ranks
from tests.gpu.test_gpu import PIECE, saved_hashes, status, until
from tests.integration.daemons import RunningDaemon
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob, SaveJob

BLOCKS, COUNT, LAYERS = 64, 24, 4


def shards(*, are_equal: bool) -> list[Tensors]:
    """Tensors of two ranks."""
    places = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(2)]
    shape = (BLOCKS, PIECE)
    made = [
        {f"l{n}": torch.randint(0, 255, shape, dtype=torch.uint8, device=at) for n in range(LAYERS)}
        for at in places
    ]
    if are_equal:
        for name, one in made[1].items():
            one.copy_(made[0][name])
    for place in places:
        torch.cuda.synchronize(place)
    return made


def save(ranks: Sequence[GpuEngine], name: str, blocks: Sequence[int]) -> int:
    """On these ranks; returns how many blocks they have stored together."""
    blob = saved_hashes(ranks[0], name, len(blocks))
    for number, rank in enumerate(ranks, 1):
        rank.worker.start_saves([SaveJob(number, name, 0, 32, blob, pack(blocks))])
    stored = 0
    for rank in ranks:
        rank._finish(rank.worker.take_report, is_alone=False)
        stored += rank.worker.tally.take().get("saved_blocks", 0)
    return stored


def found(ranks: Sequence[GpuEngine], name: str) -> int:
    blob = saved_hashes(ranks[0], name, COUNT)
    answer = ranks[0].scheduler.query(name, 32, blob).result(10)
    ranks[0].scheduler.release([name])
    return answer.hit_count


def load(ranks: Sequence[GpuEngine], name: str, blocks: Sequence[int]) -> None:
    blob = saved_hashes(ranks[0], name, len(blocks))
    answer = ranks[0].scheduler.query(name, 32, blob).result(10)
    assert answer.hit_count == len(blocks)
    for rank in ranks:
        rank.worker.start_loads([LoadJob(name, answer.lease, 0, pack(blocks))])
    for rank in ranks:
        rank._finish(lambda rank=rank: rank.worker.loads_in_flight == 0, is_alone=False)
        assert rank.worker.take_invalid() == set()
    ranks[0].scheduler.release([name])


def test_a_block_is_found_once_both_ranks_have_saved_it(daemon: RunningDaemon) -> None:
    mine = shards(are_equal=False)
    with gpu_ranks(daemon.address, mine, BLOCKS, model="two ranks") as ranks:
        source, target = list(range(COUNT)), list(range(BLOCKS - COUNT, BLOCKS))
        assert not any(rank.equal(source, target) for rank in ranks)
        assert save(ranks[:1], "half", source) == COUNT
        assert found(ranks, "half") == 0
        assert save(ranks[1:], "half", source) == COUNT
        load(ranks, "half", target)
        assert all(rank.equal(source, target) for rank in ranks)
        first, second = (shard["l0"][0].cpu() for shard in mine)
        assert not torch.equal(first, second)  # each has its own part


@pytest.mark.parametrize("rank", [0, 1])
def test_what_both_ranks_hold_alike_is_stored_once(daemon: RunningDaemon, rank: int) -> None:
    with gpu_ranks(
        daemon.address, shards(are_equal=True), BLOCKS, model=f"alike {rank}", replicas=2
    ) as ranks:
        source, target = list(range(COUNT)), list(range(BLOCKS - COUNT, BLOCKS))
        before = status(daemon)["pool"]["usedBytes"]
        ordered = ranks if rank == 0 else ranks[::-1]
        assert save(ordered, "alike", source) == COUNT
        until(lambda: found(ranks, "alike") == COUNT)
        grown = status(daemon)["pool"]["usedBytes"] - before
        assert grown == COUNT * LAYERS * PIECE
        for one in ranks[1].tensors.values():
            one[: COUNT // 2] = 0  # what it loads is not its own
        load(ranks, "alike", target)
        assert ranks[0].equal(source, target)
        for name, one in ranks[1].tensors.items():
            assert torch.equal(one[target].cpu(), ranks[0].tensors[name][source].cpu())
