"""The scheduler's half by itself: fake calls, a clock by hand, and each answer that vLLM gets."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.doubles import Attachment, FakeCalls
from trikv.connector.calls import Answer, unpack
from trikv.connector.holding import Holding
from trikv.connector.jobs import Report, StepJobs
from trikv.connector.scheduler import SAVE_BLOCKS_MAX, SchedulerHalf
from trikv.connector.tracks import Policy

LOG = logging.getLogger("test.halves")
TOKENS = 4


def request(name: str = "r", tokens: int = 22, **more: Any) -> Any:
    hashes = [i.to_bytes(32, "little") for i in range(tokens // TOKENS)]
    return SimpleNamespace(request_id=name, num_tokens=tokens, block_hashes=hashes, **more)


def step_output(
    *,
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    scheduled: dict[str, int] | None = None,
    resumed: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> Any:
    """What vLLM's SchedulerOutput has of interest; blocks and computed tokens by request."""
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[(b,) if b is not None else None for b, _ in cached.values()],
            num_computed_tokens=[computed for _, computed in cached.values()],
        ),
        num_scheduled_tokens=scheduled or {},
        total_num_scheduled_tokens=sum((scheduled or {}).values()),
        preempted_req_ids=set(preempted),
    )


class Bench:
    """A scheduler's half with its calls and clock."""

    def __init__(self, **policy: Any) -> None:
        self.calls = FakeCalls()
        self.now_s = 100.0
        self.half = SchedulerHalf(
            self.calls,  # type: ignore[arg-type]
            Policy(block_tokens=TOKENS, **policy),
            LOG,
            lambda: self.now_s,
        )

    def answer(
        self,
        hits: int,
        *,
        lease: int = 9,
        lease_s: float = 30.0,
        at: int = -1,
        coming: tuple[int, float] = (0, 0.0),
    ) -> None:
        answer = Answer(hits, lease if hits else 0, lease_s, *coming)
        self.calls.queries[at][2].set_result(answer)


def test_a_query_is_started_once_and_answered_when_it_is_there() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    assert bench.half.matched(one, 0) == (None, False)
    assert bench.half.matched(one, 0) == (None, False)
    assert len(bench.calls.queries) == 1
    assert bench.calls.queries[0][1] == b"".join(one.block_hashes)
    bench.answer(3)
    assert bench.half.matched(one, 0) == (12, True)
    assert bench.half.matched(one, 0) == (12, True)
    assert bench.half.matched(one, 8) == (4, True)
    assert bench.half.matched(one, 12) == (0, False)


@pytest.mark.parametrize(
    ("tokens", "loaded", "held"), [(20, 19, 16), (21, 20, 20), (22, 20, 20), (24, 23, 20)]
)
def test_a_token_is_left_to_compute_and_a_block_where_a_forward_waits(
    tokens: int, loaded: int, held: int
) -> None:
    bench = Bench()
    one = request(tokens=tokens)
    bench.half.add(one)
    bench.answer(99)
    assert bench.half.matched(one, 0) == (loaded, True)
    assert bench.half.matched(one, held) == (0, False)  # not worth a load
    bench.half._holding = Holding(1.0, 1)
    assert bench.half.matched(one, 0) == (held, False)


@pytest.mark.parametrize(
    "one",
    [
        request(tokens=3),
        request(tokens=4),
        request(lora_request=object()),
        request(resumable=True),
        request(name="x" * 507),  # a load is tried again as "again/" and this
    ],
)
def test_requests_that_are_not_looked_up(one: Any) -> None:
    bench = Bench()
    bench.half.add(one)
    assert bench.half.matched(one, 0) == (0, False)
    assert not bench.calls.queries


def test_a_late_answer_is_waited_for_once_and_then_less() -> None:
    bench = Bench(query_s=0.1)
    one, two, three = request("1"), request("2"), request("3")
    assert bench.half.matched(one, 0) == (None, False)
    bench.now_s += 0.099
    assert bench.half.matched(one, 0) == (None, False)
    bench.now_s += 0.002
    assert bench.half.matched(one, 0) == (0, False)
    assert bench.half.matched(two, 0) == (None, False)
    bench.now_s += 0.011
    assert bench.half.matched(two, 0) == (0, False)
    bench.answer(2, at=0)  # somebody answers: patience is back
    assert bench.half.matched(three, 0) == (None, False)
    bench.now_s += 0.05
    assert bench.half.matched(three, 0) == (None, False)
    assert bench.half.matched(one, 0) == (8, True)


