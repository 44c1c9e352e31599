"""Pages that something below fills, by example."""

import numpy as np
import pytest
from cache_world import ONE, PAGE, POOL, ask, drop_space, key, new_cache, save, words

from trikv.core import room
from trikv.core.blocks import DOOMED
from trikv.core.cache import Cache
from trikv.core.landing import Landing

SSD = 1


def fetch(cache: Cache, nodes: list[int], wanted: list[int]) -> Landing:
    mask = np.array([node in wanted for node in nodes])
    return cache.prepare_fetch(ONE, words(nodes), mask, source=SSD)


def end(cache: Cache, landing: Landing, arrived: list[bool]) -> None:
    rows = np.arange(len(landing.entries))
    cache.complete_fetch(landing, rows, np.array(arrived, np.bool_))


def nodes_of(landing: Landing) -> list[int]:
    return landing.words[:, 0].tolist()


def test_absent_blocks_land_and_are_found() -> None:
    cache = new_cache()
    save(cache, key("r"), [1])
    landing = fetch(cache, [1, 2, 4], [1, 2, 4])
    assert nodes_of(landing) == [2, 4]  # the first is there
    assert landing.positions.tolist() == [1, 2]
    assert landing.offsets.shape == (1, 2)
    assert ask(cache, key("s"), [1, 2, 4]) == 1
    assert cache.filling_bytes == cache.landings.bytes == 2 * PAGE
    end(cache, landing, [True, True])
    assert ask(cache, key("t"), [1, 2, 4]) == 3
    assert cache.filling_bytes == 0
    assert not cache.transfers
    assert not cache.landings.is_landing.any()


def test_what_is_on_its_way_is_not_fetched_twice_nor_saved() -> None:
    cache = new_cache()
    first = fetch(cache, [1, 2], [1, 2])
    assert fetch(cache, [1, 2, 4], [1, 2, 4]).words[:, 0].tolist() == [4]
    plan = cache.prepare_save(key("r"), words([1, 2]), rank=0, first=0, now_s=0.0)
    assert (len(plan.entries), plan.present_count) == (0, 2)
    end(cache, first, [True, True])


def test_what_does_not_arrive_leaves_and_gives_its_pages_back() -> None:
    cache = new_cache()
    landing = fetch(cache, [1, 2, 4], [1, 2, 4])
    end(cache, landing, [True, False, True])
    assert ask(cache, key("r"), [1, 2, 4]) == 1
    assert cache.pages.used_bytes == 2 * PAGE
    assert fetch(cache, [1, 2, 4], [1, 2, 4]).words[:, 0].tolist() == [2]
    assert (cache.landings.blocks_total, cache.landings.failed_blocks_total) == (2, 1)


def test_a_landing_ends_in_parts() -> None:
    cache = new_cache()
    landing = fetch(cache, [1, 2, 4], [1, 2, 4])
    cache.complete_fetch(landing, np.array([2]), np.array([True]))
    assert cache.landings.bytes == 2 * PAGE
    assert len(cache.transfers) == 1
    cache.complete_fetch(landing, np.array([0, 1]), np.array([True, True]))
    assert ask(cache, key("r"), [1, 2, 4]) == 3
    assert not cache.transfers


def test_a_block_that_stands_twice_in_a_request_lands_once() -> None:
    cache = new_cache()
    landing = fetch(cache, [1, 2, 1, 2, 4], [1, 2, 4])
    assert nodes_of(landing) == [1, 2, 4]
    end(cache, landing, [True] * 3)


