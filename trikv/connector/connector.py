"""The class that vLLM loads: one thin facade for both roles.

Decided here: which hook does what, that none of them ever raises, and what vLLM is told when one
fails. This file knows vLLM and the two halves, and nothing of how they work.

vLLM 0.20 to 0.33: hooks that older versions lack are defined all the same, and newer types are not
imported.
"""

import logging
import os
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.logger import init_logger

from trikv.connector import engine, identity, shapes, tally
from trikv.connector.calls import Calls
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.guards import guarded, nothing
from trikv.connector.jobs import LoadJob, Report, StepJobs
from trikv.connector.scheduler import SchedulerHalf
from trikv.connector.settings import read_settings
from trikv.connector.tracks import Policy
from trikv.connector.worker import WorkerHalf

RESET_S: Final = 5.0
WORKERS: Final = weakref.WeakValueDictionary[str, WorkerHalf]()
"""Of this process, by instance, where that has one rank."""


@dataclass
class TriKVMetadata(KVConnectorMetadata):
    """Scheduler to workers, each step."""

    jobs: StepJobs = field(default_factory=StepJobs)


@dataclass
class TriKVWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, each step."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another worker's report."""
        if isinstance(other, TriKVWorkerMetadata):
            self.report.add(other.report)
        return self


@dataclass
class TriKVStats(KVConnectorStats):
    """Counters of one interval."""

    def reset(self) -> None:
        """Start again from nothing."""
        self.data: dict[str, int] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another process's counters."""
        self.data = tally.merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counters as vLLM's log prints them."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True when nothing was counted."""
        return not self.data


class TriKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in a TriKV daemon and loads them back."""

    _cache_hit_source = engine.hit_source()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:  # noqa: ANN401
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._log = init_logger("vllm.trikv")
        self._failed: set[str] = set()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._client: Client | None = None
        self._abilities = engine.abilities(KVConnectorBase_V1)
        why = shapes.refusal(vllm_config, kv_cache_config, self._abilities, os.environ)
        if why:
            raise ValueError(why)
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._ask_for_recompute()
        why = shapes.unsupported(vllm_config, kv_cache_config)
        if why:
            self._log.warning("TriKV: %s: nothing is cached", why)
            return
        try:
            self._build(role)
        except identity.IdentityError as exc:
            self._log.warning("TriKV: %s; nothing is cached", exc)
        except Exception:  # noqa: BLE001  # an engine without a cache is better than none
            self._log.exception("TriKV: could not start: nothing is cached")

    def _ask_for_recompute(self) -> None:
        """A block that fails to load must be computed; vLLM's default ends its request.

        All of 0.20 to 0.33 read the policy right after this constructor.
        """
        transfer = self._vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy == "recompute":
            return
        transfer.kv_load_failure_policy = "recompute"
        if self._role == KVConnectorRole.SCHEDULER:
            self._log.info("TriKV: set kv_load_failure_policy to recompute")

    def _build(self, role: Any) -> None:  # noqa: ANN401
        transfer = self._vllm_config.kv_transfer_config
        self._shape = shapes.shape(self._vllm_config, self._kv_cache_config)
        # engine_id may be given by the user and so be shared; instance_id is drawn at each start.
        self._instance = f"{transfer.engine_id}/{getattr(self._vllm_config, 'instance_id', '')}"[
            :256
        ]
        software = engine.software()
        self._client = Client(Settings(software, given=self._settings.address), self._log)
        if role == KVConnectorRole.WORKER:
            self._rank = engine.rank(self._vllm_config)
            calls = Calls(self._client, self._rank)
            self._worker = WorkerHalf(
                calls,
                self._log,
                save_s=self._settings.save_s,
                orders_loads=not self._abilities.has_deferred_frees,
                waits_by_layer=self._waits_by_layer(),
            )
            if self._shape.rank_count == 1:
                WORKERS[self._instance] = self._worker
            return
        fields = self._fields(software)
        policy = Policy(
            block_tokens=self._shape.block_tokens,
            rank_count=self._shape.rank_count,
            query_s=self._settings.query_s,
            load_wait_s=self._settings.load_wait_s,
            hold_s=self._hold_s(),
            block_bytes=sum(self._shape.page_bytes.values()),
            saves=transfer.is_kv_producer,
            loads=transfer.is_kv_consumer,
        )
        self._scheduler = half = SchedulerHalf(
            Calls(self._client), policy, self._log, begin=self._begin_load
        )
        instance = {"name": self._instance, "rankCount": self._shape.rank_count}

        def declaration() -> dict[str, Any]:
            now = fields | ({"altered": half.altered} if half.altered else {})
            pairs = [{"name": name, "value": value} for name, value in now.items()]
            return {"instance": instance | {"fields": pairs}}

        self._client.start(Introduction("declare", declaration))

    def _begin_load(self, job: LoadJob) -> bool:
        """One rank mostly runs in the scheduler's process: its load need not wait for the step."""
        worker = WORKERS.get(self._instance)
        return worker is not None and worker.begin(job)

    def _hold_s(self) -> float:
        if self._settings.hold_s and not self._abilities.has_loads_first:
            self._log.warning("TriKV: this vLLM begins loads after the forward: no hold_ms")
            return 0.0
        return self._settings.hold_s

    def _waits_by_layer(self) -> bool:
        """Not with a draft model: its layers run in a way of their own, which no step shows."""
        holds = self._settings.hold_s > 0 and self._abilities.has_loads_first
        return holds and getattr(self._vllm_config, "speculative_config", None) is None

    def _fields(self, software: str) -> dict[str, str]:
        return identity.fields(
            self._vllm_config,
            software=software,
            hash_probe=engine.hash_probe(self._vllm_config, self._shape.block_tokens),
            hash_generation=engine.hash_generation(KVConnectorBase_V1),
            tenant=self._settings.tenant,
            weights_epoch=self._settings.weights_epoch,
            replicas=self._shape.replicas,
        )

    def note_failure(self, hook: str) -> None:
        """Log the exception being handled, once a hook, and promise nothing from now on."""
        if hook not in self._failed:
            self._failed.add(hook)
            self._log.exception("TriKV: %s failed: no further hits are promised", hook)
        if self._scheduler is not None:
            self._scheduler.promises = False

    # -- what vLLM asks before it starts ---------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss."""
        return False

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """False: any layout is described by its addresses."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, _extra_config: dict[str, Any]) -> bool:
        """False: layer hooks are used where they are called, and not needed."""
        return False

    @classmethod
    def supports_sleep_mode(cls, _kv_transfer_config: Any) -> bool:  # noqa: ANN401
        """False: the daemon would go on using memory that sleep takes away."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Counters that came from another process."""
        return TriKVStats(data=data or {})

    # -- scheduler -------------------------------------------------------------------------------

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Start the query (0.22 and later)."""
        if self._scheduler is not None:
            self._scheduler.add(request)

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ANN401
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded behind the local hit; None: not known yet."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    @guarded(nothing)
    def update_state_after_alloc(
        self,
        request: Any,  # noqa: ANN401
        blocks: Any,  # noqa: ANN401
        num_external_tokens: int,
    ) -> None:
        """Note where a promised load goes."""
        if self._scheduler is not None:
            self._scheduler.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    @guarded(TriKVMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """What the workers have to do in this step."""
        if self._scheduler is None:
            return TriKVMetadata()
        return TriKVMetadata(self._scheduler.step(scheduler_output))

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """What the workers have reported."""
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        self._scheduler.update(
            meta.report if isinstance(meta, TriKVWorkerMetadata) else None,
            connector_output.finished_recving or (),
            connector_output.finished_sending or (),
            frozenset(connector_output.invalid_block_ids or ()),
        )

    @guarded(lambda: (False, None))
    def request_finished(self, request: Any, _block_ids: Any) -> tuple[bool, None]:  # noqa: ANN401
        """Whether the blocks must outlive the request."""
        return (self._scheduler is not None and self._scheduler.finish(request.request_id)), None

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        _block_ids: Any,  # noqa: ANN401
    ) -> tuple[bool, None]:
        """The same, with several cache groups."""
        return (self._scheduler is not None and self._scheduler.finish(request.request_id)), None

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """True keeps the engine stepping until all blocks that were held are reported."""
        return self._scheduler is not None and self._scheduler.has_pending

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        """Forget all blocks of this model, for every engine that shares them."""
        if self._scheduler is None or self._client is None:
            return None
        is_done = self._scheduler.forget(RESET_S)
        if not is_done:
            self._log.warning("TriKV: the blocks are not forgotten yet: no hits until then")
        return is_done

    # -- worker ----------------------------------------------------------------------------------

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Offer the KV tensors to the daemon."""
        if self._worker is None:
            return
        tensors = {name: kv_caches[name] for name in self._shape.page_bytes if name in kv_caches}
        what = (tensors, self._shape.block_count, self._shape.page_bytes)
        self._worker.register(self._instance, self._rank, *what, replicas=self._shape.replicas)

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401
        """Give up saves of blocks that this step may overwrite; takes metadata or a set of ids."""
        if self._worker is None:
            return
        if isinstance(kv_connector_metadata, TriKVMetadata):
            self._worker.void(kv_connector_metadata.jobs.preempted)
        elif isinstance(kv_connector_metadata, set | frozenset | list | tuple):
            self._worker.void(kv_connector_metadata)

    @property
    def _jobs(self) -> StepJobs:
        bound = self._connector_metadata
        return bound.jobs if isinstance(bound, TriKVMetadata) else StepJobs()

    @guarded(nothing)
    def start_load_kv(self, forward_context: Any, **_kwargs: Any) -> None:  # noqa: ANN401
        """Send this step's loads; they end between steps, or this step's forward waits for them."""
        if self._worker is not None:
            self._worker.start_loads(self._jobs.loads, engine.forward_mode(forward_context))
            self._worker.delay(self._jobs.delayed)

    @guarded(nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """What follows on the GPU waits for this layer's blocks, where it waits layer by layer."""
        if self._worker is not None:
            self._worker.launched(layer_name)

    @guarded(nothing)
    def save_kv_layer(self, *_args: Any, **_kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: saves are sent in one piece."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        """Send this step's saves; waits for nothing."""
        if self._worker is not None:
            self._worker.start_saves(self._jobs.saves)

    @guarded(lambda: (None, None))
    def get_finished(self, _finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ended requests whose blocks may go, and requests whose load has ended."""
        if self._worker is None:
            return None, None
        sent, loaded = self._worker.finished(is_idle=self._jobs.is_idle)
        return sent or None, loaded or None

    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that did not arrive, of the loads just reported."""
        return self._worker.take_invalid() if self._worker is not None else set()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Saves that have ended."""
        report = self._worker.take_report() if self._worker is not None else None
        return TriKVWorkerMetadata(report) if report is not None else None

    # -- both ------------------------------------------------------------------------------------

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters since the last call."""
        half = self._scheduler or self._worker
        counts = half.tally.take() if half is not None else {}
        return TriKVStats(data=counts) if counts else None

    @guarded(nothing)
    def shutdown(self) -> None:
        """Close the session; waits at most a few seconds."""
        if self._worker is not None:
            self._worker.abandon()
        half = self._scheduler or self._worker
        if half is not None and half.tally.total and self._log.isEnabledFor(logging.INFO):
            self._log.info("TriKV: in all: %s", tally.line(half.tally.total))
        if self._client is not None:
            self._client.close()
