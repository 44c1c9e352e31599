"""The world of `below_world.py` with other nodes: what they are told, borrow, and hold up."""

from dataclasses import dataclass

import numpy as np
from below_world import NODES, WHICH, BelowMachine, origin_of
from cache_world import PAGE, PAGES, SLAB, path_to, words
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from trikv.core.adverts import Part
from trikv.core.blocks import SEALED
from trikv.core.errors import OverloadedError
from trikv.core.lending import Lending, Loan
from trikv.core.lifting import Lift, Lifting
from trikv.core.parts import ReadPart
from trikv.core.reading import NOBODY, PEERS
from trikv.core.shared import Shared
from trikv.core.words import PeerId, SpaceId, Words

LIFT_BYTES = 6 * PAGE
PEER = st.sampled_from([1, 2]).map(PeerId)


@dataclass(eq=False)
class Borrowing:
    """A peer's call from its beginning to the end of its loan."""

    peer: PeerId
    space: int
    words: Words
    lift: Lift | None
    loan: Loan | None = None
    bytes_there: dict[int, object] | None = None  # of the pool, when it was made


class LiftingMachine(BelowMachine):
    """A quarter of the pool may be lent; of blocks with three pages, two may be read up."""

    def open(self, space: int) -> None:
        super().open(space)
        if getattr(self, "owner_of", None) is not self.below:
            self.owner_of = self.below
            self.told: dict[tuple[bytes, int], bool] = {}  # is it below?
            self.borrowings: list[Borrowing] = []
            self.opened: dict[int, SpaceId] = {}
            self.shared = Shared(self.cache, self.below, lift_bytes_max=LIFT_BYTES)
            self.shared.tell, self.shared.announce_anew = self.hear, self.hear_all
            self.lending = Lending(self.cache, self.shared)
            self.lending.grants.bytes_max = self.lending.grants.peer_bytes_max = SLAB
            self.lifting = Lifting(
                self.cache, self.below, self.shared, self.lending, self.lifts_max()
            )
        if space in self.opened:
            self.shared.retire_space(self.opened[space])
        self.opened[space] = self.number[space]
        self.shared.open_space(self.number[space], origin_of(space))

    def lifts_max(self) -> int:
        return LIFT_BYTES

    # -- what they are told

    def hear(self, part: Part) -> None:
        for node in part.words[:, 0].tolist():
            self.told.pop((part.origin, node), None)
            if part.is_held:
                self.told[part.origin, node] = part.is_below

    def hear_all(self) -> None:
        self.told.clear()
        for part in self.shared.snapshot():
            assert part.is_held
            self.hear(part)

    def disk_fails(self, which: int) -> None:
        super().disk_fails(which)
        self.below.lost()

    def held(self) -> dict[tuple[bytes, int], bool]:
        """What is at hand, by looking."""
        found: dict[tuple[bytes, int], bool] = {}
        nodes = list(range(256))
        for space in self.spaces:
            if not self.is_shared(space):
                continue
            origin = origin_of(space)[:20]
            below = self.below.has(self.number[space], words(nodes))
            found |= {(origin, node): True for node in np.flatnonzero(below).tolist()}
            above = self.in_pool(space, nodes)
            found |= {(origin, node): False for node in np.flatnonzero(above >= 0).tolist()}
        return found

    def is_shared(self, space: int) -> bool:
        return self.shared.origin_of(self.number[space]) is not None

    # -- what they borrow

    @rule(peer=PEER, which=WHICH, node=NODES, first=st.integers(0, 2))
    def borrow(self, peer: PeerId, which: int, node: int, first: int) -> None:
        space = self.spaces[which % len(self.spaces)]
        asked = words(path_to(node)[first:])
        if len(asked) == 0:
            return
        before = [one for part in self.reads for one in self.keys_of(part)]
        lift = self.lifting.begin(peer, origin_of(space)[:20], asked)
        for part in lift.parts if lift else ():
            assert not set(before) & set(self.keys_of(part))  # each block is read once for all
            self.put(part.landing.entries[part.rows], space, [part] * len(part.rows))  # torn
            self.reads += [part.take(np.array([at])) for at in range(len(part.rows))]
        self.borrowings.append(Borrowing(peer, space, asked, lift))

    def keys_of(self, part: ReadPart) -> list[tuple[int, int]]:
        return list(zip(*self.keys(part.entries, part.disk), strict=True))

    @precondition(lambda self: [one for one in self.borrowings if one.loan is None])
    @rule(which=WHICH)
    def lend(self, which: int) -> None:
        """Its time is over, or all has come; reads that were not begun go on here."""
        waiting = [one for one in self.borrowings if one.loan is None]
        one = waiting[which % len(waiting)]
        origin = origin_of(one.space)[:20]
        try:
            loan = self.lending.lend(one.peer, origin, one.words, ttl_s=5.0, now_s=self.now_s)
        except OverloadedError:
            loan = None
        if loan is None:
            self.borrowings.remove(one)
            self.end(one)
            return
        assert (self.cache.blocks.state[loan.grant.entries] == SEALED).all()
        if one.lift is not None:
            self.lifting.lent(one.lift, loan)
        one.loan = loan
        units = np.concatenate(
            [
                loan.offsets[rank][:, None] // PAGE + np.arange(count)
                for rank, count in enumerate(PAGES[one.space])
            ],
            axis=1,
        )
        nodes = one.words[loan.positions, 0].tolist()
        one.bytes_there = {
            unit: (self.tag(one.space, node), at)
            for node, row in zip(nodes, units.tolist(), strict=True)
            for at, unit in enumerate(row)
        }

    @precondition(lambda self: [one for one in self.borrowings if one.loan is not None])
    @rule(which=WHICH)
    def give_back(self, which: int) -> None:
        lent = [one for one in self.borrowings if one.loan is not None]
        one = lent[which % len(lent)]
        assert one.loan is not None
        self.borrowings.remove(one)
        was_valid, grant = self.lending.release(one.peer, one.loan.grant.id)
        assert was_valid
        assert grant is not None
        self.lending.unpin(grant)
        self.end(one)

    @rule(peer=PEER, which=WHICH)
    def peer_is_lost(self, peer: PeerId, which: int) -> None:
        if which > 20:
            return
        fence = self.lending.lose(peer)
        lost = [one for one in self.borrowings if one.peer == peer and one.loan is not None]
        assert (fence is None) == (not lost)
        if fence is not None:
            self.lending.fenced(fence)
        for one in lost:
            self.borrowings.remove(one)
            self.end(one)

    def end(self, one: Borrowing) -> None:
        if one.lift is not None:
            self.lifting.end(one.lift)

    # -- what must be true

    @invariant()
    def check_others(self) -> None:
        if not hasattr(self, "cache"):
            return
        shared = {origin_of(one)[:20] for one in self.spaces if self.is_shared(one)}
        told = {key: is_below for key, is_below in self.told.items() if key[0] in shared}
        assert told == self.held()  # what was reset is withdrawn as it is forgotten
        for one in self.borrowings:
            for unit, tag in (one.bytes_there or {}).items():
                assert self.memory[unit] == tag  # nobody has written there meanwhile
        lifts = [one.lift for one in self.borrowings if one.lift is not None]
        assert self.lifting.count == len(lifts)
        held = sum(len(one.held) * one.block_bytes for one in lifts)
        coming = sum(
            len(part.rows) * self.cache.spaces[part.landing.space].block_bytes
            for part in self.reads
            if part.landing.is_spare
        )
        assert self.lifting.bytes == held + coming <= self.lifting.bytes_max
        reading = self.below.reading
        rows = np.flatnonzero(reading.marks != NOBODY).tolist()
        assert sorted(rows) == sorted(
            row for part in self.reads for row in part.landing.entries[part.rows].tolist()
        )
        assert reading.peer_rows == int((reading.marks == PEERS).sum())

    def teardown(self) -> None:
        for one in list(getattr(self, "borrowings", ())):
            if one.loan is not None:
                grant = self.lending.release(one.peer, one.loan.grant.id)[1]
                assert grant is not None
                self.lending.unpin(grant)
            self.end(one)
            self.borrowings.remove(one)
        super().teardown()
        assert not getattr(self, "told", None)
