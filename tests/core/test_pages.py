"""The slab pool against a set of used slots, and against the bytes they cover."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trikv.core.errors import BadRequestError, OverloadedError
from trikv.core.pages import PAGE_ALIGN, SHAPES_MAX, Pages
from trikv.core.words import ShapeId

KIB = 1024
SLAB = 16 * PAGE_ALIGN
CHOICES = st.randoms(use_true_random=False)


def runs_of(numbers: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(numbers))


class PagesMachine(RuleBasedStateMachine):
    """Five slabs, three shapes (one and two ranks, odd sizes), owners and stamps."""

    SLABS = 5
    SHAPES = ((PAGE_ALIGN,), (2 * PAGE_ALIGN - 1, PAGE_ALIGN + 1), (5 * PAGE_ALIGN, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(self.SLABS * SLAB + 123, SLAB)
        self.shapes = [self.pages.add_shape(shape) for shape in self.SHAPES]
        self.used: dict[int, tuple[ShapeId, int]] = {}  # slot: shape, owner
        self.newest: dict[int, int] = {}  # slab in use: stamp

    def slots_per_slab(self, shape: ShapeId) -> int:
        return SLAB // sum(-(-one // PAGE_ALIGN) * PAGE_ALIGN for one in self.SHAPES[shape])

    def slab(self, slot: int) -> int:
        return slot // self.pages.slots_per_slab_max

    def slabs(self, shape: ShapeId) -> set[int]:
        return {self.slab(slot) for slot, (other, _) in self.used.items() if other == shape}

    def used_in(self, slab: int) -> list[int]:
        return sorted(slot for slot in self.used if self.slab(slot) == slab)

    def room(self, shape: ShapeId) -> int:
        slabs_free = self.SLABS - len({self.slab(slot) for slot in self.used})
        slab_count = len(self.slabs(shape)) + slabs_free
        used = sum(other == shape for other, _ in self.used.values())
        return slab_count * self.slots_per_slab(shape) - used

    @rule(which=st.integers(0, 2), count=st.integers(0, 40), owned=st.booleans())
    def allocate(self, which: int, count: int, *, owned: bool) -> None:
        shape = self.shapes[which]
        expected = min(count, self.room(shape))
        partial = {
            slab: free
            for slab in self.slabs(shape)
            if (free := self.slots_per_slab(shape) - len(self.used_in(slab)))
        }
        slots = self.pages.allocate(shape, count)
        assert slots.dtype == np.int64
        assert len(slots) == len(set(slots.tolist())) == expected
        assert not self.used.keys() & set(slots.tolist())
        order = list(dict.fromkeys(self.slab(slot) for slot in slots.tolist()))
        took = [slab for slab in order if slab in partial]
        assert order[: len(took)] == took
        frees = [partial[slab] for slab in took]
        assert frees == sorted(partial.values(), reverse=True)[: len(took)]
        if len(took) < len(order):
            assert len(took) == len(partial)
        for slab in order:
            inside = [slot for slot in slots.tolist() if self.slab(slot) == slab]
            first = slab * self.pages.slots_per_slab_max
            every = range(first, first + self.slots_per_slab(shape))
            free = [slot for slot in every if slot not in self.used]
            assert inside == (free[: len(inside)] if slab == order[-1] else free)
        owners = np.arange(len(slots), dtype=np.int32) + np.int32(100 * len(self.used))
        if owned:
            self.pages.set_owner(slots, owners)
        for slot, owner in zip(slots.tolist(), owners.tolist(), strict=True):
            self.used[slot] = shape, owner if owned else -1
            self.newest.setdefault(self.slab(slot), -1)

    @rule(choice=CHOICES, count=st.integers(0, 40))
    def free(self, choice: Random, count: int) -> None:
        gone = choice.sample(sorted(self.used), min(count, len(self.used)))
        self.drop(gone)

    @rule(slab=st.integers(0, SLABS - 1))
    def free_a_slab(self, slab: int) -> None:
        self.drop(self.used_in(slab))

    def drop(self, slots: list[int]) -> None:
        self.pages.free(np.array(slots, np.int64))
        for slot in slots:
            del self.used[slot]
        for slab in [slab for slab in self.newest if not self.used_in(slab)]:
            del self.newest[slab]

    @rule(choice=CHOICES, count=st.integers(0, 5), stamp=st.integers(0, 20))
    def use(self, choice: Random, count: int, stamp: int) -> None:
        slots = choice.sample(sorted(self.used), min(count, len(self.used)))
        self.pages.used(np.array(slots, np.int64), stamp)
        for slot in slots:
            self.newest[self.slab(slot)] = max(self.newest[self.slab(slot)], stamp)

    @invariant()
    def counts_agree(self) -> None:
        pages = self.pages
        assert pages.capacity_bytes == self.SLABS * SLAB
        assert pages.free_slab_count == self.SLABS - len(self.newest)
        used_bytes = 0
        for shape in self.shapes:
            used = sum(other == shape for other, _ in self.used.values())
            used_bytes += used * pages.slot_bytes(shape)
            assert pages.used_slots(shape) == used
            assert pages.slabs_in_use(shape) == len(self.slabs(shape))
            assert pages.free_count(shape) == self.room(shape)
        assert pages.used_bytes == used_bytes

    @invariant()
    def slabs_know_their_shape_owners_and_age(self) -> None:
        for slab in range(self.SLABS):
            inside = [self.used[slot] for slot in self.used_in(slab)]
            assert self.pages.shape_of_slab(slab) == (inside[0][0] if inside else -1)
            owners = [owner for _, owner in inside if owner >= 0]
            assert self.pages.entries_in_slab(slab).tolist() == owners
            assert self.pages.newest_use[slab] == self.newest.get(slab, -1)
        for shape in self.shapes:
            others = self.newest.keys() - self.slabs(shape)
            ordered = self.pages.slabs_of_other_shapes(shape).tolist()
            assert set(ordered) == others
            assert sorted(ordered, key=self.newest.__getitem__) == ordered

    @invariant()
    def no_byte_belongs_to_two_pages(self) -> None:
        taken: set[int] = set()
        for shape in self.shapes:
            slots = [slot for slot, (other, _) in self.used.items() if other == shape]
            for rank, page_bytes in enumerate(self.pages.page_bytes(shape)):
                offsets = self.pages.offsets(np.array(slots, np.int64), rank)
                for slot, offset in zip(slots, offsets.tolist(), strict=True):
                    assert offset % PAGE_ALIGN == 0
                    units = range(offset // PAGE_ALIGN, (offset + page_bytes) // PAGE_ALIGN)
                    assert self.slab(slot) * SLAB <= offset
                    assert offset + page_bytes <= (self.slab(slot) + 1) * SLAB
                    assert taken.isdisjoint(units)
                    taken.update(units)
        assert len(taken) * PAGE_ALIGN == self.pages.used_bytes


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_pages_are_rank_major_and_consecutive_slots_contiguous() -> None:
    pages = Pages(2 * SLAB, SLAB)
    shape = pages.add_shape((5000, 4096))
    slots = pages.allocate(shape, 6)
    assert pages.page_bytes(shape) == (8192, 4096)
    assert pages.offsets(slots, 0).tolist() == [0, 8192, 16384, 24576, 32768, SLAB]
    first = 5 * 8192  # behind the pages of rank 0
    expected = [first + 4096 * position for position in range(5)]
    assert pages.offsets(slots, 1).tolist() == [*expected, SLAB + first]


def test_offsets_of_several_shapes_at_once() -> None:
    pages = Pages(2 * SLAB, SLAB)
    small, large = pages.add_shape((4096,)), pages.add_shape((8192,))
    slots = np.concatenate([pages.allocate(small, 2), pages.allocate(large, 2)])
    assert pages.offsets(slots[::-1], 0).tolist() == [SLAB + 8192, SLAB, 4096, 0]
    assert pages.offsets(slots[:0], 0).tolist() == []
    with pytest.raises(IndexError):
        pages.offsets(slots, 1)


def test_offsets_beyond_four_gibibytes() -> None:
    slab = 1 << 30
    pages = Pages(64 * slab, slab)
    shape = pages.add_shape((slab // 2,))
    slots = pages.allocate(shape, 128)
    assert pages.offsets(slots, 0).tolist() == [slot * slab // 2 for slot in range(128)]


def test_the_same_page_sizes_are_one_shape() -> None:
    pages = Pages(SLAB, SLAB)
    first = pages.add_shape((4000, 1))
    assert pages.add_shape((4096, 4096)) == first
    assert pages.add_shape((8192,)) != first


@pytest.mark.parametrize("page_bytes", [(), (0,), (4096, -1), (SLAB + 1,), (SLAB // 2, SLAB)])
def test_a_shape_that_cannot_be_held_is_refused(page_bytes: tuple[int, ...]) -> None:
    pages = Pages(SLAB, SLAB)
    with pytest.raises(BadRequestError):
        pages.add_shape(page_bytes)
    assert pages.add_shape((SLAB,)) == 0


def test_shapes_have_a_bound() -> None:
    pages = Pages(4 * KIB * PAGE_ALIGN, 4 * KIB * PAGE_ALIGN)
    for number in range(SHAPES_MAX):
        pages.add_shape(((number + 1) * PAGE_ALIGN,))
    with pytest.raises(OverloadedError):
        pages.add_shape(((SHAPES_MAX + 1) * PAGE_ALIGN,))
    assert pages.add_shape((PAGE_ALIGN,)) == 0


def test_a_pool_without_a_whole_slab_gives_nothing() -> None:
    pages = Pages(SLAB - 1, SLAB)
    shape = pages.add_shape((4096,))
    assert pages.free_count(shape) == 0
    assert pages.allocate(shape, 1).tolist() == []
    assert pages.slabs_of_other_shapes(shape).tolist() == []


def test_freed_twice_or_never_allocated_is_our_bug() -> None:
    pages = Pages(2 * SLAB, SLAB)
    shape = pages.add_shape((4096,))
    slots = pages.allocate(shape, 3)
    with pytest.raises(AssertionError):
        pages.free(slots[[0, 0]])
    pages.free(slots[:1])
    with pytest.raises(AssertionError):
        pages.free(slots[:1])
    with pytest.raises(AssertionError):
        pages.free(np.array([pages.slots_per_slab_max], np.int64))
    with pytest.raises(AssertionError):
        pages.set_owner(slots[:1], np.array([5], np.int32))


def test_a_large_batch_after_churn_is_cheap_to_cut_into_runs() -> None:
    slab_slots = 512
    pages = Pages(64 * slab_slots * PAGE_ALIGN, slab_slots * PAGE_ALIGN)
    shape = pages.add_shape((PAGE_ALIGN,))
    everything = pages.allocate(shape, 64 * slab_slots)
    assert runs_of(everything.tolist()) == 1
    pages.free(everything[:100])
    pages.free(everything[1000:1400])
    pages.free(everything[5 * slab_slots : 6 * slab_slots])
    assert runs_of(pages.allocate(shape, 300).tolist()) == 1
    assert pages.allocate(shape, 2000).shape == (100 + 400 + slab_slots - 300,)
    assert pages.free_count(shape) == 0
