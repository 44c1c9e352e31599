"""The worker's half by itself: when it may say that a copy has ended."""

import ctypes
import logging
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.connector.doubles import Attachment, FakeCalls
from trikv.connector.calls import Saved, pack
from trikv.connector.fences import Fences
from trikv.connector.jobs import LoadJob, SaveJob
from trikv.connector.link import AbsentError, LostError, RefusedError
from trikv.connector.worker import WorkerHalf

LOG = logging.getLogger("test.halves")


class Rank:
    """A worker's half with its calls and clock."""

    def __init__(self) -> None:
        self.calls = FakeCalls()
        self.now_s = 100.0
        self.half = WorkerHalf(
            self.calls,  # type: ignore[arg-type]
            LOG,
            save_s=2.0,
            clock=lambda: self.now_s,
        )
        self.half.register("i", 0, {"l": torch.zeros(8, 2, 4, 4)}, 8, 128)

    def load(self, name: str = "r", blocks: tuple[int, ...] = (1, 2, 3), lease: int = 5) -> None:
        self.half.start_loads([LoadJob(name, lease, 0, pack(blocks))])

    def save(self, number: int, name: str = "r") -> None:
        self.half.start_saves([SaveJob(number, name, 0, 32, bytes(32), pack([1]))])


def test_a_load_is_reported_once_with_what_failed() -> None:
    rank = Rank()
    rank.load()
    assert rank.half.finished() == (set(), set())
    rank.calls.loads["r"][1].set_result((0, 2))
    assert rank.half.finished() == (set(), {"r"})
    assert rank.half.take_invalid() == {1, 3}
    assert rank.half.finished() == (set(), set())
    assert rank.half.take_invalid() == set()


@pytest.mark.parametrize("error", [AbsentError("gone"), RefusedError("lease-lost", "")])
def test_a_load_that_was_not_begun_fails_at_once(error: Exception) -> None:
    rank = Rank()
    rank.load()
    rank.calls.loads["r"][1].set_exception(error)
    assert rank.half.finished() == (set(), {"r"})
    assert rank.half.take_invalid() == {1, 2, 3}


def test_loads_without_lease_or_daemon_fail_at_once() -> None:
    rank = Rank()
    rank.load("a", lease=0)
    rank.calls.attached = None
    rank.load("b")
    assert rank.half.finished() == (set(), {"a", "b"})


def test_a_lost_load_waits_for_proof() -> None:
    """A daemon that lives may still write, whatever became of the connection."""
    rank = Rank()
    rank.load()
    rank.calls.loads["r"][1].set_exception(LostError("cut"))
    assert rank.half.finished() == (set(), set())
    rank.calls.attached = None
    rank.now_s += 1e6
    assert rank.half.finished() == (set(), set())
    rank.calls.attached = Attachment(number=2, epoch=8)  # another daemon proves nothing
    assert rank.half.finished() == (set(), set())
    rank.calls.attached = Attachment(number=2, epoch=7)
    assert rank.half.finished() == (set(), {"r"})
    assert rank.half.take_invalid() == {1, 2, 3}


def test_a_lost_load_of_a_dead_daemon_has_ended() -> None:
    rank = Rank()
    via = rank.calls.attached
    rank.load()
    rank.calls.loads["r"][1].set_exception(LostError("cut"))
    rank.calls.attached = None
    assert rank.half.finished() == (set(), set())
    via.watch.dead = True
    assert rank.half.finished() == (set(), {"r"})


def test_a_load_that_cannot_be_sent_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    load = rank.calls.load

    def picky(job: LoadJob, via: Any, budget_s: float, event: int) -> Any:
        if job.request == "a":
            raise MemoryError
        return load(job, via, budget_s, event)

    monkeypatch.setattr(rank.calls, "load", picky)
    jobs = [LoadJob(name, 5, 0, pack([i])) for i, name in enumerate("abc", 1)]
    rank.half.start_loads(jobs)
    for name in "bc":
        rank.calls.loads[name][1].set_result(())
    assert rank.half.finished() == (set(), {"a", "b", "c"})
    assert rank.half.take_invalid() == {1}


def test_an_ended_request_is_reported_when_its_saves_are_answered() -> None:
    rank = Rank()
    rank.save(1)
    rank.save(2)
    rank.half.delay(["r"])
    rank.calls.saves[1][3].set_result(Saved(1, 0, 0))
    assert rank.half.finished() == (set(), set())
    rank.calls.saves[2][3].set_exception(RefusedError("overloaded", ""))
    assert rank.half.finished() == ({"r"}, set())
    assert rank.half.finished() == (set(), set())
    report = rank.half.take_report()
    assert report is not None
    assert report.answered == {1: 1, 2: 1}


def test_an_ended_request_is_not_held_longer_than_allowed() -> None:
    rank = Rank()
    rank.save(1)
    _, fence, generation, _ = rank.calls.saves[1]
    rank.half.delay(["r"])
    rank.now_s += 1.9
    assert rank.half.finished() == (set(), set())
    rank.now_s += 0.2
    assert rank.half.finished() == ({"r"}, set())
    assert rank.half._fences.generation(fence) == generation + 1


def test_an_ended_request_without_saves_is_reported_at_once() -> None:
    rank = Rank()
    rank.half.delay(["r"])
    assert rank.half.finished() == ({"r"}, set())


def test_preemption_raises_the_fence_before_it_returns() -> None:
    rank = Rank()
    rank.save(1)
    _, fence, generation, future = rank.calls.saves[1]
    rank.half.void(["r", "unknown"])
    assert rank.half._fences.generation(fence) == generation + 1
    report = rank.half.take_report()
    assert report is not None
    assert report.answered == {1: 1}
    future.set_result(Saved(0, 0, 1))
    rank.save(2)
    _, fence, generation, _ = rank.calls.saves[2]
    assert rank.half._fences.generation(fence) == generation


