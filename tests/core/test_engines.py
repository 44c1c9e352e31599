"""Engines against a record of who said what, and namespaces that count their users rightly."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trikv.core import namespace as namespaces
from trikv.core.engines import Engines
from trikv.core.errors import (
    BadRequestError,
    ConflictError,
    KvError,
    NotReadyError,
    OverloadedError,
)
from trikv.core.layout import Geometry, GroupLayout, Piece, Range
from trikv.core.namespace import Fields, fingerprint
from trikv.core.words import InstanceName, SessionId

INSTANCES_MAX = 2
NAMESPACES_MAX = 2
A, B = InstanceName("a"), InstanceName("b")
NAMES = st.sampled_from("aaabbc").map(InstanceName)
SESSIONS = st.integers(1, 3).map(SessionId)
FIELDS = st.sampled_from(["1", "2"]).map(lambda value: (("weights", value),))
PLAIN: Fields = (("weights", "1"),)
OTHER: Fields = (("weights", "2"),)


Groups = tuple[GroupLayout, ...]


def group(piece_bytes: int, replicas: int = 1) -> GroupLayout:
    pieces = (Piece(0, 0, 16, piece_bytes),)
    return GroupLayout((Range(0, 64),), pieces, 2, "f32", replicas=replicas)


ONE, WIDE = (group(8),), (group(16),)
TWO = (group(8), group(8))
SAME = (group(8, 2),)  # with another rank
GROUPS = st.sampled_from([ONE, ONE, ONE, SAME, SAME, WIDE, (group(16, 2),), TWO])


@dataclass
class Said:
    """All that was said about one instance and not taken back."""

    declared: tuple[SessionId, int, Fields] | None = None
    ranks: dict[int, tuple[SessionId, Groups]] = field(default_factory=dict)

    def is_complete(self) -> bool:
        return self.declared is not None and len(self.ranks) == self.declared[1]

    def contradicts(self, session: SessionId, rank_count: int) -> bool:
        is_anothers = self.declared is not None and self.declared[0] != session
        return is_anothers or any(rank >= rank_count for rank in self.ranks)

    def fingerprint(self) -> bytes:
        assert self.declared is not None
        ranks = [self.ranks[rank][1] for rank in range(self.declared[1])]
        held: list[tuple[Geometry, ...]] = []
        for column in zip(*ranks, strict=True):  # the first of those that hold the same bytes
            first = column[0].geometry
            is_shared = column[0].replicas == len(column)
            held.append((first,) if is_shared else tuple(one.geometry for one in column))
        return fingerprint(self.declared[2], tuple(held))


def disagree(column: Groups) -> bool:
    """About who holds the same bytes, in a group of one or two ranks."""
    told = {one.replicas for one in column}
    if told == {2}:
        return len(column) == 1 or column[0].geometry != column[1].geometry
    return told != {1}


class EnginesMachine(RuleBasedStateMachine):
    """Three sessions, three names, room for two instances and two namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(namespaces, "NAMESPACES_MAX", NAMESPACES_MAX)
        self.engines = Engines(INSTANCES_MAX)
        self.model: dict[InstanceName, Said] = {}
        self.known: set[bytes] = set()

    def teardown(self) -> None:
        for session in range(1, 4):
            self.lose(SessionId(session))
        self.all_agrees()
        assert not self.engines.by_name
        self.patch.undo()

    def forget(self, session: SessionId) -> set[InstanceName]:
        """Take back all that a session said; returns whose requests end."""
        ended = set()
        for name, said in list(self.model.items()):
            own = [rank for rank, (whose, _) in said.ranks.items() if whose == session]
            for rank in own:
                del said.ranks[rank]
            was_scheduler = said.declared is not None and said.declared[0] == session
            if was_scheduler:
                said.declared = None
            is_gone = said.declared is None and not said.ranks
            if is_gone:
                del self.model[name]
            if was_scheduler or (own and is_gone):
                ended.add(name)
        return ended

    def refusal_of(self, name: InstanceName) -> type[KvError] | None:
        """How completing an instance is refused, if it is."""
        said = self.model[name]
        if not said.is_complete():
            return None
        ranks = [groups for _, groups in said.ranks.values()]
        if len({len(groups) for groups in ranks}) > 1:
            return BadRequestError
        if any(disagree(column) for column in zip(*ranks, strict=True)):
            return BadRequestError
        key = said.fingerprint()
        if key not in self.known and len(self.known) == NAMESPACES_MAX:
            return OverloadedError
        self.known.add(key)
        return None

    @rule(session=SESSIONS, name=NAMES, rank_count=st.integers(1, 2), fields=FIELDS)
    def declare(
        self, session: SessionId, name: InstanceName, rank_count: int, fields: Fields
    ) -> None:
        said = self.model.get(name)
        refusal: type[KvError] | None = None
        if said is None and len(self.model) == INSTANCES_MAX:
            refusal = OverloadedError
        elif said is not None and said.contradicts(session, rank_count):
            refusal = ConflictError
        else:
            said = self.model.setdefault(name, Said())
            said.declared = (session, rank_count, fields)
            refusal = self.refusal_of(name)
            if refusal is not None:
                self.forget(session)
        if refusal is None:
            instance = self.engines.declare(session, name, rank_count=rank_count, fields=fields)
            assert instance is self.engines.by_name[name]
            return
        with pytest.raises(refusal):
            self.engines.declare(session, name, rank_count=rank_count, fields=fields)

    @rule(session=SESSIONS, name=NAMES, rank=st.integers(0, 2), groups=GROUPS)
    def register(self, session: SessionId, name: InstanceName, rank: int, groups: Groups) -> None:
        said = self.model.get(name)
        refusal: type[KvError] | None = None
        if said is None and len(self.model) == INSTANCES_MAX:
            refusal = OverloadedError
        elif said is not None and rank in said.ranks and said.ranks[rank][0] != session:
            refusal = ConflictError
        elif said is not None and said.declared is not None and rank >= said.declared[1]:
            refusal = BadRequestError
        else:
            said = self.model.setdefault(name, Said())
            said.ranks[rank] = (session, groups)
            refusal = self.refusal_of(name)
            if refusal is not None:
                self.forget(session)
        if refusal is None:
            instance = self.engines.register(session, name, rank, groups)
            assert instance is self.engines.by_name[name]
            return
        with pytest.raises(refusal):
            self.engines.register(session, name, rank, groups)

    @rule(session=SESSIONS)
    def lose(self, session: SessionId) -> None:
        expected = self.forget(session)
        found = self.engines.session_lost(session)
        assert len(found) == len(set(found))
        assert set(found) == expected

    @invariant()
    def all_agrees(self) -> None:
        engines = self.engines
        assert engines.by_name.keys() == self.model.keys()
        users: Counter[bytes] = Counter()
        for name, said in self.model.items():
            instance = engines.by_name[name]
            assert instance.declared_by == (said.declared and said.declared[0])
            assert {rank: facts.session for rank, facts in instance.ranks.items()} == {
                rank: session for rank, (session, _) in said.ranks.items()
            }
            if not said.is_complete():
                assert instance.missing()
                with pytest.raises(NotReadyError):
                    engines.ready(name)
                continue
            assert instance.missing() == ""
            ready = engines.ready(name)
            assert ready.namespace is not None
            assert ready.namespace.fingerprint == said.fingerprint()
            users[said.fingerprint()] += 1
        found = engines.namespaces.by_fingerprint
        assert {key: one.instances for key, one in found.items()} == {
            key: users[key] for key in self.known
        }


