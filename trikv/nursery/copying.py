"""Copies between engines and the pool: bounded queues, a few workers each way, one end a copy.

Decided here: loads never wait behind saves (workers of their own), what stops a copy, and that a
copy's outcome is applied to the core exactly once, whoever still waits for it. This file does not
know how bytes move: that is the `Memory` it is given.

| a copy | then |
| --- | --- |
| queue full | refused as overloaded before anything was claimed |
| session closes, deadline passes | ends at its next step; blocks not begun have not arrived |
| the call that asked is cancelled | goes on: it owns its pages and pins until it ends |
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.core.errors import KvError, OverloadedError, ShuttingDownError
from trikv.nursery.sessions import Attachment, Session, Sessions
from trikv.tiers.copies import Copy, Process

log = structlog.get_logger()

GUARD_S = 1.0
"""How often a busy direction shows that this process is not frozen."""


class Memory(Protocol):
    """Moves bytes between engines and the pool."""

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        """Move; returns which blocks are whole, when no byte is touched any more.

        Cancellation: none; `is_stopped` ends it early.
        """
        ...

    async def read_word(self, process: Process, address: int) -> int | None:
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


@dataclass(slots=True, eq=False)
class Job:
    """One copy in flight; it ends, whoever still waits for it.

    Attributes:
        complete: applies the outcome (bool[blocks]) to the core; called exactly once.
        fence: address of the word and the generation that it must still have after the copy.
        stop_s: no block is begun after this; None: no limit.
        arrived: the outcome, once `ended` is set.
    """

    session: Session
    copy: Copy
    block_count: int
    complete: Callable[[NDArray[np.bool_]], None]
    fence: tuple[int, int] | None = None
    stop_s: float | None = None
    is_stopped: bool = False
    arrived: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    ended: trio.Event = field(default_factory=trio.Event)


class Guard(Protocol):
    """Ends this process when it is not moved in time; see `trikv.tiers.freeze`."""

    def move(self) -> None:
        """The full limit from now on."""
        ...

    def stop(self) -> None:
        """No limit."""
        ...


class Copying:
    """One direction: a queue and the workers that empty it."""

    def __init__(
        self,
        name: str,
        memory: Memory,
        sessions: Sessions,
        *,
        workers: int,
        queue_jobs_max: int,
        guard: Guard | None = None,
    ) -> None:
        """Make a direction.

        Args:
            name: `save` or `load`.
            memory: moves the bytes.
            sessions: whose copies they are.
            workers: copies at a time.
            queue_jobs_max: copies waiting; a session may have a quarter of them.
            guard: kept moving while copies wait or run, at rest otherwise.
        """
        self.name = name
        self._guard = guard
        self._pending = 0
        self._session_jobs_max = max(1, queue_jobs_max // 4)
        self._memory = memory
        self._sessions = sessions
        self._workers = workers
        self._send, self._receive = trio.open_memory_channel[Job](queue_jobs_max)
        self._is_closed = False
        self._is_short = False
        self._failed = f"{name}.failed"  # the name of an event is made once

    def check_room(self, session: Session) -> None:
        """Refuse before anything is claimed.

        Raises:
            OverloadedError: the queue is full.
            ShuttingDownError: no more copies are taken.
        """
        if self._is_closed:
            raise ShuttingDownError("the daemon is ending")
        facts = self._send.statistics()
        if facts.current_buffer_used >= facts.max_buffer_size:
            raise OverloadedError(f"{facts.current_buffer_used} {self.name} copies are waiting")
        if session.copies >= self._session_jobs_max:
            raise OverloadedError(f"{session.copies} copies of this session are waiting")

    def start(self, job: Job) -> None:
        """Queue a copy; `check_room` was called with no checkpoint in between."""
        self._send.send_nowait(job)
        job.session.copies += 1
        self._pending += 1
        if self._guard is not None:
            self._guard.move()

    def stop(self) -> None:
        """Take no more copies; those that wait or run end at their next step."""
        self._is_closed = True

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the queue until cancelled; then every queued copy ends as not arrived.

        Cancellation: copies that have begun are stopped at their next step and waited for.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_guard)
                for _ in range(self._workers):
                    nursery.start_soon(self._work, nursery)
                task_status.started()
        finally:
            with contextlib.ExitStack() as ends, contextlib.suppress(trio.WouldBlock):
                while True:  # all of them end, even if one's end should raise
                    job = self._receive.receive_nowait()
                    ends.callback(self._end, job, np.zeros(job.block_count, np.bool_))

    async def _keep_guard(self) -> None:
        """Show that this process is not frozen; at the end, tell shielded copies to stop."""
        try:
            while True:
                await trio.sleep(GUARD_S)
                if self._guard is not None and self._pending:
                    self._guard.move()
        finally:
            self.stop()

    async def _work(self, timers: trio.Nursery) -> None:
        while True:
            job = await self._receive.receive()
            if job.stop_s is not None:
                job.is_stopped = trio.current_time() >= job.stop_s
                timers.start_soon(_stop_in_time, job, job.stop_s)
            arrived = np.zeros(job.block_count, np.bool_)
            try:
                with trio.CancelScope(shield=True):  # a copy cannot be called back, only stopped
                    arrived = await self._copy(job)
            except KvError as error:
                log.warning(self._failed, session=job.session.id, reason=str(error))
            finally:
                self._end(job, arrived)

    async def _copy(self, job: Job) -> NDArray[np.bool_]:
        """Copy, then look at the fence: only bytes that were still the blocks' are believed."""

        def is_stopped() -> bool:
            return job.is_stopped or job.session.is_closing or self._is_closed

        arrived = await self._memory.copy(job.copy, is_stopped)
        self._note_short(job, arrived, is_stopped=is_stopped())
        if job.fence is not None:
            address, generation = job.fence
            assert job.session.process is not None
            if await self._memory.read_word(job.session.process, address) != generation:
                arrived[:] = False
        return arrived

    def _note_short(self, job: Job, arrived: NDArray[np.bool_], *, is_stopped: bool) -> None:
        """Say that memory is gone, once until a copy is whole again."""
        missing = len(arrived) - int(arrived.sum())
        if missing and not is_stopped and not self._is_short:
            reason = "memory of the engine or of the pool cannot be touched"
            log.warning(self._failed, session=job.session.id, reason=reason, block_count=missing)
        self._is_short = missing > 0 and (self._is_short or not is_stopped)

    def _end(self, job: Job, arrived: NDArray[np.bool_]) -> None:
        """Apply the outcome and wake who waits for it, also when a bug of ours ends the daemon."""
        job.arrived = arrived
        try:
            job.complete(arrived)
        finally:
            job.ended.set()
            self._pending -= 1
            if self._guard is not None and self._pending == 0:
                self._guard.stop()
            self._sessions.copy_ended(job.session)


async def _stop_in_time(job: Job, stop_s: float) -> None:
    with trio.move_on_at(stop_s):
        await job.ended.wait()
        return
    job.is_stopped = True
