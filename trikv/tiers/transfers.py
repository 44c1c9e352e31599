"""What the layers below a disk say to each other: operations, and what carries them out.

Decided here: the words of `Ring` and `Queue`. Holds no behaviour.
"""

import errno
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

HELD: Final = -1
"""No errno: the operation has not ended, and its memory must never be used again."""

NOBODYS: Final = -1
"""No file: memory that no other process will ever have."""

PIECES_MAX: Final = 1_024


@dataclass(frozen=True, slots=True)
class Transfers:
    """n operations of one direction.

    Ownership: all memory that it names is the ring's until `Ring.run` returns, and for ever where
    the result is `HELD`.

    Attributes:
        offsets: int64[n], on the disk.
        pieces: uint64[m, 2], address and length; an operation has at most `PIECES_MAX`.
        first: int64[n + 1], where each operation's pieces begin.
        keep: what owns the memory; kept while the ring may touch it.
        results: int64[n], 0, an errno or `HELD`; see `ring.py`.
    """

    is_write: bool
    offsets: NDArray[np.int64]
    pieces: NDArray[np.uint64]
    first: NDArray[np.int64]
    keep: object = None
    results: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        assert self.pieces.flags.c_contiguous
        assert len(self.first) == len(self.offsets) + 1
        object.__setattr__(self, "results", np.full(len(self.offsets), errno.ECANCELED))


class Queue(Protocol):
    """What carries operations out. Nothing in it waits, and it is called by one thread."""

    name: str
    depths: tuple[int, int]  # reads and writes that it should have under way
    joins_memory: bool  # neighbouring pages may be one piece
    event_fd: int  # becomes readable when `reap` may have something

    def push(self, ticket: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> None:
        """Take an operation; its pieces stay in place until it is reaped."""

    def cancel(self, ticket: int) -> None:
        """Ask that an operation ends early."""

    def submit(self) -> bool:
        """Begin what was taken; false when some of it has to be asked for again."""

    def reap(self) -> list[tuple[int, int]]:
        """Tickets of what has ended, each with its bytes or, negative, its errno."""

    def close(self) -> None:
        """Give back what the queue holds."""


class Ring(Protocol):
    """What a disk needs: `ring.Ring`, or what a test puts in its place."""

    name: str
    joins_memory: bool  # see `Queue`

    async def run(self, transfers: Transfers) -> None:
        """Carry out operations."""

    async def sync(self) -> None:
        """Wait for the medium."""
