"""On a real GPU: forwards that wait for their loads."""

import os
import signal
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.gpu_engine import GpuEngine, gpu_engine
from tests.gpu.test_gpu import saved_hashes, status, tensors_of, until
from tests.integration.daemons import RunningDaemon
from trikv.connector import layers
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob


def held_job(name: str, lease: int, blocks: bytes, signal: int, value: int, blob: bytes) -> LoadJob:
    """A load that a forward waits for."""
    return LoadJob(name, lease, 0, blocks, signal=signal, value=value, hash_bytes=32, hashes=blob)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_forward_behind_a_held_load_reads_what_was_loaded(
    daemon: RunningDaemon, *, is_started: bool
) -> None:
    """What the engine's stream is given while the load runs sees all of its bytes, each time."""
    blocks, count = 2 * 512, 512
    tensors = tensors_of(blocks, 8)
    with gpu_engine(daemon.address, tensors, blocks) as engine:
        name = f"held {is_started}"
        engine.save(name, list(range(count)))
        blob = saved_hashes(engine, name, count)
        assert engine.worker._overlap.words is not None
        ids = pack(range(count, blocks))
        for turn in range(1, 6):
            for one in tensors.values():
                one[count:] = 0
            torch.cuda.synchronize()
            answer = engine.scheduler.query(name, 32, blob).result(10)
            job = held_job(name, answer.lease, ids, turn, turn + 1, blob)
            if is_started:
                engine.worker.begin(job)
                time.sleep(0.001)
            engine.worker.start_loads([job])
            read = [one[count:].clone() for one in tensors.values()]  # the forward
            assert not torch.cuda.current_stream().query(), "the load was over: nothing shown"
            assert engine.worker.finished() == (set(), set())
            torch.cuda.synchronize()
            for one, seen in zip(tensors.values(), read, strict=True):
                assert torch.equal(seen, one[:count])
            assert engine.worker.take_invalid() == set()


def believe(engine: GpuEngine) -> None:
    """A forward in which every layer's hook is called."""
    engine.worker.start_loads([], "NONE")
    for layer in engine.tensors:
        engine.worker.launched(layer)
    engine.worker.start_saves([])
    engine.worker.finished()
    assert engine.worker._overlap.layers is not None
    assert engine.worker._overlap.layers._trusted == {"NONE"}


def prepared(engine: GpuEngine, name: str, blocks: list[int]) -> bytes:
    """Save blocks, and have hooks trusted; returns the blocks' hashes."""
    engine.save(name, blocks)
    believe(engine)
    return saved_hashes(engine, name, len(blocks))


def forward(engine: GpuEngine, first: int) -> tuple[list[torch.Tensor], list[torch.cuda.Event]]:
    """Each layer's blocks from `first` on as it read them, and an event behind that."""
    read, events = [], []
    for layer, tensor in engine.tensors.items():
        engine.worker.launched(layer)
        read.append(tensor[first:].clone())
        events.append(torch.cuda.Event())
        events[-1].record()
    engine.worker.start_saves([])
    return read, events


