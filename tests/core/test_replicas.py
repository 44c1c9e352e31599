"""Ranks that hold the same bytes: one page, each block saved by one of them, loaded by all."""

from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_world import PAGE, Clock, Engine, R, layout_of, new_store, pieces, save

from trikv.core.blocks import State
from trikv.core.errors import BadRequestError, LeaseLostError
from trikv.core.layout import GroupLayout, Piece, Range
from trikv.core.replicas import own_turns, page_of, pages_of
from trikv.core.words import InstanceName, SessionId
from trikv.nursery.store import Store

if TYPE_CHECKING:
    from trikv.core.plans import SavePlan

BLOCKS = (11, 12, 13, 14, 15)


def mla(store: Store, ranks: int, name: str = "mla", session: int = 100) -> Engine:
    """An engine all of whose ranks hold the same bytes."""
    groups = (pieces(PAGE, ranks),)
    return Engine(store, InstanceName(name), SessionId(session), ranks, groups=groups).start()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    return new_store(clock)


def found(engine: Engine, *hashes: int) -> int:
    count = engine.query(*hashes).count
    engine.store.release(engine.name, [R])
    return count


@given(st.integers(1, 64), st.integers(0, 1_000), st.integers(0, 200), st.integers(0, 7))
def test_each_block_is_saved_by_one_of_the_ranks(
    replicas: int, first: int, count: int, page: int
) -> None:
    ranks = range(page * replicas, (page + 1) * replicas)
    assert {page_of(rank, replicas) for rank in ranks} == {page}
    turns = np.array([own_turns(rank, replicas, first, count) for rank in ranks])
    assert turns.shape == (replicas, count)
    assert (turns.sum(axis=0) == 1).all()
    shares = turns.sum(axis=1)
    assert shares.max(initial=0) - shares.min(initial=count) <= 1, "the work is shared evenly"


@given(st.data())
def test_whose_turn_it_is_does_not_depend_on_how_a_request_is_cut(data: st.DataObject) -> None:
    replicas, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    first, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    rank = data.draw(st.integers(0, 17))
    whole = own_turns(rank, replicas, 0, count)
    part = own_turns(rank, replicas, first, end - first)
    assert part.tolist() == whole[first:end].tolist()


# -- who says so


def layout(*piece_bytes: int, replicas: int, text: str = "f32") -> GroupLayout:
    places = [sum(piece_bytes[:at]) for at in range(len(piece_bytes))]
    pieces = tuple(
        Piece(0, place, 64, size) for place, size in zip(places, piece_bytes, strict=True)
    )
    return GroupLayout((Range(4096, 1 << 20),), pieces, 4, text, replicas=replicas)