TestEngines = EnginesMachine.TestCase
TestEngines.settings = settings(stateful_step_count=40, deadline=None)


@pytest.fixture
def engines() -> Engines:
    return Engines(INSTANCES_MAX)


def sid(number: int) -> SessionId:
    return SessionId(number)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_ready_with_the_last_word_whatever_the_order(
    engines: Engines, order: tuple[int, ...]
) -> None:
    shapes = [group(8), group(12), group(16)]
    for number, step in enumerate(order):
        if number:
            with pytest.raises(NotReadyError):
                engines.ready(A)
        if step == 3:
            engines.declare(sid(3), A, rank_count=3, fields=PLAIN)
        else:
            engines.register(sid(step), A, step, (shapes[step],))
    namespace = engines.ready(A).namespace
    assert namespace is not None
    assert namespace.fingerprint == fingerprint(PLAIN, (tuple(one.geometry for one in shapes),))
    assert namespace.instances == 1


def test_the_refusal_says_what_is_missing(engines: Engines) -> None:
    with pytest.raises(NotReadyError, match="declare or register first"):
        engines.ready(None)
    with pytest.raises(NotReadyError, match="declare or register first"):
        engines.ready(A)
    engines.register(sid(1), A, 1, ONE)
    with pytest.raises(NotReadyError, match="scheduler has not declared"):
        engines.ready(A)
    engines.declare(sid(2), A, rank_count=4, fields=PLAIN)
    with pytest.raises(NotReadyError, match="rank 0, 2, 3 of 4"):
        engines.ready(A)


def ready(engines: Engines, name: InstanceName = A, *, session: int = 1) -> None:
    engines.declare(sid(session), name, rank_count=1, fields=PLAIN)
    engines.register(sid(session + 1), name, 0, ONE)


