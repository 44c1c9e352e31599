"""Whatever happens to a cache, its records name exactly its sealed blocks; and they come back."""

import itertools
from typing import Any

import numpy as np
import pytest
from cache_world import ONE, PAGE, PAGES, POOL, SLAB, ask, key, new_cache, save
from hypothesis import settings
from hypothesis.stateful import invariant
from numpy.typing import NDArray
from test_cache import CacheMachine

from trikv.core import room
from trikv.core.blocks import State
from trikv.core.cache import Cache
from trikv.core.errors import OverloadedError
from trikv.core.keeper import Keeper
from trikv.core.ledger import Found, Ledger, bytes_for
from trikv.core.namespace import origin_of, parts_of
from trikv.core.words import ShapeId, SpaceId

MEASURES = {"pool_bytes": POOL, "slab_bytes": SLAB}
Places = dict[tuple[int, int], tuple[int, ...]]  # space and node: offset on each rank


def keep(cache: Cache, memory: NDArray[np.uint8]) -> Keeper:
    ledger = Ledger(memory, **MEASURES)
    keeper = Keeper(ledger, cache.pages, cache.blocks, cache.index, cache.room)
    for space, facts in cache.spaces.items():
        keeper.open_space(
            space,
            facts.shape,
            origin_of(space.to_bytes(16, "little"), 3),
            f"tenant {space % 2}",
        )
    return keeper


def sealed(cache: Cache) -> Places:
    rows = np.flatnonzero(cache.blocks.state == State.SEALED).astype(np.int32)
    return {
        (int(space), int(word)): offsets_of(cache, slot, int(space))
        for space, word, slot in zip(
            cache.blocks.space[rows],
            cache.index.hashes_of(rows)[:, 0],
            cache.blocks.slot[rows],
            strict=True,
        )
    }


def offsets_of(cache: Cache, slot: int, space: int) -> tuple[int, ...]:
    slots = np.array([slot], np.int64)
    return tuple(cache.pages.offsets(slots, rank).item() for rank in range(len(PAGES[space])))


def adopted(memory: NDArray[np.uint8], **limits: Any) -> Cache:  # noqa: ANN401
    """A new daemon's cache with what is found; in spaces of its own numbers."""
    cache = new_cache(**limits)
    keeper = keep(cache, memory.copy())

    def open_space(found: Found) -> tuple[SpaceId, ShapeId]:
        fingerprint, group = parts_of(found.origin)
        assert group == 3
        space = SpaceId(int.from_bytes(fingerprint, "little"))
        assert found.tenant == f"tenant {space % 2}"
        assert cache.pages.page_bytes(cache.spaces[space].shape) == found.page_bytes
        return space, cache.spaces[space].shape

    for _ in keeper.adopt(open_space):
        cache.blocks.check()
    return cache


class KeptMachine(CacheMachine):
    """The machine of the cache, beside records."""

    @invariant()
    def the_records_are_the_sealed_blocks(self) -> None:
        if not hasattr(self, "records"):  # the first look comes before the first rule
            self.records = np.zeros(bytes_for(**MEASURES), np.uint8)
            keep(self.cache, self.records)
        assert sealed(adopted(self.records)) == sealed(self.cache)


TestKept = KeptMachine.TestCase
TestKept.settings = settings(stateful_step_count=15, deadline=None)


def fill(cache: Cache) -> list[int]:
    """Prompts of four blocks, until the pool is full; returns their first nodes."""
    firsts = list(range(100, 100 + 32 * 4, 16))
    for number, first in enumerate(firsts):
        save(cache, key(f"r{number}"), [first, first + 1, first + 2, first + 3])
        cache.release(key("x").instance, key(f"r{number}").request)
    return firsts


def test_found_blocks_go_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EVICT_BATCH", 1)
    cache, memory = new_cache(), np.zeros(bytes_for(**MEASURES), np.uint8)
    keep(cache, memory)
    firsts = fill(cache)
    again = adopted(memory)
    order = []
    for one in itertools.count(5_000):
        before = {node for _, node in sealed(again)}
        save(again, key("new"), [one])
        again.release(key("new").instance, key("new").request)
        gone = before - {node for _, node in sealed(again)}
        order += sorted(gone, reverse=True)
        if len(order) >= 32:
            break
    expected = [node for first in firsts for node in range(first + 3, first - 1, -1)]
    assert order[:32] == expected[:32]


def test_found_blocks_are_hits_of_a_space_that_opens_later() -> None:
    cache, memory = new_cache(), np.zeros(bytes_for(**MEASURES), np.uint8)
    keep(cache, memory)
    save(cache, key("r"), [1, 2, 4])
    again = adopted(memory)
    assert ask(again, key("s"), [1, 2, 4, 8]) == 3
    assert sealed(again)[ONE, 2] == sealed(cache)[ONE, 2]


def test_what_finds_no_row_is_struck() -> None:
    cache, memory = new_cache(), np.zeros(bytes_for(**MEASURES), np.uint8)
    keep(cache, memory)
    fill(cache)
    again = new_cache(entries_max=5)
    records = memory.copy()
    keeper = keep(again, records)
    space, shape = ONE, again.spaces[ONE].shape
    assert sum(keeper.adopt(lambda _: (space, shape))) == 5
    assert again.pages.used_bytes == 5 * PAGE
    assert len(sealed(adopted(records))) == 5


def test_a_space_that_is_refused_loses_its_blocks_and_no_others() -> None:
    cache, memory = new_cache(), np.zeros(bytes_for(**MEASURES), np.uint8)
    keep(cache, memory)
    save(cache, key("r"), [1, 2])
    save(cache, key("r", SpaceId(3)), [5])
    again, records = new_cache(), memory.copy()

    def open_space(found: Found) -> tuple[SpaceId, ShapeId]:
        space = SpaceId(int.from_bytes(parts_of(found.origin)[0], "little"))
        if space == 3:
            raise OverloadedError("no")
        return space, again.spaces[space].shape

    assert sum(keep(again, records).adopt(open_space)) == 2
    assert set(sealed(adopted(records))) == {(1, 1), (1, 2)}


def test_origins_are_told_apart() -> None:
    assert parts_of(origin_of(b"f" * 16, 7)) == (b"f" * 16, 7)
    assert len(origin_of(b"f" * 16, 7)) == 32
