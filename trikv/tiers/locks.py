"""Patience with what another process has: it may have been killed a moment ago.

What it gave to the kernel has its files, and with them its locks, until that is over; a disk may
take as long as `ring.IO_S_MAX` for it.
"""

import contextlib
import errno
import time
from collections.abc import Callable
from typing import Final, TypeVar

import trio

T = TypeVar("T")
LOCK_S: Final = 30.0
LOCK_STEP_S: Final = 0.02
TAKEN: Final = frozenset({errno.EAGAIN, errno.EBUSY})


def patiently(attempt: Callable[[], T]) -> T:
    """Try until it is not taken, for `LOCK_S` at most; blocks the calling thread.

    Raises:
        OSError: the attempt's, the last one's where it stays taken.
        trio.Cancelled: nobody waits for this thread any more.
    """
    until_s = time.perf_counter() + LOCK_S
    while True:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in TAKEN or time.perf_counter() >= until_s:
                raise
            time.sleep(LOCK_STEP_S)
            with contextlib.suppress(RuntimeError):  # not a thread of Trio's
                trio.from_thread.check_cancelled()
