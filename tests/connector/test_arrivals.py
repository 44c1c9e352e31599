"""Words of copies that no forward waits for: believed when they say so, and never otherwise."""

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.connector.doubles import FakeCalls
from trikv.connector import arrivals
from trikv.connector.arrivals import Arrivals
from trikv.connector.calls import Saved, pack
from trikv.connector.jobs import SIGNAL_COUNT, LoadJob, SaveJob
from trikv.connector.link import CallError, LostError, RefusedError
from trikv.connector.worker import WorkerHalf

if TYPE_CHECKING:
    from concurrent.futures import Future

LOG = logging.getLogger("test.arrivals")


class Words:
    """What the GPU has written."""

    def __init__(self) -> None:
        self.values = [0] * 2 * SIGNAL_COUNT

    def read(self) -> list[int]:
        return self.values

    def show(self, marked: LoadJob | SaveJob) -> None:
        self.values[marked.signal - 1] = marked.value


class Rank:
    def __init__(self) -> None:
        self.calls, self.words = FakeCalls(), Words()
        self.half = WorkerHalf(self.calls, LOG)  # type: ignore[arg-type]
        self.half.register("i", 0, {"l": torch.zeros(8, 2, 4, 4)}, 8, 128)
        words = Arrivals(self.words, LOG)  # type: ignore[arg-type]
        self.half._arrivals = self.half._saves.arrivals = words

    def load(self, name: str, *, is_alone: bool = True) -> tuple[LoadJob, "Future[Any]"]:
        """What was sent, and what will be its answer."""
        self.half.start_loads([LoadJob(name, 5, 0, pack([1, 2]), is_alone=is_alone)])
        return self.calls.loads[name]

    def save(self, number: int, name: str = "r", *, is_alone: bool = True) -> tuple[SaveJob, Any]:
        """Likewise."""
        job = SaveJob(number, name, 0, 32, bytes(32), pack([1]), is_alone=is_alone)
        self.half.start_saves([job])
        sent, _, _, answer = self.calls.saves[number]
        return sent, answer

    def report(self) -> dict[int, int]:
        """Saves that are over, as an idle step says it."""
        self.half.finished(is_idle=True)
        report = self.half.take_report()
        return report.answered if report is not None else {}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trikv.connector.worker.IDLE_S", 0.01)


def test_a_load_that_has_come_is_reported_before_its_answer_once() -> None:
    rank = Rank()
    shown, answer = rank.load("a")
    assert SIGNAL_COUNT < shown.signal <= 2 * SIGNAL_COUNT
    assert rank.half.finished(is_idle=True) == (set(), set())
    rank.words.show(shown)
    assert rank.half.finished(is_idle=True) == (set(), {"a"})
    answer.set_result(())
    assert rank.half.finished(is_idle=True) == (set(), set())
    assert rank.half.take_invalid() == set()
    assert rank.half.tally.take()["loaded_blocks"] == 2


def test_what_is_missing_is_said_by_the_answer() -> None:
    rank = Rank()
    _, answer = rank.load("a")
    answer.set_result((1,))
    assert rank.half.finished(is_idle=True) == (set(), {"a"})
    assert rank.half.take_invalid() == {2}


def test_a_load_of_a_lost_session_has_come_when_its_word_says_so() -> None:
    rank = Rank()
    shown, answer = rank.load("a")
    answer.set_exception(LostError("cut"))
    assert rank.half.finished(is_idle=True) == (set(), set())  # it may still be written
    rank.words.show(shown)
    assert rank.half.finished(is_idle=True) == (set(), {"a"})
    assert rank.half.take_invalid() == set()


def test_a_word_is_given_again_with_another_value_and_only_after_the_answer() -> None:
    rank = Rank()
    first, answer = rank.load("a")
    given = {rank.load(f"other {n}")[0].signal for n in range(SIGNAL_COUNT - 1)}
    assert len(given | {first.signal}) == SIGNAL_COUNT
    assert rank.load("one more")[0].signal == 0
    rank.words.show(first)
    assert rank.half.finished(is_idle=True)[1] == {"a"}
    assert rank.load("and one")[0].signal == 0  # the answer is still out
    answer.set_result(())
    again, _ = rank.load("b")
    assert again.signal == first.signal
    assert again.value != first.value
    rank.words.show(first)  # late
    assert rank.half.finished(is_idle=True) == (set(), set())
    rank.words.show(again)
    assert rank.half.finished(is_idle=True) == (set(), {"b"})