def test_a_lease_is_renewed_and_not_promised_meanwhile() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3, lease_s=10)
    bench.now_s += 4.9
    assert bench.half.matched(one, 0) == (12, True)
    bench.now_s += 0.2
    assert bench.half.matched(one, 0) == (None, False)
    bench.answer(2, lease=11, lease_s=10)
    assert bench.half.matched(one, 0) == (8, True)
    bench.half.admit(one, range(1, 7), 8)
    (job,) = bench.half.step(step_output()).loads
    assert (job.lease, job.first, unpack(job.blocks)) == (11, 0, [1, 2])


def test_an_expired_lease_is_never_promised() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3, lease_s=10)
    bench.now_s += 9.1
    bench.calls.is_ready = False  # and nobody can be asked
    assert bench.half.matched(one, 0) == (0, False)


def test_the_age_of_a_lease_counts_from_the_question() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.now_s += 9.5
    bench.answer(3, lease_s=10)
    bench.calls.is_ready = False
    assert bench.half.matched(one, 0) == (0, False)


def test_fewer_tokens_than_promised_are_loaded() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(5)
    assert bench.half.matched(one, 4) == (16, True)
    bench.half.admit(one, range(10, 16), 8)
    (job,) = bench.half.step(step_output()).loads
    assert (job.first, unpack(job.blocks)) == (1, [11, 12])


def test_admission_without_external_tokens_loads_nothing() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(5)
    bench.half.matched(one, 0)
    bench.half.admit(one, range(10, 16), 0)
    assert bench.half.step(step_output()).loads == ()


def test_a_failed_load_is_not_promised_again() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3)
    bench.half.matched(one, 0)
    bench.half.admit(one, range(1, 7), 12)
    bench.half.step(step_output())
    bench.half.update(None, ["r"], [], frozenset({2}))
    assert bench.half.matched(one, 0) == (0, False)
    assert len(bench.calls.queries) == 1


def test_another_ranks_failure_may_come_before_the_last_ranks_end() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3)
    bench.half.matched(one, 0)
    bench.half.admit(one, range(1, 7), 12)
    bench.half.update(None, [], [], frozenset({3}))
    bench.half.update(None, ["r"], [], frozenset())
    assert bench.half.matched(one, 0) == (0, False)


def run_prompt(bench: Bench, one: Any, *, scheduled: int = 22) -> StepJobs:
    bench.half.matched(one, 0)
    bench.half.admit(one, range(1, 7), 0)
    return bench.half.step(
        step_output(new={"r": (list(range(1, 7)), 0)}, scheduled={"r": scheduled})
    )


def test_full_blocks_are_saved_once_as_they_fill() -> None:
    bench = Bench()
    one = request()
    (job,) = run_prompt(bench, one, scheduled=9).saves
    assert (job.first, unpack(job.blocks)) == (0, [1, 2])
    assert job.hashes == b"".join(one.block_hashes[:2])
    output = step_output(cached={"r": (None, 9)}, scheduled={"r": 13})
    (job,) = bench.half.step(output).saves
    assert (job.first, unpack(job.blocks)) == (2, [3, 4, 5])
    output = step_output(cached={"r": (None, 22)}, scheduled={"r": 1})
    assert bench.half.step(output).saves == ()


def test_hashes_that_lag_are_looked_at_again() -> None:
    bench = Bench()
    one = request()
    hashes, one.block_hashes = one.block_hashes, one.block_hashes[:3]
    (job,) = run_prompt(bench, one).saves
    assert len(unpack(job.blocks)) == 3
    one.block_hashes = hashes
    output = step_output(cached={"r": ([9], 22)}, scheduled={"r": 1})
    (job,) = bench.half.step(output).saves
    assert (job.first, unpack(job.blocks)) == (3, [4, 5])


def test_what_the_daemon_has_is_not_saved() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3)
    (job,) = run_prompt(bench, one).saves
    assert (job.first, unpack(job.blocks)) == (3, [4, 5])


def test_the_null_block_is_never_saved() -> None:
    bench = Bench()
    one = request()
    bench.half.matched(one, 0)
    blocks = [1, 2, 0, 4, 5, 6]
    output = step_output(new={"r": (blocks, 0)}, scheduled={"r": 22})
    (job,) = bench.half.step(output).saves
    assert unpack(job.blocks) == [1, 2]
    output = step_output(cached={"r": (None, 22)}, scheduled={"r": 1})
    assert bench.half.step(output).saves == ()


