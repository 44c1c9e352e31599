"""An engine for GPU benchmarks: KV tensors as vLLM lays them out, and the real connector's worker.

Shapes are Qwen3-8B's (36 layers, 16-token blocks, 8 KV heads of 128, bfloat16: 2.25 MiB a block)
and, for MLA, DeepSeek-V3's (61 layers, 64-token blocks of 576).
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bench.daemons import HASH_BYTES, READY_S, hashes
from trikv.connector.calls import Calls, pack
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.jobs import LoadJob, SaveJob
from trikv.connector.worker import WorkerHalf

LAYERS, TOKENS, HEADS, SIZE = 36, 16, 8, 128
FORWARD_CYCLES = 10_000_000  # some 5 ms
MLA_LAYERS, MLA_TOKENS, MLA_SIZE = 61, 64, 576
Tensors = dict[str, torch.Tensor]


def _fill(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Random bytes in an allocation of its own."""
    count = 1
    for extent in shape:
        count *= extent
    words = torch.randint(-(2**62), 2**62, (count * dtype.itemsize // 8,), device="cuda")
    return words.view(dtype).view(shape)


def _apart(blocks: int) -> Tensors:
    return {f"l{n}": _fill((2, blocks, TOKENS, HEADS, SIZE)) for n in range(LAYERS)}


def _together(blocks: int) -> Tensors:
    return {f"l{n}": _fill((blocks, 2, TOKENS, HEADS, SIZE)) for n in range(LAYERS)}


def _packed(blocks: int) -> Tensors:
    return {f"l{n}": _fill((blocks, HEADS, TOKENS, 2 * SIZE)) for n in range(LAYERS)}


def _one_storage(blocks: int) -> Tensors:
    whole = _fill((LAYERS, blocks, HEADS, TOKENS, 2 * SIZE))
    return {f"l{n}": whole[n] for n in range(LAYERS)}


def _block_outermost(blocks: int) -> Tensors:
    whole = _fill((blocks, LAYERS, HEADS, TOKENS, 2 * SIZE))
    return {f"l{n}": whole[:, n] for n in range(LAYERS)}


def _heads_outermost(blocks: int) -> Tensors:
    whole = _fill((LAYERS, HEADS, blocks, TOKENS, 2 * SIZE))
    return {f"l{n}": whole[n].permute(1, 0, 2, 3) for n in range(LAYERS)}


def _padded(blocks: int) -> Tensors:
    wide = {f"l{n}": _fill((blocks, MLA_TOKENS, MLA_SIZE + 64)) for n in range(MLA_LAYERS)}
    return {name: one[:, :, :MLA_SIZE] for name, one in wide.items()}


def _mla(blocks: int) -> Tensors:
    return {f"l{n}": _fill((blocks, MLA_TOKENS, MLA_SIZE)) for n in range(MLA_LAYERS)}


def _fp8(blocks: int) -> Tensors:
    shape, dtype = (blocks, 2, TOKENS, HEADS, SIZE), torch.float8_e4m3fn
    return {f"l{n}": _fill(shape, dtype) for n in range(LAYERS)}


def _fp32(blocks: int) -> Tensors:
    shape = (2, blocks, TOKENS, HEADS, SIZE)
    return {f"l{n}": _fill(shape, torch.float32) for n in range(LAYERS)}


LAYOUTS: dict[str, Callable[[int], Tensors]] = {
    "block outermost": _block_outermost,
    "K and V apart": _apart,
    "K and V together": _together,
    "packed": _packed,
    "one storage": _one_storage,
    "heads outermost": _heads_outermost,
    "MLA": _mla,
    "padded rows": _padded,
    "fp8": _fp8,
    "fp32": _fp32,
}


class Forward:
    """Work of the GPU, some milliseconds of it, whose end is known on the host's clock."""

    def __init__(self) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begun_s = 0.0

    def begin(self) -> None:
        """Launch it on a GPU that has nothing to do, and do not wait for it."""
        self._begun_s = time.perf_counter()
        self._begin.record()
        torch.cuda._sleep(FORWARD_CYCLES)  # noqa: SLF001  # there is no other
        self._end.record()

    def synchronize(self) -> None:
        """Wait for all of the GPU's work."""
        torch.cuda.synchronize()

    def end_s(self) -> float:
        """When it had ended, as `time.perf_counter` counts; waits for it."""
        self._end.synchronize()
        return self._begun_s + self._begin.elapsed_time(self._end) / 1e3


@dataclass
class GpuEngine:
    """One rank whose tensors are registered with a daemon."""

    tensors: Tensors
    blocks: int
    page_bytes: int
    scheduler: Calls
    worker: WorkerHalf
    address: str
    _numbers: int = 0
    _saved_count: int = 0

    def save(
        self,
        name: str,
        blocks: list[int],
        forward: Forward | None = None,
        *,
        is_alone: bool = True,
    ) -> float:
        """Save blocks under made-up hashes; returns seconds from the call to its end.

        As the connector sees it for an engine that computes nothing else, or does not. With a
        forward: from that one's end, which the call does not wait for, as in an engine.
        """
        self._numbers += 1
        blob = hashes(name, len(blocks))
        job = SaveJob(self._numbers, name, 0, HASH_BYTES, blob, pack(blocks), is_alone=is_alone)
        if forward is not None:
            forward.begin()
        begin_s = time.perf_counter()
        self.worker.start_saves([job])
        self._finish(lambda: self.worker.take_report() is not None, is_alone=is_alone)
        end_s = time.perf_counter()
        took_s = end_s - (begin_s if forward is None else forward.end_s())
        self._finish(self._counted, is_alone=False)
        if self._saved_count != len(blocks):
            raise RuntimeError(f"{self._saved_count} of {len(blocks)} blocks were saved")
        return took_s

    def load(self, name: str, blocks: list[int], *, is_alone: bool = True) -> tuple[float, float]:
        """Load them back into other blocks; returns seconds of the query and of the load.

        As the connector does it for an engine that computes nothing else, or does not.
        """
        blob = hashes(name, len(blocks))
        begin_s = time.perf_counter()
        answer = self.scheduler.query(name, HASH_BYTES, blob, is_alone=is_alone).result(10)
        query_s = time.perf_counter() - begin_s
        if answer.hit_count != len(blocks):
            raise RuntimeError(f"{answer.hit_count} of {len(blocks)} blocks were found")
        begin_s = time.perf_counter()
        job = LoadJob(name, answer.lease, 0, pack(blocks), is_alone=is_alone)
        self.worker.start_loads([job])
        self._finish(lambda: self.worker.loads_in_flight == 0, is_alone=is_alone)
        took_s = time.perf_counter() - begin_s
        failed = self.worker.take_invalid()
        if failed:
            raise RuntimeError(f"{len(failed)} blocks did not arrive")
        self.scheduler.release([name])
        return query_s, took_s

    def _counted(self) -> bool:
        """Whether the daemon has answered a save, and what became of its blocks."""
        counts = self.worker.tally.take()
        self._saved_count = counts.get("saved_blocks", 0)
        return any("save" in name or name == "present_blocks" for name in counts)

    def _finish(self, check: Callable[[], object], *, is_alone: bool) -> None:
        """Go round as an engine does that has nothing else to do."""
        self.worker.finished(is_idle=is_alone)
        while not check():
            if not is_alone:
                time.sleep(20e-6)
            self.worker.finished(is_idle=is_alone)

    def equal(self, first: list[int], second: list[int]) -> bool:
        """Whether two sets of blocks hold the same bytes, on all layers."""
        return all(
            torch.equal(rows(one, self.blocks, first), rows(one, self.blocks, second))
            for one in self.tensors.values()
        )

    def clear(self, ids: list[int]) -> None:
        """Make blocks zero, on all layers."""
        where = torch.tensor(ids, device="cuda")
        for one in self.tensors.values():
            one.index_fill_(list(one.shape).index(self.blocks), where, 0)
        torch.cuda.synchronize()


def rows(tensor: torch.Tensor, blocks: int, ids: list[int]) -> torch.Tensor:
    """The bytes of some blocks of one layer; as bytes, because NaN differs from itself."""
    where = list(tensor.shape).index(blocks)
    words = tensor if tensor.dtype is not torch.float8_e4m3fn else tensor.view(torch.uint8)
    picked = words.index_select(where, torch.tensor(ids, device="cuda"))
    return picked.contiguous().view(torch.uint8)


@contextlib.contextmanager
def gpu_engine(
    address: str,
    tensors: Tensors,
    blocks: int,
    *,
    model: str = "bench",
    waits_by_layer: bool = False,
) -> Iterator[GpuEngine]:
    """Register tensors as one rank's, and declare its engine."""
    with gpu_ranks(
        address, [tensors], blocks, model=model, waits_by_layer=waits_by_layer
    ) as engines:
        yield engines[0]


@contextlib.contextmanager
def gpu_ranks(
    address: str,
    shards: Sequence[Tensors],
    blocks: int,
    *,
    model: str = "bench",
    waits_by_layer: bool = False,
    replicas: int = 1,
) -> Iterator[list[GpuEngine]]:
    """Register the tensors of each rank, and declare their engine; one `GpuEngine` a rank."""
    torch.cuda.synchronize()
    name = f"bench-{os.getpid()}-{time.monotonic_ns()}"
    log = logging.getLogger("bench")
    settings = Settings("bench", address)
    scheduler_client, *clients = (Client(settings, log) for _ in range(len(shards) + 1))
    engines = []
    for rank, (client, tensors) in enumerate(zip(clients, shards, strict=True)):
        page = {name: one.numel() // blocks * one.element_size() for name, one in tensors.items()}
        worker = WorkerHalf(Calls(client, rank), log, waits_by_layer=waits_by_layer)
        worker.register(name, rank, tensors, blocks, page, replicas=replicas)
        scheduler = Calls(scheduler_client)
        engines.append(GpuEngine(tensors, blocks, sum(page.values()), scheduler, worker, address))
    fields = [{"name": "model", "value": model}]
    declared = {"name": name, "rankCount": len(shards), "fields": fields}
    scheduler_client.start(Introduction("declare", lambda: {"instance": declared}))
    try:
        deadline_s = time.monotonic() + READY_S
        while not all(one.is_ready for one in (scheduler_client, *clients)):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the engine did not attach")
            time.sleep(0.02)
        yield engines
    finally:
        for one in (scheduler_client, *clients):
            one.close()