def test_pages_are_those_that_differ() -> None:
    heads = [layout(4 + rank // 2, replicas=2) for rank in range(4)]
    (pages,) = pages_of([(one,) for one in heads])
    assert [one.page_bytes for one in pages] == [4, 5]


def test_groups_may_differ_in_who_holds_the_same() -> None:
    ranks = [(layout(8, replicas=4), layout(16, replicas=1)) for _ in range(4)]
    assert [len(pages) for pages in pages_of(ranks)] == [1, 4]


@pytest.mark.parametrize(
    "ranks",
    [
        [layout(8, replicas=2), layout(8, replicas=1)],
        [layout(8, replicas=2)],
        [layout(8, replicas=2)] * 3,
        [layout(8, replicas=4)] * 2,
        [layout(8, replicas=2), layout(16, replicas=2)],
        [layout(8, replicas=2), layout(4, 4, replicas=2)],
        [layout(8, replicas=2), layout(8, replicas=2, text="f16")],
        [*[layout(8, replicas=2)] * 3, layout(9, replicas=2)],
    ],
)  # fmt: skip
def test_ranks_that_contradict_each_other_are_refused(ranks: list[GroupLayout]) -> None:
    with pytest.raises(BadRequestError, match=r"^group 0: ") as refused:
        pages_of([(one,) for one in ranks])
    assert "\n" not in str(refused.value)


# -- saved in turns


@given(
    replicas=st.sampled_from([2, 4, 8]),
    count=st.integers(1, 8),
    order=st.randoms(use_true_random=False),
    failing=st.sets(st.integers(0, 7), max_size=3),
    absent=st.sets(st.integers(0, 7), max_size=2),
)
def test_a_block_is_visible_iff_the_rank_whose_turn_it_was_has_saved_it(
    replicas: int, count: int, order: Random, failing: set[int], absent: set[int]
) -> None:
    """Copies begin and end in any order; some fail, some ranks never come."""
    engine = mla(new_store(Clock()), replicas)
    cache = engine.store.cache
    hashes = tuple(range(1, 1 + count))
    steps = [rank for rank in range(replicas) if rank not in absent] * 2
    order.shuffle(steps)
    begun: dict[int, SavePlan] = {}
    saved: set[int] = set()
    lost: set[int] = set()  # their copy failed, and nobody has reserved them again
    for rank in steps:
        turns = {at for at in range(count) if at % replicas == rank}
        if rank not in begun:
            begun[rank] = engine.prepare_save(save(*hashes, rank=rank))
            assert set(begun[rank].positions.tolist()) == turns
            lost.clear()
            continue
        copied = np.full(len(turns), rank not in failing)
        engine.store.complete_save(begun[rank], copied, layout_of(engine))
        (saved if rank not in failing else lost).update(turns)
        whole = next((at for at in range(count) if at not in saved), count)
        assert found(engine, *hashes) == whole
        assert cache.pages.used_bytes == (count - len(lost)) * PAGE
    assert cache.blocks.counts[State.DOOMED] == 0


def test_the_pool_holds_one_page_for_all_ranks(store: Store) -> None:
    engine = mla(store, 8)
    engine.save(*BLOCKS)
    assert store.cache.pages.used_bytes == len(BLOCKS) * PAGE
    counters = store.cache.counters
    assert counters.save_blocks_total == counters.sealed_blocks_total == len(BLOCKS)
    assert counters.save_bytes_total == len(BLOCKS) * PAGE
    assert counters.save_present_blocks_total == 0, "what another rank saves is not counted"
    engine.save(*BLOCKS)
    assert counters.save_present_blocks_total == len(BLOCKS)


def test_every_rank_loads_all_blocks_and_the_last_one_ends_the_lease(store: Store) -> None:
    engine = mla(store, 4)
    engine.save(*BLOCKS)
    lease = engine.lease(*BLOCKS)
    offsets = []
    for rank in (2, 0, 3, 1):
        assert store.cache.leases.pinned_bytes == len(BLOCKS) * PAGE
        plan = engine.prepare_load(lease, *range(len(BLOCKS)), rank=rank)
        offsets.append(plan.offsets.tolist())
    assert offsets == offsets[:1] * 4
    assert len(set(offsets[0])) == len(BLOCKS)
    assert store.cache.leases.pinned_bytes == 0
    with pytest.raises(LeaseLostError):
        engine.prepare_load(lease, 0)


def test_a_rank_that_never_saves_costs_its_own_blocks_for_a_while(
    store: Store, clock: Clock
) -> None:
    engine = mla(store, 2)
    plan, layout = store.prepare_save(engine.session(0), engine.name, save(*BLOCKS))
    store.complete_save(plan, np.ones(3, np.bool_), layout)
    assert found(engine, *BLOCKS) == 1
    assert store.cache.pages.used_bytes == 5 * PAGE
    clock.now_s += 1_000.0
    store.sweep()
    assert store.cache.pages.used_bytes == 3 * PAGE
    engine.save(*BLOCKS)
    assert found(engine, *BLOCKS) == 5


# -- shared whatever the number of ranks


def test_engines_share_whatever_the_number_of_ranks(store: Store) -> None:
    eight, four, one = (mla(store, n, f"of {n}", 100 * n) for n in (8, 4, 1))
    assert len(store.engines.namespaces.by_fingerprint) == 1
    eight.save(*BLOCKS)
    assert found(four, *BLOCKS) == found(one, *BLOCKS) == len(BLOCKS)
    lease = four.lease(*BLOCKS)
    for rank in range(4):
        four.prepare_load(lease, *range(len(BLOCKS)), rank=rank)
    one.save(*BLOCKS, 16)
    assert found(eight, *BLOCKS, 16) == 6
    assert store.cache.pages.used_bytes == 6 * PAGE


def test_engines_of_the_same_page_bytes_but_a_page_each_rank_do_not_share(store: Store) -> None:
    mla(store, 2)
    split = Engine(store, InstanceName("split"), SessionId(50), 2).start()
    assert len(store.engines.namespaces.by_fingerprint) == 2
    split.save(*BLOCKS)
    assert store.cache.pages.used_bytes == 2 * len(BLOCKS) * PAGE


def test_a_page_is_written_once_also_by_engines_with_other_turns(store: Store) -> None:
    two, one = mla(store, 2, "two", 100), mla(store, 1, "one", 200)
    first = two.prepare_save(save(*BLOCKS, rank=1))
    assert first.positions.tolist() == [1, 3]
    other = one.prepare_save(save(*BLOCKS))
    assert other.positions.tolist() == [0, 2, 4], "what nobody has begun"
    assert other.present_count == 2
    late = two.prepare_save(save(*BLOCKS, rank=0))
    assert (len(late.positions), late.present_count) == (0, 3)


def test_groups_that_all_hold_and_that_ranks_split_live_side_by_side(store: Store) -> None:
    groups = (pieces(PAGE, 2), pieces(PAGE))
    mixed = Engine(store, InstanceName("mixed"), SessionId(50), 2, groups=groups).start()
    mixed.save(*BLOCKS)
    assert store.cache.pages.used_bytes == len(BLOCKS) * PAGE
    mixed.save(*BLOCKS, group=1)
    assert store.cache.pages.used_bytes == 3 * len(BLOCKS) * PAGE
    for group, pages in ((0, 1), (1, 2)):
        hit = mixed.query(*BLOCKS, group=group)
        assert hit.lease is not None
        plans = [mixed.prepare_load(hit.lease.id, *range(5), rank=rank) for rank in (0, 1)]
        assert len({plan.offsets.item(0) for plan in plans}) == pages
