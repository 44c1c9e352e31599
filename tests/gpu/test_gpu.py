"""On a real GPU: bytes of every layout, order after the engine's work, deaths, refusals."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.gpu_engine import LAYOUTS, GpuEngine, gpu_engine, rows
from tests.answers import answer_of
from tests.conftest import Start
from tests.integration.daemons import RunningDaemon, hashes
from trikv.connector import cuda, layouts
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob, SaveJob
from trikv.core.calls import GpuMemory, GroupPieces, Register
from trikv.core.layout import GroupLayout, Piece, Place, Range
from trikv.core.words import InstanceName
from trikv.nursery.copiers import Copiers, PoolPlace
from trikv.tiers.copies import Copy
from trikv.tiers.pool import open_pool
from trikv.wire import ALLOCATION_BYTES_MAX

LOG = logging.getLogger("bench")
PIECE = 64 << 10


def tensors_of(blocks: int, layers: int = 4) -> dict[str, torch.Tensor]:
    return {
        f"l{n}": torch.randint(0, 255, (blocks, PIECE), dtype=torch.uint8, device="cuda")
        for n in range(layers)
    }


def status(daemon: RunningDaemon) -> dict[str, Any]:
    command = [sys.executable, "-m", "trikv.cli.main", "status", "--json"]
    shown = subprocess.run(
        [*command, "--addr", daemon.address], check=True, stdout=subprocess.PIPE
    ).stdout
    facts: dict[str, Any] = json.loads(shown)
    return facts


def until(check: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.01)


def used_bytes() -> int:
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_every_layout_come_back(daemon: RunningDaemon, layout: str) -> None:
    blocks = 48
    with gpu_engine(daemon.address, LAYOUTS[layout](blocks), blocks, model=layout) as engine:
        order = np.random.default_rng(1).permutation(blocks).tolist()
        source, target, rest = order[:16], order[16:32], order[32:]
        before = {name: one.clone() for name, one in engine.tensors.items()}
        assert not engine.equal(source, target)
        engine.save(layout, source)
        engine.load(layout, target)
        assert engine.equal(source, target)
        for name, one in engine.tensors.items():  # and nothing else was touched
            kept = source + rest
            assert torch.equal(rows(one, blocks, kept), rows(before[name], blocks, kept))


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from([1, 2, 6, 8, 48, 1000, 4096, 70_000]), min_size=1, max_size=6),
    apart=st.booleans(),
    padding=st.sampled_from([0, 1, 16]),
    data=st.data(),
)
def test_random_layouts_against_numpy(
    *,
    daemon: RunningDaemon,
    sizes: list[int],
    apart: bool,
    padding: int,
    data: st.DataObject,
) -> None:
    """Rows of bytes, in an allocation each or side by side in one, all widths of the kernel."""
    blocks = 24
    if apart:
        wide = [torch.randint(0, 255, (blocks, n + padding), device="cuda").byte() for n in sizes]
        views = [one[:, :n] for one, n in zip(wide, sizes, strict=True)]
    else:
        whole = torch.randint(0, 255, (blocks, sum(sizes) + padding), device="cuda").byte()
        ends = np.cumsum(sizes).tolist()
        views = [whole[:, end - n : end] for end, n in zip(ends, sizes, strict=True)]
    tensors = {f"l{at}": view for at, view in enumerate(views)}
    order = data.draw(st.permutations(range(blocks)))
    source, target = order[:9], order[9:18]
    expected = [view.cpu().numpy().copy() for view in views]
    for one in expected:
        one[target] = one[source]
    model = f"{sizes}{apart}{padding}"
    with gpu_engine(daemon.address, tensors, blocks, model=model) as engine:
        name = f"{model}{order}"
        engine.save(name, list(source))
        engine.load(name, list(target))
    for view, one in zip(views, expected, strict=True):
        assert np.array_equal(view.cpu().numpy(), one)


def test_a_save_comes_after_the_engine_s_work(daemon: RunningDaemon) -> None:
    """A slow kernel, then the write: what was there before is never read."""
    tensors = tensors_of(64)
    for one in tensors.values():
        one.fill_(1)
    with gpu_engine(daemon.address, tensors, 64) as engine:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        for _ in range(60):
            a @ a
        for one in tensors.values():
            one[:32] = 2
        begin_s = time.perf_counter()
        engine.save("after", list(range(32)))
        assert time.perf_counter() - begin_s > 0.02, "the kernels were over before: nothing shown"
        engine.load("after", list(range(32, 64)))
        assert all(bool((one[32:] == 2).all()) for one in tensors.values())


def test_each_record_of_an_event_counts_not_only_its_first(daemon: RunningDaemon) -> None:
    """More saves than there are events, each behind a kernel of its own."""
    rounds = cuda.EVENT_COUNT + 8
    tensors = tensors_of(2 * rounds)
    for one in tensors.values():
        one.zero_()
    with gpu_engine(daemon.address, tensors, 2 * rounds) as engine:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        for at in range(rounds):
            for _ in range(8):
                a @ a
            for one in tensors.values():
                one[at] = at + 1
            engine.save(f"again {at}", [at])
        for at in range(rounds):
            engine.load(f"again {at}", [rounds + at])
            assert all(bool((one[rounds + at] == at + 1).all()) for one in tensors.values())


def test_an_engine_that_dies_before_its_event_costs_only_its_saves(
    daemon: RunningDaemon, start: Start
) -> None:
    tensors = tensors_of(8)
    with gpu_engine(daemon.address, tensors, 8, model="other") as engine:
        engine.save("stays", [0, 1])
        command = [sys.executable, "-m", "tests.gpu.engine_process", daemon.address, "64", "hang"]
        child = start(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2])
        assert child.stdout is not None
        assert child.stdout.readline() == "saving\n"
        time.sleep(0.3)
        copier = status(daemon)["copiers"][0]["pid"]
        child.send_signal(signal.SIGKILL)
        child.wait()
        time.sleep(1.0)
        facts = status(daemon)["copiers"][0]
        assert (facts["pid"], facts["state"]) == (copier, "")
        engine.load("stays", [4, 5])
        assert engine.equal([0, 1], [4, 5])


def test_preempted_blocks_are_not_believed(daemon: RunningDaemon) -> None:
    """The save is held by a kernel; its request is preempted, its blocks are written anew."""
    tensors = tensors_of(64)
    with gpu_engine(daemon.address, tensors, 64) as engine:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        for _ in range(60):
            a @ a
        blob = hashes(*(f"preempted {n}" for n in range(32)))
        engine.worker.start_saves([SaveJob(77, "p", 0, 32, blob, pack(range(32)))])
        engine.worker.void(["p"])
        for one in tensors.values():
            one.fill_(9)
        torch.cuda.synchronize()
        until(lambda: status(daemon)["pool"]["fillingCount"] == 0)
        assert engine.scheduler.query("p", 32, blob).result(10).hit_count == 0


def test_a_load_that_was_reported_as_late_writes_nothing_later(daemon: RunningDaemon) -> None:
    blocks = 2 * 512
    tensors = tensors_of(blocks, 2)
    with gpu_engine(daemon.address, tensors, blocks) as engine:
        engine.save("late", list(range(512)))
        answer = engine.scheduler.query("late", 32, saved_hashes(engine, "late", 512)).result(10)
        via = engine.worker._calls.attached
        assert via is not None
        job = LoadJob("late", answer.lease, 0, pack(range(512, blocks)))
        failed = engine.worker._calls.load(job, via, 1e-6, 0).result(10)
        assert failed, "it was in time: nothing shown"
        for one in tensors.values():
            one[512:] = 3
        torch.cuda.synchronize()
        time.sleep(0.3)
        assert all(bool((one[512:] == 3).all()) for one in tensors.values())


def saved_hashes(engine: GpuEngine, name: str, count: int) -> bytes:
    from bench.daemons import hashes as made_up  # noqa: PLC0415

    del engine
    return made_up(name, count)


def test_a_killed_engine_s_gpu_memory_is_free_at_once(daemon: RunningDaemon, start: Start) -> None:
    tensors = tensors_of(8)  # keeps the copier and its context alive
    with gpu_engine(daemon.address, tensors, 8, model="other") as engine:
        engine.save("before", [0, 1])
        engine.load("before", [2, 3])  # both directions have their staging
        before = used_bytes()
        command = [sys.executable, "-m", "tests.gpu.engine_process", daemon.address, "1024"]
        child = start(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[2])
        assert child.stdout is not None
        assert child.stdout.readline() == "saved\n"
        time.sleep(0.3)
        assert used_bytes() > before + (1 << 30)
        copier = status(daemon)["copiers"][0]["pid"]
        child.send_signal(signal.SIGKILL)
        child.wait()
        until(lambda: used_bytes() < before + (256 << 20), 2.0)
        facts = status(daemon)["copiers"][0]
        assert (facts["pid"], facts["state"]) == (copier, "")
        engine.load("before", [4, 5])
        assert engine.equal([0, 1], [4, 5])


def test_a_killed_copier_is_replaced_and_the_engine_hits_again(daemon: RunningDaemon) -> None:
    tensors = tensors_of(64)
    with gpu_engine(daemon.address, tensors, 64) as engine:
        engine.save("kept", list(range(16)))
        pid = status(daemon)["copiers"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: "ended by signal 9" in status(daemon)["state"])
        until(lambda: status(daemon)["state"] == "serving", 30.0)
        assert status(daemon)["copiers"][0]["pid"] != pid
        until(lambda: engine.worker._calls.is_ready)
        engine.load("kept", list(range(32, 48)))
        assert engine.equal(list(range(16)), list(range(32, 48)))


def test_memory_of_expandable_segments_is_refused_by_name(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from trikv.connector import cuda, layouts\n"
        "t = {'l': torch.zeros(64, 65536, dtype=torch.uint8, device='cuda')}\n"
        "try:\n"
        "    cuda.export(layouts.pieces(t, 64, 65536), cuda.Driver())\n"
        "except layouts.LayoutError as error:\n"
        "    print(error)\n"
    )
    path = f"{Path(__file__).resolve().parents[2]}:{os.environ.get('PYTHONPATH', '')}"
    shown = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ
        | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert "expandable_segments:True" in shown


def test_a_gpu_is_found_where_the_kernel_lists_it() -> None:
    """By what the copier asks of CUDA; so the NUMA node near it is read from the right place."""
    from trikv.tiers import gpu, numa  # noqa: PLC0415  # needs cuda-python

    device = gpu.find_device(cuda.Driver().uuid())
    assert device is not None
    place = numa.SYSFS / "bus/pci/devices" / gpu.pci_address(device)
    assert (place / "vendor").read_text().strip() == numa.NVIDIA
    assert (place / "class").read_text().startswith(numa.DISPLAY_CLASSES)


def test_one_allocation_is_exported_once() -> None:
    whole = torch.zeros(4, 64, PIECE, dtype=torch.uint8, device="cuda")
    plan = layouts.pieces({f"l{n}": whole[n] for n in range(4)}, 64, PIECE)
    exported = cuda.export(plan, cuda.Driver())
    assert len(exported.allocations) == 1
    assert len(exported.device) == 16


def test_a_poisoned_context_costs_that_copier_only() -> None:
    """An address beyond the allocation, which the daemon would refuse, faults on the GPU."""
    tensors = {"l": torch.zeros(64, PIECE, dtype=torch.uint8, device="cuda")}
    exported = cuda.export(layouts.pieces(tensors, 64, PIECE), cuda.Driver())
    pool = open_pool(64 << 20, use_hugepages=False)
    copiers = Copiers(PoolPlace(pool.fd, pool.bytes, 4 << 20, 32 << 20))
    lost: list[str] = []

    def register(offset: int) -> Register:
        pieces = (Piece(0, offset, PIECE, PIECE),)
        return Register(
            InstanceName("i"),
            0,
            (Range(ALLOCATION_BYTES_MAX, 64 * PIECE),),
            (GroupPieces(64, pieces, "bytes"),),
            0,
            0,
            GpuMemory(exported.device, (exported.allocations[0].handle,), ()),
        )

    class Nobody:
        pid = os.getpid()

        def is_alive(self) -> bool:
            return True

        def close(self) -> None:
            pass

    async def copy(number: int) -> np.ndarray:
        piece = (Piece(0, 0, PIECE, PIECE),)
        place = Place(number, 0)
        layout = GroupLayout((Range(0, 64 * PIECE),), piece, 64, "bytes", place)
        blocks, offsets = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64) * PIECE
        order = Copy(Nobody(), layout, blocks, offsets, into_engine=False)
        return await answer_of(lambda tell: copiers.begin(order, place, lambda: False, tell))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(copiers.run)
            bad = await copiers.attach(register(1 << 42), lost.append)
            assert not (await copy(bad.number)).any()
            assert lost == ["the GPU's copier has ended"]
            assert "CUDA_ERROR" in copiers.faults[exported.device.hex()]
            await trio.sleep(1.1)
            good = await copiers.attach(register(0), lost.append)
            assert (await copy(good.number)).all()
            assert not copiers.faults
            nursery.cancel_scope.cancel()

    trio.run(main)
    pool.close()
