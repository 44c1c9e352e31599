"""A rail that cannot be joined, at one end or the other, on the double."""

from pathlib import Path

import pytest

from tests.tiers.double import Double, ends
from tests.tiers.peers import MIB, check, fetch_of, rows
from trikv.core.rails import PAIRS_A_PATH
from trikv.tiers.peer import Outcome


@pytest.mark.parametrize("owners", [True, False])
async def test_a_rail_that_cannot_be_joined_costs_no_other(
    double: Double, sysfs: Path, *, owners: bool
) -> None:
    """The owner's end is joined first, and one of a path's queue pairs is enough to tell."""
    told: list[tuple[str, str]] = []
    async with ends(sysfs) as both:
        dial = both.transport._dial_owner

        async def then_fail(offer: bytes) -> bytes:
            if owners:
                double.set(0, join_fails=1)
            answer = await dial(offer)
            if not owners:
                double.set(0, join_fails=1)
            return answer

        both.transport._dial_owner = then_fail
        both.transport._tell = lambda path, why: told.append((path, why))
        await both.transport.fetch(fetch := fetch_of(rows(both.pool, (0, 0, 8 * MIB))))
        check(fetch, both.source, both.pool)
        assert sorted(lane.path for lane in both.transport._lanes.values()) == [1] * PAIRS_A_PATH
        ((path, why),) = told
        assert path == "fake0 to rail 0"
        assert why == "the owner cannot join it" if owners else "No route to host" in why


async def test_when_no_rail_can_be_joined_the_fetch_fails(double: Double, sysfs: Path) -> None:
    async with ends(sysfs) as both:
        for number in range(2):
            double.set(number, join_fails=1)
        await both.transport.fetch(fetch := fetch_of(rows(both.pool, (0, 0, MIB))))
        assert (fetch.outcome == Outcome.FAILED).all()
