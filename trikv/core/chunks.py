"""How a copy to or from a GPU is cut, and which copy goes on next.

Decided here: the order of a copy's blocks, where chunks begin, which neighbours move as one, who
goes first among copies that wait, and which bytes of the staging buffer a chunk gets. This file
does not know devices: it deals in numbers of bytes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Offsets

AGING_BYTES_S: Final = 256 << 20
"""A copy that waits a second goes before one that is this much smaller."""
BRIDGE_BYTES: Final = 64 << 20
BRIDGE_PIECES: Final = 2048
BRIDGE_PIECE_BYTES: Final = 8 << 10
"""The bus takes a request in a microsecond: smaller pieces leave it idle most of that time."""
TAIL_BYTES: Final = 32 << 20
"""Of smaller pieces, which go by a kernel: what the bus brings in a part of that time."""

_ZERO: Final = np.zeros(1, np.int64)

Runs = NDArray[np.int64]
"""Shape (n, 3): two places and a number of bytes; what moves with one request to the hardware."""


@dataclass(frozen=True, slots=True, eq=False)
class Sorted:
    """A copy's blocks in the order in which they move: by place in the pool, so neighbours meet.

    Attributes:
        order: int64[blocks], position in the message of the block that moves n-th.
        blocks: int32[blocks], the engine's, in this order.
        offsets: int64[blocks], of the pool, in this order: they ascend, but for `put_first`.
        heads: bool[blocks], False where a page follows its predecessor without a gap.
    """

    order: NDArray[np.int64]
    blocks: NDArray[np.int32]
    offsets: Offsets
    heads: NDArray[np.bool_]


def sort(
    blocks: NDArray[np.int32], offsets: Offsets, *, page_bytes: int, slab_bytes: int
) -> Sorted:
    """Put the blocks of one copy in order.

    Args:
        blocks: the engine's, shape (n,), n >= 1.
        offsets: of their pages in the pool, distinct.
        page_bytes: with padding.
        slab_bytes: no run crosses from one slab into the next: each is registered by itself.
    """
    order = np.argsort(offsets, kind="stable")
    offsets = offsets[order]
    heads = offsets % slab_bytes == 0  # no page reaches over the end of its slab
    heads[1:] |= offsets[1:] - offsets[:-1] != page_bytes
    heads[0] = True
    return Sorted(order, blocks[order], offsets, heads)


def put_first(blocks: Sorted, pages: Offsets) -> tuple[Sorted, int]:
    """The same blocks, those of some pages before all others; and how many these are.

    None are where a page is of several blocks: what was brought of it can go to one place only.

    Args:
        blocks: of one copy.
        pages: in the pool, ascending, at least one; some may be of no block.
    """
    near = pages[np.minimum(np.searchsorted(pages, blocks.offsets), len(pages) - 1)]
    is_first = near == blocks.offsets
    first = blocks.offsets[is_first]
    if len(first) == 0 or (first[1:] == first[:-1]).any():
        return blocks, 0
    if len(first) == len(blocks.offsets):
        return blocks, len(first)
    at = np.argsort(~is_first, kind="stable")
    heads = blocks.heads[at]
    heads[0] = True
    heads[1:] |= at[1:] - at[:-1] != 1
    return Sorted(blocks.order[at], blocks.blocks[at], blocks.offsets[at], heads), len(first)


def blocks_of(pages: Offsets, blocks: Sorted, count: int) -> NDArray[np.int32]:
    """The block of each page; -1: of none.

    Args:
        pages: in the pool, ascending.
        blocks: the first `count` have one of these each.
        count: of them.
    """
    ids = np.full(len(pages), -1, np.int32)
    ids[np.searchsorted(pages, blocks.offsets[:count])] = blocks.blocks[:count]
    return ids


def chunk_blocks(started: int, left: int, *, page_bytes: int, chunk_bytes: int) -> int:
    """How many blocks the next chunk has.

    The first chunks are smaller: the bus has something to do while the rest is gathered. The last
    one is not: a chunk of a few blocks costs as much as any, so the one before it takes them along.

    Args:
        started: blocks in earlier chunks.
        left: blocks that are in none yet.
        page_bytes: of one block; a page that is larger than a chunk makes one of its own.
        chunk_bytes: of a full chunk; the last one may have a quarter more.
    """
    full = max(1, chunk_bytes // page_bytes)
    least = -(-full // 4)
    size = min(full, max(started, least))
    return left if left - size < least else size


def tail_blocks(count: int, *, page_bytes: int, pieces: int) -> tuple[int, bool]:
    """How many of a load's blocks come while its kernels wait for a time slice of a busy GPU.

    That wait is up to 2 ms, in which the bus would have nothing to do.

    Args:
        count: of the copy.
        page_bytes: of one block, without padding.
        pieces: of one block.

    Returns:
        Blocks, the last of the copy; and whether they go without a kernel, piece by piece.
    """
    if page_bytes < pieces * BRIDGE_PIECE_BYTES:
        return min(TAIL_BYTES // page_bytes, count // 4), False
    return min(BRIDGE_PIECES // pieces, BRIDGE_BYTES // page_bytes, count // 4), True


def page_runs(offsets: Offsets, heads: NDArray[np.bool_], *, page_bytes: int) -> Runs:
    """Pages of a chunk that lie side by side, as (bytes before them, offset of the first, bytes).

    Args:
        offsets: of the chunk, as in `Sorted`.
        heads: likewise.
        page_bytes: with padding.
    """
    first = np.flatnonzero(heads)
    if len(first) == 0 or first[0] != 0:  # the chunk begins in the midst of a run
        first = np.concatenate((_ZERO, first))
    runs = np.empty((len(first), 3), np.int64)
    runs[:, 0] = first * page_bytes
    runs[:, 1] = offsets[first]
    runs[:-1, 2] = first[1:]
    runs[-1, 2] = len(offsets)
    runs[:, 2] -= first
    runs[:, 2] *= page_bytes
    return runs


def tall_runs(
    offsets: Offsets, heads: NDArray[np.bool_], *, least: int
) -> tuple[Runs, NDArray[np.int64]]:
    """Pages of a chunk of which a part is wanted: those worth one request for several, and others.

    Args:
        offsets: of the chunk, as in `Sorted`.
        heads: likewise.
        least: pages side by side that are worth it.

    Returns:
        (pages before them, offset of the first, pages) of each run, and positions of the others.
    """
    runs = page_runs(offsets, heads, page_bytes=1)
    is_tall = runs[:, 2] >= least
    return runs[is_tall], np.flatnonzero(~np.repeat(is_tall, runs[:, 2]))


def cut(
    lengths: NDArray[np.int64], begin: int, end: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The pieces of a part of a page.

    Args:
        lengths: bytes of each piece, in page order.
        begin: of the part, in bytes of the page.
        end: likewise.

    Returns:
        For each piece that reaches into it: its number, bytes of it before the part, bytes in it.
    """
    ends = np.cumsum(lengths)
    first, last = np.maximum(ends - lengths, begin), np.minimum(ends, end)
    which = np.flatnonzero(first < last)
    return which, (first - ends + lengths)[which], (last - first)[which]


