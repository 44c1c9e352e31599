"""Loads that the engine's next forward waits for on the GPU, instead of the scheduler for turns.

Decided here: that such a load always ends well, or the engine does not go on. The forward is given
to the GPU while the load still runs: behind a word that the copier writes after the last byte. vLLM
counts the blocks as computed from the start and cannot take that back while it schedules ahead, so
a load that fails is tried again by the blocks' names, from whichever daemon and copier are there
then; and without success the step raises, for wrong tokens would be worse than a restart.

| the load | then |
| --- | --- |
| arrived | the word is written, by the copier and once more from here |
| failed, or the daemon or its copier has ended | loaded again, within `RECOVER_S` |
| still not there | no save counts any more, the word is written, `settle` says what is wrong |

Without words (an engine on a CPU) the forward waits in `hold`. This file knows neither vLLM nor
tensors.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from trikv.connector.calls import ID_BYTES, Calls
from trikv.connector.jobs import AGAIN
from trikv.connector.layers import LoadLostError
from trikv.connector.link import CallError, UnknownError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from trikv.connector.client import Attached
    from trikv.connector.jobs import LoadJob
    from trikv.connector.layers import Layers, Words

RECOVER_S: Final = 10.0
"""How long a failed load is tried again; a daemon and its kept pool are back within a few."""
RETRY_S: Final = 0.05
QUERY_S: Final = 2.0


@dataclass(slots=True, eq=False)
class _Held:
    """A load that a step waits for."""

    job: LoadJob
    via: Attached | None  # whose copies may still write; None: nobody's
    failed: Sequence[int] | None = None  # positions, once it has ended
    ended: threading.Event = field(default_factory=threading.Event)


class Overlap:
    """One rank's loads that steps wait for. `hold` and `settle` run on the worker's main thread."""

    def __init__(
        self,
        calls: Calls,
        log: logging.Logger,
        is_over: Callable[[Attached], bool],
        lost: Callable[[], None],
        *,
        recover_s: float = RECOVER_S,
    ) -> None:
        """Make a rank's.

        Args:
            calls: to the daemon.
            log: the engine's.
            is_over: whether the copies of a lost session have surely ended.
            lost: what a forward computes is worth nothing; called by another thread before the
                GPU goes on with it.
            recover_s: how long a failed load is tried again.
        """
        self.words: Words | None = None  # None: the engine computes on a CPU
        self.layers: Layers | None = None  # None: a forward waits for all of its load, or for none
        self._calls = calls
        self._log = log
        self._is_over = is_over
        self._lost = lost
        self._recover_s = recover_s
        self._held: list[_Held] = []

    def hold(
        self, job: LoadJob, via: Attached | None, sent: Future[tuple[int, ...]] | None
    ) -> None:
        """Have the forward wait for a load.

        Args:
            job: what is loaded.
            via: where it was sent.
            sent: its outcome; None: it could not be sent.

        Raises:
            LoadLostError: the GPU would not wait.
        """
        try:
            if self.words is not None and not (self.layers is not None and self.layers.hold(job)):
                self.words.hold(job.signal, job.value)
        except Exception as error:
            self._lost()
            raise LoadLostError(
                f"the forward cannot be made to wait for the blocks of request {job.request}"
            ) from error
        held = _Held(job, via)
        self._held.append(held)
        if sent is None:
            self._try_again(held)
        else:
            sent.add_done_callback(lambda future: self._end(held, future))
        if self.words is None:
            held.ended.wait()

    def shown(self, job: LoadJob) -> LoadJob:
        """A load that a forward waits for, as it should be sent: its word is there or not."""
        return job if self.words is not None else replace(job, signal=0)

    def in_order(self, job: LoadJob) -> LoadJob:
        """A load as it should be sent: section after section, where that may be of use."""
        is_ordered = self.layers is not None and self.layers.may_order(job)
        return replace(job, is_ordered=True) if is_ordered else job

    def began(self, way: str) -> None:
        """How this step's forward is run; see `Layers`."""
        if self.layers is not None:
            self.layers.began(way)

    def launched(self, layer: str) -> None:
        """A layer is launched now."""
        if self.layers is not None:
            self.layers.called(layer)

    def prove(self) -> None:
        """The forward has been launched: its layers wait for what they read, or this raises.

        Raises:
            LoadLostError: they may not.
        """
        if self.layers is not None:
            try:
                self.layers.prove()
            except LoadLostError:
                self._lost()
                raise

    def settle(self) -> list[tuple[LoadJob, Sequence[int]]]:
        """Wait for this step's loads; returns each with the positions that did not arrive.

        Raises:
            LoadLostError: as `prove`.
        """
        self.prove()
        if self.layers is not None and self.layers.ended():
            self._log.info("TriKV: forwards can wait for their loads layer by layer")
        held, self._held = self._held, []
        settled = []
        for one in held:
            one.ended.wait()
            assert one.failed is not None
            settled.append((one.job, one.failed))
        return settled

    def _end(self, held: _Held, future: Future[tuple[int, ...]]) -> None:
        """On the client's thread: the load was answered, or never will be."""
        error = future.exception()
        if error is None and not future.result():
            self._finish(held, ())
            return
        if not isinstance(error, UnknownError):
            held.via = None  # answered, or never sent
        self._try_again(held)

    def _try_again(self, held: _Held) -> None:
        """In a thread of its own: the main one may be stuck behind the very word."""
        thread = threading.Thread(target=self._recover, args=(held,), name="trikv-recover")
        thread.daemon = True
        thread.start()

    def _recover(self, held: _Held) -> None:
        job = held.job
        failed: Sequence[int] = range(len(job.blocks) // ID_BYTES)
        try:
            self._log.warning("TriKV: a load that a forward waits for has failed: trying again")
            until_s = time.perf_counter() + self._recover_s
            while time.perf_counter() < until_s:
                failed = self._load_again(job)
                if not failed:
                    self._log.info("TriKV: the blocks of request %s are there", job.request)
                    break
                time.sleep(RETRY_S)
            if held.via is not None:
                self._wait_until_over(held.via)  # the first try may write as long as that
        except Exception:  # noqa: BLE001  # whoever waits must be told
            self._log.exception("TriKV: a load could not be tried again")
        finally:
            self._finish(held, failed)

    def _load_again(self, job: LoadJob) -> Sequence[int]:
        """By the blocks' names, under another request id; returns the positions that failed."""
        count = len(job.blocks) // ID_BYTES
        everything = range(count)
        via = self._calls.attached
        if via is None:
            return everything
        name = AGAIN + job.request
        load: Future[tuple[int, ...]] | None = None
        try:
            answer = self._calls.query(name, job.hash_bytes, job.hashes, QUERY_S).result()
            if answer.hit_count < job.first + count:
                return everything
            again = replace(job, request=name, lease=answer.lease, signal=0, is_ordered=False)
            load = self._calls.load(again, via, 0.0, 0)
            return load.result()
        except CallError as error:
            if load is not None and isinstance(error, UnknownError):
                self._wait_until_over(via)  # it may write; a query without an answer writes nothing
            return everything
        finally:
            self._calls.release([name])

    def _wait_until_over(self, via: Attached) -> None:
        while not self._is_over(via):
            time.sleep(RETRY_S)

    def _finish(self, held: _Held, failed: Sequence[int]) -> None:
        try:
            if failed:
                self._lost()
            if self.words is not None:
                self.words.write(held.job.signal, held.job.value)
        finally:
            held.failed = failed
            held.ended.set()
