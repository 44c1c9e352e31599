"""A reset that does not reach the daemon is owed: nothing is promised until it has been done."""

from typing import Any

import pytest

from tests.connector.test_scheduler_half import Bench, request
from trikv.connector.link import AbsentError, CallError, LateError


def reset_that_ends(bench: Bench, outcome: Any) -> None:
    """Make the next resets end at once."""
    make = bench.calls.reset

    def reset(altered: str) -> Any:
        future = make(altered)
        if isinstance(outcome, CallError):
            future.set_exception(outcome)
        elif outcome is not None:
            future.set_result(outcome)
        return future

    bench.calls.reset = reset  # type: ignore[method-assign]


def test_a_reset_that_is_done_changes_nothing_else() -> None:
    bench = Bench()
    reset_that_ends(bench, 5)
    assert bench.half.forget(1.0) is True
    assert bench.half.matched(request(), 0) == (None, False)
    assert len(bench.calls.queries) == 1


@pytest.mark.parametrize("error", [AbsentError("nobody"), LateError("late"), None])
def test_nothing_is_promised_until_a_reset_was_answered(error: CallError | None) -> None:
    bench = Bench()
    reset_that_ends(bench, error)
    assert bench.half.forget(0.01) is False
    assert bench.half.matched(request("a"), 0) == (0, False)
    assert bench.calls.queries == []
    assert len(bench.calls.resets) == 1, "not asked again at each look"
    bench.now_s += 1.0
    assert bench.half.matched(request("b"), 0) == (0, False)
    if error is None:  # it was only late
        assert len(bench.calls.resets) == 1
        bench.calls.resets[0].set_result(3)
    else:
        assert len(bench.calls.resets) == 2
        bench.now_s += 1.0
        bench.calls.reset = type(bench.calls).reset.__get__(bench.calls)  # type: ignore[method-assign]
        bench.half.matched(request("c"), 0)
        bench.calls.resets[-1].set_result(3)
    assert bench.half.matched(request("d"), 0) == (None, False)
    assert len(bench.calls.queries) == 1


def test_what_was_found_before_is_not_promised_after() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(5)
    assert bench.half.matched(one, 0) == (20, True)
    reset_that_ends(bench, AbsentError("nobody"))
    assert bench.half.forget(1.0) is False
    assert bench.half.matched(one, 0) == (0, False)


def test_its_name_has_changed_as_soon_as_a_reset_was_answered_and_not_before() -> None:
    """A daemon that restarts in between must be told the name under which its blocks are."""
    bench = Bench()
    assert bench.half.altered == ""
    bench.half.forget(0.0)
    assert bench.half.altered == ""  # the blocks of this name are still to be forgotten
    bench.now_s += 1.0
    bench.calls.resets[0].set_exception(AbsentError("nobody"))
    bench.half.matched(request("a"), 0)
    assert bench.half.altered == ""
    bench.calls.resets[1].set_result(3)
    first = bench.half.altered
    assert bench.calls.altered == [first, first]
    bench.half.forget(0.0)
    bench.calls.resets[2].set_result(0)
    assert bench.half.altered == bench.calls.altered[2] != first
