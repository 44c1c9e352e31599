"""The queue of copies alone: who is begun when, who ends how, and each exactly once."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest
import trio
from numpy.typing import NDArray
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.sim.fakes import FakeProcess
from trikv.core.errors import EngineLostError, OverloadedError, ShuttingDownError
from trikv.core.words import SessionId
from trikv.nursery.copying import GUARD_S, Copying, Job, Memory
from trikv.nursery.sessions import Session, Sessions
from trikv.tiers.copies import Copy, Process

BLOCKS = 3
Arrived = NDArray[np.bool_]
ALL, NONE = [True] * BLOCKS, [False] * BLOCKS


@dataclass(eq=False)
class Begun:
    """A copy that somebody else carries out, as the test says."""

    job: Job
    is_stopped: Callable[[], bool]
    ended: Callable[[Arrived], None]
    is_over: bool = False

    def end(self, arrived: list[bool]) -> None:
        self.is_over = True
        self.ended(np.array(arrived))


@dataclass(eq=False)
class ScriptedMemory:
    """Begins copies and leaves their ends to the test."""

    begun: list[Begun] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)  # by the id of the copy
    is_lost: bool = False
    ends_at_once: bool = False
    has_tasks: bool = False
    word: int | None = 7
    release: trio.Event = field(default_factory=trio.Event)

    def begin(
        self, copy: Copy, is_stopped: Callable[[], bool], ended: Callable[[Arrived], None]
    ) -> bool:
        if self.has_tasks:
            return False
        if self.is_lost:
            raise EngineLostError("the copier has ended")
        self.begun.append(Begun(self.jobs[id(copy)], is_stopped, ended))
        if self.ends_at_once:
            self.begun[-1].end(ALL)
        return True

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> Arrived:
        self.begun.append(Begun(self.jobs[id(copy)], is_stopped, lambda _: None))
        await self.release.wait()
        if self.is_lost:
            raise EngineLostError("gone")
        return np.array(NONE if is_stopped() else ALL)

    def read_word(self, process: Process, address: int) -> int | None:
        del process, address
        return self.word


class FakeSessions:
    """Counts the copies of sessions, as the real ones do."""

    def __init__(self) -> None:
        self.ended: list[Session] = []

    def copy_ended(self, session: Session) -> None:
        session.copies -= 1
        self.ended.append(session)


class FakeGuard:
    limit_s = 4.0

    def __init__(self) -> None:
        self.trace: list[str] = []

    def move(self) -> None:
        self.trace.append("move")

    def stop(self) -> None:
        self.trace.append("stop")


@dataclass(eq=False)
class Direction:
    """A `Copying` with everything around it."""

    copying: Copying
    memory: ScriptedMemory
    session: Session
    completed: list[tuple[Job, list[bool]]] = field(default_factory=list)
    told: list[tuple[Job, list[bool]]] = field(default_factory=list)

    def start(self, **facts: Any) -> Job:  # noqa: ANN401  # a job's
        job = self.prepare(**facts)
        self.copying.check_room(self.session)
        self.copying.start(job)
        job.then(lambda arrived: self.told.append((job, arrived.tolist())))
        return job

    def prepare(self, **facts: Any) -> Job:  # noqa: ANN401  # a job's
        process = self.session.process
        assert process is not None
        blocks = np.arange(BLOCKS, dtype=np.int32)
        copy = Copy(
            process, cast("Any", None), blocks, np.zeros(BLOCKS, np.int64), into_engine=True
        )
        job = Job(self.session, copy, lambda arrived: self.complete(job, arrived), **facts)
        self.memory.jobs[id(copy)] = job
        return job

    def complete(self, job: Job, arrived: Arrived) -> None:
        assert all(job is not one for one, _ in self.completed), "completed twice"
        self.completed.append((job, arrived.tolist()))

    def finish(self) -> None:
        """End what runs, and what is begun then."""
        self.memory.ends_at_once = True
        for begun in list(self.memory.begun):
            if not begun.is_over:
                begun.end(NONE)

    @property
    def running(self) -> list[Job]:
        return [one.job for one in self.memory.begun]

    def check_over(self, jobs: list[Job]) -> None:
        """All of them were completed and told, once, with the same outcome."""
        assert sorted(self.told, key=lambda one: id(one[0])) == sorted(
            self.completed, key=lambda one: id(one[0])
        )
        assert {id(job) for job, _ in self.told} == {id(job) for job in jobs}
        assert len(self.told) == len(jobs)
        assert self.session.copies == 0


@asynccontextmanager
async def direction(
    *, at_once: int = 2, queued: int = 8, guard: FakeGuard | None = None
) -> AsyncIterator[Direction]:
    """A direction that runs until the block ends, and is cancelled then."""
    memory, sessions = ScriptedMemory(), FakeSessions()
    copying = Copying(
        "load",
        cast("Memory", memory),
        cast("Sessions", sessions),
        jobs_max=at_once,
        queue_jobs_max=queued,
        guard=guard,
    )
    session = Session(SessionId(1), FakeProcess(1, 64), "test", 0.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(copying.run)
        yield Direction(copying, memory, session)
        nursery.cancel_scope.cancel()


async def test_a_copy_is_begun_in_the_call_and_others_in_their_order() -> None:
    async with direction(at_once=2, queued=16) as one:
        jobs = [one.start() for _ in range(4)]
        assert one.running == jobs[:2]
        one.memory.begun[1].end(ALL)
        assert one.running == jobs[:3]
        assert one.told == one.completed == [(jobs[1], ALL)]
        one.memory.begun[0].end([True, False, True])
        one.memory.begun[2].end(ALL)
        assert one.running == jobs
        one.memory.begun[3].end(ALL)
        one.check_over(jobs)
        assert one.told[1] == (jobs[0], [True, False, True])


async def test_who_asks_late_is_told_at_once() -> None:
    async with direction() as one:
        job = one.prepare()
        one.copying.start(job)
        one.memory.begun[0].end(ALL)
        told: list[list[bool]] = []
        job.then(lambda arrived: told.append(arrived.tolist()))
        assert told == [ALL]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_copies_that_end_as_soon_as_they_are_begun_are_no_recursion(*, is_lost: bool) -> None:
    async with direction(at_once=1, queued=20_000) as one:
        jobs = [one.start() for _ in range(5_000)]
        one.memory.ends_at_once, one.memory.is_lost = True, is_lost
        one.memory.begun[0].end(ALL)
        one.check_over(jobs)
        assert one.told[-1] == (jobs[-1], NONE if is_lost else ALL)


async def test_the_queue_has_a_bound_and_a_session_a_share_of_it() -> None:
    async with direction(at_once=2, queued=8) as one:
        one.start()
        one.start()
        with pytest.raises(OverloadedError, match="of this session"):
            one.copying.check_room(one.session)
        other = Session(SessionId(2), FakeProcess(2, 64), "test", 0.0)
        one.copying.check_room(other)
        for _ in range(8):
            one.copying.start(one.prepare())
        with pytest.raises(OverloadedError, match="8 load copies are waiting"):
            one.copying.check_room(other)
        one.finish()


async def test_a_session_that_closes_between_order_and_report_stops_its_copy() -> None:
    async with direction() as one:
        job = one.start()
        assert not one.memory.begun[0].is_stopped()
        one.session.is_closing = True
        assert one.memory.begun[0].is_stopped()
        assert one.session.copies == 1
        assert not one.completed
        one.memory.begun[0].end([True, False, False])
        one.check_over([job])
        assert one.told == [(job, [True, False, False])]


async def test_a_deadline_stops_a_copy(autojump_clock: MockClock) -> None:
    del autojump_clock
    async with direction() as one:
        one.start(stop_s=trio.current_time() + 5)
        await trio.sleep(4.9)
        assert not one.memory.begun[0].is_stopped()
        await trio.sleep(0.1)
        assert one.memory.begun[0].is_stopped()
        one.finish()


@pytest.mark.parametrize(("word", "outcome"), [(7, ALL), (8, NONE), (None, NONE)])
async def test_bytes_count_while_the_fence_stands(word: int | None, outcome: list[bool]) -> None:
    async with direction() as one:
        job = one.start(fence=(64, 7))
        one.memory.word = word
        one.memory.begun[0].end(ALL)
        assert one.completed == one.told == [(job, outcome)]


@pytest.mark.parametrize("has_tasks", [False, True])
async def test_at_the_end_queued_copies_have_not_arrived_and_others_are_waited_for(
    *, has_tasks: bool
) -> None:
    jobs: list[Job] = []
    async with trio.open_nursery() as nursery:
        async with direction(at_once=2, queued=16) as one:
            one.memory.has_tasks = has_tasks
            jobs = [one.start() for _ in range(4)]
            await wait_all_tasks_blocked()

            async def end_them() -> None:
                await wait_all_tasks_blocked()
                assert one.told == [(job, NONE) for job in jobs[3:1:-1]]  # last in, first out
                with pytest.raises(ShuttingDownError):
                    one.copying.check_room(one.session)
                assert all(begun.is_stopped() for begun in one.memory.begun)
                one.memory.release.set()
                for begun in one.memory.begun:
                    begun.end([True, False, False])

            nursery.start_soon(end_them)
        assert len(one.memory.begun) == 2
        one.check_over(jobs)


async def test_draining_lets_copies_end_and_stopping_hurries_them() -> None:
    async with direction(at_once=1) as one, trio.open_nursery() as nursery:
        jobs = [one.start(), one.start()]
        nursery.start_soon(one.copying.drain)
        await wait_all_tasks_blocked()
        one.copying.stop()
        assert one.memory.begun[0].is_stopped()
        one.memory.begun[0].end(ALL)
        await wait_all_tasks_blocked()
        assert nursery.child_tasks, "one is left"
        one.memory.begun[1].end(NONE)
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks
        one.check_over(jobs)


async def test_a_copy_of_process_memory_has_a_task_and_the_same_bounds() -> None:
    async with direction(at_once=1) as one:
        one.memory.has_tasks = True
        jobs = [one.start(), one.start()]
        await wait_all_tasks_blocked()
        assert one.running == jobs[:1]
        one.memory.release.set()
        await wait_all_tasks_blocked()
        assert one.running == jobs
        assert one.told == [(job, ALL) for job in jobs]
        one.memory.is_lost = True
        jobs.append(one.start())
        await wait_all_tasks_blocked()
        assert one.told[-1] == (jobs[2], NONE)
        one.check_over(jobs)


async def test_a_bug_at_one_end_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with direction(at_once=1) as one:
        jobs = [one.start(), one.start()]

        def broken(*_: object) -> None:
            raise ZeroDivisionError("planted")

        with monkeypatch.context() as patch:
            patch.setattr(one, "complete", broken)
            with pytest.raises(ZeroDivisionError):
                one.memory.begun[0].end(ALL)
        assert one.told == [(jobs[0], ALL)]
        one.memory.begun[1].end(ALL)
        assert one.told[1] == (jobs[1], ALL)
        assert one.session.copies == 0


async def test_the_guard_is_set_once_and_rests_when_there_is_nothing_to_do(
    autojump_clock: MockClock,
) -> None:
    del autojump_clock
    guard = FakeGuard()
    async with direction(guard=guard) as one:
        for _ in range(3):
            one.start()
            one.memory.begun[-1].end(ALL)
        assert guard.trace == ["move"]
        await trio.sleep(1.1 * GUARD_S)
        assert guard.trace == ["move", "stop"]
        one.start()
        await trio.sleep(2 * GUARD_S)
        assert guard.trace == ["move", "stop", "move", "move", "move"]
        one.memory.begun[-1].end(ALL)
        one.start()
        one.memory.begun[-1].end(ALL)
    assert guard.trace[-1] == "stop"
    assert guard.trace.count("stop") == 2
