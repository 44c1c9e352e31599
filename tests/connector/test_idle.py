"""While an engine computes nothing, both halves wait a moment for an answer; never else."""

import itertools
import threading
import time

import pytest

from tests.connector.test_scheduler_half import TOKENS, Bench, request, run_prompt, step_output
from tests.connector.test_worker_half import Rank
from trikv.connector import lookups
from trikv.connector.jobs import IDLE_S


def test_an_idle_step_waits_a_moment_for_a_load_and_a_busy_one_does_not() -> None:
    rank = Rank()
    rank.load("r")
    _, future = rank.calls.loads["r"]
    begin_s = time.perf_counter()
    assert rank.half.finished() == (set(), set())
    assert rank.half.finished(is_idle=True) == (set(), set())
    assert time.perf_counter() - begin_s >= IDLE_S
    threading.Timer(IDLE_S / 4, future.set_result, [()]).start()
    until_s = time.perf_counter() + 10
    while rank.half.finished(is_idle=True) != (set(), {"r"}):
        assert time.perf_counter() < until_s


def test_an_idle_engine_waits_a_moment_for_the_answer_once() -> None:
    bench = Bench()
    other = request("s")
    bench.half.step(step_output(scheduled={"q": 5}))
    bench.half.step(step_output())
    bench.half.add(other)
    begin_s = time.perf_counter()
    assert bench.half.matched(other, 0) == (None, False)
    assert time.perf_counter() - begin_s >= IDLE_S
    for number in itertools.count():
        third = request(f"t{number}")
        bench.half.add(third)
        at = len(bench.calls.queries) - 1  # this one's, however late the timer
        timer = threading.Timer(IDLE_S / 4, bench.answer, [3], {"at": at})
        timer.start()
        answer = bench.half.matched(third, 0)
        timer.join()
        if answer != (None, False):  # unless the timer was late
            break
    assert answer == (3 * TOKENS, True)


@pytest.mark.parametrize("has_computed", [False, True])
def test_an_engine_whose_requests_have_ended_waits(
    monkeypatch: pytest.MonkeyPatch, *, has_computed: bool
) -> None:
    """Its last step computed something, and yet it has nothing else to do now."""
    monkeypatch.setattr(lookups, "IDLE_S", 20.0)
    bench = Bench()
    if has_computed:
        bench.half.add(request("q"))
        bench.half.step(step_output(scheduled={"q": 5}))
        bench.half.finish("q")
    one = request("r")
    bench.half.add(one)
    at = len(bench.calls.queries) - 1
    timer = threading.Timer(0.02, bench.answer, [3], {"at": at})
    timer.start()
    assert bench.half.matched(one, 0) == (3 * TOKENS, True)


def test_a_busy_engine_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_s = 20.0
    monkeypatch.setattr(lookups, "IDLE_S", wait_s)
    bench = Bench()
    bench.half.step(step_output(scheduled={"q": 5}))
    one = request("u")
    bench.half.add(one)
    begin_s = time.perf_counter()
    assert bench.half.matched(one, 0) == (None, False)
    assert time.perf_counter() - begin_s < wait_s


def test_a_query_says_whether_what_it_finds_is_loaded_at_once() -> None:
    """Copiers then begin with it before they know the blocks; a busy engine gains nothing by it."""
    bench = Bench()
    bench.half.add(request("q"))
    bench.half.step(step_output(scheduled={"q": 5}))
    bench.half.add(request("r"))
    bench.half.finish("q")
    bench.half.finish("r")
    bench.half.add(request("s"))
    assert bench.calls.alone == [True, False, True]


def test_a_save_of_a_step_for_itself_may_be_the_last_thing_the_engine_does() -> None:
    """Its end is seen sooner then; see `Arrivals`."""
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.half.add(request("s"))
    (job,) = run_prompt(bench, one, scheduled=9).saves
    assert job.is_alone
    output = step_output(cached={"r": (None, 9)}, scheduled={"r": 13, "s": 1})
    (job,) = bench.half.step(output).saves
    assert not job.is_alone