def piece_runs(
    addresses: NDArray[np.int64],
    offsets: Offsets,
    lengths: NDArray[np.int64],
    *,
    slab_bytes: int,
) -> Runs:
    """Pieces that are neighbours at both ends, as (address, offset, bytes).

    Args:
        addresses: of each piece of each block, shape (blocks, pieces).
        offsets: of the pages, ascending, shape (blocks,).
        lengths: bytes of each piece, in page order, shape (pieces,).
        slab_bytes: as above.
    """
    places = offsets[:, None] + (np.cumsum(lengths) - lengths)
    flat = np.column_stack((addresses.ravel(), places.ravel(), np.tile(lengths, len(offsets))))
    end = flat[:-1, :2] + flat[:-1, 2:]
    gap = (end != flat[1:, :2]).any(axis=1)
    gap |= np.diff(flat[:, 1] // slab_bytes) != 0
    first = np.concatenate(([0], np.flatnonzero(gap) + 1))
    return np.column_stack((flat[first, :2], np.add.reduceat(flat[:, 2], first)))


class Waiting(Protocol):
    """What decides when a copy's next chunk goes."""

    @property
    def bytes_left(self) -> int:
        """That have not been started."""
        ...

    @property
    def since_s(self) -> float:
        """When it came, on the caller's clock."""
        ...


def next_copy(waiting: Sequence[Waiting], *, now_s: float) -> int:
    """Which copy goes on: the one with the least left, older ones gaining with time.

    So a small load is not held up by a large one, and the large one is not held up for ever.

    Args:
        waiting: at least one.
        now_s: seconds on the clock of `since_s`.
    """
    if len(waiting) == 1:
        return 0
    left = [one.bytes_left - AGING_BYTES_S * (now_s - one.since_s) for one in waiting]
    return left.index(min(left))


@dataclass(slots=True)
class Ring:
    """Parts of one buffer, given out and given back in the same order.

    Attributes:
        size: of the buffer; 0: there is none.
    """

    size: int
    _taken: deque[tuple[int, int]] = field(default_factory=deque)  # begin, end

    def take(self, count: int) -> int | None:
        """Where `count` bytes in a row are free, or None while they are not.

        Args:
            count: at most `size`; more never fits.
        """
        assert 0 < count <= self.size
        begin = 0
        if self._taken:
            begin, oldest = self._taken[-1][1], self._taken[0][0]
            is_wrapped = begin <= oldest
            if not is_wrapped and begin + count > self.size:  # too little is left at the end
                begin, is_wrapped = 0, True
            if is_wrapped and begin + count > oldest:
                return None
        self._taken.append((begin, begin + count))
        return begin

    def give_back(self) -> None:
        """The oldest part is free again."""
        self._taken.popleft()