@pytest.mark.parametrize("is_started", [False, True])
def test_layers_read_what_was_loaded_while_later_ones_still_come(
    daemon: RunningDaemon, *, is_started: bool
) -> None:
    blocks, count = 2 * 256, 256
    tensors = tensors_of(blocks, 16)
    with gpu_engine(daemon.address, tensors, blocks, waits_by_layer=True) as engine:
        name = f"layers {is_started}"
        blob = prepared(engine, name, list(range(count)))
        ids = pack(range(count, blocks))
        for turn in range(1, 6):
            for one in tensors.values():
                one[count:] = 0
            torch.cuda.synchronize()
            answer = engine.scheduler.query(name, 32, blob).result(10)
            job = held_job(name, answer.lease, ids, turn, 8 * turn + 1, blob)
            if is_started:
                engine.worker.begin(job)
            engine.worker.start_loads([job], "NONE")
            read, events = forward(engine, count)
            while not events[0].query():
                pass
            assert not events[-1].query(), "all came at once: nothing shown"
            assert engine.worker.finished() == (set(), set())
            torch.cuda.synchronize()
            for one, seen in zip(tensors.values(), read, strict=True):
                assert torch.equal(seen, one[:count])
            assert engine.worker.take_invalid() == set()


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.sampled_from([1, 6, 8, 48, 1000, 4096, 70_000]), min_size=2, max_size=20),
    padding=st.sampled_from([0, 1, 16]),
    count=st.sampled_from([1, 5, 20]),
    data=st.data(),
)
def test_sections_of_random_layouts_against_numpy(
    *, daemon: RunningDaemon, sizes: list[int], padding: int, count: int, data: st.DataObject
) -> None:
    """Pages of few blocks move as rows, those of many as rectangles."""
    blocks = 2 * count + 3
    wide = [torch.randint(0, 255, (blocks, n + padding), device="cuda").byte() for n in sizes]
    tensors = {f"l{at}": one[:, :n] for at, (one, n) in enumerate(zip(wide, sizes, strict=True))}
    order = data.draw(st.permutations(range(blocks)))
    source, target = list(order[:count]), list(order[count : 2 * count])
    wanted = [view.cpu().numpy().copy() for view in tensors.values()]
    for one in wanted:
        one[target] = one[source]
    model = f"sections {sizes}{padding}{count}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "LAYERS_MIN", 1)
        patch.setattr(layers, "ORDERED_BYTES_MIN", 1)
        with gpu_engine(
            daemon.address, tensors, blocks, model=model, waits_by_layer=True
        ) as engine:
            name = f"{model}{order}"
            blob = prepared(engine, name, source)
            answer = engine.scheduler.query(name, 32, blob).result(10)
            job = held_job(name, answer.lease, pack(target), 1, 9, blob)
            engine.worker.start_loads([job], "NONE")
            read, _ = forward(engine, 0)
            assert engine.worker.finished() == (set(), set())
            torch.cuda.synchronize()
    for one, seen in zip(wanted, read, strict=True):
        assert np.array_equal(seen.cpu().numpy(), one)


@pytest.mark.parametrize("way", ["", "NONE"])
def test_a_copier_that_dies_under_a_held_load_costs_no_byte_and_frees_the_stream(
    daemon: RunningDaemon, way: str
) -> None:
    blocks, count = 2 * 1024, 1024
    tensors = tensors_of(blocks, 8)
    with gpu_engine(daemon.address, tensors, blocks, waits_by_layer=True) as engine:
        name = f"dies {way}"
        blob = prepared(engine, name, list(range(count)))
        answer = engine.scheduler.query(name, 32, blob).result(10)
        job = held_job(name, answer.lease, pack(range(count, blocks)), 1, 9, blob)
        pid = status(daemon)["copiers"][0]["pid"]
        engine.worker.start_loads([job], way)
        os.kill(pid, signal.SIGKILL)
        read, _ = forward(engine, count)
        assert engine.worker.finished() == (set(), set())  # or it raises, and the engine ends
        torch.cuda.synchronize()
        assert status(daemon)["copiers"][0]["pid"] != pid
        for one, seen in zip(tensors.values(), read, strict=True):
            assert torch.equal(seen, one[:count])


def test_an_idle_engine_sees_that_a_load_has_come_without_its_answer(daemon: RunningDaemon) -> None:
    """Each time, by a word that the GPU writes behind the last byte."""
    blocks, count = 2 * 256, 256
    tensors = tensors_of(blocks, 8)
    with gpu_engine(daemon.address, tensors, blocks) as engine:
        name = "alone"
        engine.save(name, list(range(count)))
        blob = saved_hashes(engine, name, count)
        for _ in range(5):
            for one in tensors.values():
                one[count:] = 0
            torch.cuda.synchronize()
            answer = engine.scheduler.query(name, 32, blob).result(10)
            job = LoadJob(name, answer.lease, 0, pack(range(count, blocks)), is_alone=True)
            engine.worker.start_loads([job])
            loading = engine.worker._loading[name]
            assert loading.future is not None
            answered, loading.future = loading.future, Future()  # nobody answers
            until(lambda: engine.worker.finished(is_idle=True)[1] == {name})
            assert all(torch.equal(one[count:], one[:count]) for one in tensors.values())
            assert engine.worker.take_invalid() == set()
            assert answered.result(10) == ()
