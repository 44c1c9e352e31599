"""What comes in a row: a daemon's end, a preemption or a reset, and what was begun before it."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.connector.doubles import Attachment
from tests.connector.test_scheduler_half import Bench, request, step_output
from tests.integration import disks
from tests.integration.daemons import attached, start_daemon
from trikv.connector.calls import unpack


def test_what_a_daemon_has_promised_is_not_asked_of_the_next_one() -> None:
    """Its number may be that of another request's lease there."""
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3)
    assert bench.half.matched(one, 0) == (12, True)
    bench.calls.attached = Attachment(2)
    assert bench.half.matched(one, 0) == (None, False)
    bench.answer(2, lease=10)
    assert bench.half.matched(one, 0) == (8, True)
    bench.calls.attached = None
    assert bench.half.matched(one, 0) == (0, False)


def test_no_two_daemons_give_a_lease_the_same_number(start: Start, tmp_path: Path) -> None:
    async def lease() -> int:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            await disks.save(engine, "a", 8)
            return int((await disks.ask(engine, "a", "r", 8)).lease)

    numbers = []
    for _ in range(3):
        daemon = start_daemon(start, tmp_path, "--pool-size", "16mb")
        numbers.append(asyncio.run(lease()))
        daemon.end(signal.SIGKILL)
    assert all(number > 1 << 32 for number in numbers), numbers
    assert len(set(numbers)) == len(numbers)


def run(bench: Bench, name: str, **more: Any) -> Any:
    """One step in which a request runs."""
    return bench.half.step(step_output(scheduled={name: 22}, **more))


def saving() -> tuple[Bench, Any]:
    """A request whose blocks are being saved."""
    bench = Bench()
    one = request(num_preemptions=0)
    bench.half.add(one)
    bench.answer(0)
    (save,) = run(bench, "r", new={"r": (list(range(1, 7)), 0)}).saves
    assert unpack(save.blocks) == [1, 2, 3, 4, 5]
    return bench, one


def test_a_preemption_that_nobody_names_voids_saves() -> None:
    """As of vLLM 0.20 by a reset; the request has new blocks later, and is saved again."""
    bench, one = saving()
    one.num_preemptions = 1
    assert bench.half.step(step_output()).preempted == {"r"}
    assert bench.half.step(step_output()).preempted == frozenset()
    jobs = run(bench, "r", cached={"r": ([10, 11, 12, 13, 14, 15], 0)}, resumed=("r",))
    assert [unpack(save.blocks) for save in jobs.saves] == [[10, 11, 12, 13, 14]]
    assert bench.half.step(step_output()).preempted == frozenset()


def test_a_preemption_that_nobody_names_is_seen_where_the_request_has_ended() -> None:
    bench, one = saving()
    one.num_preemptions = 1
    assert bench.half.finish("r")
    assert bench.half.step(step_output()).preempted == {"r"}


def test_a_named_preemption_is_no_second_one() -> None:
    bench, one = saving()
    one.num_preemptions = 1
    more = {"cached": {"r": (list(range(10, 16)), 0)}, "resumed": ("r",), "preempted": ("r",)}
    assert run(bench, "r", **more).preempted == {"r"}
    assert bench.half.step(step_output()).preempted == frozenset()


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("is_loading", [False, True])
def test_what_was_there_before_a_reset_is_not_saved_after(
    *, is_loading: bool, is_named: bool
) -> None:
    """Else it came back under the new name. What is computed again is."""
    bench = Bench()
    one = request(num_preemptions=0)
    bench.half.add(one)
    bench.answer(3 if is_loading else 0)
    if is_loading:
        assert bench.half.matched(one, 0) == (12, True)
        bench.half.admit(one, range(1, 7), 12)
    else:
        assert run(bench, "r", new={"r": (list(range(1, 7)), 0)}).saves
    bench.half.forget(0.0)
    bench.calls.resets[0].set_result(5)
    assert bench.half.matched(request("other"), 0) == (None, False)  # it is settled
    if is_loading:
        bench.half.update(None, ["r"], [], frozenset())
        assert run(bench, "r", new={"r": (list(range(1, 7)), 12)}).saves == ()
    assert run(bench, "r", cached={"r": ([7], 22)}).saves == ()
    one.num_preemptions = 1
    bench.half.step(step_output(preempted=("r",) if is_named else ()))
    jobs = run(bench, "r", cached={"r": (list(range(10, 16)), 0)}, resumed=("r",))
    assert [unpack(save.blocks) for save in jobs.saves] == [[10, 11, 12, 13, 14]]


def test_a_save_says_of_which_weights_its_blocks_are() -> None:
    """The daemon refuses those of others, however late they come."""
    bench = Bench()
    said = []
    for name in ("a", "b"):
        bench.half.add(request(name))
        bench.answer(0)
        jobs = run(bench, name, new={name: (list(range(1, 7)), 0)})
        said.append([save.altered for save in jobs.saves])
        bench.half.forget(0.0)
        bench.calls.resets[-1].set_result(5)
        assert bench.half.matched(request("other"), 0) == (None, False)  # it is settled
    assert said == [[""], bench.calls.altered[:1]]
