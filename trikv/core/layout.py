"""Where the pieces of a block lie in an engine's memory, and which of them make a page.

Decided here: the check of a registration (bounds, overlaps, sizes) and the addresses of pieces by
arithmetic. This file does not know how bytes are moved or what kind of memory a base address is in.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.banks import ANY_BANK
from trikv.core.errors import BadRequestError
from trikv.core.rows import is_all

ADDRESS_MAX = 1 << 63


@dataclass(frozen=True, slots=True)
class Piece:
    """One contiguous run of every block: block `b` has it at `offset + b * stride` of a memory."""

    memory: int
    offset: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Range:
    """A registered range: `base` is an address in whatever space the memory kind uses."""

    base: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """Memory that is not the process's own: who has mapped it, and as which of its groups.

    Attributes:
        bank: of the pool, near it.
    """

    attachment: int
    group: int
    bank: int = ANY_BANK


@dataclass(frozen=True, slots=True)
class Geometry:
    """What of a group's layout decides the bytes of a page; part of the namespace."""

    page_bytes: int
    piece_bytes: tuple[int, ...]
    layout: str


class GroupLayout:
    """The pieces of one cache group on one rank, checked, as columns.

    Attributes:
        base: uint64[pieces], address of the piece of block 0.
        stride: uint64[pieces].
        length: uint64[pieces], bytes of each piece, in page order.
        block_count: ids run from 0 to this, less one.
        place: who has mapped the memory; None: it is the process's own.
        replicas: so many ranks in a row hold the same page.
    """

    def __init__(
        self,
        ranges: tuple[Range, ...],
        pieces: tuple[Piece, ...],
        block_count: int,
        layout: str,
        place: Place | None = None,
        *,
        replicas: int = 1,
    ) -> None:
        """Check a registration and keep it.

        Raises:
            BadRequestError: a piece leaves its range, overlaps another, or has no bytes.
        """
        _check_sizes(ranges, pieces, block_count)
        self.block_count = block_count
        self.place = place
        self.replicas = replicas
        memory = np.array([piece.memory for piece in pieces], dtype=np.int64)
        offset = np.array([piece.offset for piece in pieces], dtype=np.uint64)
        self.stride = np.array([piece.stride for piece in pieces], dtype=np.uint64)
        self.length = np.array([piece.bytes for piece in pieces], dtype=np.uint64)
        size = np.array([one.bytes for one in ranges], dtype=np.uint64)[memory]
        self.base = np.array([one.base for one in ranges], dtype=np.uint64)[memory] + offset
        last = offset + np.uint64(block_count - 1) * self.stride + self.length
        if bool((last > size).any()):
            which = int(np.flatnonzero(last > size)[0])
            raise BadRequestError(
                f"piece {which} ends at {int(last[which])} in a range of {int(size[which])} bytes"
            )
        if block_count > 1 and bool((self.stride < self.length).any()):
            raise BadRequestError("a stride is shorter than its piece: blocks overlap")
        _check_apart(self.base, self.stride, self.length)
        self.page_bytes = int(self.length.sum())
        self.geometry = Geometry(self.page_bytes, tuple(int(n) for n in self.length), layout)

    def check_blocks(self, blocks: NDArray[np.int32]) -> None:
        """Refuse block ids that were not registered.

        Raises:
            BadRequestError: an id is out of bounds.
        """
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.block_count:
            raise BadRequestError(f"block ids must lie in 0 to {self.block_count - 1}")

    def check_targets(self, blocks: NDArray[np.int32]) -> None:
        """As `check_blocks`; each may stand there once.

        Raises:
            BadRequestError: an id is out of bounds, or there twice.
        """
        ids = np.sort(blocks)
        self.check_blocks(ids[:: max(1, len(ids) - 1)])  # the first and the last
        if not is_all(ids[1:] != ids[:-1]):
            raise BadRequestError("an engine block stands twice in one load")

    def addresses(self, blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Address of each piece of each block, shape (blocks, pieces), in page order."""
        return self.base + blocks.astype(np.uint64)[:, None] * self.stride


def _check_sizes(ranges: tuple[Range, ...], pieces: tuple[Piece, ...], block_count: int) -> None:
    """Everything that must hold before arithmetic on the numbers can be trusted not to wrap."""
    if not 0 < block_count < 1 << 31:
        raise BadRequestError("blockCount must lie in 1 to 2147483647")
    for one in ranges:
        if not (0 < one.bytes < ADDRESS_MAX and 0 <= one.base < ADDRESS_MAX - one.bytes):
            raise BadRequestError("a memory range is empty or leaves the address space")
    for piece in pieces:
        if piece.memory >= len(ranges):
            raise BadRequestError(f"a piece names memory {piece.memory} of {len(ranges)}")
        if not 0 < piece.bytes < 1 << 31:
            raise BadRequestError("a piece must have 1 to 2147483647 bytes")
        if (
            piece.offset + (block_count - 1) * piece.stride + piece.bytes
            > ranges[piece.memory].bytes
        ):
            raise BadRequestError("a piece leaves its memory range")


def _check_apart(
    base: NDArray[np.uint64], stride: NDArray[np.uint64], length: NDArray[np.uint64]
) -> None:
    """Refuse pieces of one block that share bytes.

    Pieces of *different* blocks may interleave (strides differ by layout), and a wrong stride can
    only mix up the caller's own blocks, so block 0 is what is checked.
    """
    del stride
    order = np.argsort(base, kind="stable")
    ends = (base + length)[order]
    if bool((base[order][1:] < ends[:-1]).any()):
        raise BadRequestError("two pieces of a block overlap")
