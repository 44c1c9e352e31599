"""The records that say what is in the slots of a disk.

Decided here: the formats of region headers and records, and when a record counts. What lies where
is in `disklayout.py`, the superblock in `superblock.py`. This file does not know files, rings, or
which blocks are wanted.

A region is cut into slots of one size by its header. A slot holds a block: the pages of all ranks,
one after another. Its record is beside those of its neighbours, 16 a page; none crosses a sector.

A record counts when its own sum is right, it bears the tag of this disk and the place where it was
found, and its region's header has the generation and sizes that it names. It says what the slot's
bytes add up to: a record whose data never arrived, or was overwritten, is found out when it is
read. So nothing has to reach the medium in any order, and nothing is invalidated before reuse.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core import sums
from trikv.core.blocks import PAGES_MAX
from trikv.core.disklayout import RECORD_BYTES, SLOT_BYTES_MIN, Layout, aligned
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.pages import PAGE_ALIGN
from trikv.core.words import Words

RECORDS_A_PAGE: Final = PAGE_ALIGN // RECORD_BYTES
RECORD_MARK: Final = 0x7C4B7254
HEADER_MARK: Final = 0x7C4B7252
RECORD_VERSION: Final = 1
NO_SLOTS: Final = 0
_SPREAD: Final = np.array([3, 5, 0x9E3779B185EBCA87, 7], np.uint64)  # the group is in the third
FEW: Final = 256  # rows for which the library is faster than the columns
SUMMED_AT_ONCE: Final = 2_048  # rows whose columns stay in the cache

HEADER: Final = np.dtype(
    [
        ("mark", "<u4"),
        ("version", "<u2"),
        ("rank_count", "<u2"),
        ("tag", "<u8"),
        ("region", "<u8"),
        ("generation", "<i8"),
        ("slot_bytes", "<i8"),
        ("page_bytes", "<i8", PAGES_MAX),
        ("rest", "u1", PAGE_ALIGN - 40 - 8 * PAGES_MAX - 8),
        ("sum", "<u8"),
    ]
)
RECORD: Final = np.dtype(
    [
        ("mark", "<u4"),
        ("version", "<u2"),
        ("rank_count", "<u2"),
        ("tag", "<u8"),
        ("region", "<u4"),
        ("position", "<u4"),
        ("generation", "<i8"),
        ("sequence", "<i8"),
        ("origin", "u1", ORIGIN_BYTES),
        ("words", "<u8", 4),
        ("depth", "<i4"),
        ("rest", "<u4"),
        ("length", "<i8"),
        ("data_sum", "<u8"),
        ("room", "<u8", 15),
        ("sum", "<u8"),
    ]
)
assert HEADER.itemsize == PAGE_ALIGN
assert RECORD.itemsize == RECORD_BYTES == 8 * (sums.ROW_WORDS + 1)


def slot_bytes(page_bytes: tuple[int, ...]) -> int:
    """Bytes of a slot for a block with these pages: what the shape of a region is."""
    return max(SLOT_BYTES_MIN, sum(aligned(one, PAGE_ALIGN) for one in page_bytes))


# -- what the core and the disk tell each other


@dataclass(frozen=True, slots=True)
class Writes:
    """Blocks to write, of one shape.

    Attributes:
        regions, positions: int64[n], the slots, each named once; their regions have been cut.
        addresses: uint64[n, ranks], where the pages lie in this process; unchanged until the end.
        lengths: bytes of a page on each rank, multiples of `PAGE_ALIGN`.
        origins: uint8[n, 32]; words: uint64[n, 4]; depths: int32[n]; sequences: int64[n].
        sums: uint64[n], filled in by the disk: what `Reads` has to name later.
    """

    regions: NDArray[np.int64]
    positions: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    lengths: tuple[int, ...]
    origins: NDArray[np.uint8]
    words: Words
    depths: NDArray[np.int32]
    sequences: NDArray[np.int64]
    sums: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", np.zeros(len(self.regions), np.uint64))


@dataclass(frozen=True, slots=True)
class Reads:
    """Blocks to read, of one shape; columns as in `Writes`.

    Attributes:
        addresses: where the pages are to be; the disk's from the call until its end.
        sums: what the bytes must add up to.
    """

    regions: NDArray[np.int64]
    positions: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    lengths: tuple[int, ...]
    sums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Some regions as found on a disk, and the blocks in them; of a key found twice, the newer.

    Attributes:
        cut: int64[m], regions that have a valid header, each in one batch only.
        slot_bytes: int64[m], what they are cut into.
        page_bytes: (m,), a tuple of a block's page bytes on each rank.
        regions, positions, ...: columns of n blocks as in `Writes`.
        lengths: int64[n], bytes of a block on all ranks.
    """

    cut: NDArray[np.int64]
    slot_bytes: NDArray[np.int64]
    page_bytes: tuple[tuple[int, ...], ...]
    regions: NDArray[np.int64]
    positions: NDArray[np.int64]
    origins: NDArray[np.uint8]
    words: Words
    depths: NDArray[np.int32]
    sequences: NDArray[np.int64]
    sums: NDArray[np.uint64]
    lengths: NDArray[np.int64]


