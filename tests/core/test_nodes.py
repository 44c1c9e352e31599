"""The metaserver's state against dicts: who holds what, and what is forgotten when."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.owned import GRACE_S, SILENCE_S, A, B, Pair, many, words
from trikv.core import nodes as nodes_module
from trikv.core.errors import ConflictError, NotReadyError, OverloadedError
from trikv.core.nodes import DIGEST_MASK, FAR_COST, Node, Nodes
from trikv.core.owners import Owners, digest_of

ADDRESSES = ["one:1", "two:1", "three:1"]
KEYS = 4
PAIRS = st.tuples(st.sampled_from([0, 1]), st.integers(0, KEYS // 2 - 1))
SOME = st.lists(PAIRS, min_size=1, max_size=KEYS + 1)
ORIGINS = st.sampled_from([A, B])


@dataclass
class Member:
    """A node as the model sees it: what it holds by an announcement that counts."""

    node: Node
    epoch: int
    session: int
    deadline_s: int
    new: set[tuple[bytes, Pair]] = field(default_factory=set)
    old: set[tuple[bytes, Pair]] = field(default_factory=set)
    below: set[tuple[bytes, Pair]] = field(default_factory=set)  # those of them on a disk only
    in_round: bool = False
    complete: bool = False
    digest: int = 0

    @property
    def held(self) -> set[tuple[bytes, Pair]]:
        return self.new | self.old


class NodesMachine(RuleBasedStateMachine):
    """Two owners a block, so that a third is crowded out; time, sweeps and expiry apart."""

    OWNERS_MAX = 2

    def __init__(self) -> None:
        super().__init__()
        # As many rows as keys: dead rows that are not swept are known, so none is declined.
        self.owners = Owners(2 * KEYS, seed=1, owners_max=self.OWNERS_MAX)
        self.nodes = Nodes(self.owners, SILENCE_S, GRACE_S)
        self.model: dict[str, Member] = {}
        self.gone: list[tuple[Node, int]] = []
        self.now_s = 0

    # -- who is there

    @rule(address=st.sampled_from(ADDRESSES), epoch=st.integers(1, 3))
    def join(self, address: str, epoch: int) -> None:
        known = self.model.get(address)
        if known is not None and epoch < known.epoch:
            with pytest.raises(ConflictError):
                self.nodes.join(address, epoch, [], now_s=self.now_s)
            return
        node = self.nodes.join(address, epoch, [], now_s=self.now_s)
        if known is not None and epoch == known.epoch:
            assert node is known.node
            assert node.session != known.session
            known.session, known.deadline_s = node.session, self.now_s + SILENCE_S
            return
        if known is not None:
            self.gone.append((known.node, known.session))
        self.model[address] = Member(node, epoch, node.session, self.now_s + SILENCE_S)

    @rule(step_s=st.integers(0, SILENCE_S))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def expire(self) -> None:
        late = [name for name, one in self.model.items() if one.deadline_s <= self.now_s]
        expected = {self.model[name].node.address for name in late}
        for name in late:
            one = self.model.pop(name)
            self.gone.append((one.node, one.session))
        assert {node.address for node in self.nodes.expire(now_s=self.now_s)} == expected

    @rule(late_s=st.integers(1, 3))
    def stopped(self, late_s: int) -> None:
        self.nodes.excuse(late_s)
        for one in self.model.values():
            one.deadline_s += late_s

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def connection_lost(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.nodes.disconnected(one.node, one.session, now_s=self.now_s)
        self.nodes.disconnected(one.node, one.session - 1, now_s=-100)  # an earlier one: nothing
        one.deadline_s = min(one.deadline_s, self.now_s + GRACE_S)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.nodes.forget(one.node)
        del self.model[one.node.address]
        self.gone.append((one.node, one.session))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.nodes.use(one.node, one.session, now_s=self.now_s)
        one.deadline_s = self.now_s + SILENCE_S
        with pytest.raises(ConflictError):
            self.nodes.use(one.node, one.session - 1, now_s=self.now_s)

    @precondition(lambda self: self.gone)
    @rule()
    def use_what_is_gone(self) -> None:
        node, session = self.gone[-1]
        with pytest.raises(NotReadyError):
            self.nodes.use(node, session, now_s=self.now_s)

    # -- what they hold

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.nodes.begin(one.node, now_s=self.now_s)
        if not one.in_round:
            one.old, one.in_round = one.new, True
        one.new, one.complete = set(), False

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = self.pick(data)
        self.nodes.finish(one.node)
        one.old, one.in_round, one.complete, one.digest = set(), False, True, 0
        one.below &= one.new

    @precondition(lambda self: self.model)
    @rule(data=st.data(), origin=ORIGINS, keys=SOME, is_below=st.booleans())
    def advertise(
        self, data: st.DataObject, origin: bytes, keys: list[Pair], *, is_below: bool
    ) -> None:
        one = self.pick(data)
        was_below = one.below
        taken = self.nodes.advertise(one.node, origin, words(*keys), is_below=is_below)
        one.digest = (one.digest + digest_of(origin, words(*keys))) & DIGEST_MASK
        new = crowded = 0
        for key in dict.fromkeys((origin, key) for key in keys):
            others = sum((key in m.new) + (key in m.old) for m in self.model.values())
            if key in one.held or others < self.OWNERS_MAX:
                one.below = one.below | {key} if is_below else one.below - {key}
            if key in one.new:
                new += is_below != (key in was_below)  # it has another tag
                continue
            if key in one.old:
                one.old.discard(key)
            elif others >= self.OWNERS_MAX:
                crowded += 1
                continue
            one.new.add(key)
            new += 1
        assert (taken.new_count, taken.crowded_count, taken.declined_count) == (new, crowded, 0)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), origin=ORIGINS, keys=SOME)
    def withdraw(self, data: st.DataObject, origin: bytes, keys: list[Pair]) -> None:
        one = self.pick(data)
        gone = {(origin, key) for key in keys} & one.held
        assert self.nodes.withdraw(one.node, origin, words(*keys)) == len(gone)
        one.digest = (one.digest - digest_of(origin, words(*keys))) & DIGEST_MASK
        one.new -= gone
        one.old -= gone
        one.below -= gone

    # -- forgetting

    @rule(rows=st.integers(1, 3))
    def sweep_a_little(self, rows: int) -> None:
        assert self.owners.sweep(rows) is not self.owners.is_clean

    @rule()
    def sweep_all(self) -> None:
        while self.owners.sweep(3):
            pass
        held = {key for one in self.model.values() for key in one.held}
        assert len(self.owners) == len(held)
        assert self.owners.origin_count == len({origin for origin, _ in held})
        tags = set(np.unique(self.owners._owners).tolist()) - {0}
        live = {tag for one in self.model.values() for tag in one.node.all_tags}
        assert tags <= live
        assert len(set(self.owners._free_tags)) == len(self.owners._free_tags)
        assert self.owners.tag_count == len(live)

    # -- answers

    @precondition(lambda self: self.model)
    @rule(data=st.data(), origin=ORIGINS, keys=SOME)
    def locate(self, data: st.DataObject, origin: bytes, keys: list[Pair]) -> None:
        asker = self.pick(data)
        plan = self.nodes.locate(asker.node, origin, words(*keys), now_s=self.now_s)
        others = [one for one in self.model.values() if one is not asker]
        owners = [{m.node.number for m in others if (origin, key) in m.held} for key in keys]
        gap = next((at for at, one in enumerate(owners) if not one), len(keys))
        assert plan.block_count == gap
        at = 0
        for segment in plan.segments:
            assert segment.first == at
            for block in range(segment.first, segment.first + segment.count):
                assert segment.node in owners[block]
                named = next(m for m in others if m.node.number == segment.node)
                if (origin, keys[block]) in named.below:  # then nobody else has it in memory
                    holders = [m for m in others if (origin, keys[block]) in m.held]
                    assert all((origin, keys[block]) in m.below for m in holders)
            at += segment.count
        assert {number: node.number for number, node in plan.nodes.items()} == {
            segment.node: segment.node for segment in plan.segments
        }

    def pick(self, data: st.DataObject) -> Member:
        return self.model[data.draw(st.sampled_from(sorted(self.model)))]

    @invariant()
    def it_knows_who_is_there(self) -> None:
        assert set(self.nodes.by_address) == set(self.model)
        for one in self.model.values():
            assert self.nodes.by_number[one.node.number] is one.node
            assert one.node.deadline_s == one.deadline_s
            assert one.node.digest == one.digest
            assert one.node.is_complete == one.complete
            assert self.nodes.held(one.node) == len(one.held)
        complete = [one.node for one in self.model.values() if one.complete]
        assert self.nodes.complete_count == len(complete)
        total = sum(node.name_digest for node in complete) & DIGEST_MASK
        assert self.nodes.complete_digest == total

    @invariant()
    def no_row_is_lost(self) -> None:
        held = {key for one in self.model.values() for key in one.held}
        assert len(self.owners) >= len(held)
        assert len(self.owners) + self.owners.free_count == self.owners.capacity


TestNodes = NodesMachine.TestCase
TestNodes.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- which owner


def test_load_and_what_was_planned_lately_decide_between_owners() -> None:
    nodes = Nodes(Owners(100, seed=0), SILENCE_S, GRACE_S)
    asker, one, two = (nodes.join(name, 1, [], now_s=0) for name in ("a:1", "b:1", "c:1"))
    for node in (one, two):
        nodes.advertise(node, A, many(50))
    one.lent = 500
    assert set(nodes.locate(asker, A, many(50), now_s=0).nodes) == {two.number}
    for _ in range(9):
        nodes.locate(asker, A, many(50), now_s=0)
    assert two.planned == 500
    two.lent += 1
    assert set(nodes.locate(asker, A, many(50), now_s=0).nodes) == {one.number}
    one.lent = 0
    one.planned = 0.0
    two.lent = 0
    assert set(nodes.locate(asker, A, many(50), now_s=0).nodes) == {one.number}
    two.planned, two.planned_s = 40.0, 0.0  # halves each second: 10 against 50 halved twice
    one.planned, one.planned_s = 44.0, 0.0
    assert set(nodes.locate(asker, A, many(50), now_s=2).nodes) == {two.number}
    assert two.planned == pytest.approx(10 + 50)


def test_a_common_rail_is_worth_more_than_any_load() -> None:
    nodes = Nodes(Owners(100, seed=0), SILENCE_S, GRACE_S)
    asker = nodes.join("a:1", 1, ["red", "blue"], now_s=0)
    near, far = nodes.join("b:1", 1, ["blue"], now_s=0), nodes.join("c:1", 1, ["green"], now_s=0)
    for node in (near, far):
        nodes.advertise(node, A, many(50))
    near.lent = 1_000_000
    assert near.lent < FAR_COST
    assert set(nodes.locate(asker, A, many(50), now_s=0).nodes) == {near.number}
    nodes.withdraw(near, A, many(50))
    assert set(nodes.locate(asker, A, many(50), now_s=0).nodes) == {far.number}
    assert nodes.locate(nodes.join("d:1", 1, [], now_s=0), A, many(50), now_s=0).block_count == 50


def test_more_rails_than_there_are_bits_are_as_good_as_none() -> None:
    nodes = Nodes(Owners(1, seed=0), SILENCE_S, GRACE_S)
    first = nodes.join("a:1", 1, [f"r{at}" for at in range(64)], now_s=0)
    assert first.rails == 2**64 - 1
    assert nodes.join("b:1", 1, ["r64", "r3"], now_s=0).rails == 8


# -- what chance finds seldom


def three_nodes(owners_max: int = 2) -> tuple[Nodes, list[Node]]:
    nodes = Nodes(Owners(9, seed=0, owners_max=owners_max), SILENCE_S, GRACE_S)
    return nodes, [nodes.join(f"{at}:1", 1, [], now_s=0) for at in range(3)]


def test_a_node_is_never_sent_to_itself() -> None:
    nodes, (one, two, _) = three_nodes()
    nodes.advertise(one, A, many(4))
    nodes.advertise(two, A, many(4)[:2])
    assert nodes.locate(one, A, many(4), now_s=0).block_count == 2
    assert set(nodes.locate(one, A, many(4), now_s=0).nodes) == {two.number}
    assert nodes.locate(two, A, many(4), now_s=0).block_count == 4


def test_who_announces_anew_needs_no_second_place() -> None:
    nodes, (one, two, three) = three_nodes()
    for node in (one, two):
        nodes.advertise(node, A, many(4))
    nodes.begin(one, now_s=0)
    taken = nodes.advertise(one, A, many(4))
    assert (taken.new_count, taken.crowded_count) == (4, 0)
    nodes.finish(one)
    nodes.forget(two)
    assert nodes.locate(three, A, many(4), now_s=0).block_count == 4


def test_what_is_withdrawn_while_all_is_announced_anew_is_gone() -> None:
    nodes, (one, _, three) = three_nodes()
    nodes.advertise(one, A, many(4))
    nodes.begin(one, now_s=0)
    nodes.advertise(one, A, many(4)[:2])
    assert nodes.locate(three, A, many(4), now_s=0).block_count == 4, "what was told counts on"
    assert nodes.withdraw(one, A, many(4)[[1, 3]]) == 2
    assert nodes.locate(three, A, many(4), now_s=0).block_count == 1
    assert nodes.locate(three, A, many(4)[2:], now_s=0).block_count == 1
    nodes.finish(one)
    assert nodes.locate(three, A, many(4)[2:], now_s=0).block_count == 0, "was not said again"


def test_who_does_not_finish_begins_anew_and_loses_nothing() -> None:
    nodes, (one, _, three) = three_nodes()
    nodes.advertise(one, A, many(4))
    nodes.begin(one, now_s=0)
    nodes.begin(one, now_s=0)
    assert nodes.locate(three, A, many(4), now_s=0).block_count == 4


def test_only_so_many_announce_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "ROUNDS_MAX", 2)
    nodes, (one, two, three) = three_nodes()
    for node in (one, two, one):
        nodes.begin(node, now_s=0)
    with pytest.raises(OverloadedError):
        nodes.begin(three, now_s=nodes_module.ROUND_S - 1)
    assert three.previous is None
    nodes.begin(three, now_s=nodes_module.ROUND_S)  # who takes so long holds up nobody
    nodes.finish(three)
    nodes.begin(two, now_s=nodes_module.ROUND_S)
    nodes.begin(one, now_s=nodes_module.ROUND_S)
    with pytest.raises(OverloadedError):
        nodes.begin(three, now_s=nodes_module.ROUND_S)
    nodes.forget(two)
    nodes.begin(three, now_s=nodes_module.ROUND_S)


def test_who_has_a_block_on_a_disk_only_is_named_where_nobody_has_it_in_memory() -> None:
    nodes, (one, two, three) = three_nodes()
    keys = many(4)
    nodes.advertise(one, A, keys, is_below=True)
    nodes.advertise(two, A, keys[1:3])
    plan = nodes.locate(three, A, keys, now_s=0)
    assert [(nodes.by_number[s.node].address, s.count) for s in plan.segments] == [
        (one.address, 1),
        (two.address, 2),
        (one.address, 1),
    ]
    nodes.advertise(one, A, keys)  # read up
    assert nodes.locate(three, A, keys, now_s=0).segments[0].count == 4
    nodes.withdraw(two, A, keys)
    nodes.advertise(one, A, keys, is_below=True)  # and evicted again
    assert nodes.locate(three, A, keys, now_s=0).block_count == 4
    assert nodes.locate(one, A, keys, now_s=0).block_count == 0
    assert nodes.held(one) == 4
    assert nodes.withdraw(one, A, keys) == 4
    assert nodes.locate(three, A, keys, now_s=0).block_count == 0
