"""Grants against a plain model: time passes, sweeps come when they come, fences end."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trikv.core.errors import OverloadedError
from trikv.core.grants import STALE_MAX, Fence, Grant, Grants
from trikv.core.words import Entries, GrantId, PeerId

BLOCK = 100
PEERS = st.sampled_from([PeerId(1), PeerId(2), PeerId(3)])


def new_grants() -> Grants:
    return Grants(
        ttl_s_max=10,
        grants_max=6,
        peer_grants_max=3,
        bytes_max=12 * BLOCK,
        peer_bytes_max=7 * BLOCK,
    )


def entries(*numbers: int) -> Entries:
    return np.array(numbers, np.int32)


@dataclass
class Model:
    """One grant as the test sees it."""

    grant: Grant
    numbers: list[int]
    fence: Fence | None = None


@dataclass
class World:
    held: dict[GrantId, Model] = field(default_factory=dict)
    over: list[tuple[PeerId, GrantId]] = field(default_factory=list)


class GrantMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.grants, self.now_s, self.world = new_grants(), 0.0, World()
        self.pins = np.zeros(20, np.int64)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        peer=PEERS,
        numbers=st.lists(st.integers(0, 19), min_size=1, max_size=5, unique=True),
        ttl_s=st.floats(0.5, 30),
    )
    def ask(self, peer: PeerId, numbers: list[int], ttl_s: float) -> None:
        held = self.world.held.values()
        mine = [one for one in held if one.grant.peer == peer]
        fits = (
            len(held) < 6
            and len(mine) < 3
            and sum(len(one.numbers) for one in held) + len(numbers) <= 12
            and sum(len(one.numbers) for one in mine) + len(numbers) <= 7
        )
        ask = {"block_bytes": BLOCK, "ttl_s": ttl_s, "now_s": self.now_s}
        if not fits:
            with pytest.raises(OverloadedError):
                self.grants.grant(peer, entries(*numbers), **ask)
            return
        grant = self.grants.grant(peer, entries(*numbers), **ask)
        assert grant.id not in self.world.held
        assert grant.deadline_s == self.now_s + min(ttl_s, 10)
        self.pins[numbers] += 1
        self.world.held[grant.id] = Model(grant, numbers)

    @precondition(lambda self: self.world.held)
    @rule(data=st.data(), by=PEERS)
    def release(self, data: st.DataObject, by: PeerId) -> None:
        model = data.draw(st.sampled_from(list(self.world.held.values())))
        released = self.grants.release(by, model.grant.id)
        is_right = by == model.grant.peer and model.fence is None
        assert released.was_valid == is_right
        if is_right:
            assert (self.pins[model.numbers] > 0).all()  # what was read is right
            self._unpin(released.entries, [model])

    @precondition(lambda self: self.world.over)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        peer, number = data.draw(st.sampled_from(self.world.over))
        released = self.grants.release(peer, number)
        assert not released.was_valid
        assert len(released.entries) == 0

    @rule()
    def sweep(self) -> None:
        live = [one for one in self.world.held.values() if one.fence is None]
        due = {one.grant.id for one in live if one.grant.deadline_s <= self.now_s}
        fences = self.grants.expire(now_s=self.now_s)
        assert len({fence.peer for fence in fences}) == len(fences)
        self._fence(fences, due)

    @rule(peer=PEERS)
    def lose(self, peer: PeerId) -> None:
        mine = [one for one in self.world.held.values() if one.grant.peer == peer]
        due = {one.grant.id for one in mine if one.fence is None}
        fence = self.grants.lose(peer)
        self._fence([fence] if fence else [], due)

    @precondition(lambda self: any(one.fence for one in self.world.held.values()))
    @rule(data=st.data())
    def fence_ends(self, data: st.DataObject) -> None:
        fences = {id(one.fence): one.fence for one in self.world.held.values() if one.fence}
        fence = data.draw(st.sampled_from(list(fences.values())))
        models = [one for one in self.world.held.values() if one.fence is fence]
        self._unpin(self.grants.fenced(fence), models)
        with pytest.raises(KeyError):
            self.grants.fenced(fence)

    def _fence(self, fences: list[Fence], due: set[GrantId]) -> None:
        named = [grant for fence in fences for grant in fence.grants]
        assert {grant.id for grant in named} == due
        assert len(named) == len(due)
        for fence in fences:
            for grant in fence.grants:
                assert grant.peer == fence.peer
                self.world.held[grant.id].fence = fence

    def _unpin(self, given: Entries, models: list[Model]) -> None:
        wanted = sorted(number for one in models for number in one.numbers)
        assert sorted(given.tolist()) == wanted
        np.subtract.at(self.pins, given, 1)
        for one in models:
            del self.world.held[one.grant.id]
            self.world.over.append((one.grant.peer, one.grant.id))

    @invariant()
    def counts_are_right(self) -> None:
        held = self.world.held.values()
        expected = np.zeros_like(self.pins)
        for one in held:
            expected[one.numbers] += 1
        assert (self.pins == expected).all()
        assert self.grants.count == len(held)
        assert self.grants.bytes == sum(BLOCK * len(one.numbers) for one in held)


TestGrants = GrantMachine.TestCase


def test_a_late_release_is_valid_until_the_sweep_has_seen_it() -> None:
    grants = new_grants()
    late = grants.grant(PeerId(1), entries(3), block_bytes=BLOCK, ttl_s=1, now_s=0)
    seen = grants.grant(PeerId(2), entries(4), block_bytes=BLOCK, ttl_s=1, now_s=0)
    assert grants.release(PeerId(1), late.id).was_valid  # its pins were held all the time
    (fence,) = grants.expire(now_s=1)
    assert not grants.release(PeerId(2), seen.id).was_valid
    assert grants.bytes == BLOCK  # pinned while the fence is under way
    assert grants.fenced(fence).tolist() == [4]
    assert grants.bytes == 0


def test_a_peer_at_its_bound_leaves_room_for_others() -> None:
    grants = new_grants()
    ask = {"block_bytes": BLOCK, "ttl_s": 1.0, "now_s": 0.0}
    grants.grant(PeerId(1), entries(*range(7)), **ask)
    assert grants.room(PeerId(1), BLOCK) == 0
    assert grants.room(PeerId(2), BLOCK) == 5
    grants.grant(PeerId(2), entries(*range(5)), **ask)
    assert grants.room(PeerId(3), BLOCK) == 0


def test_deadlines_of_released_grants_do_not_pile_up() -> None:
    grants = new_grants()
    kept = grants.grant(PeerId(2), entries(1), block_bytes=BLOCK, ttl_s=5, now_s=0)
    for _ in range(3 * STALE_MAX):
        one = grants.grant(PeerId(1), entries(2), block_bytes=BLOCK, ttl_s=9, now_s=0)
        grants.release(PeerId(1), one.id)
    assert len(grants._deadlines) <= STALE_MAX + 4
    (fence,) = grants.expire(now_s=5)
    assert fence.grants == (kept,)
