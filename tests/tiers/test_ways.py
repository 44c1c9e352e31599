"""Ways to one peer, tried in order; and the wait for what a NIC has ended."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import trio

from trikv.core.rails import Reach
from trikv.tiers.peer import Fetch, Outcome, Ways
from trikv.tiers.rdma import Lane

if TYPE_CHECKING:
    from trikv.tiers.pairs import QueuePair


@dataclass(eq=False)
class Way:
    """Gives runs the outcomes that are told, by their places at the owner."""

    outcomes: dict[int, Outcome]
    name: str = "way"
    asked: list[list[int]] = field(default_factory=list)

    async def fetch(self, fetch: Fetch) -> None:
        await trio.lowlevel.checkpoint()
        places = fetch.runs[:, 0].tolist()
        self.asked.append(places)
        fetch.outcome[:] = [self.outcomes.get(place, Outcome.FAILED) for place in places]

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


def fetch_of(count: int, seconds: float = 60) -> Fetch:
    runs = np.array([(at, 1_000 + at, 1) for at in range(count)], np.int64)
    return Fetch(runs, trio.current_time() + seconds, b"token")


async def test_only_runs_that_failed_are_asked_of_the_next_way() -> None:
    """A run that a NIC may still write is nobody's: another way must not bring it."""
    first = Way({0: Outcome.ARRIVED, 1: Outcome.UNFENCED})
    second = Way({1: Outcome.ARRIVED, 2: Outcome.ARRIVED})
    third = Way({})
    fetch = fetch_of(4)
    await Ways([first, second, third]).fetch(fetch)
    assert [first.asked, second.asked, third.asked] == [[[0, 1, 2, 3]], [[2, 3]], [[3]]]
    assert fetch.outcome.tolist() == [
        Outcome.ARRIVED,
        Outcome.UNFENCED,
        Outcome.ARRIVED,
        Outcome.FAILED,
    ]


async def test_after_the_deadline_no_way_is_asked() -> None:
    way = Way({0: Outcome.ARRIVED})
    fetch = fetch_of(1, seconds=-1)
    await Ways([way]).fetch(fetch)
    assert way.asked == []
    assert fetch.outcome.tolist() == [Outcome.FAILED]


async def test_a_cancelled_way_says_what_it_knew() -> None:
    class Stuck(Way):
        async def fetch(self, fetch: Fetch) -> None:
            fetch.outcome[0] = Outcome.UNFENCED
            await trio.sleep_forever()

    fetch = fetch_of(2)
    with trio.move_on_after(0.01):
        await Ways([Stuck({})]).fetch(fetch)
    assert fetch.outcome.tolist() == [Outcome.UNFENCED, Outcome.FAILED]


async def test_what_ends_while_the_channel_is_armed_is_not_missed() -> None:
    class Racing:
        """Ends a read after the first look, before `arm`: no event will ever come."""

        fd = -1
        looks = 0

        def poll(self) -> list[tuple[int, int]]:
            self.looks += 1
            return [(7, 0)] if self.looks > 1 else []

        def arm(self) -> None:
            assert self.looks == 1

    lane = Lane(0, 0, -1, cast("QueuePair", Racing()), [], (), Reach(0, 0, (), ()))
    assert await lane.ended() == [(7, 0)]
