"""One rank's saves under way: sent, made void, and counted as over once and never too early.

Decided here: when a save's source may be overwritten. This file does not know loads or vLLM.

A save reads only. It is over when one of these is known:

    answered    the daemon has answered: no byte is read any more
    read        the GPU has written the save's word, behind the last byte it read; see `Arrivals`
    not sent    it never left this process, or was refused
    void        its fence was raised: the daemon throws away what it may still read

What became of its blocks only the answer says; nobody waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trikv.connector.calls import ID_BYTES, Calls, Saved
from trikv.connector.jobs import Report, SaveJob
from trikv.connector.link import AbsentError, CallError, UnknownError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from trikv.connector.arrivals import Arrivals
    from trikv.connector.fences import Fences
    from trikv.connector.tally import Tally


@dataclass(slots=True)
class _Saving:
    """Saves of one request that may still read its blocks."""

    fence: int
    jobs: dict[int, tuple[SaveJob, Future[Saved]]] = field(default_factory=dict)


class Saves:
    """All methods run on the worker's main thread, but `give_up`.

    Attributes:
        arrivals: words by which an idle engine sees that a save is over.
    """

    def __init__(self, calls: Calls, fences: Fences, tally: Tally, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self._calls = calls
        self._fences = fences
        self._tally = tally
        self._is_lost = False  # what the engine computes is worth nothing: it will end
        self._by_request: dict[str, _Saving] = {}
        self._unanswered: list[Future[Saved]] = []  # of saves that are over
        self._report = Report()

    def start(self, jobs: Iterable[SaveJob], record: Callable[[], int] | None) -> None:
        """Send saves of blocks that are complete once the step's work is over.

        Args:
            jobs: those that cannot be sent count as over.
            record: marks the end of the work that is queued now; none: nothing is registered.
        """
        event: int | None = None  # recorded for the first
        for job in jobs:
            saving = self._by_request.get(job.request)
            if saving is None:
                is_ready = record is not None and self._calls.is_ready
                fence = self._fences.take() if is_ready else None
                if fence is None:
                    self._note_over(job.number)
                    self._tally.add("save_blocks_refused", len(job.blocks) // ID_BYTES)
                    continue
                saving = self._by_request[job.request] = _Saving(fence)
            generation = self._fences.generation(saving.fence)
            if self._is_lost:  # set before fences are lifted, so looked at after reading one
                self._note_over(job.number)
                continue
            if event is None:
                event = record() if record is not None else 0
            shown = self.arrivals.mark(job)
            outcome = self._calls.save(shown, saving.fence, generation, event)
            self.arrivals.follow(shown, outcome)
            saving.jobs[job.number] = (job, outcome)

    def give_up(self) -> None:
        """What is computed from now on must not be kept; any thread."""
        self._is_lost = True
        self._fences.lift_all()

    @property
    def is_under_way(self) -> bool:
        """Whether some save may still read."""
        return bool(self._by_request)

    @property
    def outcomes(self) -> list[Future[Saved]]:
        """Of saves that may still read."""
        saves = self._by_request.values()
        return [outcome for saving in saves for _, outcome in saving.jobs.values()]

    def may_read(self, request: str) -> bool:
        """Whether a save of this request may still read its blocks, as `collect` has seen it."""
        return request in self._by_request

    def collect(self) -> None:
        """Note what has ended."""
        for request in list(self._by_request):
            self._collect(request)
        answered = [one for one in self._unanswered if one.done()]
        if answered:
            self._unanswered = [one for one in self._unanswered if not one.done()]
            for outcome in answered:
                self._count(outcome)

    def _collect(self, request: str) -> None:
        saving = self._by_request[request]
        for number, (job, outcome) in list(saving.jobs.items()):
            if outcome.done():
                if not self._count(outcome):
                    self.void(request)  # it may be read on; not under this generation
                    return
            elif self.arrivals.has(job):
                self._unanswered.append(outcome)
            else:
                continue
            self.arrivals.forget(job)
            del saving.jobs[number]
            self._note_over(number)
        if not saving.jobs:
            self._fences.give_back(saving.fence)
            del self._by_request[request]

    def _count(self, outcome: Future[Saved]) -> bool:
        """Count what became of its blocks; False: nobody knows, and it may be read on."""
        try:
            saved = outcome.result()
        except UnknownError:
            return False
        except CallError as exc:
            self._tally.add("saves_unsent" if isinstance(exc, AbsentError) else "saves_refused")
        else:
            self._tally.add("saved_blocks", saved.saved_count)
            self._tally.add("present_blocks", saved.present_count)
            self._tally.add("save_blocks_refused", saved.refused_count)
        return True

    def void(self, request: str) -> None:
        """Make all saves under way of a request worthless, so that its blocks may be reused."""
        saving = self._by_request.pop(request, None)
        if saving is None:
            return
        self._fences.lift(saving.fence)
        self._fences.give_back(saving.fence)
        for number, (job, _) in saving.jobs.items():
            self.arrivals.forget(job)
            self._note_over(number)
        self._tally.add("saves_voided", len(saving.jobs))

    def void_all(self) -> None:
        """At shutdown: nothing that is read later becomes visible."""
        for request in list(self._by_request):
            self.void(request)

    def take_report(self) -> Report | None:
        """Saves that were seen to be over since the last call."""
        if not self._report.answered:
            return None
        report, self._report = self._report, Report()
        return report

    def _note_over(self, number: int) -> None:
        self._report.answered[number] = 1
