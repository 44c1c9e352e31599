"""Reads and writes of a disk under Trio, whatever carries them out.

Decided here: how many operations are under way at once, in which order they are begun (reads before
writes), what happens when one is short, is cancelled or hangs. What carries them out is a `Queue`:
the kernel's ring, entered by ourselves (`uring.py`) or by a package (`uring_package.py`), or
threads (`threads.py`). This file does not know slots or blocks.

| an operation | its result |
| --- | --- |
| moved all its bytes | 0 |
| failed | the errno; `EIO` when it came to the end of the file |
| was short, or met `EAGAIN` or `EINTR` | the rest is begun again |
| its caller was cancelled before it was begun | `ECANCELED`, at once |
| its caller was cancelled later | what it comes to: the caller waits; a cancellation is sent |
| had no answer within `io_s_max` | `HELD`: the kernel may touch its memory for ever |

After the first `HELD` nothing is begun any more: a disk that hangs is off until the next start.
"""

import errno
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import outcome
import trio
from numpy.typing import NDArray

from trikv.tiers.transfers import HELD, Queue, Transfers

IO_S_MAX: Final = 20.0
TURN_S: Final = 0.00025
"""How long the kernel may take what is given to it before others have a turn: it pins the pages on
our time, 8 MiB of huge pages in that time, or 1 MiB of small ones."""
BYTES_A_TURN: Final = (1 << 20, 8 << 20)
SMALL_BYTES: Final = 64 << 10
RETRIES_MAX: Final = 1_000

_QUARANTINE: Final[list[Transfers]] = []  # memory that the kernel may read until the very end


@dataclass(slots=True, eq=False)
class _Job:
    """One call of `run`."""

    transfers: Transfers
    task: trio.lowlevel.Task
    begun: int = 0  # operations before this one were given to the queue
    ended: int = 0
    raise_cancel: trio.lowlevel.RaiseCancelT | None = None


@dataclass(slots=True, eq=False)
class _Flight:
    """One operation that the queue has."""

    job: _Job
    index: int
    pieces: NDArray[np.uint64]
    offset: int
    left: int
    begin_s: float
    retries: int = 0


