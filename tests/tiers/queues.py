"""A queue whose answers a test decides, and memory to move."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trikv.tiers.transfers import Transfers


@dataclass
class Taken:
    """An operation that the queue has and has not answered: its memory is the kernel's."""

    ticket: int
    offset: int
    pieces: NDArray[np.uint64]
    is_write: bool

    @property
    def size(self) -> int:
        return int(self.pieces[:, 1].sum())


@dataclass
class ScriptedQueue:
    """See `transfers.Queue`: takes everything, and ends what it is told to end."""

    depths: tuple[int, int] = (4, 2)
    name: str = "scripted"
    joins_memory: bool = True
    refuses: int = 0  # how many more times `submit` asks to be asked again
    event_fd: int = -1
    taken: dict[int, Taken] = field(default_factory=dict)
    begun: list[Taken] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    is_closed: bool = False
    _ended: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def push(self, ticket: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> None:
        assert ticket not in self.taken
        self.taken[ticket] = Taken(ticket, offset, pieces, is_write)
        self.begun.append(self.taken[ticket])
        for way in (False, True):
            count = sum(one.is_write == way for one in self.taken.values())
            assert count <= self.depths[way], "more under way than the queue should have"

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)

    def submit(self) -> bool:
        if self.refuses > 0:
            self.refuses -= 1
            return False
        return True

    def reap(self) -> list[tuple[int, int]]:
        ended, self._ended = self._ended, []
        return ended

    def end(self, ticket: int, result: int | None = None) -> None:
        """Answer for an operation: all its bytes, or `result`."""
        taken = self.taken.pop(ticket)
        self._ended.append((ticket, taken.size if result is None else result))
        os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        self.is_closed = True
        os.close(self.event_fd)


def transfers(
    count: int,
    *,
    is_write: bool = False,
    size: int = 4096,
    pieces: int = 1,
    address: int = 1 << 20,
    offset: int = 0,
) -> Transfers:
    """Operations on consecutive bytes of disk and memory, each in so many pieces."""
    table = np.empty((count * pieces, 2), np.uint64)
    table[:, 0] = address + np.arange(count * pieces) * (size // pieces)
    table[:, 1] = size // pieces
    first = np.arange(count + 1) * pieces
    return Transfers(is_write, offset + np.arange(count) * size, table, first)


def spread(value: int) -> Iterator[int]:
    """Numbers from a seed."""
    rng = np.random.default_rng(value)
    while True:
        yield int(rng.integers(1 << 30))
