"""The owner of the core: calls of engines in their order, with a clock that tests set."""

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
from store_world import (
    FILL_S,
    LEASE_S,
    PAGE,
    PLAIN,
    SLAB,
    A,
    B,
    Clock,
    Engine,
    R,
    ids,
    layout_of,
    new_store,
    pieces,
    save,
    words,
)

from trikv.core import namespace as namespaces
from trikv.core.calls import Load, Named, Query
from trikv.core.errors import (
    BadRequestError,
    KvError,
    LeaseLostError,
    NotReadyError,
    OverloadedError,
)
from trikv.core.words import InstanceName, LeaseId, RequestId, SessionId
from trikv.nursery import store as module
from trikv.nursery.store import Store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return new_store(clock)


@pytest.fixture
def a(store: Store) -> Engine:
    return Engine(store, A, SessionId(10)).start()


@pytest.fixture
def b(store: Store) -> Engine:
    return Engine(store, B, SessionId(20)).start()


def holdings(store: Store) -> tuple[object, ...]:
    """Everything that a refused call must leave as it was."""
    cache = store.cache
    columns = [cache.blocks.state, cache.blocks.pins, cache.blocks.writers]
    known = sorted(store.engines.namespaces.by_fingerprint)
    leases = {one.id: (one.deadline_s, one.ranks_left) for one in cache.leases.active.values()}
    return (
        [column.tolist() for column in columns],
        (cache.pages.used_bytes, len(cache.index), len(cache.chains), cache.filling_bytes),
        (set(cache.transfers), leases, known, sorted(cache.spaces), sorted(store.engines.by_name)),
    )


def test_what_one_engine_saves_another_finds_and_loads(store: Store, a: Engine, b: Engine) -> None:
    a.save(1, 2)
    hit = b.query(1, 2, 3)
    assert hit.lease is not None
    assert hit.count == 2
    plan = b.prepare_load(hit.lease.id, 5, 4)
    assert plan.offsets.tolist() == [0, PAGE]
    store.complete_load(plan, np.array([True, False]), layout_of(b))
    counters = store.cache.counters
    assert (counters.load_blocks_total, counters.load_failed_blocks_total) == (1, 1)
    assert (counters.load_bytes_total, counters.save_bytes_total) == (PAGE, 2 * PAGE)
    assert store.cache.blocks.pins.sum() == 0


def test_a_name_is_known_with_the_last_rank(store: Store) -> None:
    engine = Engine(store, A, SessionId(1), rank_count=2, groups=(pieces(PAGE), pieces(100)))
    assert engine.declare() == Named("", (), ())
    assert engine.register(1) == Named("", (PAGE, 100), ())
    named = engine.register(0)
    assert len(named.namespace) == 32
    assert engine.declare().namespace == named.namespace
    other = Engine(store, B, SessionId(9), fields=(("hash_probe", "x"), *PLAIN))
    third = Engine(store, InstanceName("c"), SessionId(19), fields=(("hash_probe", "y"), *PLAIN))
    other.start()
    third.declare()
    (note,) = third.register().notes
    assert "PYTHONHASHSEED" in note


def load_by(session: int, a: Engine) -> object:
    call = Load(0, LeaseId(a.lease(1, 2)), 0, ids(0), 0.0)
    return a.store.prepare_load(SessionId(session), A, call)


def save_by(session: int, a: Engine, name: InstanceName | None = A) -> object:
    return a.store.prepare_save(SessionId(session), name, save(5))


