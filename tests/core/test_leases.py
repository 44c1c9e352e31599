"""Leases against a dict of promises, with deadlines that coincide."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trikv.core.errors import LeaseLostError, OverloadedError
from trikv.core.leases import STALE_MAX, Lease, Leases
from trikv.core.words import Entries, InstanceName, LeaseId, RequestId, SpaceId

TTL_S = 4
LEASES_MAX = 4
PINNED_BYTES_MAX = 20
INSTANCES = st.sampled_from(["one", "two"]).map(InstanceName)
REQUESTS = st.sampled_from(["r", "s", "t"]).map(RequestId)
SPACE = SpaceId(7)
ONE, TWO, R, S = InstanceName("one"), InstanceName("two"), RequestId("r"), RequestId("s")


def entries_of(*numbers: int) -> Entries:
    return np.array(numbers, np.int32)


@dataclass
class Promise:
    """What was promised; `left` are the ranks that have not loaded."""

    lease: Lease
    entries: list[int]
    block_bytes: int
    left: set[int]
    deadline_s: int


class LeasesMachine(RuleBasedStateMachine):
    """Time passes in one rule, sweeps are another: an expired lease may still be there."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(TTL_S, LEASES_MAX, PINNED_BYTES_MAX)
        self.model: dict[tuple[InstanceName, RequestId], Promise] = {}
        self.ended: list[tuple[LeaseId, InstanceName]] = []
        self.now_s = 0
        self.next_entry = 0

    def end(self, key: tuple[InstanceName, RequestId]) -> list[int]:
        promise = self.model.pop(key)
        self.ended.append((promise.lease.id, key[0]))
        return promise.entries

    @rule(step_s=st.integers(0, TTL_S + 1))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def sweep(self) -> None:
        late = [key for key, one in self.model.items() if one.deadline_s <= self.now_s]
        expected = {self.model[key].lease.id: self.model[key].entries for key in late}
        for key in late:
            self.end(key)
        gone = self.leases.expire(now_s=self.now_s)
        assert len(gone) == len(late)
        assert {lease.id: lease.entries.tolist() for lease in gone} == expected

    @rule(
        instance=INSTANCES,
        request=REQUESTS,
        count=st.integers(1, 6),
        block_bytes=st.sampled_from([1, 3, 5]),
        rank_count=st.integers(1, 3),
    )
    def grant(
        self,
        instance: InstanceName,
        request: RequestId,
        count: int,
        block_bytes: int,
        rank_count: int,
    ) -> None:
        key = (instance, request)
        if key in self.model:
            assert self.leases.end(self.model[key].lease).tolist() == self.end(key)
        used = sum(one.block_bytes * len(one.entries) for one in self.model.values())
        room = (PINNED_BYTES_MAX - used) // block_bytes if len(self.model) < LEASES_MAX else 0
        assert self.leases.room(block_bytes) == room
        entries = np.arange(self.next_entry, self.next_entry + count, dtype=np.int32)
        facts = {
            "space": SPACE,
            "block_bytes": block_bytes,
            "rank_count": rank_count,
            "now_s": self.now_s,
        }
        if count > room:
            with pytest.raises(OverloadedError):
                self.leases.grant(instance, request, entries, **facts)
            return
        self.next_entry += count
        lease = self.leases.grant(instance, request, entries, **facts)
        taken = {one.lease.id for one in self.model.values()} | {number for number, _ in self.ended}
        assert lease.id not in {0, *taken}
        left = set(range(rank_count))
        deadline_s = self.now_s + TTL_S
        self.model[key] = Promise(lease, entries.tolist(), block_bytes, left, deadline_s)

    @rule(instance=INSTANCES, request=REQUESTS)
    def renew(self, instance: InstanceName, request: RequestId) -> None:
        lease = self.leases.of_space(instance, request, SPACE)
        promise = self.model.get((instance, request))
        assert (lease is None) == (promise is None)
        if lease is not None and promise is not None:
            self.leases.renew(lease, now_s=self.now_s)
            promise.deadline_s = self.now_s + TTL_S

    @rule(instance=INSTANCES, request=REQUESTS, caller=INSTANCES, rank=st.integers(0, 3))
    def load(
        self, instance: InstanceName, request: RequestId, caller: InstanceName, rank: int
    ) -> None:
        promise = self.model.get((instance, request))
        if promise is None:
            return
        lease_id = promise.lease.id
        if caller != instance or promise.deadline_s <= self.now_s or rank not in promise.left:
            with pytest.raises(LeaseLostError):
                self.leases.use(lease_id, caller, rank, now_s=self.now_s)
            return
        lease = self.leases.use(lease_id, caller, rank, now_s=self.now_s)
        assert lease is promise.lease
        over = self.leases.consumed(lease, rank)
        promise.left.remove(rank)
        if promise.left:
            assert over is None
        else:
            assert over is not None
            assert over.tolist() == self.end((instance, request))

    @precondition(lambda self: self.ended)
    @rule(which=st.integers(0, 99), rank=st.integers(0, 3))
    def use_an_ended_lease(self, which: int, rank: int) -> None:
        lease_id, instance = self.ended[which % len(self.ended)]
        with pytest.raises(LeaseLostError):
            self.leases.use(lease_id, instance, rank, now_s=self.now_s)

    @rule(instance=INSTANCES)
    def instance_ends(self, instance: InstanceName) -> None:
        keys = [key for key in self.model if key[0] == instance]
        found = self.leases.of_instance(instance)
        assert {lease.id for lease in found} == {self.model[key].lease.id for key in keys}
        for lease in found:
            assert self.leases.end(lease).tolist() == self.end((instance, lease.request))

    @invariant()
    def sums_agree(self) -> None:
        active = self.leases.active
        assert active.keys() == {one.lease.id for one in self.model.values()}
        held = sum(one.block_bytes * len(one.entries) for one in self.model.values())
        assert self.leases.pinned_bytes == held <= PINNED_BYTES_MAX
        for (instance, request), one in self.model.items():
            assert self.leases.of_space(instance, request, SPACE) is active[one.lease.id]
            assert one.lease.entries.tolist() == one.entries
            assert one.lease.deadline_s == one.deadline_s