def test_saying_the_same_again_changes_nothing(engines: Engines) -> None:
    ready(engines)
    namespace = engines.ready(A).namespace
    engines.declare(sid(1), A, rank_count=1, fields=PLAIN)
    engines.register(sid(2), A, 0, ONE)
    assert engines.ready(A).namespace is namespace
    assert namespace is not None
    assert namespace.instances == 1


def test_saying_something_else_moves_to_another_namespace(engines: Engines) -> None:
    ready(engines)
    first = engines.ready(A).namespace
    engines.declare(sid(1), A, rank_count=1, fields=OTHER)
    second = engines.ready(A).namespace
    engines.register(sid(2), A, 0, WIDE)
    third = engines.ready(A).namespace
    assert first is not None
    assert second is not None
    assert third is not None
    assert [one.instances for one in (first, second, third)] == [0, 0, 1]
    engines.declare(sid(1), A, rank_count=2, fields=OTHER)
    assert third.instances == 0
    with pytest.raises(NotReadyError, match="rank 1 of 2"):
        engines.ready(A)


def test_equal_engines_share_a_namespace_and_the_last_one_leaves_it_empty(engines: Engines) -> None:
    ready(engines)
    ready(engines, B, session=3)
    namespace = engines.ready(A).namespace
    assert namespace is not None
    assert engines.ready(B).namespace is namespace
    assert namespace.instances == 2
    assert engines.session_lost(sid(4)) == []  # a worker; its scheduler still lives
    assert namespace.instances == 1
    assert engines.session_lost(sid(3)) == [B]
    assert engines.session_lost(sid(1)) == [A]
    assert engines.session_lost(sid(2)) == [A]
    assert engines.session_lost(sid(2)) == []
    assert namespace.instances == 0
    assert list(engines.namespaces.by_fingerprint.values()) == [namespace]


def test_a_conflict_leaves_the_holder_alone(engines: Engines) -> None:
    ready(engines)
    with pytest.raises(ConflictError, match="another live process"):
        engines.declare(sid(9), A, rank_count=1, fields=PLAIN)
    with pytest.raises(ConflictError, match="another live process"):
        engines.register(sid(9), A, 0, ONE)
    with pytest.raises(BadRequestError):
        engines.register(sid(2), A, 1, ONE)
    engines.register(sid(5), B, 3, ONE)
    with pytest.raises(ConflictError, match="beyond 2"):
        engines.declare(sid(6), B, rank_count=2, fields=PLAIN)
    assert engines.ready(A).missing() == ""
    assert engines.session_lost(sid(9)) == []
    with pytest.raises(OverloadedError, match="--max-engines"):
        engines.register(sid(9), InstanceName("c"), 0, ONE)


@pytest.fixture(params=["groups", "namespaces"])
def second(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Groups of rank 1 with which an instance cannot be completed."""
    if request.param == "namespaces":
        monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 0)
    return TWO if request.param == "groups" else ONE


def test_a_scheduler_that_was_refused_has_said_nothing(engines: Engines, second: Groups) -> None:
    engines.register(sid(1), A, 0, ONE)
    engines.register(sid(2), A, 1, second)
    engines.register(sid(3), B, 0, ONE)
    with pytest.raises((BadRequestError, OverloadedError)):
        engines.declare(sid(3), A, rank_count=2, fields=PLAIN)
    assert engines.by_name.keys() == {A}  # what it said of B is gone too
    assert engines.by_name[A].declared_by is None
    assert engines.by_name[A].ranks.keys() == {0, 1}
    assert not engines.namespaces.by_fingerprint


def test_a_worker_that_was_refused_has_said_nothing(engines: Engines, second: Groups) -> None:
    engines.register(sid(1), A, 0, ONE)
    engines.declare(sid(2), A, rank_count=2, fields=PLAIN)
    engines.declare(sid(3), B, rank_count=1, fields=PLAIN)
    with pytest.raises((BadRequestError, OverloadedError)):
        engines.register(sid(3), A, 1, second)
    assert engines.by_name.keys() == {A}
    assert engines.by_name[A].declared_by == 2
    assert engines.by_name[A].ranks.keys() == {0}
    assert not engines.namespaces.by_fingerprint


def test_a_declaration_is_gone_with_its_session(engines: Engines) -> None:
    """A restarted engine may be larger, and its workers faster than its scheduler."""
    ready(engines)
    engines.session_lost(sid(1))
    assert engines.by_name[A].rank_count == 0
    engines.register(sid(3), A, 1, ONE)
    engines.declare(sid(4), A, rank_count=2, fields=PLAIN)
    engines.ready(A)
