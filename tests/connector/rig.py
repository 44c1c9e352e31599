"""vLLM's real scheduler, block pool and factory in one process, with no model and no engine.

`Rig` makes both connector roles and plays the model runner by hand. Its "model" is honest about
what a cache may break: the value written for a token depends on all tokens before it, each forward
pass first checks every byte that it would read, and the next token is drawn from those bytes. So a
wrong, missing or late block shows as `wrong` or as another output, wherever it comes from.

With several ranks each has a worker's connector and memory of its own: either its share of the
heads, or, with `is_latent`, all of the same one, as a model with MLA has.

Runs in a process of its own, with the files of one vLLM version first on PYTHONPATH.
"""

import contextlib
import dataclasses
import pickle
import time
from collections import deque
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.daemons import PATIENCE_S
from trikv.connector import engine

torch.set_num_threads(1)  # tensors are tiny; two threads on a busy machine only wait for each other

BLOCK = 16
LAYERS = 2
HEADS = 2
HEAD_SIZE = 8
LAYER_NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
LOADS_LAST = not hasattr(KVConnectorBase_V1, "register_cross_layers_kv_cache")  # 0.29 and later


def configuration(model: str, address: str, *, overlaps: bool, extra: dict[str, Any]) -> Any:
    """What an engine on this daemon would be configured with."""
    transfer = KVTransferConfig(
        kv_connector="TriKVConnector",
        kv_connector_module_path="trikv.connector",
        kv_role="kv_both",
        # Patient, for a machine that is busy with other tests.
        kv_connector_extra_config={
            "trikv.address": address,
            "trikv.query_timeout_ms": 10_000,
            **extra,
        },
    )
    return EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        enforce_eager=True,
        max_num_batched_tokens=500,
        max_num_seqs=16,
        skip_tokenizer_init=True,
        async_scheduling=overlaps,
        kv_transfer_config=transfer,
    ).create_engine_config()


def layer_spec(heads: int, *, is_latent: bool) -> Any:
    if not is_latent:
        return FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
        )
    known = {field.name for field in dataclasses.fields(MLAAttentionSpec)}
    shards = {"max_tp_shards": 1} if "max_tp_shards" in known else {}  # as its layers say
    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=2 * HEAD_SIZE, dtype=torch.float32, **shards
    )


def say_who_holds_the_same(config: Any, kv_config: Any) -> None:
    """By vLLM's own rule; before 0.31 it has none but that the model has MLA."""
    if hasattr(kv_config, "kv_tp_replicas"):
        for module in ("kv_cache_planning", "kv_cache_utils"):
            with contextlib.suppress(ImportError, AttributeError):
                rule = import_module(f"vllm.v1.core.{module}").kv_cache_groups_tp_replicas
                ranks = config.parallel_config.tensor_parallel_size
                kv_config.kv_tp_replicas = rule(kv_config.kv_cache_groups, ranks)
                return
        raise AssertionError("vLLM's rule has gone elsewhere")
    if isinstance(kv_config.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec):
        kind = type(config.model_config)
        config.model_config.__class__ = type(kind.__name__, (kind,), {"use_mla": True})


