"""The back end that works everywhere: a thread for each operation under way.

Decided here: that an operation is one `preadv` or `pwritev` in a thread of Trio's cache. The calls
release the GIL. A thread that hangs cannot be ended; it dies with the process.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.tiers.hostmem import NO_THREAD
from trikv.tiers.transfers import NOBODYS

if TYPE_CHECKING:
    import outcome

T = TypeVar("T")

DEPTHS: Final = (4, 2)  # more threads made it slower where it was measured

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
for _function in (_LIBC.preadv64, _LIBC.pwritev64):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)


class ThreadQueue:
    """Operations in threads; see `transfers.Queue`.

    A thread that the kernel holds keeps its process, and that the file of the memory.
    """

    name = "threads"
    depths = DEPTHS
    joins_memory = True

    def __init__(self, fd: int, _memory_fd: int = NOBODYS) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fd = fd
        self._taken: list[tuple[int, partial[int]]] = []
        self._ended: deque[tuple[int, int]] = deque()
        self._under_way = 0
        self._is_closed = False

    def push(self, ticket: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> None:
        """Take an operation."""
        self._taken.append((ticket, partial(move, self._fd, offset, pieces, is_write=is_write)))

    def cancel(self, ticket: int) -> None:
        """A system call in a thread cannot be called back."""

    def submit(self) -> bool:
        """Give each operation to a thread."""
        for ticket, call in self._taken:
            self._under_way += 1
            try:
                trio.lowlevel.start_thread_soon(
                    call, partial(self._has_ended, ticket), "trikv disk"
                )
            except RuntimeError:  # the machine, or a limit, refuses one more
                self._ended.append((ticket, -errno.ENOMEM))
                os.eventfd_write(self.event_fd, 1)
        self._taken.clear()
        return True

    def reap(self) -> list[tuple[int, int]]:
        """What the threads have come to."""
        ended = []
        with suppress(IndexError):
            while True:
                ended.append(self._ended.popleft())
        self._under_way -= len(ended)
        return ended

    def close(self) -> None:
        """Close the event's descriptor, unless a hung thread may still write to it."""
        self._is_closed = True
        if self._under_way == 0:
            os.close(self.event_fd)

    def _has_ended(self, ticket: int, result: "outcome.Outcome[int]") -> None:
        """In the thread."""
        self._ended.append((ticket, result.unwrap()))
        os.eventfd_write(self.event_fd, 1)


async def in_thread(call: Callable[[], T], limiter: trio.CapacityLimiter) -> T:
    """What `call` returns, from a thread, or from here when none can be started."""
    try:
        return await trio.to_thread.run_sync(call, limiter=limiter)
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
    return call()


def move(fd: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> int:
    """Bytes moved or, negative, the errno; releases the GIL."""
    function = _LIBC.pwritev64 if is_write else _LIBC.preadv64
    got: int = function(fd, pieces.ctypes.data, len(pieces), offset)
    return got if got >= 0 else -ctypes.get_errno()
