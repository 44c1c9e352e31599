"""Copies of a GPU that others use too, with all the staging a daemon takes by default; and loads
that are begun before their blocks are known."""

import time

import pytest
import torch

from bench.busy import computing
from bench.daemons import HASH_BYTES, hashes
from bench.gpu_engine import LAYOUTS, GpuEngine, gpu_engine, rows
from tests.conftest import Start
from tests.gpu.test_gpu import status, used_bytes
from tests.integration.daemons import RunningDaemon, start_daemon
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob

BLOCKS = 420
MOVED = 200  # some 450 MiB
BUSY_S = 2.0


@pytest.fixture(scope="module")
def roomy(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> RunningDaemon:
    """A daemon whose staging may grow."""
    return start_daemon(start_shared, tmp_path_factory.mktemp("busy"), "--pool-size", "3gb")


def announce(engine: GpuEngine, name: str, count: int, request: str) -> int:
    blob = hashes(name, count)
    answer = engine.scheduler.query(request, HASH_BYTES, blob, is_alone=True).result(10)
    assert answer.hit_count == count
    time.sleep(0.02)  # its first chunks have been brought by then
    return int(answer.lease)


def load(engine: GpuEngine, request: str, lease: int, first: int, blocks: list[int]) -> None:
    engine.worker.start_loads([LoadJob(request, lease, first, pack(blocks), is_alone=True)])
    while not engine.worker.finished(is_idle=True)[1]:
        pass
    assert not engine.worker.take_invalid()


@pytest.mark.parametrize("layout", ["K and V apart", "block outermost", "padded rows"])
def test_what_is_brought_ahead_is_what_is_loaded(roomy: RunningDaemon, layout: str) -> None:
    """Some of it, after another load came first, and after its request has ended."""
    tensors = LAYOUTS[layout](160)
    with gpu_engine(roomy.address, tensors, 160, model=f"ahead {layout}") as engine:
        first, second = list(range(40)), list(range(40, 60))
        engine.save("a", first)
        engine.save("b", second)
        lease = announce(engine, "a", 40, "r1")
        load(engine, "r1", lease, 0, list(range(60, 100)))
        assert engine.equal(first, list(range(60, 100)))
        lease = announce(engine, "a", 40, "r2")
        before = {name: one.clone() for name, one in engine.tensors.items()}
        load(engine, "r2", lease, 20, list(range(100, 115)))  # of 28 brought ones, and no others
        assert engine.equal(first[20:35], list(range(100, 115)))
        others = [one for one in range(160) if not 100 <= one < 115]
        for name, one in engine.tensors.items():
            assert torch.equal(rows(one, 160, others), rows(before[name], 160, others))
        waiting = announce(engine, "a", 40, "r3")
        lease = announce(engine, "b", 20, "r4")
        load(engine, "r4", lease, 0, list(range(133, 153)))
        assert engine.equal(second, list(range(133, 153)))
        load(engine, "r3", waiting, 0, list(range(60, 100)))
        assert engine.equal(first, list(range(60, 100)))
        announce(engine, "a", 40, "r5")
        engine.scheduler.release(["r1", "r2", "r3", "r4", "r5"])
        engine.save("c", list(range(100, 130)))
        engine.clear(list(range(60, 90)))
        engine.load("c", list(range(60, 90)))
        assert engine.equal(list(range(100, 130)), list(range(60, 90)))


@pytest.mark.parametrize("layout", ["K and V apart", "MLA", "block outermost"])
def test_bytes_are_right_while_others_compute(roomy: RunningDaemon, layout: str) -> None:
    """Before it is known that they do, as it becomes known, and with the staging of then."""
    from trikv.tiers.device import staging_part  # noqa: PLC0415  # it imports CUDA
    from trikv.tiers.lane import WINDOW_BYTES  # noqa: PLC0415

    count = MOVED if layout != "MLA" else MOVED // 2
    tensors = LAYOUTS[layout](BLOCKS)
    with gpu_engine(roomy.address, tensors, BLOCKS, model=layout) as engine, computing():
        before = used_bytes()
        turns, until_s = 0, time.monotonic() + BUSY_S
        while time.monotonic() < until_s:
            ids = torch.randperm(BLOCKS).tolist()
            source, target = ids[:count], ids[count : 2 * count]
            engine.clear(target)
            engine.save(f"{layout}/{turns}", source)
            engine.load(f"{layout}/{turns}", target, is_alone=turns % 2 == 0)
            assert engine.equal(source, target), f"turn {turns}"
            turns += 1
        most = staging_part(torch.cuda.get_device_properties(0).total_memory) - WINDOW_BYTES
        assert used_bytes() - before >= most // 2, "the staging has not grown"
    (copier,) = status(roomy)["copiers"]
    assert copier["endedCount"] == 0
