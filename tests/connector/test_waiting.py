"""Blocks that come up from a disk: the request waits for them, bounded, and never the scheduler."""

import pytest

from tests.connector.test_scheduler_half import Bench, request, step_output


def test_a_request_waits_for_what_is_coming() -> None:
    bench = Bench(load_wait_s=2.0)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=(3, 0.5))
    assert bench.half.matched(one, 0) == (None, False)
    assert bench.calls.waits == [0.0, 2.0]
    bench.now_s += 1.9
    assert bench.half.matched(one, 0) == (None, False)
    assert len(bench.calls.queries) == 2
    bench.answer(4, lease=10)
    assert bench.half.matched(one, 0) == (16, True)


@pytest.mark.parametrize("coming", [(3, 2.1), (0, 0.0)])
def test_what_comes_too_late_is_not_waited_for(coming: tuple[int, float]) -> None:
    bench = Bench(load_wait_s=2.0)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=coming)
    assert bench.half.matched(one, 0) == (4, True)
    assert bench.calls.waits == [0.0]


def test_zero_means_that_nothing_is_waited_for() -> None:
    bench = Bench(load_wait_s=0.0)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=(3, 0.0))
    assert bench.half.matched(one, 0) == (4, True)


def test_what_the_engine_has_itself_is_not_waited_for() -> None:
    bench = Bench(load_wait_s=2.0)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=(2, 0.1))
    assert bench.half.matched(one, 12) == (0, False)
    assert bench.calls.waits == [0.0]
    assert bench.half.matched(one, 8) == (None, False)  # of three blocks it has two


def test_the_wait_is_one_however_often_more_is_coming() -> None:
    bench = Bench(load_wait_s=2.0)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=(4, 0.1))
    assert bench.half.matched(one, 0) == (None, False)
    bench.now_s += 1.5
    bench.answer(2, coming=(3, 0.1))
    assert bench.half.matched(one, 0) == (None, False)
    assert bench.calls.waits == [0.0, 2.0, 0.5]
    bench.now_s += 0.5
    bench.answer(3, coming=(2, 0.1))
    assert bench.half.matched(one, 0) == (12, True)
    assert len(bench.calls.queries) == 3


def test_a_daemon_that_says_nothing_is_given_up() -> None:
    bench = Bench(load_wait_s=2.0, query_s=0.1)
    one = request()
    bench.half.add(one)
    bench.answer(1, coming=(3, 0.5))
    assert bench.half.matched(one, 0) == (None, False)
    bench.now_s += 2.05
    assert bench.half.matched(one, 0) == (None, False)
    bench.now_s += 0.1
    assert bench.half.matched(one, 0) == (0, False)
    assert bench.half.tally.total["queries_late"] == 1
    bench.half.admit(one, [1, 2, 3, 4, 5], 0)  # it is computed; its answer comes in vain
    bench.answer(4)
    jobs = bench.half.step(step_output(new={"r": ([1, 2, 3, 4, 5], 0)}, scheduled={"r": 22}))
    assert [job.first for job in jobs.saves] == [4]


def test_an_idle_engine_waits_a_moment_a_step_not_one_a_request() -> None:
    bench = Bench(load_wait_s=2.0)
    bench.half.step(step_output())  # computed nothing
    names = [request(str(number)) for number in range(50)]
    for one in names:
        bench.half.add(one)
        bench.answer(1, coming=(3, 0.5))
        assert bench.half.matched(one, 0) == (None, False)
    moments = []
    half = bench.half._lookups
    half.has_waited = False
    for one in names:
        before = half.has_waited
        assert bench.half.matched(one, 0) == (None, False)
        moments.append(half.has_waited and not before)
    assert sum(moments) == 1


def test_a_request_without_room_lets_those_behind_it_go_first_where_nothing_runs() -> None:
    """Else it waits for ever for blocks of loads that have come: vLLM never looks at those."""
    bench = Bench()
    one, other = request(), request("other")
    bench.half.add(one)
    bench.answer(3)
    for _ in range(3):
        assert bench.half.matched(one, 0) == (12, True)
        bench.half.step(step_output())  # it found no room
        assert bench.half.matched(one, 0) == (None, False)
        bench.half.step(step_output())
    assert bench.half.matched(one, 0) == (12, True)
    bench.half.step(step_output(scheduled={"other": 1}))  # somebody runs, and will make room
    assert bench.half.matched(one, 0) == (12, True)
    bench.half.admit(one, range(1, 4), 12)
    bench.half.step(step_output())
    assert bench.half.matched(one, 0) == (0, False)  # its load is under way
    bench.half.step(step_output())
    bench.half.add(other)
    assert bench.half.matched(other, 0) == (None, False)  # nobody has answered yet
    bench.half.step(step_output())
    bench.answer(0)
    assert bench.half.matched(other, 0) == (0, False)
    bench.half.step(step_output())
    assert bench.half.matched(other, 0) == (None, False), "also one that is computed"
