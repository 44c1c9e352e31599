"""On a real GPU: forwards that wait for their loads."""

import os
import signal
import time

import pytest
import torch

from bench.gpu_engine import gpu_engine
from tests.gpu.test_gpu import saved_hashes, status, tensors_of
from tests.integration.daemons import RunningDaemon
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob


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
            job = LoadJob(name, answer.lease, 0, ids, turn, turn + 1, 32, blob)
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


def test_a_copier_that_dies_under_a_held_load_costs_no_byte_and_frees_the_stream(
    daemon: RunningDaemon,
) -> None:
    blocks, count = 2 * 1024, 1024
    tensors = tensors_of(blocks, 8)
    with gpu_engine(daemon.address, tensors, blocks) as engine:
        engine.save("dies", list(range(count)))
        blob = saved_hashes(engine, "dies", count)
        answer = engine.scheduler.query("dies", 32, blob).result(10)
        job = LoadJob("dies", answer.lease, 0, pack(range(count, blocks)), 1, 2, 32, blob)
        pid = status(daemon)["copiers"][0]["pid"]
        engine.worker.start_loads([job])
        os.kill(pid, signal.SIGKILL)
        read = [one[count:].clone() for one in tensors.values()]
        assert engine.worker.finished() == (set(), set())  # or it raises, and the engine ends
        torch.cuda.synchronize()
        assert status(daemon)["copiers"][0]["pid"] != pid
        for one, seen in zip(tensors.values(), read, strict=True):
            assert torch.equal(seen, one[:count])
