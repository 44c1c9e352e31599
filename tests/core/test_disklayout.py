"""Where everything is on a disk, also on one that has grown: within its capacity, nothing twice."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core.disklayout import (
    RECORD_BYTES,
    REGION_BYTES_MIN,
    SLOT_BYTES_MIN,
    Layout,
    grow,
    layout_for,
    layout_of,
)
from trikv.core.errors import BadRequestError
from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import COPIES, GROWN_MAX, Superblock

MIB = 1 << 20


def pieces(layout: Layout, regions: list[int]) -> list[tuple[int, int]]:
    """What belongs to some regions, and to the superblocks: begin and end, in order."""
    at = np.array(regions)
    found = [(0, COPIES * PAGE_ALIGN)]
    for begins, size in (
        (layout.headers_at(at), PAGE_ALIGN),
        (layout.records_at(at), layout.records_bytes),
        (layout.regions_at(at), layout.region_bytes),
    ):
        found += [(begin, begin + size) for begin in begins.tolist()]
    return sorted(found)


def check(layout: Layout) -> None:
    """Nothing overlaps; of many regions those at the ends of parts are looked at."""
    ends = np.cumsum([layout.first_count, *layout.grown]).tolist()
    regions = sorted({max(0, min(at, layout.region_count - 1)) for end in [0, *ends]
                      for at in (end - 2, end - 1, end, end + 1)})  # fmt: skip
    found = pieces(layout, regions)
    assert all(before[1] <= after[0] for before, after in pairwise(found))
    assert found[-1][1] == layout.end <= layout.capacity_bytes
    assert not (layout.regions_at(np.array(regions)) % REGION_BYTES_MIN).any()
    assert layout.records_bytes >= layout.region_bytes // SLOT_BYTES_MIN * RECORD_BYTES


@given(st.integers(4 * MIB, 1 << 42))
def test_a_layout_stays_within_its_capacity(capacity: int) -> None:
    layout = layout_for(capacity)
    check(layout)
    assert capacity - layout.end < 2 * layout.region_bytes + 4 * MIB  # and uses nearly all of it


def test_too_small_is_refused() -> None:
    with pytest.raises(BadRequestError, match=r"hold no region: at least \d+") as refusal:
        layout_for(2 * MIB)
    least = int(str(refusal.value).split()[-3])
    assert layout_for(least).region_count == 1
    with pytest.raises(BadRequestError):
        layout_for(least - 1)


def superblock_for(capacity: int, region_bytes: int = 0) -> Superblock:
    layout = layout_for(capacity, region_bytes)
    return Superblock(bytes(16), capacity, layout.region_bytes, layout.region_count)


@given(st.integers(4 * MIB, 1 << 36), st.lists(st.integers(1, 1 << 34), max_size=GROWN_MAX))
def test_what_grows_keeps_its_places_and_uses_nearly_all(capacity: int, steps: list[int]) -> None:
    superblock = superblock_for(capacity)
    for step in steps:
        before = layout_of(superblock)
        after = grow(superblock, superblock.capacity_bytes + step)
        assert after == layout_of(superblock)
        check(after)
        old = [0, before.region_count - 1]
        assert pieces(after, old) == pieces(before, old)
        assert after.capacity_bytes - after.end < 2 * after.region_bytes + 4 * MIB
    assert superblock.capacity_bytes == capacity + sum(steps)


def test_the_bounds_of_growing() -> None:
    superblock = superblock_for(8 * MIB, 2 * MIB)
    before = layout_of(superblock)
    assert grow(superblock, 8 * MIB + 5).grown == ()  # too little for a region
    with pytest.raises(BadRequestError, match="too small to grow so far"):
        grow(superblock, 1 << 42)
    for _ in range(GROWN_MAX):
        grow(superblock, superblock.capacity_bytes + 4 * MIB)
    full = layout_of(superblock)
    assert full.first_count == before.first_count
    with pytest.raises(BadRequestError, match="grown 16 times already"):
        grow(superblock, superblock.capacity_bytes + 4 * MIB)
    assert layout_of(superblock) == full
