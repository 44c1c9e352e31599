"""Reading a peer's pool by RDMA READ: queue pairs over all rails, posted in chains.

Decided here: which queue pair reads what, when a rail is left alone, and the fence: pages that a
read may still write belong to the NIC until the read has ended or its queue pair is destroyed.

A queue pair serves one fetch at a time. So a fetch that is cancelled or late destroys those that it
holds, at once and without a wait, and no other fetch notices; the next one dials them again.
"""

from collections.abc import Awaitable, Callable
from typing import Final

import numpy as np
import trio

from trikv.core.pauses import Pauses
from trikv.core.rails import (
    PAIRS_A_PATH,
    Answer,
    PairFacts,
    Reach,
    Seat,
    pack_offer,
    pair_rails,
    read_answer,
)
from trikv.core.stripes import cut, whole_runs
from trikv.tiers.pairs import SUCCESS, NicError, QueuePair
from trikv.tiers.peer import Fetch, Outcome, PeerLostError
from trikv.tiers.rails import Rails
from trikv.tiers.reads import Job, Lane

PIECE_BYTES: Final = 1 << 20
"""A request: smaller ones cost more time in Python than on the wire."""
CHAIN_MAX: Final = 32
CHAINS: Final = 2
"""Of one queue pair, under way at once: while one moves the next is there."""
DEPTH: Final = CHAIN_MAX * CHAINS
PAUSE_S: Final = 30.0
"""How long a path is left alone after an error, at first."""
TURNS: Final = 4
"""Chains that end without a wait before the loop gets a turn."""

Dial = Callable[[bytes], Awaitable[bytes]]
"""Give an offer to the owner; answers its answer, or raises `PeerLostError`."""
Tell = Callable[[str, str], object]
"""Told when a path is left alone: which one, and why."""