class Ring:
    """Carries out operations on one descriptor; made by `open_ring`.

    Attributes:
        name: of the back end.
        joins_memory: neighbouring pages may be one piece.
        is_stalled: an operation hangs; nothing is begun any more.
        is_holding: something may still use the descriptor: it must stay what it is.
    """

    def __init__(self, queue: Queue, fd: int, io_s_max: float) -> None:
        self.name = queue.name
        self.joins_memory = queue.joins_memory
        self.is_stalled = False
        self.is_holding = False
        self._queue = queue
        self._fd = fd
        self._io_s_max = io_s_max
        # Of reads and of writes: small ones, and all others.
        self._waiting = [(deque[_Job](), deque[_Job]()) for _ in range(2)]
        self._again: deque[_Flight] = deque()  # the rests of short ones
        self._live: dict[int, _Flight] = {}
        self._under_way = [0, 0]
        self._turn_bytes = BYTES_A_TURN[0]
        self._next_ticket = 1
        self._feeder: trio.lowlevel.Task | None = None
        self._is_feed_wanted = False
        self._is_closed = False
        self._is_idle = trio.Event()  # set once it is closed and nothing is under way

    async def run(self, transfers: Transfers) -> None:
        """Carry out the operations and fill in their results.

        Ownership: the memory is the kernel's until this returns, for ever where it is `HELD`.

        Cancellation: what was not begun never is; what was is waited for, `io_s_max` at most.

        At the bound: operations beyond the depth of their direction wait, first come first served,
        less than `SMALL_BYTES` before all others: they are records, for which whole blocks wait.
        """
        if self.is_stalled or self._is_closed or len(transfers.offsets) == 0:
            transfers.results[:] = errno.ESHUTDOWN
            await trio.lowlevel.checkpoint()
            return
        await trio.lowlevel.checkpoint_if_cancelled()
        job = _Job(transfers, trio.lowlevel.current_task())
        is_large = int(transfers.pieces[:, 1].sum()) >= SMALL_BYTES
        self._waiting[transfers.is_write][is_large].append(job)
        self._want_feed()

        def abort(raise_cancel: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            job.raise_cancel = raise_cancel
            self._drop_waiting(job, errno.ECANCELED)
            if job.ended == len(transfers.offsets):
                return trio.lowlevel.Abort.SUCCEEDED
            for ticket, flight in self._live.items():
                if flight.job is job:
                    self._queue.cancel(ticket)
            if not self._queue.submit():
                self._want_feed()
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def sync(self) -> None:
        """Wait until all that was written is on the medium.

        Cancellation: the caller leaves, the synchronisation goes on.

        Raises:
            OSError: it failed, no thread could be started (`ENOMEM`), or it took longer than
                `io_s_max` (`ETIMEDOUT`): the ring stalls.
        """
        with trio.move_on_after(self._io_s_max) as limit:
            try:
                await trio.to_thread.run_sync(os.fdatasync, self._fd, abandon_on_cancel=True)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, str(error)) from error
        if limit.cancelled_caught:
            self.is_holding = True
            self._stall()
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    async def _serve(self) -> None:
        async with trio.open_nursery() as tasks:
            tasks.start_soon(self._feed)
            tasks.start_soon(self._reap)
            tasks.start_soon(self._watch)

    # -- beginning

    def _want_feed(self) -> None:
        if self._feeder is not None and not self._is_feed_wanted:
            trio.lowlevel.reschedule(self._feeder)
        self._is_feed_wanted = True

    async def _feed(self) -> None:
        """Give operations to the queue, some megabytes a turn."""

        def abort(_: trio.lowlevel.RaiseCancelT) -> trio.lowlevel.Abort:
            self._feeder = None
            return trio.lowlevel.Abort.SUCCEEDED

        while True:
            if not self._is_feed_wanted:
                self._feeder = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(abort)
                self._feeder = None
            self._is_feed_wanted = False
            if self._push_some():
                self._is_feed_wanted = True
            self._deliver()
            await trio.lowlevel.checkpoint()

    def _push_some(self) -> bool:
        """Begin what one turn allows; true when there is more that could be begun."""
        room = self._turn_bytes
        while room > 0 and not self.is_stalled:
            flight = self._next_flight()
            if flight is None:
                break
            self._push(flight)
            room -= flight.left
        begin_s = time.perf_counter()
        is_taken = self._queue.submit()
        took_s, given = time.perf_counter() - begin_s, self._turn_bytes - room
        self._turn_bytes = turn_bytes(self._turn_bytes, given, took_s)
        return not is_taken or room <= 0

    def _next_flight(self) -> _Flight | None:
        if self._again:
            return self._again.popleft()
        for is_write, (small, large) in enumerate(self._waiting):
            lane = small or large
            if not lane or self._under_way[is_write] >= self._queue.depths[is_write]:
                continue
            job = lane[0]
            index, transfers = job.begun, job.transfers
            job.begun += 1
            if job.begun == len(transfers.offsets):
                lane.popleft()
            self._under_way[is_write] += 1
            pieces = transfers.pieces[transfers.first.item(index) : transfers.first.item(index + 1)]
            left = int(pieces[:, 1].sum())
            return _Flight(job, index, pieces, transfers.offsets.item(index), left, 0.0)
        return None

    def _push(self, flight: _Flight) -> None:
        ticket = self._next_ticket
        self._next_ticket += 1
        flight.begin_s = trio.current_time()
        self._live[ticket] = flight
        is_write = flight.job.transfers.is_write
        self._queue.push(ticket, flight.offset, flight.pieces, is_write=is_write)

    # -- ending

    async def _reap(self) -> None:
        """Deliver what has ended, whenever something has."""
        while True:
            await trio.lowlevel.wait_readable(self._queue.event_fd)
            with suppress(BlockingIOError):
                os.eventfd_read(self._queue.event_fd)  # before reaping, so that no event is lost
            sleeper = None if self._is_feed_wanted else self._feeder
            if sleeper is not None:
                self._feeder = None  # what takes the place of the ended needs no turn of its own
            self._deliver()
            if sleeper is not None:
                is_wanted = self._is_feed_wanted and self._push_some()
                self._feeder, self._is_feed_wanted = sleeper, False
                if is_wanted:
                    self._want_feed()

    def _deliver(self) -> None:
        for ticket, outcome_ in self._queue.reap():
            flight = self._live.pop(ticket, None)
            if flight is not None and not self.is_stalled:
                self._land(flight, outcome_)
        if self._is_closed and not self._live:
            self._is_idle.set()

    def _land(self, flight: _Flight, got: int) -> None:
        """The queue has answered for an operation."""
        if got in {-errno.EAGAIN, -errno.EINTR} and flight.retries < RETRIES_MAX:
            flight.retries += 1
            self._begin_again(flight)
        elif got < 0:
            self._end(flight, -got)
        elif got == 0:
            self._end(flight, errno.EIO)  # past the end of what should be there
        elif got < flight.left:
            flight.pieces = _rest(flight.pieces, got)
            flight.offset += got
            flight.left -= got
            self._begin_again(flight)
        else:
            self._end(flight, 0)

    def _begin_again(self, flight: _Flight) -> None:
        if flight.job.raise_cancel is not None:
            self._end(flight, errno.ECANCELED)
        else:
            self._again.append(flight)
            self._want_feed()

    def _end(self, flight: _Flight, result: int) -> None:
        job = flight.job
        self._under_way[job.transfers.is_write] -= 1
        job.transfers.results[flight.index] = result
        self._count_ended(job, 1)
        if any(small or large for small, large in self._waiting):
            self._want_feed()

    def _count_ended(self, job: _Job, count: int) -> None:
        job.ended += count
        if job.ended < len(job.transfers.offsets):
            return
        is_cut = job.raise_cancel is not None and bool(
            (job.transfers.results == errno.ECANCELED).any()
        )
        if is_cut and job.raise_cancel is not None:
            trio.lowlevel.reschedule(job.task, outcome.capture(job.raise_cancel))
        else:
            trio.lowlevel.reschedule(job.task)

    def _drop_waiting(self, job: _Job, result: int) -> None:
        """Operations that were not begun never will be; does not wake the caller."""
        for lane in self._waiting[job.transfers.is_write]:
            if job in lane:
                lane.remove(job)
        count = len(job.transfers.offsets) - job.begun
        job.transfers.results[job.begun :] = result
        job.begun += count
        job.ended += count
        for flight in [flight for flight in self._again if flight.job is job]:
            self._again.remove(flight)
            self._under_way[job.transfers.is_write] -= 1
            job.transfers.results[flight.index] = result
            job.ended += 1

    # -- hanging

    async def _watch(self) -> None:
        """Notice an operation that has no answer for `io_s_max`."""
        while True:
            await trio.sleep(self._io_s_max / 4)
            oldest = next(iter(self._live.values()), None)
            if oldest is not None and trio.current_time() - oldest.begin_s > self._io_s_max:
                self._stall()

    def _stall(self) -> None:
        """The disk hangs."""
        if not self.is_stalled:
            self._deliver()
            self._give_up()

    def _give_up(self) -> None:
        """Tell every caller what it can know; nothing is begun any more."""
        if self.is_stalled:
            return
        self.is_stalled = True
        jobs = {id(job): job for lanes in self._waiting for lane in lanes for job in lane}
        jobs |= {id(flight.job): flight.job for flight in self._again}
        jobs |= {id(flight.job): flight.job for flight in self._live.values()}
        self.is_holding |= bool(self._live)
        for flight in self._live.values():
            flight.job.transfers.results[flight.index] = HELD
            flight.job.ended += 1
            _QUARANTINE.append(flight.job.transfers)
        for job in jobs.values():
            self._drop_waiting(job, errno.ESHUTDOWN)
            trio.lowlevel.reschedule(job.task)
        self._is_idle.set()

    async def _drain(self) -> None:
        """Wait until the queue has nothing of ours, or hangs."""
        self._is_closed = True
        if self._live and not self.is_stalled:
            await self._is_idle.wait()