BAD, LOST, EARLY = BadRequestError, LeaseLostError, NotReadyError
REFUSALS: dict[str, tuple[type[KvError], Callable[[Engine, Engine], object]]] = {
    "query of no engine": (EARLY, lambda a, _: a.store.query(None, Query(R, 0, words(1)))),
    "query in a group too many": (BAD, lambda a, _: a.query(1, group=1)),
    "save of no engine": (EARLY, lambda a, _: save_by(11, a, None)),
    "save for another's rank": (BAD, lambda a, _: save_by(21, a)),
    "save by the scheduler": (BAD, lambda a, _: save_by(10, a)),
    "save for no rank": (BAD, lambda a, _: a.prepare_save(save(5, rank=1))),
    "save in a group too many": (BAD, lambda a, _: a.prepare_save(save(5, group=1))),
    "save beyond the blocks": (BAD, lambda a, _: a.prepare_save(save(5, 6, blocks=ids(0, 8)))),
    "save before the blocks": (BAD, lambda a, _: a.prepare_save(save(5, blocks=ids(-1)))),
    "save a hash twice": (BAD, lambda a, _: a.prepare_save(save(5, 6, 5))),
    "load an unknown lease": (LOST, lambda a, _: a.prepare_load(999, 0)),
    "load another's lease": (LOST, lambda a, b: b.prepare_load(a.lease(1, 2), 0)),
    "load for another's rank": (BAD, lambda a, _: load_by(21, a)),
    "load for no rank": (LOST, lambda a, _: a.prepare_load(a.lease(1, 2), 0, rank=1)),
    "load for rank 65,535": (LOST, lambda a, _: a.prepare_load(a.lease(1, 2), 0, rank=65_535)),
    "load beyond the blocks": (BAD, lambda a, _: a.prepare_load(a.lease(1, 2), 8)),
    "load into a block twice": (BAD, lambda a, _: a.prepare_load(a.lease(1, 2), 3, 3)),
    "load more than leased": (BAD, lambda a, _: a.prepare_load(a.lease(1, 2), 0, 1, 2)),
    "load from behind": (BAD, lambda a, _: a.prepare_load(a.lease(1, 2), 0, first=2)),
    "load nothing": (BAD, lambda a, _: a.prepare_load(a.lease(1, 2))),
    "reset of no engine": (EARLY, lambda a, _: a.store.reset(InstanceName("c"))),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_call_leaves_nothing_behind(a: Engine, b: Engine, name: str) -> None:
    refusal, call = REFUSALS[name]
    a.save(1, 2)
    a.lease(1, 2)
    before = holdings(a.store)
    with pytest.raises(refusal):
        call(a, b)
    assert holdings(a.store) == before
    b.save(1, 2, 3)
    assert a.query(1, 2, 3).count == 3


# -- time


def test_leases_and_fills_end_with_the_sweep_and_not_before(clock: Clock, a: Engine) -> None:
    store = a.store
    a.save(1)
    lease = a.lease(1)
    flying = a.prepare_save(save(5))
    clock.now_s += LEASE_S
    with pytest.raises(LeaseLostError):
        a.prepare_load(lease, 0)
    assert store.cache.blocks.pins.sum() == 1
    store.sweep()
    assert store.cache.blocks.pins.sum() == 0
    assert store.cache.filling_bytes == PAGE
    clock.now_s += FILL_S - LEASE_S
    store.sweep()
    assert store.cache.filling_bytes == 0
    store.complete_save(flying, np.ones(1, np.bool_), layout_of(a))
    assert a.query(5).count == 0


def test_a_load_that_began_in_time_outlives_its_lease(clock: Clock, a: Engine) -> None:
    a.save(1)
    plan = a.prepare_load(a.lease(1), 0)
    clock.now_s += 10 * LEASE_S
    a.store.sweep()
    assert a.store.reset(A) == 1
    for message in range(8):
        later = a.prepare_save(save(*range(8 * message + 10, 8 * message + 18)))
        assert plan.offsets[0] not in later.offsets
        a.store.complete_save(later, np.ones(len(later.entries), np.bool_), layout_of(a))
    assert a.store.cache.blocks.pins[plan.entries[0]] == 1
    a.store.complete_load(plan, np.ones(1, np.bool_), layout_of(a))
    assert a.store.cache.blocks.pins.sum() == 0


# -- reset


def sweep(store: Store) -> None:
    store.sweep()
    while store.drop_retired():
        pass


def test_a_reset_takes_everything_from_all_who_share(clock: Clock, a: Engine, b: Engine) -> None:
    store = a.store
    a.save(1, 2)
    lease = b.lease(1, 2)
    flying = a.prepare_save(save(3))
    assert store.reset(A) == 3
    assert b.query(9).count == 0  # ends b's lease: its request has asked again
    with pytest.raises(LeaseLostError):
        b.prepare_load(lease, 0, 1)
    store.complete_save(flying, np.ones(1, np.bool_), layout_of(a))
    assert a.query(1, 2, 3).count == 0
    clock.now_s += FILL_S
    sweep(store)
    assert store.cache.pages.used_bytes == 0
    a.save(1, 2)
    assert b.query(1, 2).count == 2


def test_a_lease_of_before_the_reset_cannot_be_loaded(clock: Clock, a: Engine, b: Engine) -> None:
    a.save(1, 2)
    lease = b.lease(1, 2)
    a.store.reset(A)
    before = holdings(a.store)
    with pytest.raises(LeaseLostError, match="reset"):
        b.prepare_load(lease, 0, 1)
    assert holdings(a.store) == before
    assert a.store.cache.pages.used_bytes == 2 * PAGE
    clock.now_s += LEASE_S
    sweep(a.store)
    assert a.store.cache.pages.used_bytes == 0


def test_an_engine_of_altered_weights_leaves_for_a_namespace_of_its_own(
    clock: Clock, a: Engine, b: Engine
) -> None:
    a.save(1)
    lease = a.lease(1)
    assert a.store.reset(A, "once") == 1
    with pytest.raises(LeaseLostError, match="reset"):
        a.prepare_load(lease, 0, 1)
    a.save(1, 2)
    assert a.query(1, 2).count == 2
    assert b.query(1, 2).count == 0
    b.save(2)
    assert a.store.reset(A, "twice") == 2
    assert a.query(1, 2).count == 0
    assert b.query(2).count == 1
    a.fields = (*a.fields, ("altered", "twice"))
    assert a.declare().namespace != b.declare().namespace  # as it says itself after a restart
    a.save(3)
    assert a.query(3).count == 1


def test_at_the_bound_of_namespaces_a_reset_that_leaves_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, a: Engine
) -> None:
    a.save(1)
    for where in (namespaces, module):
        monkeypatch.setattr(where, "NAMESPACES_MAX", 1)
    before = holdings(a.store)
    with pytest.raises(OverloadedError):
        a.store.reset(A, "once")
    assert holdings(a.store) == before
    assert a.query(1).count == 1


