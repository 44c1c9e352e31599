"""Loads that a forward waits for: when they are chosen, and that no step ends on missing blocks."""

import logging
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.connector.daemons import PATIENCE_S
from tests.connector.doubles import Attachment, FakeCalls
from trikv.connector import overlap
from trikv.connector.calls import Answer, pack
from trikv.connector.guards import guarded
from trikv.connector.holding import Holding
from trikv.connector.jobs import SIGNAL_COUNT, LoadJob, SaveJob
from trikv.connector.layers import LoadLostError
from trikv.connector.link import LateError, LostError, RefusedError
from trikv.connector.worker import WorkerHalf

LOG = logging.getLogger("test.overlap")
JOB = LoadJob("r", 5, 1, pack([4, 5]), signal=3, value=9, hash_bytes=32, hashes=bytes(96))


class Words:
    """A stream that waits: what was held, and what was written."""

    def __init__(self) -> None:
        self.held: list[tuple[int, int]] = []
        self.written: list[tuple[int, int]] = []

    def hold(self, number: int, value: int) -> None:
        self.held.append((number, value))

    def write(self, number: int, value: int) -> None:
        self.written.append((number, value))


class Rank:
    def __init__(self, *, on_gpu: bool = True) -> None:
        self.calls = FakeCalls()
        self.half = WorkerHalf(self.calls, LOG)  # type: ignore[arg-type]
        self.half.register("i", 0, {"l": torch.zeros(8, 2, 4, 4)}, 8, 128)
        self.words = Words()
        if on_gpu:
            self.half._overlap.words = self.words
        self.half._overlap._recover_s = 5.0

    def answer(self, request: str, outcome: Any) -> None:
        """Answer a load as soon as it is asked for, from another thread."""

        def run() -> None:
            until_s = time.monotonic() + PATIENCE_S
            while request not in self.calls.loads and time.monotonic() < until_s:
                time.sleep(0.001)
            future = self.calls.loads[request][1]
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        threading.Thread(target=run, daemon=True).start()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "RETRY_S", 0.001)


def found(count: int) -> "Future[Answer]":
    future: Future[Answer] = Future()
    future.set_result(Answer(count, 77, 30.0))
    return future


def test_the_stream_waits_and_the_step_ends_with_the_load() -> None:
    rank = Rank()
    rank.half.start_loads([JOB])
    assert rank.words.held == [(3, 9)]
    assert rank.calls.loads["r"][0].signal == 3
    assert rank.words.written == []
    rank.answer("r", ())
    assert rank.half.finished() == (set(), set())  # vLLM hears of no load that it did not wait for
    assert rank.words.written == [(3, 9)]
    assert rank.half.take_invalid() == set()
    assert rank.half.tally.take()["loaded_blocks"] == 2


def test_without_words_the_forward_waits_on_the_thread() -> None:
    rank = Rank(on_gpu=False)
    rank.answer("r", ())
    rank.half.start_loads([JOB])  # returns when the blocks are there
    assert rank.calls.loads["r"][0].signal == 0
    assert rank.calls.loads["r"][1].done()


@pytest.mark.parametrize(
    "outcome", [(1,), RefusedError("lease-lost", ""), LostError("the daemon has ended")]
)
def test_a_load_that_fails_is_tried_again_by_name(outcome: Any) -> None:
    rank = Rank()
    asked: list[tuple[str, int, bytes]] = []

    def query(request: str, size: int, hashes: bytes, *_: Any) -> Any:
        asked.append((request, size, hashes))
        return found(2 if len(asked) == 1 else 3)  # at first not all of them are back

    rank.calls.query = query  # type: ignore[method-assign]
    rank.half.start_loads([JOB])
    first = rank.calls.attached
    rank.calls.attached = Attachment(number=2, epoch=7)  # the same daemon took this rank again
    rank.answer("r", outcome)
    rank.answer("again/r", ())
    assert rank.half.finished() == (set(), set())
    assert rank.half.take_invalid() == set()
    assert asked == [("again/r", 32, bytes(96))] * 2
    again = rank.calls.loads["again/r"][0]
    assert (again.lease, again.first, again.blocks, again.signal) == (77, 1, JOB.blocks, 0)
    assert rank.words.written == [(3, 9)]
    assert rank.calls.released[-1] == "again/r"
    assert first is not rank.calls.attached


