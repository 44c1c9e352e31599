"""The worker's half: hands copies to the daemon, and reports their end once and never too early.

Decided here: when a load has surely ended, and how long an ended request's blocks are kept for its
saves (`Saves` knows when these are over). This file does not know sockets, vLLM's classes or which
blocks are worth anything.

A load is reported when one of these is known:

    answered    the daemon has answered: no byte is written any more
    come        the GPU has written the load's word, behind its last byte; see `Arrivals`
    not sent    it never left this process
    dead        the connection broke, and the daemon's process has ended
    fenced      the connection broke, and the same daemon has accepted this rank again, which it
                does only after the old session's copies have ended

Nothing ever waits for a save but an ended request's blocks, for `save_s` at most.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from trikv.connector import cuda, layouts
from trikv.connector.arrivals import Arrivals
from trikv.connector.calls import ID_BYTES, Calls, unpack
from trikv.connector.client import Attached, Introduction
from trikv.connector.fences import Fences
from trikv.connector.jobs import IDLE_S, LoadJob, Report, SaveJob
from trikv.connector.layers import Layers, LoadLostError, section_ends
from trikv.connector.link import CallError, UnknownError
from trikv.connector.offers import gpu_memory, process_memory, registration
from trikv.connector.overlap import Overlap
from trikv.connector.saves import Saves
from trikv.connector.tally import Tally

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

SAVE_S: Final = 2.0
"""How long an ended request's blocks are kept for a save that is not answered."""


@dataclass(slots=True)
class _Loading:
    job: LoadJob
    via: Attached | None
    future: Future[tuple[int, ...]] | None  # None: not sent


_Sent: TypeAlias = "tuple[LoadJob, Attached | None, Future[tuple[int, ...]] | None]"
"""A load, over what it was sent, and its outcome; nothing where it was not sent."""