class Rig:
    """One engine: its scheduler, its worker's connector, its KV memory."""

    def __init__(
        self,
        model: str,
        address: str,
        *,
        blocks: int = 64,
        overlaps: bool = False,
        extra: dict[str, Any] | None = None,
        ranks: int = 1,
        is_latent: bool = False,
    ) -> None:
        self.config = configuration(model, address, overlaps=overlaps, extra=extra or {})
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.cache_config.block_size = BLOCK
        self.config.parallel_config.tensor_parallel_size = ranks
        self.marks = torch.arange(HEADS * 2 * HEAD_SIZE).reshape(HEADS, -1)
        self.marks = self.marks[:1] if is_latent else self.marks
        self.is_latent, self.heads = is_latent, 1 if is_latent else HEADS // ranks
        groups = [KVCacheGroupSpec(LAYER_NAMES, layer_spec(self.heads, is_latent=is_latent))]
        self.kv_config = kv_config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )
        say_who_holds_the_same(self.config, kv_config)
        # The engine that starts after another one finds garbage, not zeros, in its memory.
        size = (blocks, self.heads, BLOCK, 2 * HEAD_SIZE)
        self.kvs = [{name: torch.full(size, -1.0) for name in LAYER_NAMES} for _ in range(ranks)]
        self.workers = []
        for rank, kv in enumerate(self.kvs):
            with mock.patch.object(engine, "rank", return_value=rank):
                self.workers.append(
                    KVConnectorFactory.create_connector(
                        self.config, KVConnectorRole.WORKER, kv_config
                    )
                )
            self.workers[-1].register_kv_caches(kv)
        self.kv, self.worker = self.kvs[0], self.workers[0]
        self.aggregator = KVOutputAggregator(ranks)
        function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        self.scheduler = (AsyncScheduler if overlaps else Scheduler)(
            self.config,
            kv_config,
            StructuredOutputManager(self.config),
            BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        init_none_hash(function)
        self.hasher = get_request_block_hasher(BLOCK, function)
        self.wrong: list[str] = []
        self.admitted: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}  # as the worker knows them
        self.ahead: deque[tuple[Any, Any]] = deque()
        self.overlaps = overlaps
        self.steps = 0

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def wait_attached(self, seconds: float = PATIENCE_S) -> None:
        until = time.monotonic() + seconds
        while not all(one._client.is_ready for one in (self.connector, *self.workers)):
            assert time.monotonic() < until, "not attached"
            time.sleep(0.01)

    def add(self, name: str, tokens: list[int], count: int = 4) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=2)
        request = Request(name, list(tokens), sampling, None, block_hasher=self.hasher)
        self.outputs[name] = []
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """One step; with `overlaps` its outcome is told after the next one has begun."""
        planned = self.scheduler.schedule()
        self.ahead.append((planned, self.execute(planned)))
        self.steps += 1
        while len(self.ahead) > (1 if self.overlaps and planned.total_num_scheduled_tokens else 0):
            for outputs in self.scheduler.update_from_output(*self.ahead.popleft()).values():
                for one in outputs.outputs:
                    self.outputs[one.request_id].extend(one.new_token_ids)
                    if one.finish_reason is not None:
                        self.finish[one.request_id] = str(one.finish_reason)
        return planned

    def execute(self, planned: Any) -> Any:
        """What a worker does with a step."""
        loads_last = LOADS_LAST and not getattr(planned, "has_sync_kv_loads", False)
        for worker in self.workers:
            metadata = pickle.loads(pickle.dumps(planned.kv_connector_metadata))
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if not loads_last:
                worker.start_load_kv(None)
        sampled = self.forward(planned)
        outputs = [
            self.after_forward(worker, planned, sampled, loads_last=loads_last)
            for worker in self.workers
        ]
        return self.aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]

    def after_forward(
        self, worker: Any, planned: Any, sampled: dict[str, list[int]], *, loads_last: bool
    ) -> Any:
        output = KVConnectorOutput()
        if loads_last:
            worker.start_load_kv(None)
        if planned.total_num_scheduled_tokens or LOADS_LAST:
            worker.wait_for_save()
        self.collect(worker, planned, output)
        worker.clear_connector_metadata()
        names = list(planned.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=output,
        )

    def collect(self, worker: Any, planned: Any, output: Any) -> None:
        if hasattr(worker, "get_transfer_results"):  # 0.30 and later
            results = worker.get_transfer_results(planned.finished_req_ids)
            output.finished_sending = results.finished_sending
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
        else:
            sent, loaded = worker.get_finished(planned.finished_req_ids)
            output.finished_sending, output.finished_recving = sent, loaded
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        meta = worker.build_connector_worker_meta()
        output.kv_connector_worker_meta = pickle.loads(pickle.dumps(meta))

    def forward(self, planned: Any) -> dict[str, list[int]]:
        """Check what would be read, write what would be written, draw the next token from it."""
        computed = {new.req_id: new.num_computed_tokens for new in planned.scheduled_new_reqs}
        self.admitted.update(computed)
        cached = planned.scheduled_cached_reqs
        for name in [*computed, *cached.resumed_req_ids]:
            self.tokens[name] = list(self.scheduler.requests[name].all_token_ids)
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {
            name: self.forward_one(name, computed[name], computed[name] + count)
            for name, count in planned.num_scheduled_tokens.items()
        }

    def forward_one(self, name: str, start: int, end: int) -> list[int]:
        tokens = self.tokens[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        slots = torch.tensor([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)])
        values = torch.tensor(prefix_values(tokens[:end]), dtype=torch.float32)[:, None, None]
        state = 0.0
        for rank, kv in enumerate(self.kvs):
            first = 0 if self.is_latent else rank * self.heads
            marks = self.marks[first : first + self.heads]
            for layer, tensor in enumerate(kv.values()):
                wanted = values * (layer + 1) + marks
                rows = tensor.permute(0, 2, 1, 3)  # block, token, head, content
                read = rows[slots[:start] // BLOCK, slots[:start] % BLOCK]
                if not torch.equal(read, wanted[:start]):
                    off = (read != wanted[:start]).nonzero()[:, 0]
                    bad = sorted({int(position) // BLOCK for position in off})
                    where = f"{name}: rank {rank}: layer {layer}"
                    self.wrong.append(f"{where}: blocks {bad} of {start // BLOCK}")
                rows[slots[start:] // BLOCK, slots[start:] % BLOCK] = wanted[start:]
            state += float(rows[slots // BLOCK, slots % BLOCK].sum(dtype=torch.float64))
        if end < len(tokens):
            return []
        # The same prompt must give the same token however much of it was read.
        tokens.append(int(state / (len(self.kvs) if self.is_latent else 1)) % 251 + 3)
        return [tokens[-1]]

    def run(self, seconds: float = PATIENCE_S, *, until: Any = None) -> int:
        """Step until no request is left; returns the number of steps."""
        end = time.monotonic() + seconds
        before = self.steps
        while (not until()) if until is not None else self.scheduler.has_requests():
            assert time.monotonic() < end, f"stuck after {self.steps - before} steps"
            planned = self.step()
            if not planned.total_num_scheduled_tokens:
                time.sleep(0.001)
        return self.steps - before

    def settle(self, free: int, seconds: float = 10.0) -> None:
        """Step until all blocks are back: versions differ in whether they do so by themselves."""
        self.run(seconds, until=lambda: self.free == free and not self.scheduler.requests)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


def prefix_values(tokens: list[int]) -> list[int]:
    """A number for each position that depends on all tokens up to it."""
    values, state = [], 7
    for token in tokens:
        state = (state * 31 + token) % 65_521
        values.append(state)
    return values