def test_only_an_engine_that_computes_nothing_gives_words() -> None:
    rank = Rank()
    assert rank.load("a", is_alone=False)[0].signal == 0
    rank.half._arrivals = Arrivals(None, LOG)
    assert rank.load("b")[0].signal == 0


def test_values_begin_again_before_they_have_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "VALUE_MAX", 3)
    rank = Rank()
    assert [rank.load(f"{n}")[0].value for n in range(5)] == [1, 2, 3, 1, 2]


def test_words_that_cannot_be_read_cost_time_only(caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank()
    _, answer = rank.load("a")

    def fail() -> list[int]:
        raise RuntimeError("called a synchronizing CUDA operation")

    rank.words.read = fail  # type: ignore[method-assign]
    assert rank.half.finished(is_idle=True) == (set(), set())
    assert "words cannot be read" in caplog.text
    answer.set_result(())
    assert rank.half.finished(is_idle=True) == (set(), {"a"})
    assert rank.load("b")[0].signal == 0


def test_a_load_that_was_sent_ahead_may_have_come_before_its_step() -> None:
    rank = Rank()
    job = LoadJob("a", 5, 0, pack([1, 2]), is_alone=True)
    assert rank.half.begin(job)
    shown, _ = rank.calls.loads["a"]
    rank.words.show(shown)
    assert rank.half.finished(is_idle=True) == (set(), set())  # its step has not begun
    rank.half.start_loads([job])
    assert rank.half.finished(is_idle=True) == (set(), {"a"})


def test_a_save_is_over_when_its_word_says_so_and_counted_when_it_is_answered() -> None:
    rank = Rank()
    (first, answer), (second, other) = rank.save(1), rank.save(2)
    assert {first.signal, second.signal} == {SIGNAL_COUNT + 1, SIGNAL_COUNT + 2}
    assert rank.report() == {}
    rank.words.show(first)
    assert rank.report() == {1: 1}
    assert rank.report() == {}
    assert rank.half.tally.take() == {}
    answer.set_result(Saved(1, 0, 0))
    assert rank.report() == {}
    assert rank.half.tally.take() == {"saved_blocks": 1}
    other.set_result(Saved(0, 1, 0))
    assert rank.report() == {2: 1}
    assert rank.half.tally.take() == {"present_blocks": 1}
    assert len(rank.half._fences._free) == rank.half._fences.count


@pytest.mark.parametrize("error", [LostError("cut"), RefusedError("overloaded", "")])
def test_what_becomes_of_a_save_that_is_over_costs_nobody_anything(error: CallError) -> None:
    rank = Rank()
    shown, answer = rank.save(1)
    rank.words.show(shown)
    assert rank.report() == {1: 1}
    answer.set_exception(error)
    assert rank.report() == {}
    assert "saves_voided" not in rank.half.tally.total


def test_an_ended_request_s_blocks_are_kept_until_its_save_has_read_them() -> None:
    rank = Rank()
    shown, _ = rank.save(1)
    rank.half.delay(["r"])
    assert rank.half.finished(is_idle=True) == (set(), set())
    rank.words.show(shown)
    assert rank.half.finished(is_idle=True) == ({"r"}, set())


def test_the_word_of_a_save_that_was_made_void_says_nothing() -> None:
    rank = Rank()
    shown, answer = rank.save(1)
    rank.half.void(["r"])
    assert rank.report() == {1: 1}
    rank.words.show(shown)
    again, _ = rank.save(2)
    assert again.signal != shown.signal  # its answer is still out
    assert rank.report() == {}
    answer.set_result(Saved(0, 0, 1))
    assert rank.report() == {}


def test_a_save_of_a_step_with_others_has_no_word() -> None:
    assert Rank().save(1, is_alone=False)[0].signal == 0