class WorkerHalf:
    """One rank's copies. All methods run on the worker's main thread.

    None waits, but for loads that a forward waits for: see `Overlap`.
    """

    def __init__(
        self,
        calls: Calls,
        log: logging.Logger,
        *,
        save_s: float = SAVE_S,
        load_s: float = 0.0,
        orders_loads: bool = False,
        waits_by_layer: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make a half.

        Args:
            calls: to the daemon.
            log: the engine's.
            save_s: how long an ended request's blocks are kept for a save.
            load_s: in which a load must have begun; 0: no limit.
            orders_loads: loads wait for the work that the engine has queued: it may give blocks
                away that this work still uses.
            waits_by_layer: a forward may wait for a load layer by layer, if hooks can be trusted.
            clock: in seconds.
        """
        self.tally = Tally()
        self._fences = Fences()
        self._arrivals = Arrivals(None, log)
        self._saves = Saves(calls, self._fences, self.tally, self._arrivals)
        self._overlap = Overlap(calls, log, self._is_over, self._saves.give_up)
        self._orders_loads, self._waits_by_layer = orders_loads, waits_by_layer
        self._events: cuda.StepEvents | None = None
        self._calls = calls
        self._log = log
        self._clock = clock
        self._save_s, self._load_s = save_s, load_s
        self._is_registered = False
        self._tensors: object = None
        self._begun: dict[tuple[str, int], _Sent] = {}  # ahead of their step, by request and lease
        self._loading: dict[str, _Loading] = {}
        self._delayed: dict[str, float] = {}  # ended requests, and until when their saves may last
        self._invalid: set[int] = set()

    def register(
        self,
        instance: str,
        rank: int,
        tensors: Mapping[str, layouts.Tensor],
        block_count: int,
        page_bytes: int | Mapping[str, int],
        *,
        replicas: int = 1,
    ) -> None:
        """Offer the KV tensors to the daemon, from now on and after each reconnect.

        Tensors that cannot be described or shared are not offered, and the log says why. So many
        ranks in a row (`replicas`) hold the same bytes.
        """
        try:
            plan = layouts.pieces(tensors, block_count, page_bytes)
            memory = self._export(plan, block_count)
        except layouts.LayoutError as error:
            self._log.warning("TriKV: %s; nothing is cached", error)
            return
        for group in memory["groups"]:
            group["replicas"] = replicas
        self._tensors = dict(tensors)  # keeps the memory mapped while the daemon may copy
        params = {"rank": registration(instance, rank, self._fences) | memory}
        self._is_registered = True
        self._calls.client.start(Introduction("register", lambda: params, offers_memory=True))
        self._log.info(
            "TriKV: offering %d blocks of %d bytes in %d pieces (%s), one copy on %d ranks",
            *(block_count, plan.page_bytes, len(plan.pieces), plan.layout, replicas),
        )

    def _export(self, plan: layouts.Plan, block_count: int) -> dict[str, Any]:
        devices = {memory.device for memory in plan.memories}
        kinds = {device.partition(":")[0] for device in devices}
        if kinds == {"cpu"}:
            return process_memory(plan, block_count)
        if kinds != {"cuda"} or len(devices) > 1:
            raise layouts.LayoutError(f"KV memory on {', '.join(sorted(devices))} is not supported")
        (device,), driver = devices, cuda.Driver()
        with cuda.on_device(device):
            exported = cuda.export(plan, driver)
            self._events = cuda.step_events(device)
            words = cuda.signal_words(device, driver)
            self._overlap.words = words
            self._arrivals = self._saves.arrivals = Arrivals(words, self._log)
            ends = section_ends(plan.layer_ends) if self._waits_by_layer else ()
            if ends and words is not None:
                self._overlap.layers = Layers(plan.layer_ends, ends, words)
            return gpu_memory(plan, block_count, exported, self._events, words, ends)

    # -- starting --------------------------------------------------------------------------------

    def void(self, requests: Iterable[str]) -> None:
        """Preempted: their blocks may be overwritten as soon as this returns."""
        for request in requests:
            self._saves.void(request)

    def begin(self, job: LoadJob) -> bool:
        """Send a load ahead of its step, or leave it to that; whether it was sent.

        Not while a save is under way: the step may raise its fence, and then it is too late for
        what the save has read of a block that this load has begun to write.
        """
        if self._orders_loads or self._saves.is_under_way:
            return False
        self._begun[job.request, job.lease] = self._send(job)
        return True

    def start_loads(self, jobs: Iterable[LoadJob], way: str = "") -> None:
        """Send loads that were not sent ahead; each will be reported, whatever happens.

        Args:
            jobs: the loads.
            way: in which this step's forward is run; empty: not so that hooks could be counted on.
        """
        self._overlap.began(way)
        event: int | None = None  # recorded for the first
        for job in jobs:
            sent = self._begun.pop((job.request, job.lease), None)
            if sent is None:
                if event is None and self._orders_loads:
                    event = self._record()
                sent = self._send(job, event or 0)
            if job.is_held:
                self._overlap.hold(*sent)
            else:
                self._loading[job.request] = _Loading(*sent)

    def launched(self, layer: str) -> None:
        """A layer of the forward is launched now; waits for nothing itself."""
        self._overlap.launched(layer)

    def _send(self, job: LoadJob, event: int = 0) -> _Sent:
        via = self._calls.attached
        job = self._overlap.in_order(job)
        if via is None or not self._is_registered or not job.lease:
            return job, None, None
        try:
            shown = self._overlap.shown(job) if job.is_held else self._arrivals.mark(job)
            outcome = self._calls.load(shown, via, self._load_s, event)
        except Exception:  # noqa: BLE001  # the others must be sent, and this one reported
            self._log.exception("TriKV: a load could not be sent")
            return job, None, None
        if not job.is_held:
            self._arrivals.follow(shown, outcome)
        return job, via, outcome

    def start_saves(self, jobs: Iterable[SaveJob]) -> None:
        """Send saves of blocks that are complete once the step's work is over.

        Those that cannot be sent count as answered.

        Raises:
            LoadLostError: this step may have read blocks before they were there.
        """
        self._overlap.prove()
        self._saves.start(jobs, self._record if self._is_registered else None)

    def _record(self) -> int:
        """Mark the end of the GPU work that is queued now; 0: there is no GPU."""
        return self._events.record() if self._events is not None else 0

    def delay(self, requests: Iterable[str]) -> None:
        """Ended requests whose blocks are kept: each will be reported as sent, once."""
        until_s = self._clock() + self._save_s
        for request in requests:
            self._delayed[request] = until_s

    # -- reporting -------------------------------------------------------------------------------

    def finished(self, *, is_idle: bool = False) -> tuple[set[str], set[str]]:
        """Requests whose saves have ended after `delay`, and whose loads have ended; each once.

        Args:
            is_idle: nothing is computed in this step: the end of a load may be waited for a little.

        Raises:
            LoadLostError: this step has read blocks that are not there.
        """
        for job, failed in self._overlap.settle():
            self._note_arrival(job, failed)
            if failed:
                raise LoadLostError(
                    f"blocks of request {job.request} did not arrive after its forward was begun"
                )
        if is_idle:
            loads = [one.future for one in self._loading.values() if one.future is not None]
            if len(loads) == len(self._loading):  # else there is something to report now
                self._arrivals.wait([*loads, *self._saves.outcomes], IDLE_S)
        self._saves.collect()
        sent = set()
        now_s = self._clock()
        for request, until_s in list(self._delayed.items()):
            if self._saves.may_read(request) and now_s >= until_s:
                self.tally.add("saves_timed_out")
                self._saves.void(request)
            if not self._saves.may_read(request):
                sent.add(request)
                del self._delayed[request]
        loaded = {request for request, loading in self._loading.items() if self._has_ended(loading)}
        for request in loaded:
            self._arrivals.forget(self._loading.pop(request).job)
        return sent, loaded

    def take_invalid(self) -> set[int]:
        """Blocks that did not arrive, of loads reported by `finished` since the last call."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> Report | None:
        """Saves that ended since the last call."""
        return self._saves.take_report()

    @property
    def loads_in_flight(self) -> int:
        """Loads not reported yet."""
        return len(self._loading)

    def _has_ended(self, loading: _Loading) -> bool:
        """Whether nothing writes the blocks any more; notes those that did not arrive."""
        failed: Iterable[int] = range(len(loading.job.blocks) // ID_BYTES)
        if self._arrivals.has(loading.job):
            failed = ()
        elif loading.future is not None and loading.via is not None:
            if not loading.future.done():
                return False
            try:
                failed = loading.future.result()
            except UnknownError:
                if not self._is_over(loading.via):
                    return False
            except CallError:
                pass
        self._note_arrival(loading.job, failed)
        return True

    def _note_arrival(self, job: LoadJob, failed: Iterable[int]) -> None:
        blocks = unpack(job.blocks)
        bad = [blocks[at] for at in failed if 0 <= at < len(blocks)]
        self._invalid.update(bad)
        self.tally.add("loaded_blocks", len(blocks) - len(bad))
        self.tally.add("load_blocks_failed", len(bad))

    def _is_over(self, via: Attached) -> bool:
        """Whether a lost session's copies have surely ended."""
        now = self._calls.attached
        if now is not None and now.number > via.number and now.epoch == via.epoch:
            return True
        return via.watch is not None and via.watch.is_dead()

    def abandon(self) -> None:
        """At shutdown: void everything, so that nothing read later becomes visible."""
        self._saves.void_all()
