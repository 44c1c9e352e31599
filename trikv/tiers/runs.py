"""From slots and pages to operations: neighbours on the disk become one.

Decided here: how large an operation gets, and that it never has more pieces than the kernel takes.
This file does not know what the bytes are.
"""

import ctypes
import mmap
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core import sums
from trikv.tiers.transfers import PIECES_MAX, Transfers

OPERATION_BYTES_MAX: Final = 4 << 20


class Memory:
    """Memory of our own for I/O, on huge pages where the host gives them.

    Attributes:
        bytes: uint8[size].
        address: where it begins.
    """

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data


def view(address: int, length: int) -> memoryview:
    """The bytes at an address of this process; the caller keeps them mapped."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def sum_blocks(
    addresses: NDArray[np.uint64], lengths: tuple[int, ...], into: NDArray[np.uint64]
) -> None:
    """Sums of blocks' pages, one rank after another; releases the GIL while it reads large ones."""
    if len(lengths) == 1:
        for row, address in enumerate(addresses[:, 0].tolist()):
            into[row] = sums.of_bytes(view(address, lengths[0]))
        return
    for row, places in enumerate(addresses.tolist()):
        into[row] = sums.of_parts(map(view, places, lengths))


def join(
    offsets: NDArray[np.int64],
    addresses: NDArray[np.uint64],
    lengths: tuple[int, ...],
    *,
    is_write: bool,
    bytes_max: int = OPERATION_BYTES_MAX,
    joins_memory: bool = True,
    keep: object = None,
) -> tuple[Transfers, NDArray[np.int64], NDArray[np.int64]]:
    """Make operations of blocks; those that are neighbours on the disk share one.

    Args:
        offsets: int64[n], where blocks begin on the disk.
        addresses: uint64[n, ranks], where their pages are in memory.
        lengths: bytes of a page on each rank; on the disk pages follow one another.
        is_write: which way they go.
        bytes_max: of an operation, unless one block is larger.
        joins_memory: pages that are neighbours in memory become one piece.
        keep: what owns the memory.

    Returns:
        (transfers, order, of): `order[k]` is a block, and operation `of[k]` moves it.
    """
    count, size = len(offsets), sum(lengths)
    ranks = len(lengths)
    assert 0 < ranks <= PIECES_MAX
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    is_first = np.ones(count, np.bool_)
    is_first[1:] = starts[1:] != starts[:-1] + size
    run = np.flatnonzero(is_first)
    within = np.arange(count) - np.repeat(run, np.diff(run, append=count))
    is_first |= within % max(1, min(bytes_max // size, PIECES_MAX // ranks)) == 0
    of = np.cumsum(is_first) - 1
    pieces = np.empty((count, ranks, 2), np.uint64)
    pieces[:, :, 0] = addresses[order]
    pieces[:, :, 1] = lengths
    table, first = _joined(pieces.reshape(-1, 2), np.flatnonzero(is_first) * ranks, joins_memory)
    transfers = Transfers(is_write, starts[is_first], table, first, keep)
    return transfers, order, of


def _joined(
    pieces: NDArray[np.uint64],
    first: NDArray[np.int64],
    joins_memory: bool,  # noqa: FBT001
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Pieces of one operation that are neighbours in memory become one."""
    count = len(pieces)
    if count == 0:
        return pieces, np.zeros(1, np.int64)
    is_first = np.ones(count, np.bool_)
    if joins_memory:
        is_first[1:] = pieces[1:, 0] != pieces[:-1, 0] + pieces[:-1, 1]
        is_first[first] = True
    kept = np.flatnonzero(is_first)
    joined = np.empty((len(kept), 2), np.uint64)
    joined[:, 0] = pieces[kept, 0]
    joined[:, 1] = np.add.reduceat(pieces[:, 1], kept)
    return joined, np.append(np.searchsorted(kept, first), len(kept))