class RdmaTransport:
    """Queue pairs to one owner's process; a `Transport`. One that restarted wants a new transport.

    Bounds: two queue pairs a path with up to `DEPTH` reads of `PIECE_BYTES` each. A fetch takes all
    that are free; one that finds none waits, until its deadline.
    """

    name = "rdma"

    def __init__(
        self,
        rails: Rails,
        far_rails: int,
        dial: Dial,
        *,
        pause_s: float = PAUSE_S,
        tell: Tell = lambda _nic, _why: None,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            rails: of this host; all landing pages lie in its pool.
            far_rails: how many the owner has.
            dial: see `Dial`.
            pause_s: see `PAUSE_S`.
            tell: see `Tell`.
        """
        self._rails = rails
        self._far_rails = far_rails
        self._dial_owner = dial
        self._tell = tell
        self._paths = pair_rails(len(rails.rails), far_rails)
        self._pauses = Pauses(len(self._paths), pause_s)
        self._lanes: dict[int, Lane] = {}
        self._reach: Reach | None = None
        self._dialing = trio.Lock()
        self._changed = trio.lowlevel.ParkingLot()
        self._quarantine: list[QueuePair] = []  # could not be destroyed

    async def fetch(self, fetch: Fetch) -> None:
        """See `Transport`."""
        job: Job | None = None
        try:
            with trio.move_on_at(fetch.deadline_s):
                await self._dial_missing()
                if self._reach is None:
                    return
                job = self._job(fetch, self._reach)
                while job.left and await self._run(job):
                    pass
        finally:
            if job is not None:
                is_whole = whole_runs(fetch.runs, job.pieces, job.arrived)
                fetch.outcome[is_whole] = Outcome.ARRIVED
                is_fenced = whole_runs(fetch.runs, job.pieces, ~job.unfenced)
                fetch.outcome[~is_fenced] = Outcome.UNFENCED

    async def aclose(self) -> None:
        """See `Transport`."""
        for lane in list(self._lanes.values()):
            self._destroy(lane)

    def _job(self, fetch: Fetch, reach: Reach) -> Job:
        far = np.array(reach.begins, np.int64)
        near = self._rails.places
        pieces = cut(fetch.runs, piece_bytes=PIECE_BYTES, far=far, near=near)
        runs = pieces.runs
        lanes = max(1, len(self._paths) * PAIRS_A_PATH)
        step = min(CHAIN_MAX, max(1, -(-len(pieces) // (lanes * CHAINS))))
        job = Job(
            pieces,
            reach,
            fetch.deadline_s,
            (runs[:, 0] + reach.address).tolist(),
            runs[:, 1].tolist(),
            runs[:, 2].tolist(),
            (np.searchsorted(far, runs[:, 0], side="right") - 1).tolist(),
            (np.searchsorted(near, runs[:, 1], side="right") - 1).tolist(),
            self._rails.nodes,
        )
        for first in range(0, len(pieces), step):
            job.give_back(first, min(first + step, len(pieces)))
        return job

    async def _run(self, job: Job) -> bool:
        """Give queue pairs to a job until its chains are handed out; False when there are none."""
        is_served = False
        async with trio.open_nursery() as nursery:
            while job.left:
                lanes = await self._take(job)
                if not lanes:
                    break
                is_served = True
                for lane in lanes:
                    nursery.start_soon(self._drive, lane, job)
                await trio.lowlevel.checkpoint()
        return is_served

    async def _take(self, job: Job) -> list[Lane]:
        """Queue pairs that are free, no more than chains; waits for one. Empty: none is left."""
        while job.left:
            await self._dial_missing()
            usable = [
                lane
                for lane in self._lanes.values()
                if lane.reach is job.reach and not self._is_paused(lane.path)
            ]
            free = [lane for lane in usable if not lane.is_busy]
            if free or not usable:  # near ones first; all paths before a path's second pair
                free.sort(key=lambda lane: (not job.is_near(lane.node), lane.seat))
                for lane in free[: job.left]:
                    lane.is_busy = True
                return free[: job.left]
            await self._changed.park()
        return []

    async def _drive(self, lane: Lane, job: Job) -> None:
        """One queue pair reads chains until none is left.

        Cancellation, deadline or error with reads under way: the queue pair is destroyed before
        this returns, and what they would have brought is given back.
        """
        under_way: dict[int, tuple[int, int]] = {}
        try:
            if await _read(lane, job, under_way):
                self._pauses.work(lane.path)
        except NicError as error:
            self._pause([lane.seat], error)
        finally:
            lane.is_busy = False
            if under_way:
                is_fenced = self._destroy(lane)
                for first, last in under_way.values():
                    if is_fenced:
                        job.give_back(first, last)
                    else:
                        job.unfenced[first:last] = True
            self._changed.unpark_all()

    def _destroy(self, lane: Lane) -> bool:
        """The fence; False when the NIC may still write."""
        self._lanes.pop(lane.seat, None)
        try:
            lane.pair.destroy()
        except NicError:
            self._quarantine.append(lane.pair)
            return False
        return True

    def _missing(self) -> list[int]:
        """Seats without a queue pair whose rail is not paused."""
        count = len(self._paths)
        return [
            seat
            for seat in range(count * PAIRS_A_PATH)
            if seat not in self._lanes and not self._is_paused(seat % count)
        ]

    async def _dial_missing(self) -> None:
        """Join what is missing; whoever comes meanwhile waits for the same.

        What cannot be joined is paused, so this raises nothing.
        """
        if not self._missing():
            return
        async with self._dialing:
            seats = self._missing()
            if not seats:
                return
            made: dict[int, QueuePair] = {}
            try:
                self._make(seats, made)
                if made:
                    offer = pack_offer([self._seat(seat, pair) for seat, pair in made.items()])
                    self._join(made, read_answer(await self._dial_owner(offer)))
            except (NicError, PeerLostError, ValueError) as error:
                self._pause(seats, error)
            finally:  # of those left nothing was ever posted
                for pair in made.values():
                    self._give_up(pair)
                self._changed.unpark_all()

    def _make(self, seats: list[int], made: dict[int, QueuePair]) -> None:
        for seat in seats:
            near, _ = self._paths[seat % len(self._paths)]
            try:
                made[seat] = self._rails.rails[near].nic.new_pair(DEPTH)
            except NicError as error:
                self._pause([seat], error)

    def _seat(self, seat: int, pair: QueuePair) -> Seat:
        return Seat(seat, self._paths[seat % len(self._paths)][1], pair.facts)

    def _join(self, made: dict[int, QueuePair], answer: Answer) -> None:
        """Queue pairs that are joined move from `made` to the lanes."""
        if len(answer.pairs) != len(made) or len(answer.reach.keys) != self._far_rails:
            raise ValueError("the other host sent other queue pairs than were offered")
        if answer.reach != self._reach:  # another process lends there now
            for lane in [lane for lane in self._lanes.values() if not lane.is_busy]:
                self._destroy(lane)
            self._reach = answer.reach
        for seat, far in zip(list(made), answer.pairs, strict=True):
            if far is None:
                self._pause([seat], NicError("the owner cannot join it"))
            elif not self._is_paused(seat % len(self._paths)):  # by its first queue pair
                self._join_one(made, seat, far, self._reach)

    def _join_one(
        self, made: dict[int, QueuePair], seat: int, far: PairFacts, reach: Reach
    ) -> None:
        path = seat % len(self._paths)
        near, far_rail = self._paths[path]
        rail = self._rails.rails[near]
        try:
            made[seat].connect(far)
        except NicError as error:
            self._pause([seat], error)
            return
        node, keys = rail.nic.facts.node, reach.keys[far_rail]
        self._lanes[seat] = Lane(seat, path, node, made.pop(seat), rail.keys, keys, reach)

    def _is_paused(self, path: int) -> bool:
        return not self._pauses.is_over(path, now_s=trio.current_time())

    def _pause(self, seats: list[int], why: Exception) -> None:
        for path in sorted({seat % len(self._paths) for seat in seats}):
            if self._pauses.fail(path, now_s=trio.current_time()):
                near, far = self._paths[path]
                name = self._rails.rails[near].nic.facts.name
                self._tell(f"{name} to rail {far}", str(why) or "it does not answer")

    def _give_up(self, pair: QueuePair) -> None:
        try:
            pair.destroy()
        except NicError:  # harmless: nothing was posted
            self._quarantine.append(pair)


async def _read(lane: Lane, job: Job, under_way: dict[int, tuple[int, int]]) -> bool:
    """Post chains and wait for them until none is left; `under_way` is always what the NIC has.

    Returns:
        Whether there were any.

    Raises:
        NicError: a read failed, and with it all that is under way.
    """
    turns = 0
    while True:
        while len(under_way) < CHAINS and (chain := job.take(lane.node)) is not None:
            under_way[chain[1] - 1] = chain
            job.post(lane, *chain)
        if not under_way:
            return turns > 0
        for number, status in await lane.ended():
            if status != SUCCESS:
                raise NicError(f"a read ended with status {status}")
            first, last = under_way.pop(number)
            job.arrived[first:last] = True
        turns += 1
        if turns % TURNS == 0:
            await trio.lowlevel.checkpoint()