TestLeases = LeasesMachine.TestCase
TestLeases.settings = settings(stateful_step_count=40, deadline=None)


def granted(
    leases: Leases, request: RequestId = R, *, now_s: float = 0.0, rank_count: int = 1
) -> Lease:
    return leases.grant(
        ONE,
        request,
        entries_of(1, 2),
        space=SPACE,
        block_bytes=5,
        rank_count=rank_count,
        now_s=now_s,
    )


@pytest.fixture
def leases() -> Leases:
    return Leases(TTL_S, LEASES_MAX, PINNED_BYTES_MAX)


def test_at_its_deadline_a_lease_is_over_and_just_before_it_is_not(leases: Leases) -> None:
    lease = granted(leases)
    before = np.nextafter(TTL_S, 0)
    assert leases.expire(now_s=before) == []
    assert leases.use(lease.id, ONE, 0, now_s=before) is lease
    with pytest.raises(LeaseLostError):
        leases.use(lease.id, ONE, 0, now_s=TTL_S)
    assert leases.expire(now_s=TTL_S) == [lease]
    assert leases.expire(now_s=TTL_S) == []


def test_each_renewal_counts_from_now(leases: Leases) -> None:
    lease = granted(leases)
    for now_s in (1, 3, 6, 9):
        leases.renew(lease, now_s=now_s)
        assert leases.expire(now_s=now_s + TTL_S - 1) == []
    assert leases.expire(now_s=13) == [lease]


def test_each_rank_loads_once_and_the_last_ends_the_lease(leases: Leases) -> None:
    lease = granted(leases, rank_count=3)
    assert leases.consumed(leases.use(lease.id, ONE, 1, now_s=0), 1) is None
    with pytest.raises(LeaseLostError, match="rank 1 has loaded"):
        leases.use(lease.id, ONE, 1, now_s=0)
    with pytest.raises(LeaseLostError):
        leases.use(lease.id, ONE, 3, now_s=0)
    assert leases.consumed(leases.use(lease.id, ONE, 2, now_s=0), 2) is None
    last = leases.consumed(leases.use(lease.id, ONE, 0, now_s=0), 0)
    assert last is not None
    assert last.tolist() == [1, 2]
    assert leases.pinned_bytes == 0


def test_another_instance_cannot_use_or_see_a_lease(leases: Leases) -> None:
    lease = granted(leases)
    with pytest.raises(LeaseLostError):
        leases.use(lease.id, TWO, 0, now_s=0)
    assert leases.of_request(TWO, R) == []
    assert leases.of_instance(TWO) == []
    assert leases.use(lease.id, ONE, 0, now_s=0) is lease


def test_limits_count_leases_and_bytes_and_a_refusal_changes_nothing(leases: Leases) -> None:
    granted(leases)
    assert leases.room(5) == 2
    assert leases.room(11) == 0
    granted(leases, S)
    assert (leases.room(1), leases.pinned_bytes) == (0, PINNED_BYTES_MAX)
    with pytest.raises(OverloadedError):
        granted(leases, RequestId("more"))
    assert leases.of_request(ONE, RequestId("more")) == []
    assert (len(leases.active), leases.pinned_bytes) == (2, PINNED_BYTES_MAX)
    few = Leases(TTL_S, 1, PINNED_BYTES_MAX)
    granted(few)
    assert few.room(1) == 0


def test_a_second_lease_of_a_request_is_our_bug(leases: Leases) -> None:
    granted(leases)
    with pytest.raises(AssertionError):
        granted(leases)


def test_a_lease_on_nothing_is_our_bug(leases: Leases) -> None:
    with pytest.raises(AssertionError):
        leases.grant(ONE, R, entries_of(), space=SPACE, block_bytes=1, rank_count=1, now_s=0)


def test_a_request_has_a_lease_in_each_space_and_loses_them_one_by_one(leases: Leases) -> None:
    other = SpaceId(8)
    first = granted(leases)
    second = leases.grant(
        ONE, R, entries_of(3), space=other, block_bytes=5, rank_count=1, now_s=0.0
    )
    assert leases.of_request(ONE, R) == [first, second]
    leases.end(first)
    assert (leases.of_space(ONE, R, SPACE), leases.of_space(ONE, R, other)) == (None, second)
    leases.end(second)
    assert leases.of_request(ONE, R) == []


def test_deadlines_of_ended_leases_do_not_pile_up(leases: Leases) -> None:
    """A lease that is loaded at once leaves its deadline behind, for an hour if so set."""
    leases.ttl_s = 3600
    kept = granted(leases)
    most = 0
    for number in range(10_000):
        one = granted(leases, request=RequestId(f"r{number}"))
        leases.end(one)
        most = max(most, len(leases._deadlines))
    assert most < 2 * STALE_MAX
    assert leases.expire(now_s=3599) == []
    assert leases.expire(now_s=3600) == [kept]
