"""The scheduler's half: what to promise, what to load, what to save, what to hold back.

Decided here: every answer that vLLM's scheduler gets. All hooks run on its thread and none waits,
but a moment for an answer while the engine has nothing else to do; look-ups run in the background
and are collected when they are asked for. This file does not know
sockets, tensors or vLLM's classes: it reads a few attributes of requests and scheduler outputs.

A request's life, as far as it is kept here:

    looked up   a query is out or answered; nothing that a lease's deadline would not undo
    loading     blocks were promised and given; until the worker reports its id
    running     blocks that are full and hashed are saved, once each
    held        ended with saves under way: its blocks stay until the worker reports its id
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from trikv.connector.calls import ID_BYTES, Calls, count_real, pack, unpack
from trikv.connector.forgetting import Forgetting
from trikv.connector.holding import Holding
from trikv.connector.jobs import AGAIN, LoadJob, Report, SaveJob, StepJobs
from trikv.connector.lookups import Lookups
from trikv.connector.tally import Tally
from trikv.connector.tracks import Policy, Track, preempted_of
from trikv.wire import BLOCKS_MAX, REQUEST_BYTES_MAX

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable

SAVE_BLOCKS_MAX: Final = 16_384
"""Blocks of one save: longer ones are cut, so that a message stays small."""

YIELD_S: Final = 0.0001
"""For the client's thread, which else gets the interpreter when the step's work lets go of it."""


class SchedulerHalf:
    """Answers vLLM's scheduler from memory; talks to the daemon in the background."""

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        log: logging.Logger,
        clock: Callable[[], float] = time.perf_counter,
        *,
        begin: Callable[[LoadJob], bool] = lambda _: False,
    ) -> None:
        """Make a half.

        Args:
            calls: to the daemon.
            policy: what the user and the engine's shape set.
            log: the engine's.
            clock: in seconds.
            begin: has the worker send a load now, if it can and says so; it is given the job in the
                step too.
        """
        self._begin = begin
        self._calls = calls
        self._policy = policy
        self._log = log
        self._clock = clock
        self._forgetting = Forgetting(calls, clock)
        self._numbers = itertools.count(1)
        self._tracks: dict[str, Track] = {}
        self._loads: list[LoadJob] = []
        self._delayed: list[str] = []
        self._ended_loading: dict[str, Track] = {}  # ended, load in flight: freed by its report
        self._held: dict[str, Track] = {}
        self._savers: dict[int, Track] = {}  # by number of a save under way
        self._releases: list[str] = []
        self._is_idle = False  # the last step computed nothing
        self._has_yielded = False  # in this step
        self._answered = ""  # request that was answered in this step and has no blocks yet
        self._blocked = ""  # the same of the last step, in which nothing ran
        self._holding = Holding(policy.hold_s, policy.block_bytes)
        self._has_said_hit = False
        self.promises = True  # False after a failure of ours: nothing more is promised
        self.tally = Tally()
        self._lookups = Lookups(calls, policy, self._forgetting, self.tally, clock)

    # -- looking up ------------------------------------------------------------------------------

    def add(self, request: Any) -> None:  # noqa: ANN401
        """A request has arrived: start its query now, it may be scheduled in a moment."""
        track = self._track(request)
        if track.is_cacheable:
            self._lookups.start(track, is_alone=not self._holding.is_computing)

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """How many tokens behind `computed_tokens` can be loaded; None: ask again.

        Free of effects that cannot be repeated: a lease that is not used ends by itself. vLLM looks
        at no request behind one that finds no room. Where nothing runs that would make some, those
        behind it may hold it, loaded and unable to start: every other time it lets them go first.
        """
        if request.request_id == self._blocked:
            self._blocked = ""
            return None, False
        answer = self._match(request, computed_tokens)
        self._answered = "" if answer[0] is None else request.request_id
        return answer

    def _match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        track = self._track(request)
        tokens = self._policy.block_tokens
        track.local_count = computed_tokens // tokens
        # A forward that waits computes a token at least; its layers wait where these are several.
        wanted = (request.num_tokens - 1) // tokens - track.local_count
        if wanted <= 0 or not track.is_cacheable or not self.promises:
            return 0, False
        if track.has_failed or track.loading is not None:
            return 0, False
        is_idle = self._is_idle or not self._holding.is_computing
        found, is_pending = self._lookups.ask(track, is_idle=is_idle)
        if found is None:
            return (None, False) if is_pending else (0, False)
        count = min(found.hit_count - track.local_count, wanted)
        if count <= 0:
            return 0, False
        track.is_held = self._holding.may_hold(count)
        if track.is_held:
            return count * tokens, False
        # Of a whole prompt the last token alone is computed again, though its block is loaded.
        found_tokens = min(found.hit_count, request.num_tokens // tokens) * tokens
        return min(found_tokens, request.num_tokens - 1) - track.local_count * tokens, True

    def _track(self, request: Any) -> Track:  # noqa: ANN401
        track = self._tracks.get(request.request_id)
        if track is None:
            track = Track(request=request, is_cacheable=self._is_cacheable(request))
            self._tracks[request.request_id] = track
        return track

    def _is_cacheable(self, request: Any) -> bool:  # noqa: ANN401
        """Requests whose block hashes name their bytes in every engine of the namespace.

        An adapter is hashed by its name only, and a resumable request may change tokens that it was
        hashed by.
        """
        if getattr(request, "lora_request", None) is not None:
            self.tally.add("requests_with_adapter")
            return False
        return not getattr(request, "resumable", False) and (
            0 < len(request.request_id.encode()) <= REQUEST_BYTES_MAX - len(AGAIN)
        )

    # -- admission -------------------------------------------------------------------------------

    def admit(self, request: Any, blocks: Iterable[int], external_tokens: int) -> None:  # noqa: ANN401
        """The request has its blocks; load the first `external_tokens` behind the local hit."""
        self._answered = ""
        track = self._track(request)
        track.blocks = list(blocks)
        if external_tokens <= 0:
            return
        tokens = self._policy.block_tokens
        count = -(-external_tokens // tokens)
        first = track.local_count
        found, track.found = track.found, None  # a load uses its lease up
        job = LoadJob(
            request=request.request_id,
            lease=found.lease if found is not None else 0,
            first=first,
            blocks=pack(track.blocks[first : first + count]),
            is_alone=not self._holding.is_computing,
        )
        if track.is_held:
            job = self._hold(track, job, first + count)
        else:
            track.loading = job
            self._holding.began_load(request.request_id)
        self._loads.append(job)
        if job.lease:
            was_sent = self._begin(job)  # a load that a forward waits for is alone, too
            if was_sent and job.is_alone and not self._has_yielded:
                # The client's thread sends it now, not after this step's work.
                self._has_yielded = True
                time.sleep(YIELD_S)
        self.tally.add("hit_blocks", count)
        self.tally.add("hit_requests")
        if not self._has_said_hit:
            self._has_said_hit = True
            numbers = (count * tokens, request.num_tokens, request.request_id)
            self._log.info("TriKV: first hit: loading %d of %d tokens of request %s", *numbers)

    def _hold(self, track: Track, job: LoadJob, end: int) -> LoadJob:
        """The load as this step's forward waits for it."""
        signal, value = self._holding.take()
        hashes = track.hashes_of(0, end)
        size = len(hashes) // end
        self.tally.add("loads_held")
        return replace(job, signal=signal, value=value, hash_bytes=size, hashes=hashes)

    def _attachment(self) -> int:
        attached = self._calls.attached
        return attached.number if attached is not None else 0

    # -- steps -----------------------------------------------------------------------------------

    def step(self, output: Any) -> StepJobs:  # noqa: ANN401
        """What this step's workers have to do. Loads are handed over whatever else goes wrong."""
        preempted = preempted_of(output, self._savers.values())
        for request_id in preempted:
            self._preempt(request_id)
        loads, self._loads = tuple(self._loads), []
        delayed, self._delayed = tuple(self._delayed), []
        saves: list[SaveJob] = []
        try:
            self._holding.stepped(output.num_scheduled_tokens)
            saves = self._saves(output)
            self._release()
        except Exception:  # noqa: BLE001  # the loads above must be handed over
            self._log.exception("TriKV: a step's saves were not planned")
        self._lookups.has_waited = self._has_yielded = False
        self._is_idle = getattr(output, "total_num_scheduled_tokens", 1) == 0
        self._blocked, self._answered = (self._answered if self._is_idle else ""), ""
        return StepJobs(loads, tuple(saves), preempted, delayed, self._is_idle)

    def _preempt(self, request_id: str) -> None:
        """Its blocks are gone; the workers void the saves that may still read them."""
        track = self._tracks.get(request_id)
        self._holding.stopped(request_id)
        if track is not None:
            track.preempted()
            self._forget_saves(track)

    def _saves(self, output: Any) -> list[SaveJob]:  # noqa: ANN401
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._set_blocks(new.req_id, new.block_ids[0], is_all=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[index]
            new_blocks = cached.new_block_ids[index]
            if new_blocks is not None:
                is_all = request_id in cached.resumed_req_ids
                self._set_blocks(request_id, new_blocks[0], is_all=is_all)
        if not self._policy.saves or not self._forgetting.is_ready():
            return []
        jobs: list[SaveJob] = []
        is_alone = len(output.num_scheduled_tokens) == 1  # maybe nothing comes after it
        for request_id, scheduled in output.num_scheduled_tokens.items():
            track = self._tracks.get(request_id)
            if track is not None and track.is_cacheable and not track.is_stale:
                end = (computed.get(request_id, 0) + scheduled) // self._policy.block_tokens
                jobs.extend(self._save(track, end, is_alone=is_alone))
        return jobs

    def _set_blocks(self, request_id: str, blocks: Iterable[int], *, is_all: bool) -> None:
        track = self._tracks.get(request_id)
        if track is None:
            return
        if is_all:
            if track.is_preempted:
                track.preempted()
            track.blocks = list(blocks)
        else:
            track.blocks.extend(blocks)

    def _save(self, track: Track, end: int, *, is_alone: bool) -> list[SaveJob]:
        """Saves of the blocks before `end` that are hashed and were not given yet.

        Hashes cover confirmed tokens only, so with asynchronous scheduling or speculation they lag:
        what is cut off here is looked at again in the next step.
        """
        hashes = track.request.block_hashes
        end = min(end, len(hashes), len(track.blocks), BLOCKS_MAX)
        attachment = self._attachment()
        if track.attachment != attachment:  # another daemon or session: it may have forgotten
            track.attachment, track.saved_count = attachment, 0
        self._lookups.collect(track)
        if track.known_attachment != attachment:
            track.known_count = 0
        start = max(track.saved_count, track.known_count)
        blocks = pack(track.blocks[start:end])
        end = start + count_real(blocks)
        jobs = []
        for first in range(start, end, SAVE_BLOCKS_MAX):
            last = min(first + SAVE_BLOCKS_MAX, end)
            job = SaveJob(
                number=next(self._numbers),
                request=track.request.request_id,
                first=first,
                hash_bytes=len(hashes[first]),
                hashes=track.hashes_of(first, last),
                blocks=blocks[ID_BYTES * (first - start) : ID_BYTES * (last - start)],
                is_alone=is_alone,
                altered=self.altered,
            )
            track.saving[job.number] = self._policy.rank_count
            self._savers[job.number] = track
            jobs.append(job)
        if end > start:
            track.saved_count = end
            track.has_spoken = True
            self.tally.add("save_blocks", end - start)
        return jobs

    def update(
        self,
        report: Report | None,
        loaded: Iterable[str],
        sent: Iterable[str],
        invalid: frozenset[int],
    ) -> None:
        """What the workers have said about the last step."""
        if invalid:
            self._note_failures(invalid)
        for request_id in loaded:
            self._holding.ended_load(request_id)
            track = self._ended_loading.pop(request_id, None) or self._tracks.get(request_id)
            if track is not None:
                track.loading = None
        for request_id in sent:
            track = self._held.pop(request_id, None)
            if track is not None:
                self._forget_saves(track)
                self._release_after(track)
        for number, ranks in (report.answered if report is not None else {}).items():
            track = self._savers.get(number)
            if track is None:
                continue
            track.saving[number] -= ranks
            if track.saving[number] <= 0:
                del track.saving[number], self._savers[number]
        self._release()

    def _note_failures(self, invalid: frozenset[int]) -> None:
        """Promise nothing again to requests whose loads have failed: they would ask for ever."""
        for track in itertools.chain(self._tracks.values(), self._ended_loading.values()):
            if track.loading is not None and invalid.intersection(unpack(track.loading.blocks)):
                track.has_failed = True
                track.known_count = track.saved_count = 0
                self.tally.add("loads_failed")

    def _forget_saves(self, track: Track) -> None:
        for number in track.saving:
            self._savers.pop(number, None)
        track.saving.clear()

    @property
    def altered(self) -> str:
        """See `Forgetting`."""
        return self._forgetting.altered

    def forget(self, wait_s: float) -> bool:
        """All blocks of the namespace are wrong; False: nothing is promised until that is done."""
        for track in self._tracks.values():
            track.forget()
        return self._forgetting.demand(wait_s)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, request_id: str) -> bool:
        """The request has ended; True: keep its blocks until a worker reports it as sent.

        Never while its load is in flight: then the load's report frees the blocks, and a second
        report would end the engine.
        """
        self._holding.stopped(request_id)
        track = self._tracks.pop(request_id, None)
        if track is None:
            return False
        if track.loading is not None:
            self._ended_loading[request_id] = track
            self._release_after(track)
            return False
        if track.saving:
            self._held[request_id] = track
            self._delayed.append(request_id)
            return True
        self._release_after(track)
        return False

    def _release_after(self, track: Track) -> None:
        """Release once a query that is still out has been answered, for it grants a lease."""
        request_id = track.request.request_id
        if track.lookup is not None and not track.lookup.future.done():
            track.lookup.future.add_done_callback(lambda _: self._calls.release([request_id]))
        elif track.has_spoken:
            self._releases.append(request_id)

    def _release(self) -> None:
        if self._releases:
            requests, self._releases = self._releases, []
            self._calls.release(requests)  # to nobody: a lost session's leases have ended anyway

    @property
    def has_pending(self) -> bool:
        """True while an ended request's blocks wait for a worker's report."""
        return bool(self._held or self._ended_loading)
