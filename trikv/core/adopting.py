"""Blocks that an earlier daemon has left: how records that were found become blocks again.

Decided here: that a found block takes its old place, is whole at once, and comes after what is
known already. This file does not know where records lie, which of them count, or in which order
found blocks count as used.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import Blocks
from trikv.core.index import Index
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.pages import Pages, Slots
from trikv.core.slots import Recovered
from trikv.core.words import Entries, ShapeId, SpaceId, Words

Int64s = NDArray[np.int64]


def bring_back(
    pages: Pages,
    blocks: Blocks,
    index: Index,
    space: SpaceId,
    shape: ShapeId,
    slots: Slots,
    words: Words,
    depths: NDArray[np.int32],
) -> tuple[Int64s, Entries]:
    """Found blocks are sealed in the places where they were found.

    Args:
        pages: of the tier, as are `blocks` and `index`.
        blocks: likewise.
        index: likewise.
        space: of all of them.
        shape: likewise.
        slots: int64[n], distinct.
        words: distinct; what the index knows already is left as it is.
        depths: int32[n].

    Returns:
        (rows, entries): which of the n have come back, and what they are now.

    At the bound: without unused rows, or where a place is taken, a block does not come back.
    """
    rows = np.flatnonzero(index.find(space, words) < 0)[: blocks.unused_count]
    taken = pages.take(shape, slots[rows])
    rows = rows[np.isin(slots[rows], taken)]
    page_count = len(pages.page_bytes(shape))
    entries = blocks.reserve(taken, depths[rows], space=space, page_count=page_count)
    if len(entries):
        pages.set_owner(taken, entries)
        index.insert(space, words[rows], entries)
        blocks.claim_whole(entries)
        blocks.fill_whole(entries)
    return rows, entries


def by_origin(origins: NDArray[np.uint8]) -> Iterator[tuple[bytes, Int64s]]:
    """The origins of a batch, mostly one or a few, and which rows are of each."""
    columns = np.ascontiguousarray(origins).view(np.uint64).reshape(-1, ORIGIN_BYTES // 8)
    rest = np.arange(len(columns))
    while len(rest):
        first = columns[rest[0]]
        is_same = np.logical_and.reduce([columns[rest, at] == one for at, one in enumerate(first)])
        yield first.tobytes(), rest[is_same]
        rest = rest[~is_same]


def parts_of(found: Recovered, records_max: int = 2_048) -> Iterator[Recovered]:
    """The same in parts that `Lower.adopt` is done with in some milliseconds; whole regions."""
    counts = np.array([np.count_nonzero(found.regions == region) for region in found.cut], np.int64)
    part = (np.cumsum(counts) - counts) // records_max
    for number in np.unique(part).tolist():
        at = part == number
        rows = np.isin(found.regions, found.cut[at])
        pages = tuple(one for one, mine in zip(found.page_bytes, at, strict=True) if mine)
        yield Recovered(
            found.cut[at],
            found.slot_bytes[at],
            pages,
            found.regions[rows],
            found.positions[rows],
            found.origins[rows],
            found.words[rows],
            found.depths[rows],
            found.sequences[rows],
            found.sums[rows],
            found.lengths[rows],
        )