def turn_bytes(before: int, given: int, took_s: float) -> int:
    """What a turn gives to the kernel, after it took so long for `given` bytes."""
    least, most = BYTES_A_TURN
    if given < least:
        return before  # tells nothing
    fits = given * TURN_S / max(took_s, 1e-6)
    return int(min(most, max(least, (before + fits) / 2)))


def _rest(pieces: NDArray[np.uint64], done: int) -> NDArray[np.uint64]:
    """What is left of pieces whose first `done` bytes have been moved."""
    ends = np.cumsum(pieces[:, 1])
    first = int(np.searchsorted(ends, done, side="right"))
    rest = pieces[first:].copy()
    into = np.uint64(done) - (ends[first] - pieces[first, 1])
    rest[0, 0] += into
    rest[0, 1] -= into
    return rest


@asynccontextmanager
async def open_ring(queue: Queue, fd: int, *, io_s_max: float = IO_S_MAX) -> AsyncIterator[Ring]:
    """Serve a ring; leaving the block waits for what is under way, `io_s_max` at most.

    Ownership: closes the queue, not the descriptor.
    """
    assert math.isfinite(io_s_max)
    ring = Ring(queue, fd, io_s_max)
    try:
        async with trio.open_nursery() as nursery:
            service = trio.CancelScope(shield=True)  # callers need answers, whatever ends

            async def serve() -> None:
                try:
                    with service:
                        await ring._serve()  # noqa: SLF001  # made for this
                finally:
                    ring._give_up()  # noqa: SLF001  # nobody waits for what nobody serves

            nursery.start_soon(serve)
            try:
                yield ring
            finally:
                with trio.CancelScope(shield=True):
                    await ring._drain()  # noqa: SLF001
                service.cancel()
    finally:
        queue.close()
