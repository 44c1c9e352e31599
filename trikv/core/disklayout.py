"""What lies where on a disk.

Decided here: how the room of a disk is cut, and where a disk that has grown goes on. This file does
not know what is written there.

    2 superblocks | a header page a region | room for the records of each region | regions

A disk that grows gets another part behind what it has, of headers, records and regions; nothing
that is there moves. Regions are numbered through all parts.
"""

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.errors import BadRequestError
from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import COPIES, DELETE, GROWN_MAX, Superblock

SLOT_BYTES_MIN: Final = 32 << 10
RECORD_BYTES: Final = 256
REGION_BYTES_MIN: Final = 2 << 20  # a huge page: where regions begin
REGION_BYTES_MAX: Final = 64 << 20
REGIONS_WANTED: Final = 64  # so that a small disk serves several sizes of blocks
REGIONS_MAX: Final = 1 << 20  # of a disk that has grown

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is on a disk of `capacity_bytes`, in bytes from its beginning.

    Attributes:
        first_count: regions that it was made with.
        grown: regions of each further part.
    """

    capacity_bytes: int
    region_bytes: int
    first_count: int
    grown: tuple[int, ...] = ()
    _starts: Int64s = field(init=False, repr=False, compare=False)  # first region of each part
    _bases: Int64s = field(init=False, repr=False, compare=False)  # headers, records, regions

    def __post_init__(self) -> None:
        starts = np.cumsum([0, self.first_count, *self.grown])[:-1].astype(np.int64)
        units = PAGE_ALIGN, self.records_bytes, self.region_bytes
        bases, end = [], COPIES * PAGE_ALIGN
        for count, first in zip((self.first_count, *self.grown), starts.tolist(), strict=True):
            records = end + count * PAGE_ALIGN
            regions = aligned(records + count * self.records_bytes, REGION_BYTES_MIN)
            places = end, records, regions
            bases.append([one - first * unit for one, unit in zip(places, units, strict=True)])
            end = regions + count * self.region_bytes
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_bases", np.array(bases, np.int64).T)

    @property
    def region_count(self) -> int:
        """Regions of all parts."""
        return self.first_count + sum(self.grown)

    @property
    def records_bytes(self) -> int:
        """Room for the records of one region."""
        return aligned(self.region_bytes // SLOT_BYTES_MIN * RECORD_BYTES, PAGE_ALIGN)

    @property
    def end(self) -> int:
        """Bytes that are used."""
        return int(self.regions_at(np.array([self.region_count - 1])).item()) + self.region_bytes

    def headers_at(self, regions: Int64s) -> Int64s:
        """Where the headers of regions are, int64[n]."""
        places: Int64s = self._bases[0][self._part(regions)] + regions * PAGE_ALIGN
        return places

    def records_at(self, regions: Int64s) -> Int64s:
        """Where the records of regions begin, int64[n]."""
        places: Int64s = self._bases[1][self._part(regions)] + regions * self.records_bytes
        return places

    def regions_at(self, regions: Int64s) -> Int64s:
        """Where regions begin, int64[n]."""
        places: Int64s = self._bases[2][self._part(regions)] + regions * self.region_bytes
        return places

    def _part(self, regions: Int64s) -> Int64s:
        return np.searchsorted(self._starts, regions, side="right") - 1


def layout_for(capacity_bytes: int, region_bytes: int = 0) -> Layout:
    """Cut a disk so that all of it stays within `capacity_bytes`.

    Args:
        capacity_bytes: the hard limit.
        region_bytes: a multiple of `REGION_BYTES_MIN`; 0: chosen by the capacity.

    Raises:
        BadRequestError: not one region fits.
    """
    if region_bytes == 0:
        wanted = max(1, capacity_bytes // REGIONS_WANTED)
        power = 1 << (wanted.bit_length() - 1)
        region_bytes = min(max(power, REGION_BYTES_MIN), REGION_BYTES_MAX)
    assert region_bytes % REGION_BYTES_MIN == 0
    least = Layout(capacity_bytes, region_bytes, 1)
    count = (capacity_bytes - COPIES * PAGE_ALIGN) // _a_region(least)
    while count > 0:
        layout = Layout(capacity_bytes, region_bytes, count)
        if layout.end <= capacity_bytes:
            return layout
        count -= 1
    raise BadRequestError(f"{capacity_bytes} bytes hold no region: at least {least.end} are needed")


def layout_of(superblock: Superblock) -> Layout:
    """How a disk is cut."""
    return Layout(
        superblock.capacity_bytes,
        superblock.region_bytes,
        superblock.region_count,
        superblock.grown,
    )


def grow(superblock: Superblock, capacity_bytes: int) -> Layout:
    """Give a disk more room, behind what it has; not written yet.

    Args:
        superblock: the disk's; changed.
        capacity_bytes: more than it has.

    Returns:
        The layout from now on; with less than a region more, the same regions.

    Raises:
        BadRequestError: it has grown too often or to too many regions; nothing was changed.
    """
    now = layout_of(superblock)
    assert capacity_bytes > now.capacity_bytes
    grown = replace(now, capacity_bytes=capacity_bytes)
    for count in range((capacity_bytes - now.end) // _a_region(now), 0, -1):
        larger = replace(grown, grown=(*now.grown, count))
        if larger.end <= capacity_bytes:
            grown = larger
            break
    if len(grown.grown) > GROWN_MAX:
        raise BadRequestError(f"it has grown {GROWN_MAX} times already: {DELETE}")
    if grown.region_count > REGIONS_MAX:
        raise BadRequestError(
            f"its regions of {now.region_bytes} bytes are too small to grow so far: {DELETE}"
        )
    superblock.capacity_bytes, superblock.grown = capacity_bytes, grown.grown
    return grown


def aligned(size: int, unit: int) -> int:
    """Rounded up to units."""
    return -(-size // unit) * unit


def _a_region(layout: Layout) -> int:
    """What a region takes in all."""
    return layout.region_bytes + PAGE_ALIGN + layout.records_bytes
