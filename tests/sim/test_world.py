"""May lose, never lies: the real shell in a fake world."""

from collections.abc import Iterator

import pytest
import structlog
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio._core import _run as scheduler
from trio.testing import MockClock

from tests.sim.engine import Report
from tests.sim.fakes import Faults
from tests.sim.world import World

FAULTS = st.builds(
    Faults,
    copy_s_mean=st.sampled_from([0.001, 0.01, 0.2]),
    copy_stall_p=st.sampled_from([0.0, 0.01]),
    copy_fail_p=st.sampled_from([0.0, 0.05]),
    engine_death_p=st.sampled_from([0.0, 0.1]),
    silence_p=st.sampled_from([0.0, 0.05]),
    preempt_p=st.sampled_from([0.0, 0.3]),
    rank_lazy_p=st.sampled_from([0.0, 0.05]),
    abandon_p=st.sampled_from([0.0, 0.3]),
    copier_death_p=st.sampled_from([0.0, 0.1]),
    copier_hang_p=st.sampled_from([0.0, 0.01]),
)
# `quiet` is the same for all examples of a test.
QUIET = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def live(seed: int, faults: Faults, *, engines: int = 3, requests: int = 8) -> Report:
    async def main() -> Report:
        return await World(seed, faults).run(engines=engines, requests=requests)

    scheduler._r.seed(seed)  # trio shuffles ready tasks; hypothesis seeds it once an example only
    return trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    yield
    structlog.reset_defaults()


@given(seed=st.integers(0, 2**32), faults=FAULTS)
@QUIET
def test_may_lose_never_lies(seed: int, faults: Faults) -> None:
    report = live(seed, faults)
    assert report.loads_wrong == 0
    assert report.late_writes == 0
    assert all(count == 0 for count in report.left.values()), report.left


@given(seed=st.integers(0, 2**32))
@settings(QUIET, max_examples=10)
def test_a_good_world_loads_and_refuses_nothing(seed: int) -> None:
    report = live(seed, Faults(copy_s_mean=0.001))
    assert report.blocks_loaded > 10
    assert report.blocks_failed == 0
    assert set(report.errors) <= {"lease-lost"}, report.errors


@given(seed=st.integers(0, 2**32))
@settings(QUIET, max_examples=3)
def test_a_seed_replays(seed: int) -> None:
    faults = Faults(copy_fail_p=0.05, engine_death_p=0.1, preempt_p=0.2, abandon_p=0.3)
    assert live(seed, faults) == live(seed, faults)