def test_long_saves_are_cut() -> None:
    bench = Bench()
    count = SAVE_BLOCKS_MAX + 5
    one = request(tokens=count * TOKENS + 1)
    bench.half.matched(one, 0)
    output = step_output(new={"r": (list(range(1, count + 2)), 0)}, scheduled={"r": count * TOKENS})
    first, second = bench.half.step(output).saves
    assert len(unpack(first.blocks)) == SAVE_BLOCKS_MAX
    assert second.first == SAVE_BLOCKS_MAX
    assert len(unpack(second.blocks)) == 5


def test_another_daemon_is_given_everything_again() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(2)
    run_prompt(bench, one)
    bench.calls.attached = Attachment(number=2)
    output = step_output(cached={"r": (None, 22)}, scheduled={"r": 1})
    (job,) = bench.half.step(output).saves
    assert job.first == 0


def test_nothing_is_saved_without_a_daemon_and_all_of_it_later() -> None:
    bench = Bench()
    bench.calls.is_ready = False
    one = request()
    assert run_prompt(bench, one).saves == ()
    bench.calls.is_ready = True
    output = step_output(cached={"r": (None, 22)}, scheduled={"r": 1})
    (job,) = bench.half.step(output).saves
    assert len(unpack(job.blocks)) == 5


def test_blocks_are_held_until_their_saves_are_answered() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(0)
    (job,) = run_prompt(bench, one).saves
    assert bench.half.finish("r") is True
    assert bench.half.has_pending
    assert bench.half.step(step_output()).delayed == ("r",)
    assert bench.half.step(step_output()).delayed == ()
    bench.half.update(Report({job.number: 1}), [], ["r"], frozenset())
    assert not bench.half.has_pending
    bench.half.step(step_output())
    assert bench.calls.released == ["r"]


def test_blocks_are_not_held_for_answered_saves() -> None:
    bench = Bench()
    (job,) = run_prompt(bench, request()).saves
    bench.half.update(Report({job.number: 1}), [], [], frozenset())
    assert bench.half.finish("r") is False


def test_all_ranks_must_have_answered() -> None:
    bench = Bench(rank_count=2)
    (job,) = run_prompt(bench, request()).saves
    bench.half.update(Report({job.number: 1}), [], [], frozenset())
    assert bench.half.finish("r") is True


def test_a_preempted_requests_saves_hold_nothing() -> None:
    bench = Bench()
    run_prompt(bench, request())
    assert bench.half.step(step_output(preempted=("r",))).preempted == {"r"}
    assert bench.half.finish("r") is False


def test_a_resumed_request_is_looked_up_and_saved_anew() -> None:
    bench = Bench()
    one = request()
    run_prompt(bench, one)
    bench.half.step(step_output(preempted=("r",)))
    assert bench.half.matched(one, 0) == (None, False)
    bench.answer(0, at=-1)
    assert bench.half.matched(one, 0) == (0, False)
    bench.half.admit(one, [11, 12, 13, 14, 15, 16], 0)
    output = step_output(
        cached={"r": ([11, 12, 13, 14, 15, 16], 0)}, scheduled={"r": 22}, resumed=("r",)
    )
    (job,) = bench.half.step(output).saves
    assert unpack(job.blocks) == [11, 12, 13, 14, 15]


def test_a_load_in_flight_is_never_joined_by_held_saves() -> None:
    """Both would be reported, and the second report would end the engine."""
    bench = Bench()
    one = request()
    run_prompt(bench, one)
    bench.calls.queries[-1][2].set_result(Answer(5, 3, 30.0))
    bench.half.matched(one, 0)
    bench.half.admit(one, range(1, 7), 20)
    assert bench.half.finish("r") is False
    assert bench.half.has_pending
    bench.half.update(None, ["r"], [], frozenset())
    assert not bench.half.has_pending


def test_a_query_still_out_is_released_after_its_answer() -> None:
    bench = Bench()
    bench.half.add(request())
    bench.half.finish("r")
    bench.half.step(step_output())
    assert bench.calls.released == []
    bench.answer(3)
    assert bench.calls.released == ["r"]


def test_a_step_that_fails_still_hands_over_its_loads() -> None:
    bench = Bench()
    one = request()
    bench.half.add(one)
    bench.answer(3)
    bench.half.matched(one, 0)
    bench.half.admit(one, range(1, 7), 12)
    assert len(bench.half.step(SimpleNamespace(preempted_req_ids=None)).loads) == 1
