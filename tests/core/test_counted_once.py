"""What the windows count of the calls of engines."""

import pytest

from tests.core.test_store import SLAB, A, B, Engine, R
from trikv.core.cache import Cache
from trikv.core.engines import Engines
from trikv.core.plans import Limits
from trikv.core.windows import Windows
from trikv.core.words import SessionId
from trikv.nursery.store import Store


@pytest.fixture
def store() -> Store:
    cache = Cache(4 * SLAB, SLAB, entries_max=64, seed=1, limits=Limits())
    windows = Windows((60.0,), now_s=100.0)
    return Store(cache, Engines(instances_max=4), lambda: 100.0, windows)


@pytest.fixture
def a(store: Store) -> Engine:
    return Engine(store, A, SessionId(10)).start()


@pytest.fixture
def b(store: Store) -> Engine:
    return Engine(store, B, SessionId(20)).start()


def counted(store: Store) -> tuple[int, int]:
    store.settle()
    facts = store.windows.read(now_s=store.now_s())[0]
    return facts.asked_blocks, sum(facts.hit_blocks)


def test_a_request_s_blocks_are_counted_once_however_often_it_asks(store: Store, a: Engine) -> None:
    a.save(1, 2)
    store.release(A, [R])
    for _ in range(3):
        a.query(1, 2, 3, 4)
    assert counted(store) == (4, 2)
    a.query(1, 2, 3, 4, 5)  # preempted, and longer now: one block more
    assert counted(store) == (5, 2)
    a.save(3, 4, 5)
    a.query(1, 2, 3, 4, 5, 6)
    assert counted(store) == (6, 2)
    a.query(1, 2)
    assert counted(store) == (6, 2)
    store.release(A, [R])
    a.query(1, 2, 3, 4)
    assert counted(store) == (10, 6)


def test_a_block_beyond_what_was_counted_may_be_a_hit(store: Store, a: Engine) -> None:
    a.save(1, 2, 3)
    store.release(A, [R])
    a.query(1)
    a.query(1, 2, 3, 4)
    assert counted(store) == (4, 3)


def test_requests_of_two_engines_are_two(store: Store, a: Engine, b: Engine) -> None:
    a.query(1)
    b.query(1)
    assert counted(store) == (2, 0)
    store.settle()
    assert store.windows.read(now_s=store.now_s())[0].distinct_blocks == 1


def test_after_a_reset_equal_hashes_are_other_blocks(store: Store, a: Engine) -> None:
    a.query(1, 2)
    store.reset(A)
    store.release(A, [R])
    a.query(1, 2)
    store.settle()
    assert store.windows.read(now_s=store.now_s())[0].distinct_blocks == 4