# -- the end of sessions, and the bound on namespaces


def test_the_schedulers_end_ends_leases_and_a_workers_does_not(a: Engine) -> None:
    store = a.store
    a.save(1)
    a.lease(1)
    store.session_lost(a.session(0))
    assert len(store.cache.leases.active) == 1
    with pytest.raises(NotReadyError):
        a.query(1)
    a.register(0)
    store.session_lost(a.scheduler)
    assert (len(store.cache.leases.active), len(store.cache.chains)) == (0, 0)
    assert store.cache.blocks.pins.sum() == 0
    a.declare()
    assert a.query(1).count == 1


def test_release_of_anything_is_fine(a: Engine) -> None:
    a.save(1)
    a.lease(1)
    a.store.release(None, [R])
    a.store.release(B, [R])
    a.store.release(A, [RequestId("x")])
    assert len(a.store.cache.leases.active) == 1
    a.store.release(A, [R, R])
    assert len(a.store.cache.leases.active) == 0


@pytest.fixture
def two_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (namespaces, module):
        monkeypatch.setattr(where, "NAMESPACES_MAX", 2)


def with_weights(store: Store, name: str, session: int) -> Engine:
    return Engine(
        store, InstanceName(name), SessionId(session), fields=(("label", name), ("weights", name))
    )


@pytest.mark.usefixtures("two_namespaces")
def test_at_the_bound_namespaces_without_engines_and_blocks_go(store: Store) -> None:
    empty, full = with_weights(store, "e", 10).start(), with_weights(store, "f", 20).start()
    full.save(1)
    for engine in (empty, full):
        store.session_lost(engine.scheduler)
        store.session_lost(engine.session(0))
    third = with_weights(store, "t", 30).start()
    known = {one.label for one in store.engines.namespaces.by_fingerprint.values()}
    assert known == {"f", "t"}
    assert third.query(1).count == 0
    fourth = with_weights(store, "u", 40)
    fourth.declare()
    with pytest.raises(OverloadedError):
        fourth.register()
    store.session_lost(fourth.scheduler)
    full.start()
    assert full.query(1).count == 1


@pytest.mark.usefixtures("two_namespaces")
def test_a_namespace_with_half_a_block_is_not_forgotten(clock: Clock, store: Store) -> None:
    half, full = with_weights(store, "h", 10), with_weights(store, "f", 20).start()
    half.rank_count = 2
    half.start()
    plan = half.prepare_save(save(1, rank=0))
    store.complete_save(plan, np.ones(1, np.bool_), layout_of(half))  # rank 1 never saves
    for session in (half.scheduler, half.session(0), half.session(1)):
        store.session_lost(session)
    third = with_weights(store, "t", 30)
    third.declare()
    with contextlib.suppress(OverloadedError):
        third.register()
    clock.now_s += FILL_S
    store.sweep()
    assert store.cache.filling_bytes == 0
    full.save(1)


def test_an_engine_whose_blocks_no_slab_holds_leaves_nothing_behind(store: Store) -> None:
    engine = Engine(store, A, SessionId(1), groups=(pieces(PAGE), pieces(SLAB + 1)))
    before = holdings(store)
    engine.declare()
    with pytest.raises(BadRequestError):
        engine.register()
    store.session_lost(engine.scheduler)
    assert holdings(store) == before


@pytest.mark.usefixtures("two_namespaces")
def test_a_refused_declaration_ends_the_leases_of_the_one_before(store: Store) -> None:
    first = with_weights(store, "f", 10).start()
    with_weights(store, "s", 20).start()
    first.save(1)
    first.lease(1)
    first.fields = (("weights", "new"),)
    with pytest.raises(OverloadedError):
        first.declare()
    assert (len(store.cache.leases.active), len(store.cache.chains)) == (0, 0)
