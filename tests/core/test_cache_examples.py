"""The cache at its bounds, by example: full pools, short rows, leases, late and lost copies."""

import contextlib

import cache_world
import numpy as np
import pytest
from cache_world import LEASE_S, ONE, PAGE, PAGES, POOL, SLAB, ask, key, new_cache, save, words
from hypothesis import given, settings
from hypothesis import strategies as st

from trikv.core import room as module
from trikv.core.blocks import State
from trikv.core.cache import Cache
from trikv.core.errors import BadRequestError, LeaseLostError
from trikv.core.words import SpaceId

TWO, THREE, FOUR = SpaceId(2), SpaceId(3), SpaceId(4)
ALL, NONE = np.ones(9, np.bool_), np.zeros(9, np.bool_)


@pytest.fixture
def cache() -> Cache:
    return new_cache(lease_s=LEASE_S, filling_fraction_many_ranks=0.5)


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evict no more than is needed."""
    monkeypatch.setattr(module, "EVICT_BATCH", 1)


def load(cache: Cache, request: str, rank: int = 0, *, count: int = 1, now_s: float = 0.0) -> None:
    (lease,) = cache.leases.of_request(key(request).instance, key(request).request)
    assert lease is not None
    plan = cache.prepare_load(lease.id, lease.instance, rank, 0, count, now_s=now_s)
    cache.complete_load(plan, copied_count=count, copied_bytes=count * PAGE)


# -- seen only when whole


def test_a_block_is_seen_when_its_last_rank_has_saved(cache: Cache) -> None:
    who = key("r", TWO)
    plans = [cache.prepare_save(who, words([1, 2]), rank=r, first=0, now_s=0) for r in (2, 0, 1)]
    assert [plan.present_count for plan in plans] == [0, 0, 0]
    for plan in plans:
        assert ask(cache, key("s", TWO), [1, 2]) == 0
        cache.complete_save(plan, ALL[:2], copied_bytes=0)
    assert ask(cache, key("s", TWO), [1, 2]) == 2
    assert ask(cache, key("s", FOUR), [1, 2]) == 0
    offsets = [plan.offsets.tolist() for plan in plans]
    assert offsets == [[6 * PAGE, 7 * PAGE], [0, 2 * PAGE], [4 * PAGE, 5 * PAGE]]


def test_nothing_behind_a_block_that_is_still_filling_is_a_hit(cache: Cache) -> None:
    save(cache, key("r"), [1])
    flying = cache.prepare_save(key("r"), words([2]), rank=0, first=1, now_s=0)
    save(cache, key("r"), [4], first=2)
    assert cache.query(key("s"), words([1, 2, 4]), now_s=0).count == 1
    cache.complete_save(flying, ALL[:1], copied_bytes=0)
    assert ask(cache, key("s"), [1, 2, 4]) == 3
    assert ask(cache, key("s"), [1, 4]) == 2  # hashes are opaque: positions are the caller's


def test_a_second_save_copies_nothing(cache: Cache) -> None:
    flying = cache.prepare_save(key("r"), words([1, 2]), rank=0, first=0, now_s=0)
    for _ in range(2):
        (again,) = save(cache, key("s"), [1, 2])
        assert (len(again.entries), again.present_count, again.refused_count) == (0, 2, 0)
    cache.complete_save(flying, ALL[:2], copied_bytes=0)
    (again,) = save(cache, key("s"), [1, 2, 3])
    assert (again.positions.tolist(), again.present_count) == ([2], 2)
    assert cache.counters.sealed_blocks_total == 3


def test_a_rank_that_failed_spoils_the_block_for_all(cache: Cache) -> None:
    who = key("r", FOUR)
    first = cache.prepare_save(who, words([1]), rank=0, first=0, now_s=0)
    second = cache.prepare_save(who, words([1]), rank=1, first=0, now_s=0)
    cache.complete_save(first, NONE[:1], copied_bytes=0)
    assert cache.filling_bytes == 0
    anew = cache.prepare_save(who, words([1]), rank=0, first=0, now_s=0)
    assert anew.offsets.tolist() != first.offsets.tolist()  # rank 1 still writes there
    cache.complete_save(second, ALL[:1], copied_bytes=0)
    cache.complete_save(anew, ALL[:1], copied_bytes=0)
    assert ask(cache, who, [1]) == 0
    assert cache.blocks.counts[State.DOOMED] == 0
    assert cache.filling_bytes == 2 * PAGE


def test_a_copy_that_ends_after_its_deadline_is_not_seen_and_its_pages_wait(cache: Cache) -> None:
    plan = cache.prepare_save(key("r"), words([1, 2]), rank=0, first=0, now_s=10)
    assert cache.expire_fills(now_s=39.9) == 0
    assert cache.expire_fills(now_s=40) == 2
    assert (cache.filling_bytes, cache.pages.used_bytes) == (0, 2 * PAGE)
    cache.complete_save(plan, ALL[:2], copied_bytes=0)
    assert cache.pages.used_bytes == 0
    assert ask(cache, key("r"), [1, 2]) == 0


def test_a_block_that_was_sealed_in_time_outlives_the_deadline(cache: Cache) -> None:
    save(cache, key("r"), [1])
    assert cache.expire_fills(now_s=1000) == 0
    assert ask(cache, key("r"), [1]) == 1


# -- room


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 3), (1, 4)])
def test_a_pool_full_of_one_model_gives_another_its_space(cache: Cache, old: int, new: int) -> None:
    size = {space: PAGE * sum(pages) for space, pages in PAGES.items()}
    for chunk in range(16):
        half = [100 * chunk + i for i in range(1, 1 + POOL // 2 // size[old])]
        save(cache, key(f"old {chunk}", SpaceId(old)), half)
    prompt = list(range(1, 1 + POOL // 2 // size[new]))
    plan = save(cache, key("new", SpaceId(new)), prompt)[0]
    assert (len(plan.entries), plan.refused_count) == (len(prompt), 0)
    assert ask(cache, key("again", SpaceId(new)), prompt) == len(prompt)


@pytest.mark.usefixtures("fine")
def test_a_model_takes_only_the_slabs_it_needs_and_the_coldest(cache: Cache) -> None:
    for slab in range(4):  # each slab is one prompt of eight blocks
        save(cache, key(f"old {slab}"), list(range(10 * slab + 1, 10 * slab + 9)))
    assert cache.pages.free_slab_count == 0
    assert ask(cache, key("use"), list(range(1, 9))) == 8
    save(cache, key("new", TWO), [1, 2])
    there = [ask(cache, key("ask"), list(range(10 * s + 1, 10 * s + 9))) for s in range(4)]
    assert there == [8, 0, 8, 8]
    assert cache.counters.reclaimed_slabs_total == 1


@pytest.mark.parametrize("space", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_prompt_larger_than_the_pool_keeps_its_prefix_without_thrashing(
    cache: Cache, space: int, chunk: int
) -> None:
    fit = POOL // (PAGE * sum(PAGES[space]))
    prompt = list(range(1, fit + 10))
    for number in range(3):
        who = key(f"r{number}", SpaceId(space))
        hit = cache.query(who, words(prompt), now_s=0)
        assert hit.count == (fit // 2 if number else 0)
        for first in range(0, len(prompt), chunk):
            save(cache, who, prompt[first : first + chunk], first=first)
        cache.release(who.instance, who.request)
        assert cache.counters.evicted_blocks_total == 0
    assert cache.blocks.counts[State.SEALED] == fit


@pytest.mark.usefixtures("fine")
def test_blocks_of_the_message_do_not_go_for_each_other() -> None:
    """A request that never asked finds its first block at hand, and the coldest of all."""
    cache = new_cache(entries_max=4)
    save(cache, key("earlier"), [1, 2, 3, 4])
    plan = cache.prepare_save(key("r"), words([1, 2, 3, 4, 5, 6]), rank=0, first=0, now_s=0)
    assert len(set(plan.offsets.tolist())) == len(plan.offsets)
    assert (plan.present_count, plan.refused_count) == (4, 2)
    save(cache, key("other"), [1, 2, 7])
    assert ask(cache, key("s"), [1, 2, 7]) == 3


def test_rows_may_be_shorter_than_pages() -> None:
    cache = new_cache(entries_max=3, filling_fraction_many_ranks=0.5)
    (plan,) = save(cache, key("r"), [1, 2, 3, 4, 5])
    assert (len(plan.entries), plan.refused_count) == (3, 2)
    assert cache.pages.used_bytes == 3 * PAGE
    assert ask(cache, key("s"), [1, 2, 3, 4, 5]) == 3
    plans = save(cache, key("t", TWO), [1, 2])  # rows come from another shape's blocks
    assert [len(plan.entries) for plan in plans] == [2, 2, 2]
    assert ask(cache, key("u", TWO), [1, 2]) == 2
    cache.blocks.check()


@pytest.mark.usefixtures("fine")
def test_rows_come_from_a_slab_that_cannot_be_taken_whole() -> None:
    cache = new_cache(entries_max=3, filling_fraction_many_ranks=0.5)
    save(cache, key("r"), [1, 2, 3])
    assert cache.query(key("s"), words([1]), now_s=0).count == 1
    save(cache, key("t", TWO), [1, 2, 4])
    assert ask(cache, key("u", TWO), [1, 2, 4]) == 2
    assert ask(cache, key("u"), [1, 2, 3]) == 1


def test_nothing_goes_that_makes_no_room() -> None:
    cache = new_cache(entries_max=33, filling_fraction_many_ranks=0.5)
    for slab in range(4):
        save(cache, key(f"r{slab}"), list(range(10 * slab + 1, 10 * slab + 9)))
        cache.query(key(f"s{slab}"), words([10 * slab + 1]), now_s=0)  # no slab can be taken
    (plan, *_) = save(cache, key("t", TWO), [1, 2])
    assert (plan.refused_count, cache.counters.evicted_blocks_total) == (2, 0)


@pytest.mark.usefixtures("fine")
def test_a_model_with_colder_blocks_of_its_own_takes_nothing_from_another(cache: Cache) -> None:
    save(cache, key("cold", TWO), [1, 2])  # a slab
    for slab in range(3):
        save(cache, key(f"hot {slab}"), list(range(10 * slab + 1, 10 * slab + 9)))
    save(cache, key("new", TWO), [10, 20])
    assert ask(cache, key("ask", TWO), [1, 2]) == 0
    assert ask(cache, key("ask", TWO), [10, 20]) == 2
    assert cache.counters.reclaimed_slabs_total == 0


def test_what_fills_has_a_cap_and_what_is_refused_is_the_end() -> None:
    cache = new_cache(filling_fraction=0.25, filling_fraction_many_ranks=0.125)
    plan = cache.prepare_save(key("r"), words(list(range(1, 20))), rank=0, first=0, now_s=0)
    assert plan.positions.tolist() == list(range(8))
    assert plan.refused_count == 11
    for space in (THREE, TWO):
        more = cache.prepare_save(key("s", space), words([1]), rank=0, first=0, now_s=0)
        assert (len(more.entries), more.refused_count) == (0, 1)
        cache.complete_save(more, NONE[:0], copied_bytes=0)
    cache.complete_save(plan, ALL[:8], copied_bytes=0)
    wide = cache.prepare_save(key("s", TWO), words([1, 2]), rank=0, first=0, now_s=0)
    assert (len(wide.entries), wide.refused_count) == (1, 1)


def test_a_block_that_no_slab_holds_is_refused(cache: Cache) -> None:
    with pytest.raises(BadRequestError):
        cache.open_space(SpaceId(9), (SLAB, 1))
    assert SpaceId(9) not in cache.spaces


def test_a_hash_twice_in_a_message_is_refused_and_changes_nothing(cache: Cache) -> None:
    with pytest.raises(BadRequestError):
        cache.prepare_save(key("r"), words([1, 2, 1]), rank=0, first=0, now_s=0)
    assert (cache.pages.used_bytes, len(cache.index), cache.transfers) == (0, 0, set())
    close = words([1, 2])
    close[1] = close[0]
    close[1, 3] += np.uint64(1)
    plan = cache.prepare_save(key("r"), close, rank=0, first=0, now_s=0)
    assert len(plan.entries) == 2


# -- leases


def test_asking_twice_renews_and_asking_otherwise_replaces(cache: Cache) -> None:
    save(cache, key("r"), [1, 2, 4])
    first = cache.query(key("r"), words([1, 2]), now_s=0)
    again = cache.query(key("r"), words([1, 2]), now_s=3)
    assert first.lease is not None
    assert again.lease is first.lease
    assert cache.expire_leases(now_s=LEASE_S + 2) == 0
    longer = cache.query(key("r"), words([1, 2, 4]), now_s=5)
    assert longer.lease is not None
    assert longer.count == 3
    assert cache.blocks.pins.sum() == 3
    with pytest.raises(LeaseLostError):
        cache.prepare_load(first.lease.id, key("r").instance, 0, 0, 1, now_s=5)
    assert cache.query(key("r"), words([9]), now_s=5).lease is None
    assert (cache.blocks.pins.sum(), cache.leases.pinned_bytes) == (0, 0)


def test_an_answer_is_new_once_the_lease_is_late(cache: Cache) -> None:
    save(cache, key("r"), [1])
    first = cache.query(key("r"), words([1]), now_s=0)
    again = cache.query(key("r"), words([1]), now_s=LEASE_S)
    assert first.lease is not None
    assert again.lease is not None
    assert first.lease.id != again.lease.id
    load(cache, "r", now_s=LEASE_S)
    assert cache.blocks.pins.sum() == 0


def test_an_answer_promises_the_blocks_to_all_ranks(cache: Cache) -> None:
    """One rank loaded, the other could not, and the request is scheduled anew."""
    save(cache, key("r", FOUR), [1])
    cache.query(key("r", FOUR), words([1]), now_s=0)
    load(cache, "r", 0)
    assert cache.query(key("r", FOUR), words([1]), now_s=1).count == 1
    for rank in range(2):
        load(cache, "r", rank, now_s=1)


def test_a_request_holds_blocks_in_several_groups(cache: Cache) -> None:
    save(cache, key("r", ONE), [1])
    save(cache, key("r", FOUR), [1])
    first = cache.query(key("r", ONE), words([1]), now_s=0)
    second = cache.query(key("r", FOUR), words([1]), now_s=0)
    assert first.lease is not None
    assert second.lease is not None
    for lease in (first.lease, second.lease):
        plan = cache.prepare_load(lease.id, lease.instance, 0, 0, 1, now_s=0)
        cache.complete_load(plan, copied_count=1, copied_bytes=PAGE)


def test_leases_at_their_limit_shorten_the_answer() -> None:
    cache = new_cache(leased_fraction=3 * PAGE / POOL, leases_max=2)
    save(cache, key("r"), [1, 2, 3, 4])
    assert cache.query(key("r"), words([1, 2, 3, 4]), now_s=0).count == 3
    assert cache.blocks.pins.tolist()[:4] == [1, 1, 1, 0]
    assert cache.query(key("s"), words([1]), now_s=0).lease is None
    assert cache.counters.query_shortened_total == 2
    cache.release(key("r").instance, key("r").request)
    assert cache.query(key("s"), words([1]), now_s=0).count == 1
    assert cache.query(key("t"), words([1]), now_s=0).count == 1
    assert cache.query(key("u"), words([1]), now_s=0).count == 0


@pytest.mark.parametrize("leased_blocks", [1, 4])
def test_a_query_that_repeats_a_hash_is_refused_or_counted_rightly(leased_blocks: int) -> None:
    cache = new_cache(leased_fraction=leased_blocks * PAGE / POOL)
    save(cache, key("r"), [1])
    with contextlib.suppress(BadRequestError):
        cache.query(key("s"), words([1, 1]), now_s=0)
        assert cache.blocks.pins[0] == len(cache.leases.active)
        load(cache, "s")
    cache.blocks.check()
    assert cache.blocks.pins[0] == 0
    save(cache, key("t"), [2])
    with contextlib.suppress(BadRequestError):
        ask(cache, key("t"), [2, 2])
    cache_world.drop_space(cache, ONE)
    assert sum(map(len, cache.room.orders.values())) == 0


def test_leased_and_loading_blocks_outlast_expiry_release_and_reset(cache: Cache) -> None:
    save(cache, key("r"), [1])
    lease = cache.query(key("r"), words([1]), now_s=0).lease
    assert lease is not None
    plan = cache.prepare_load(lease.id, lease.instance, 0, 0, 1, now_s=0)
    cache.release_instance(lease.instance)
    assert cache_world.drop_space(cache, ONE) == 1
    assert ask(cache, key("s"), [1]) == 0
    for chunk in range(6):
        (other,) = save(cache, key(f"s{chunk}"), [100 + 10 * chunk + i for i in range(9)])
        assert not set(other.offsets.tolist()) & set(plan.offsets.tolist())
    cache.complete_load(plan, copied_count=1, copied_bytes=PAGE)
    assert cache.blocks.counts[State.DOOMED] == 0


# -- recency


def test_a_hash_at_two_positions_of_a_request_is_one_block_in_the_order(cache: Cache) -> None:
    flying = cache.prepare_save(key("r"), words([1]), rank=0, first=0, now_s=0)
    save(cache, key("r"), [1], first=1)
    cache.complete_save(flying, ALL[:1], copied_bytes=0)
    (order,) = [one for one in cache.room.orders.values() if len(one)]
    assert len(order) == 1
    cache_world.drop_space(cache, ONE)
    assert len(order) == 0
    assert order.coldest() is None


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("step", ["query", "save more", "save the same"])
def test_whatever_uses_a_prefix_keeps_it(cache: Cache, step: str) -> None:
    save(cache, key("r"), [1, 2])
    save(cache, key("s"), list(range(10, 26)))
    save(cache, key("t"), list(range(30, 43)))  # one page is free
    if step == "query":
        ask(cache, key("u"), [1, 2])
    else:
        save(cache, key("r"), [3] if step == "save more" else [2], first=2 if "more" in step else 1)
    save(cache, key("v"), [50, 51, 52])
    assert ask(cache, key("w"), [1, 2]) == 2
    assert ask(cache, key("w"), list(range(10, 26))) < 16


REQUESTS = st.lists(
    st.tuples(st.sampled_from([1, 2, 3]), st.integers(1, 63), st.integers(1, 6)), max_size=20
)


@pytest.mark.parametrize("spaces", [(1, 3), (2,), (1, 2)])
@settings(max_examples=max(1, settings().max_examples // 2))
@given(requests=REQUESTS)
def test_no_parent_is_older_than_its_child(
    spaces: tuple[int, ...], requests: list[tuple[int, int, int]]
) -> None:
    """Requests one after another: query, then save the rest in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EVICT_BATCH", 1)
        cache = new_cache(pool=2 * SLAB, filling_fraction_many_ranks=1.0, filling_fraction=1.0)
        for number, (space, node, chunk) in enumerate(requests):
            who = key(str(number), SpaceId(spaces[space % len(spaces)]))
            prompt = [node >> up for up in reversed(range(node.bit_length()))]
            ask(cache, who, prompt)
            hit_count = cache.query(who, words(prompt), now_s=0).count
            for first in range(hit_count, len(prompt), chunk):
                save(cache, who, prompt[first : first + chunk], first=first)
                parents_are_there_and_not_older(cache, spaces)
            cache.release(who.instance, who.request)


def parents_are_there_and_not_older(cache: Cache, spaces: tuple[int, ...]) -> None:
    nodes = np.arange(2, 64)
    for space in spaces:
        rows = cache.index.find(SpaceId(space), words(nodes.tolist()))
        parents = cache.index.find(SpaceId(space), words((nodes // 2).tolist()))
        both = (rows >= 0) & (parents >= 0)
        assert (cache.recency[parents] >= cache.recency[rows])[both].all()
        if len({PAGES[one] for one in spaces}) == 1:  # no slab is taken with all that is in it
            assert not ((rows >= 0) & (parents < 0)).any()
