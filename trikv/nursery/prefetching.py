"""Blocks on their way up: reads that requests wait for, and the waiting.

Decided here: in which order disks are read, how many reads are under way, and when a request waits
no longer. This file does not know what is read or how.

| a read | then |
| --- | --- |
| of a request that waits or has just asked | before all others |
| for another node, wanted by no request here | after them, few at once; given up with its loan |
| of a request that has ended | after all; given up when too many wait |
| failed | its blocks are misses, and so is what follows them |
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import trio

from trikv.core.below import Below
from trikv.core.calls import Query
from trikv.core.parts import ReadPart
from trikv.core.words import InstanceName, RequestId
from trikv.nursery.disks import DiskTier

READ_BYTES_MAX: Final = 16 << 20  # of one read: then those who wait are told
READERS: Final = 4  # reads under way on each disk
LIFT_BYTES_MAX: Final = 4 << 20  # of one read for another node: requests here wait for no more
LIFTERS: Final = 2  # of the readers, that may read for other nodes
WAITS_MAX: Final = 256
UNWANTED_MAX: Final = 256
WAIT_S_MAX: Final = 60.0
PATIENCE: Final = 4.0  # an estimate may be so many times too high
GRACE_S: Final = 0.1
NO_REQUEST: Final = RequestId("")


@dataclass(slots=True, eq=False)
class Job:
    """One read that waits for its turn."""

    part: ReadPart
    instance: InstanceName | None
    request: RequestId
    is_lift: bool = False  # for another node


class _Queue:
    """The reads of one disk."""

    def __init__(self) -> None:
        self.wanted: deque[Job] = deque()
        self.lifts: deque[Job] = deque()
        self.unwanted: deque[Job] = deque()
        self.bytes = 0  # waiting and under way, without lifts
        self.lifting = 0  # lifts under way
        self.has_more = trio.Event()

    def tell(self) -> None:
        """All readers that have nothing to do look again."""
        self.has_more.set()
        self.has_more = trio.Event()

    def next(self) -> Job | None:
        if not self.wanted and self.lifts and self.lifting < LIFTERS:
            return self.lifts.popleft()
        return (self.wanted or self.unwanted).popleft() if self.wanted or self.unwanted else None


class Prefetching:
    """Reads of all disks.

    At the bound: a request that would be one too many to wait is answered at once.
    """

    def __init__(self, below: Below, tiers: list[DiskTier]) -> None:
        self.waits = 0
        self.waited_total = 0
        self.given_up_total = 0
        self.others_s: Callable[[], float] = lambda: 0.0  # likewise as `seconds`, of other nodes
        self._below = below
        self._tiers = tiers
        self._queues: list[_Queue] = []
        self._moved = trio.Event()
        self._is_closed = False

    def begin(self, instance: InstanceName | None, request: RequestId) -> None:
        """Queue the reads that a query has prepared, or wants too."""
        if self._below.reading.has_promoted:
            self._below.reading.has_promoted = False
            for queue in self._queues:
                self._promote(queue, instance, request)
        while self._below.begun:
            part = self._below.begun.popleft()
            if self._is_closed:
                self._below.give_up(part)
                continue
            queue = self._queues[part.disk]
            for one in _pieces(part, READ_BYTES_MAX):
                queue.wanted.append(Job(one, instance, request))
                queue.bytes += one.bytes
            queue.tell()

    def lift(self, parts: Iterable[ReadPart]) -> None:
        """Queue reads that another node waits for, until `forgo`."""
        for part in parts:
            if self._is_closed:
                self._below.give_up(part)
                continue
            queue = self._queues[part.disk]
            for one in _pieces(part, LIFT_BYTES_MAX):
                queue.lifts.append(Job(one, None, NO_REQUEST, is_lift=True))
            queue.tell()

    def forgo(self, parts: Iterable[ReadPart]) -> None:
        """The other node waits no more: what was not begun is given up, unless wanted here."""
        for part in parts:
            queue = self._queues[part.disk]
            mine = [one for one in queue.lifts if one.part.landing is part.landing]
            queue.lifts = deque(one for one in queue.lifts if one.part.landing is not part.landing)
            for job in mine:
                self._give_up(queue, job)

    async def moved(self) -> None:
        """Wait until a read has ended, or will not be begun."""
        await self._moved.wait()

    def _promote(self, queue: _Queue, instance: InstanceName | None, request: RequestId) -> None:
        """A request here wants what was to be read for other nodes."""
        others: deque[Job] = deque()
        for job in queue.lifts:
            if self._below.reading.is_wanted(job.part.pool_entries):
                queue.wanted.append(Job(job.part, instance, request))
                queue.bytes += job.part.bytes
            else:
                others.append(job)
        queue.lifts = others

    def seconds(self) -> float:
        """An estimate of how long what was queued takes."""
        pairs = zip(self._tiers, self._queues, strict=True)
        return max(self.others_s(), *(queue.bytes / tier.rate for tier, queue in pairs), 0.0)

    def released(self, instance: InstanceName | None, requests: Iterable[RequestId]) -> None:
        """Requests have ended: what they waited for is read when nobody else wants anything."""
        ended = set(requests)
        for queue in self._queues:
            mine = [one for one in queue.wanted if _is_of(one, instance, ended)]
            if mine:
                others = (one for one in queue.wanted if not _is_of(one, instance, ended))
                queue.wanted = deque(others)
                queue.unwanted += mine
            while len(queue.unwanted) > UNWANTED_MAX:
                self._give_up(queue, queue.unwanted.popleft())

    async def wait(self, call: Query, coming: Callable[[], tuple[int, int]]) -> None:
        """Return when nothing more is coming, waiting pays no more, or the time is over.

        Args:
            call: says how long it may wait.
            coming: how many blocks are at hand, and how many are coming.

        Raises:
            KvError: as `coming` does.
        """
        until_s = trio.current_time() + min(call.wait_s, WAIT_S_MAX)
        if self.waits >= WAITS_MAX:
            return
        self.waits += 1
        self.waited_total += 1
        try:
            with trio.move_on_at(until_s):
                while not self._is_closed and coming()[1] > 0 and self._pays(until_s):
                    await self._moved.wait()
        finally:
            self.waits -= 1

    def _pays(self, until_s: float) -> bool:
        """False when far more is queued than can be read in time, so that most waited in vain."""
        return self.seconds() <= PATIENCE * max(0.0, until_s - trio.current_time()) + GRACE_S

    def close(self) -> None:
        """Nothing more is begun, and nobody waits."""
        self._is_closed = True
        self.tell()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read until cancelled; then every read that waits is given up.

        Cancellation: reads that have begun are waited for.
        """
        self._queues = [_Queue() for _ in self._tiers]
        try:
            async with trio.open_nursery() as nursery:
                for tier, queue in zip(self._tiers, self._queues, strict=True):
                    for _ in range(READERS):
                        nursery.start_soon(self._read, tier, queue)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.close()
            for queue in self._queues:
                for job in (*queue.wanted, *queue.lifts, *queue.unwanted):
                    self._give_up(queue, job)
                queue.wanted.clear()
                queue.lifts.clear()
                queue.unwanted.clear()

    async def _read(self, tier: DiskTier, queue: _Queue) -> None:
        while True:
            job = queue.next()
            if job is None:
                await queue.has_more.wait()
                continue
            queue.lifting += job.is_lift
            try:
                await tier.read(job.part)
            finally:
                self._end(queue, job)
                queue.lifting -= job.is_lift
                self.tell()
            await trio.lowlevel.checkpoint()

    def _end(self, queue: _Queue, job: Job) -> None:
        if not job.is_lift:
            queue.bytes -= job.part.bytes

    def _give_up(self, queue: _Queue, job: Job) -> None:
        self._end(queue, job)
        self.given_up_total += len(job.part.rows)
        self._below.give_up(job.part)
        self.tell()

    def tell(self) -> None:
        """Those who wait look again."""
        self._moved.set()
        self._moved = trio.Event()


def _pieces(part: ReadPart, bytes_max: int) -> Iterator[ReadPart]:
    """A part in reads of at most so many bytes, one block at least."""
    step = max(1, bytes_max // sum(part.landing.lengths))
    for first in range(0, len(part.rows), step):
        yield part.take(np.arange(first, min(first + step, len(part.rows))))


def _is_of(job: Job, instance: InstanceName | None, requests: set[RequestId]) -> bool:
    return job.instance == instance and job.request in requests