def test_a_bound_for_all_landings_together() -> None:
    cache = new_cache(fetching_fraction=4 * PAGE / POOL)
    first = fetch(cache, [1, 2, 4], [1, 2, 4])
    second = fetch(cache, [1, 3, 6, 13], [3, 6, 13])
    assert (nodes_of(first), nodes_of(second)) == ([1, 2, 4], [3])
    end(cache, first, [True] * 3)
    third = fetch(cache, [1, 3, 6, 13], [3, 6, 13])
    assert nodes_of(third) == [6, 13]
    nothing = fetch(cache, [1, 3, 6, 13, 27, 55], [27, 55])
    assert nodes_of(nothing) == [27]
    empty = fetch(cache, [1, 3, 6, 13, 27, 55], [55])
    assert len(empty.entries) == 0
    assert empty.transfer not in cache.transfers


def test_a_request_s_own_blocks_do_not_go_for_those_behind_them() -> None:
    cache = new_cache(entries_max=3)
    save(cache, key("r"), [1, 2])
    save(cache, key("s"), [64])
    landing = fetch(cache, [1, 2, 4, 8], [4, 8])
    assert nodes_of(landing) == [4]  # in the place of the stranger
    assert ask(cache, key("t"), [1, 2]) == 2


def test_what_arrived_is_younger_than_none_of_its_ancestors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "EVICT_BATCH", 1)
    cache = new_cache(entries_max=4)
    save(cache, key("r"), [1, 2])
    save(cache, key("s"), [64])
    landing = fetch(cache, [1, 2, 4], [4])
    end(cache, landing, [True])
    recency = cache.recency[cache.index.find(ONE, words([1, 2, 4]))]
    assert (recency == recency[0]).all()
    save(cache, key("t"), [65])
    assert ask(cache, key("u"), [1, 2, 4]) == 3
    assert ask(cache, key("u"), [64]) == 0


def test_a_hit_from_below_is_told_once() -> None:
    cache = new_cache()
    save(cache, key("r"), [1])
    end(cache, fetch(cache, [1, 2, 4], [2, 4]), [True, True])
    for expected in ((2, 0), (0, 0)):
        assert cache.query(key("s"), words([1, 2, 4]), now_s=0.0).landed == expected


def test_a_dropped_space_s_landing_ends_without_a_trace() -> None:
    cache = new_cache()
    landing = fetch(cache, [1, 2], [1, 2])
    assert drop_space(cache, ONE) == 2
    assert (cache.blocks.state[landing.entries] == DOOMED).all()
    assert cache.pages.used_bytes == 2 * PAGE  # whoever fills them goes on
    end(cache, landing, [True, False])
    assert cache.pages.used_bytes == 0
    assert cache.filling_bytes == 0
    cache.blocks.check()


def test_what_is_abandoned_is_out_of_sight_and_its_pages_are_not_used_again() -> None:
    cache = new_cache()
    landing = fetch(cache, [1, 2], [1, 2])
    cache.abandon_fetch(landing, np.array([1]))
    cache.complete_fetch(landing, np.array([0]), np.array([True]))
    assert ask(cache, key("r"), [1, 2]) == 1
    assert not cache.transfers
    assert cache.landings.bytes == cache.filling_bytes == 0
    held = set(range(POOL // PAGE)) & {int(landing.offsets[0, 1]) // PAGE}
    save(cache, key("s"), [64, 65, 66, 67, 68, 69, 70, 71])
    slots = cache.blocks.slot[cache.index.find(ONE, words([64, 65, 66, 67, 68, 69, 70, 71]))]
    assert held.isdisjoint((cache.pages.offsets(slots, 0) // PAGE).tolist())
    assert drop_space(cache, ONE) > 0
    assert cache.pages.used_bytes == PAGE


def test_saves_have_room_of_their_own_while_much_is_landing() -> None:
    cache = new_cache(filling_fraction=4 * PAGE / POOL)
    landing = fetch(cache, [1, 2, 4, 8], [1, 2, 4, 8])
    plan = cache.prepare_save(key("r"), words([64, 65, 66, 67, 68]), rank=0, first=0, now_s=0.0)
    assert (len(plan.entries), plan.refused_count) == (4, 1)
    end(cache, landing, [True] * 4)
