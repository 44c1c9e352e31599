"""Copies between engines and the pool: bounded queues, so many at once each way, one end a copy.

Decided here: loads never wait behind saves (queues of their own), what stops a copy, and that a
copy's outcome is applied to the core exactly once, whoever still waits for it. This file does not
know how bytes move: that is the `Memory` it is given.

A copy that somebody else carries out has no task: it is begun in the call that asks for it, and the
report of its end completes it, in plain calls.

| a copy | then |
| --- | --- |
| as many as may run do | waits for the first of them to end |
| queue full | refused as overloaded before anything was claimed |
| session closes, deadline passes | ends at its next step; blocks not begun have not arrived |
| the call that asked is cancelled | goes on: it owns its pages and pins until it ends |
"""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.core.errors import KvError, OverloadedError, ShuttingDownError
from trikv.core.layout import Place
from trikv.core.words import Offsets
from trikv.nursery.sessions import Attachment, Session, Sessions
from trikv.tiers.copies import Copy, Process

log = structlog.get_logger()

GUARD_S = 1.0
"""How often a busy direction shows that this process is not frozen, at least."""

Arrived = NDArray[np.bool_]
"""Shape (blocks,): which blocks of a copy are whole."""


class Memory(Protocol):
    """Moves bytes between engines and the pool."""

    def begin(
        self, copy: Copy, is_stopped: Callable[[], bool], ended: Callable[[Arrived], None]
    ) -> bool:
        """Have somebody else move the bytes, if this memory has such a one.

        Args:
            copy: what to move.
            is_stopped: asked now and then; once it says so the copy ends early.
            ended: called once, maybe at once, when no byte is touched any more.

        Returns:
            False: nothing was begun; it is to be moved by `copy`.

        Raises:
            KvError: it cannot be moved, nothing was begun.
        """
        ...

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> Arrived:
        """Move; returns which blocks are whole, when no byte is touched any more.

        Cancellation: none; `is_stopped` ends it early. It may be asked on any thread.
        """
        ...

    def read_word(self, process: Process, address: int) -> int | None:
        """One uint64 of the engine's memory, or None when it cannot be read."""
        ...

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment | None:
        """Map what a rank has exported; None: it is process memory, there is nothing to map.

        Args:
            call: the rank's registration.
            on_lost: called once, with the reason, when the memory is out of reach for good.

        Raises:
            KvError: it cannot be mapped, or not yet; nothing is left behind.
        """
        ...

    def detach(self, attachment: Attachment) -> None:
        """Unmap; the rank's copies have ended."""
        ...

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        """A copy of this memory is about to come, most likely."""
        ...

    def bring(self, place: Place, lease: int, offsets: Offsets) -> None:
        """A load of these pages is about to come, most likely; they stay as they are until then.

        Args:
            place: where to; not into which blocks.
            lease: of the load. One of another lease has other bytes, be its pages the same.
            offsets: of some of its pages; the load may want others, and not all of these.
        """
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One copy in flight; it ends, whoever still waits for it.

    Attributes:
        complete: applies the outcome to the core; called exactly once.
        fence: address of the word and the generation that it must still have after the copy.
        stop_s: no block is begun after this; None: no limit.
    """

    session: Session
    copy: Copy
    complete: Callable[[Arrived], None]
    fence: tuple[int, int] | None = None
    stop_s: float | None = None
    _arrived: Arrived | None = None  # once it has ended
    _tell: Callable[[Arrived], None] | None = None

    def then(self, tell: Callable[[Arrived], None]) -> None:
        """Have `tell` called once with the outcome when it is applied, maybe at once; one only."""
        assert self._tell is None
        if self._arrived is None:
            self._tell = tell
        else:
            tell(self._arrived)

    def end(self, arrived: Arrived) -> None:
        """The outcome has been applied."""
        self._arrived = arrived
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(arrived)

    def none_arrived(self) -> Arrived:
        """The outcome of a copy that was not begun."""
        return np.zeros(len(self.copy.blocks), np.bool_)


class Guard(Protocol):
    """Ends this process when it is not moved in time; see `trikv.tiers.freeze`."""

    @property
    def limit_s(self) -> float:
        """In which it must be moved."""
        ...

    def move(self) -> None:
        """The full limit from now on."""
        ...

    def stop(self) -> None:
        """No limit."""
        ...


class Copying:
    """One direction: what waits, and what runs."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        sessions: Sessions,
        *,
        jobs_max: int,
        queue_jobs_max: int,
        guard: Guard | None = None,
    ) -> None:
        """Make a direction.

        Args:
            name: `save` or `load`.
            memory: moves the bytes.
            sessions: whose copies they are.
            jobs_max: copies at a time.
            queue_jobs_max: copies waiting; a session may have a quarter of them.
            guard: kept moving while copies wait or run, at rest soon after: setting the kernel's
                timer for each copy would cost the copy 50 µs.
        """
        self.name = name
        self._guard = guard
        self._session_jobs_max = max(1, queue_jobs_max // 4)
        self._jobs_max, self._queue_jobs_max = jobs_max, queue_jobs_max
        self._memory = memory
        self._sessions = sessions
        self._queue: deque[Job] = deque()
        self._running = self._pending = 0
        self._is_beginning = False
        self._is_closed = False
        self._is_short = False
        self._is_guarded = False
        self._rest = trio.Event()  # set while no copy waits or runs
        self._rest.set()
        self._tasks: trio.Nursery | None = None  # opened by `run`
        self._failed = f"{name}.failed"  # the name of an event is made once

    def check_room(self, session: Session) -> None:
        """Refuse before anything is claimed.

        Raises:
            OverloadedError: the queue is full.
            ShuttingDownError: no more copies are taken.
        """
        if self._is_closed:
            raise ShuttingDownError("the daemon is ending")
        if self._running >= self._jobs_max and len(self._queue) >= self._queue_jobs_max:
            raise OverloadedError(f"{len(self._queue)} {self.name} copies are waiting")
        if session.copies >= self._session_jobs_max:
            raise OverloadedError(f"{session.copies} copies of this session are waiting")

    def start(self, job: Job) -> None:
        """Begin a copy or queue it; `check_room` was called with no checkpoint in between."""
        job.session.copies += 1
        self._pending += 1
        if self._pending == 1:
            self._rest = trio.Event()
        if self._guard is not None and not self._is_guarded:
            self._is_guarded = True
            self._guard.move()
        self._queue.append(job)
        self._begin_next()

    def stop(self) -> None:
        """Take no more copies; those that wait or run end at their next step."""
        self._is_closed = True

    async def drain(self) -> None:
        """Return when no copy waits or runs.

        Cancellation: none; `stop` ends them early.
        """
        with trio.CancelScope(shield=True):
            await self._rest.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take copies until cancelled; then every queued one ends as not arrived.

        Cancellation: copies that have begun are stopped at their next step and waited for.
        """
        look_s = GUARD_S if self._guard is None else min(GUARD_S, self._guard.limit_s / 4)
        async with trio.open_nursery() as self._tasks:
            try:
                task_status.started()
                while True:
                    await trio.sleep(look_s)
                    self._keep_guard()
            finally:
                self.stop()
                queued, self._queue = self._queue, deque()
                with contextlib.ExitStack() as ends:  # all end, even if one's end should raise
                    for job in queued:
                        ends.callback(self._end, job, job.none_arrived())
                await self.drain()  # while there is a nursery for copies in tasks
                self._keep_guard()

    def _keep_guard(self) -> None:
        """Show that this process is not frozen, as long as it has copies."""
        if self._guard is None or not self._is_guarded:
            return
        self._is_guarded = self._pending > 0
        if self._is_guarded:
            self._guard.move()
        else:
            self._guard.stop()

    # -- one copy

    def _begin_next(self) -> None:
        """Begin what may run; not recursively, where a copy ends as soon as it is begun."""
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            while self._queue and self._running < self._jobs_max:
                self._running += 1
                self._begin(self._queue.popleft())
        finally:
            self._is_beginning = False

    def _begin(self, job: Job) -> None:
        assert self._tasks is not None
        is_stopped = self._stopper(job)
        try:
            if not self._memory.begin(job.copy, is_stopped, partial(self._moved, job, is_stopped)):
                self._tasks.start_soon(self._move, job, is_stopped)
        except KvError as error:
            self._say(job, str(error))
            self._end_running(job, job.none_arrived())

    def _stopper(self, job: Job) -> Callable[[], bool]:
        """Tells on any thread whether a copy is to stop."""
        clock, stop_s, session = trio.lowlevel.current_clock(), job.stop_s, job.session

        def is_stopped() -> bool:
            is_late = stop_s is not None and clock.current_time() >= stop_s
            return is_late or session.is_closing or self._is_closed

        return is_stopped

    async def _move(self, job: Job, is_stopped: Callable[[], bool]) -> None:
        """Move in a task of its own."""
        arrived = job.none_arrived()
        try:
            with trio.CancelScope(shield=True):  # a copy cannot be called back, only stopped
                arrived = await self._memory.copy(job.copy, is_stopped)
        except KvError as error:
            self._say(job, str(error))
        finally:
            self._moved(job, is_stopped, arrived)

    def _moved(self, job: Job, is_stopped: Callable[[], bool], arrived: Arrived) -> None:
        """No byte moves any more; only those that were still the blocks' are believed."""
        believed = job.none_arrived()
        try:
            self._note_short(job, arrived, is_stopped=is_stopped())
            if self._is_still_theirs(job):
                believed = arrived
        finally:
            self._end_running(job, believed)

    def _is_still_theirs(self, job: Job) -> bool:
        if job.fence is None:
            return True
        address, generation = job.fence
        assert job.session.process is not None
        return self._memory.read_word(job.session.process, address) == generation

    def _note_short(self, job: Job, arrived: Arrived, *, is_stopped: bool) -> None:
        """Say that memory is gone, once until a copy is whole again."""
        missing = len(arrived) - int(np.count_nonzero(arrived))
        if missing and not is_stopped and not self._is_short:
            reason = "memory of the engine or of the pool cannot be touched"
            self._say(job, reason, block_count=missing)
        self._is_short = missing > 0 and (self._is_short or not is_stopped)

    def _say(self, job: Job, reason: str, **facts: int) -> None:
        log.warning(self._failed, session=job.session.id, reason=reason, **facts)

    def _end_running(self, job: Job, arrived: Arrived) -> None:
        self._running -= 1
        try:
            self._end(job, arrived)
        finally:
            self._begin_next()

    def _end(self, job: Job, arrived: Arrived) -> None:
        """Apply the outcome and tell who asked, also when a bug of ours ends the daemon."""
        try:
            job.complete(arrived)
        finally:
            self._pending -= 1
            if self._pending == 0:
                self._rest.set()
            try:
                self._sessions.copy_ended(job.session)
            finally:
                job.end(arrived)
