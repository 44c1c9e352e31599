"""A pool in several NUMA nodes' memory: how it is divided, and that near slots go first."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.cache_world import key, words
from trikv.core.banks import ANY_BANK, WHOLE, Banks, divide
from trikv.core.cache import Cache
from trikv.core.engines import Engines
from trikv.core.layout import GroupLayout, Piece, Place, Range
from trikv.core.pages import PAGE_ALIGN, Pages
from trikv.core.plans import Limits
from trikv.core.words import InstanceName, SessionId, ShapeId, SpaceId

SLAB = 4 * PAGE_ALIGN
SLABS = 7
HALVES = divide(SLABS * SLAB, (0, 1), unit=PAGE_ALIGN)


@given(
    size=st.integers(1, 1 << 40),
    banks=st.lists(st.integers(0, 9), unique=True, max_size=8),
    unit=st.sampled_from([1, 4096, 2 << 20]),
)
def test_parts_are_equal_and_in_a_row(size: int, banks: list[int], unit: int) -> None:
    parts = divide(size, banks, unit=unit)
    if not banks:
        assert parts == WHOLE
        return
    assert [bank for _, bank in parts] == banks
    begins = [begin for begin, _ in parts]
    assert begins[0] == 0
    assert all(begin % unit == 0 for begin in begins)
    sizes = np.diff([*begins, size])
    assert sizes.min() >= 0
    assert sizes.max() - sizes.min() <= 2 * unit


def test_slabs_are_first_used_in_turns_and_one_bank_is_as_none() -> None:
    banks = Banks(((0, 3), (4 * SLAB, 5)), SLABS, SLAB)
    assert banks.of_slab.tolist() == [3, 3, 3, 3, 5, 5, 5]
    assert banks.order().tolist() == [0, 4, 1, 5, 2, 6, 3]
    offsets = np.array([0, 4 * SLAB - 1, 4 * SLAB, 7 * SLAB - 1])
    assert banks.at(offsets).tolist() == [3, 3, 5, 5]
    assert [banks.far_count(offsets, one) for one in (3, 5, 4, ANY_BANK)] == [2, 2, 4, 0]
    for parts in (WHOLE, ((0, 2),), ((0, 2), (SLAB, 2))):
        alone = Banks(parts, SLABS, SLAB)
        assert not alone.is_split
        assert alone.order().tolist() == list(range(SLABS))
        assert alone.far_count(offsets, 1) == 0


@given(data=st.data())
def test_near_slots_go_first_whatever_was_there_before(data: st.DataObject) -> None:
    pages = Pages(SLABS * SLAB, SLAB, parts=HALVES)
    shapes = [pages.add_shape((PAGE_ALIGN,)), pages.add_shape((PAGE_ALIGN, 1))]
    slots_per_slab = dict(zip(shapes, (4, 2), strict=True))
    used: dict[int, ShapeId] = {}

    def slab_of(slot: int) -> int:
        return slot // pages.slots_per_slab_max

    def bank_of(slot: int) -> int:
        return int(pages.banks.of_slab[slab_of(slot)])

    def room(shape: ShapeId, bank: int) -> int:
        foreign = {slab_of(slot) for slot, other in used.items() if other != shape}
        slabs = [n for n in range(SLABS) if n not in foreign and pages.banks.of_slab[n] == bank]
        mine = sum(other == shape and bank_of(slot) == bank for slot, other in used.items())
        return len(slabs) * slots_per_slab[shape] - mine

    for _ in range(12):
        shape = data.draw(st.sampled_from(shapes))
        near = data.draw(st.sampled_from([ANY_BANK, 0, 1]))
        count = data.draw(st.integers(0, 12))
        rooms = [room(shape, 0), room(shape, 1)]
        slots = pages.allocate(shape, count, near=near).tolist()
        assert not used.keys() & set(slots)
        assert len(slots) == len(set(slots)) == min(count, sum(rooms))
        if near != ANY_BANK:
            assert sum(bank_of(slot) == near for slot in slots) == min(count, rooms[near])
        slabs = [slab_of(slot) for slot in slots]
        assert sum(a != b for a, b in pairwise(slabs)) == max(0, len(set(slabs)) - 1), "grouped"
        used |= dict.fromkeys(slots, shape)
        gone = data.draw(st.lists(st.sampled_from(sorted(used)), unique=True)) if used else []
        pages.free(np.array(gone, np.int64))
        for slot in gone:
            del used[slot]
        assert pages.free_slab_count == SLABS - len({slab_of(slot) for slot in used})


def test_a_cache_saves_near_who_asks() -> None:
    cache = Cache(SLABS * SLAB, SLAB, entries_max=64, seed=1, limits=Limits(), pool_parts=HALVES)
    cache.open_space(SpaceId(1), (PAGE_ALIGN,))
    for at, near in enumerate((1, 0, 1)):
        who = replace(key(f"r{at}", instance=f"i{near}"), near=near)
        plan = cache.prepare_save(who, words([10 * at, 10 * at + 1]), rank=0, first=0, now_s=0.0)
        assert cache.pages.banks.at(plan.offsets).tolist() == [near, near]
        cache.complete_save(plan, np.ones(2, np.bool_), copied_bytes=0)


@pytest.mark.parametrize(
    ("banks", "common"),
    [((0, 0), 0), ((1, 1), 1), ((0, 1), ANY_BANK), ((0, None), ANY_BANK), ((None, None), ANY_BANK)],
)
def test_an_engine_has_a_bank_when_all_its_ranks_are_near_one(
    banks: tuple[int | None, ...], common: int
) -> None:
    engines, name = Engines(4), InstanceName("i")
    for rank, bank in enumerate(banks):
        place = None if bank is None else Place(rank, 0, bank)
        layout = GroupLayout((Range(0, 64),), (Piece(0, 0, 8, 8),), 8, "bytes", place)
        engines.register(SessionId(rank), name, rank, (layout,))
    instance = engines.declare(SessionId(9), name, rank_count=2, fields=(("model", "m"),))
    assert instance.missing() == ""
    assert instance.bank == common