def test_a_query_without_an_answer_is_asked_again_as_it_writes_nothing() -> None:
    """Its session lives on: nobody would ever say that it is over."""
    rank = Rank()
    late: Future[Answer] = Future()
    late.set_exception(LateError("query was not answered in time"))
    answers = [late, found(3)]
    rank.calls.query = lambda *_: answers.pop(0)  # type: ignore[method-assign]
    rank.half.start_loads([JOB])
    rank.answer("r", (1,))
    rank.answer("again/r", ())
    thread = threading.Thread(target=rank.half.finished, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert rank.words.written == [(3, 9)]


def test_a_step_does_not_end_while_a_lost_load_may_still_write() -> None:
    rank = Rank()
    rank.calls.query = lambda *_: found(3)  # type: ignore[method-assign]
    via = rank.calls.attached
    rank.half.start_loads([JOB])
    rank.answer("r", LostError("cut"))
    rank.answer("again/r", ())
    rank.calls.attached = Attachment(number=2, epoch=8)  # another daemon: no proof
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (rank.half.finished(), ended.set()), daemon=True)
    thread.start()
    assert not ended.wait(0.2)
    assert rank.words.written == []
    via.watch.dead = True
    assert ended.wait(PATIENCE_S)
    assert rank.half.take_invalid() == set()


def test_blocks_that_stay_away_end_the_step_with_an_error_that_no_hook_swallows() -> None:
    rank = Rank()
    rank.half._overlap._recover_s = 0.01
    rank.calls.query = lambda *_: found(0)  # type: ignore[method-assign]
    rank.half.start_loads([JOB])
    rank.answer("r", (0,))
    hook = guarded(lambda: (None, None))(lambda _self: rank.half.finished())
    with pytest.raises(LoadLostError, match="request r"):
        hook(SimpleNamespace(note_failure=lambda _: None))
    assert rank.words.written == [(3, 9)]  # the GPU is not left waiting


def test_a_stream_that_cannot_be_made_to_wait_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its forward would read blocks before they are there, and the step would never end."""
    rank = Rank()

    def fail(_number: int, _value: int) -> None:
        raise OSError("CUDA error 700")

    monkeypatch.setattr(rank.words, "hold", fail)
    hook = guarded(lambda: None)(lambda _self: rank.half.start_loads([JOB]))
    with pytest.raises(LoadLostError, match="request r"):
        hook(SimpleNamespace(note_failure=lambda _: None))
    rank.half.start_saves([SaveJob(1, "s", 0, 32, bytes(32), pack([4]))])
    assert not rank.calls.saves


def test_a_load_that_cannot_be_sent_is_tried_again_too() -> None:
    rank = Rank()
    rank.half._overlap._recover_s = 0.01
    rank.calls.attached = None
    rank.half.start_loads([JOB])
    with pytest.raises(LoadLostError):
        rank.half.finished()
    assert rank.half.take_invalid() == {4, 5}


def test_a_forward_waits_only_where_nobody_else_does() -> None:
    holding = Holding(0.025, 1_000_000)  # a thousand blocks
    assert holding.may_hold(1_000)
    assert not holding.may_hold(1_001)
    holding.take()
    assert not holding.may_hold(1)  # one a step
    holding.stepped(["a"])
    assert not holding.may_hold(1)  # a computes
    holding.stepped([])
    assert not holding.may_hold(1)  # and still does, a step later
    holding.stopped("a")
    assert holding.may_hold(1)
    holding.began_load("b")
    assert not holding.may_hold(1)
    holding.ended_load("b")
    assert holding.may_hold(1)
    assert not Holding(0.0, 1_000_000).may_hold(1)


def test_words_are_used_in_turns_with_values_that_grow() -> None:
    holding = Holding(1.0, 1)
    taken = [holding.take() for _ in range(3 * SIGNAL_COUNT)]
    last: dict[int, int] = {}
    for number, value in taken:
        assert 1 <= number <= SIGNAL_COUNT
        assert value > last.get(number, 1)
        last[number] = value


def test_a_load_may_be_sent_ahead_of_its_step_once() -> None:
    rank = Rank()
    rank.half.begin(JOB)
    assert rank.calls.loads["r"][0].signal == 3
    assert rank.words.held == []
    rank.calls.loads["r"][1].set_result(())
    first = rank.calls.loads.pop("r")
    rank.half.start_loads([JOB])
    assert "r" not in rank.calls.loads  # it is not sent again
    assert rank.words.held == [(3, 9)]
    assert rank.half.finished() == (set(), set())
    assert first[1].done()


def test_no_load_is_sent_ahead_while_a_save_may_read_its_blocks() -> None:
    """The step would raise the save's fence first; a load sent before would alter what it reads."""
    rank = Rank()
    rank.half.start_saves([SaveJob(1, "s", 0, 32, bytes(32), pack([4]))])
    rank.half.begin(JOB)
    assert not rank.calls.loads
    rank.half.void(["s"])
    rank.half.start_loads([JOB])
    assert "r" in rank.calls.loads
    rank.answer("r", ())
    assert rank.half.finished() == (set(), set())


def test_loads_that_wait_for_the_engine_s_work_are_not_sent_ahead() -> None:
    half = WorkerHalf(FakeCalls(), LOG, orders_loads=True)  # type: ignore[arg-type]
    half.register("i", 0, {"l": torch.zeros(8, 2, 4, 4)}, 8, 128)
    half.begin(JOB)
    assert not half._calls.loads  # type: ignore[attr-defined]