def test_a_lost_save_raises_the_fence() -> None:
    rank = Rank()
    rank.save(1)
    _, fence, generation, future = rank.calls.saves[1]
    future.set_exception(LostError("cut"))
    rank.half.delay(["r"])
    assert rank.half.finished() == ({"r"}, set())
    assert rank.half._fences.generation(fence) == generation + 1


def test_saves_without_a_free_fence_are_not_sent() -> None:
    rank = Rank()
    for number in range(1_030):
        rank.save(number, f"r{number}")
    assert len(rank.calls.saves) == 1_024
    report = rank.half.take_report()
    assert report is not None
    assert sorted(report.answered) == list(range(1_024, 1_030))


def test_gpu_memory_that_cannot_be_shared_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    calls = FakeCalls()
    half = WorkerHalf(calls, LOG)  # type: ignore[arg-type]
    tensor = torch.zeros(8, 2, 4, 4)

    class OnDevice:
        """A CPU tensor that says otherwise."""

        device = "cuda:0"

        def __getattr__(self, name: str) -> Any:
            return getattr(tensor, name)

    with caplog.at_level(logging.WARNING):
        half.register("i", 0, {"l": OnDevice()}, 8, 128)  # type: ignore[dict-item]
    assert "CUDA driver cannot be loaded" in caplog.text
    assert "nothing is cached" in caplog.text
    half.start_saves([SaveJob(1, "r", 0, 32, bytes(32), pack([1]))])
    half.start_loads([LoadJob("q", 5, 0, pack([1]))])
    assert not calls.saves
    assert half.finished() == (set(), {"q"})


def test_fences_lie_where_they_say() -> None:
    fences = Fences(16)
    word = fences.take()
    assert word == 0
    fences.lift(0)
    words = (ctypes.c_uint64 * 16).from_address(fences.address)
    assert list(words) == [1] + [0] * 15
    assert fences.address % 8 == 0


class WorkerMachine(RuleBasedStateMachine):
    """Loads, saves, preemptions, losses and endings in any order, against what must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = Rank()
        self.number = 0
        self.loading: set[str] = set()
        self.saving: dict[str, set[int]] = {}
        self.delayed: set[str] = set()
        self.unanswered: set[int] = set()

    names = st.sampled_from("abcd")

    @rule(name=names)
    def load(self, name: str) -> None:
        if name not in self.loading | self.delayed:
            self.rank.load(name)
            self.loading.add(name)

    @rule(name=names)
    def save(self, name: str) -> None:
        if name not in self.loading | self.delayed:
            self.number += 1
            self.unanswered.add(self.number)
            self.rank.save(self.number, name)

    @rule(name=names)
    def preempt(self, name: str) -> None:
        self.rank.half.void([name])
        for job, fence, generation, future in self.rank.calls.saves.values():
            if job.request == name and not future.done():
                assert self.rank.half._fences.generation(fence) > generation

    @rule(name=names)
    def end(self, name: str) -> None:
        if name not in self.loading | self.delayed:
            self.rank.half.delay([name])
            self.delayed.add(name)

    @rule(name=names, is_lost=st.booleans())
    def answer_load(self, name: str, *, is_lost: bool) -> None:
        found = self.rank.calls.loads.get(name)
        if found is not None and not found[1].done():
            if is_lost:
                found[1].set_exception(LostError("cut"))
            else:
                found[1].set_result(())

    @rule(data=st.data(), is_lost=st.booleans())
    def answer_save(self, data: st.DataObject, *, is_lost: bool) -> None:
        waiting = [s for s in self.rank.calls.saves.values() if not s[3].done()]
        if waiting:
            future = data.draw(st.sampled_from(waiting))[3]
            if is_lost:
                future.set_exception(LostError("cut"))
            else:
                future.set_result(Saved(1, 0, 0))

    @rule()
    def reattach(self) -> None:
        self.rank.calls.attached = Attachment(number=self.rank.calls.attached.number + 1)

    @rule(step_s=st.integers(0, 3))
    def time_passes(self, step_s: int) -> None:
        self.rank.now_s += step_s

    @rule()
    def report(self) -> None:
        sent, loaded = self.rank.half.finished()
        assert sent <= self.delayed
        assert loaded <= self.loading
        self.delayed -= sent
        self.loading -= loaded
        report = self.rank.half.take_report()
        if report is not None:
            assert report.answered.keys() <= self.unanswered
            self.unanswered -= report.answered.keys()
        for name in sent:  # nothing can make these saves visible any more
            for job, fence, generation, future in self.rank.calls.saves.values():
                if job.request == name:
                    is_void = self.rank.half._fences.generation(fence) > generation
                    assert future.done() or is_void

    @invariant()
    def fences_are_neither_lost_nor_shared(self) -> None:
        held = [saving.fence for saving in self.rank.half._saves._by_request.values()]
        assert len(set(held)) == len(held)
        assert len(held) + len(self.rank.half._fences._free) == self.rank.half._fences.count

    def teardown(self) -> None:
        """In the end everything is reported."""
        for name in list(self.loading):
            future = self.rank.calls.loads[name][1]
            if not future.done():
                future.set_result(())
        self.reattach()
        self.report()
        self.rank.now_s += 10
        self.report()
        for name in "abcd":
            self.preempt(name)
        self.report()
        assert not self.loading
        assert not self.delayed
        assert not self.unanswered


WorkerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_worker_machine = WorkerMachine.TestCase