# -- headers


def make_header(tag: int, region: int, generation: int, page_bytes: tuple[int, ...]) -> bytes:
    """The page that cuts a region."""
    header = np.zeros(1, HEADER)
    header["mark"], header["version"], header["tag"] = HEADER_MARK, RECORD_VERSION, tag
    header["region"], header["generation"] = region, generation
    header["rank_count"], header["slot_bytes"] = len(page_bytes), slot_bytes(page_bytes)
    header["page_bytes"][0, : len(page_bytes)] = page_bytes
    header["sum"] = sums.of_bytes(header.tobytes()[:-8])
    return header.tobytes()


class Regions:
    """How all regions of a disk are cut, in columns.

    Attributes:
        slot_bytes: int64[region], `NO_SLOTS` when it has no valid header.
        generation: int64[region], grows whenever it is cut anew.
        rank_count, length: int64[region], of a block: its ranks, and bytes of its pages.
        page_bytes: by region.
    """

    def __init__(self, layout: Layout, tag: int) -> None:
        self.layout = layout
        self.tag = tag
        self.slot_bytes = np.full(layout.region_count, NO_SLOTS, np.int64)
        self.generation = np.zeros(layout.region_count, np.int64)
        self.rank_count = np.zeros(layout.region_count, np.int64)
        self.length = np.zeros(layout.region_count, np.int64)
        self.page_bytes: dict[int, tuple[int, ...]] = {}

    def cut(self, region: int, generation: int, page_bytes: tuple[int, ...]) -> None:
        """A region's header says this now."""
        assert all(one > 0 and one % PAGE_ALIGN == 0 for one in page_bytes)
        assert slot_bytes(page_bytes) <= self.layout.region_bytes
        self.slot_bytes[region] = slot_bytes(page_bytes)
        self.generation[region] = generation
        self.rank_count[region] = len(page_bytes)
        self.length[region] = sum(page_bytes)
        self.page_bytes[region] = page_bytes

    def adopt(self, first: int, raw: NDArray[np.uint8]) -> None:
        """Read the header pages of consecutive regions; those that are not valid stay uncut."""
        headers = raw.view(HEADER)
        right = (headers["mark"] == HEADER_MARK) & (headers["version"] == RECORD_VERSION)
        right &= headers["tag"] == self.tag
        right &= headers["region"] == np.arange(first, first + len(headers))
        for row in np.flatnonzero(right).tolist():
            header = headers[row]
            page = raw[row * PAGE_ALIGN : (row + 1) * PAGE_ALIGN - 8]
            if sums.of_bytes(page.data) == header["sum"]:
                pages = tuple(header["page_bytes"][: int(header["rank_count"])].tolist())
                self.cut(first + row, int(header["generation"]), pages)

    def slots(self, regions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many slots each region has."""
        return self.layout.region_bytes // np.maximum(self.slot_bytes[regions], SLOT_BYTES_MIN)

    def record_pages(self, regions: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many pages the records of each region fill."""
        return -(-self.slots(regions) // RECORDS_A_PAGE)

    def offsets(
        self, regions: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Where slots begin on the disk, int64[n]."""
        return self.layout.regions_at(regions) + positions * self.slot_bytes[regions]


# -- records


def make_records(regions: Regions, writes: Writes) -> NDArray[np.void]:
    """The records of blocks whose sums are known, RECORD[n]."""
    records = np.zeros(len(writes.regions), RECORD)
    records["mark"], records["version"], records["tag"] = RECORD_MARK, RECORD_VERSION, regions.tag
    records["rank_count"], records["length"] = len(writes.lengths), sum(writes.lengths)
    records["region"], records["position"] = writes.regions, writes.positions
    records["generation"] = regions.generation[writes.regions]
    records["sequence"], records["depth"] = writes.sequences, writes.depths
    records["origin"], records["words"] = writes.origins, writes.words
    records["data_sum"] = writes.sums
    records["sum"] = _record_sums(records)
    return records


def valid_records(
    regions: Regions, at: NDArray[np.int64], positions: NDArray[np.int64], raw: NDArray[np.void]
) -> NDArray[np.int64]:
    """Which of the records that were found at these places count, as rows of `raw`, ascending."""
    right = (raw["mark"] == RECORD_MARK) & (raw["version"] == RECORD_VERSION)
    right &= (raw["tag"] == regions.tag) & (raw["region"] == at) & (raw["position"] == positions)
    right &= raw["generation"] == regions.generation[at]
    right &= raw["rank_count"] == regions.rank_count[at]
    right &= (raw["length"] == regions.length[at]) & (positions < regions.slots(at))
    rows = np.flatnonzero(right)
    found = picked(raw, rows)
    valid: NDArray[np.int64] = rows[_record_sums(found) == found["sum"]]
    return valid


def picked(records: NDArray[np.void], rows: NDArray[np.int64]) -> NDArray[np.void]:
    """As `records[rows]` for distinct rows, in a third of the time, or none when it is all."""
    if len(rows) == len(records):
        return records
    words = records.view(np.uint64).reshape(-1, RECORD_BYTES // 8)
    return words.take(rows, axis=0).view(RECORD).reshape(-1)


def newest(records: NDArray[np.void]) -> NDArray[np.int64]:
    """Rows without those whose key another row has with a higher sequence, ascending."""
    origins = np.ascontiguousarray(records["origin"]).view(np.uint64)
    names = records["words"][:, 0] ^ (origins * _SPREAD).sum(axis=1, dtype=np.uint64)
    _, group, counts = np.unique(names, return_inverse=True, return_counts=True)
    best: dict[bytes, int] = {}  # only of rows whose name is not unique
    is_kept = np.ones(len(records), np.bool_)
    for row in np.flatnonzero(counts[group] > 1).tolist():
        key = records["origin"][row].tobytes() + records["words"][row].tobytes()
        other = best.get(key)
        if other is None or records["sequence"][other] < records["sequence"][row]:
            best[key], loser = row, other
        else:
            loser = row
        if loser is not None:
            is_kept[loser] = False
    return np.flatnonzero(is_kept)


def _record_sums(records: NDArray[np.void]) -> NDArray[np.uint64]:
    if len(records) < FEW:
        raw = records.tobytes()
        at = range(0, len(raw), RECORD_BYTES)
        return np.array([sums.of_bytes(raw[one : one + RECORD_BYTES - 8]) for one in at], np.uint64)
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, RECORD_BYTES // 8)
    parts = [
        sums.of_rows(words[first : first + SUMMED_AT_ONCE])
        for first in range(0, len(words), SUMMED_AT_ONCE)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)
