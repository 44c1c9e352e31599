"""The end of a daemon that is frozen while it may still write into an engine.

Decided here: how an engine can be sure that a load is over although nobody answers. A process that
is stopped (SIGSTOP, a frozen container) between two system calls would go on writing whenever it is
continued, into memory that its engine has long given to something else. So each load arms a kernel
timer before each step; if the step is not over in time, the kernel ends the whole process with
SIGKILL, also while it is stopped. The engine sees the death and computes. This file does not know
what is copied.
"""

import ctypes
import os
import signal
from typing import Final, Self

from trikv.core.errors import OverloadedError

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
CLOCK_MONOTONIC: Final = 1
SIGEV_SIGNAL: Final = 0


class _SigEvent(ctypes.Structure):
    """`struct sigevent`; 64 bytes on Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    )


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class FreezeGuard:
    """A timer that ends this process unless it is moved or closed in time.

    Use as a context manager around one copy, in the thread that copies; costs some microseconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._limit = _TimerSpec(0, 0, int(limit_s), int(limit_s % 1 * 1e9))
        self._timer = ctypes.c_void_p()

    def __enter__(self) -> Self:
        event = _SigEvent(signo=signal.SIGKILL, notify=SIGEV_SIGNAL)
        made = _LIBC.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        _check(made)
        return self

    def move(self) -> None:
        """The next step begins: the full limit from now on."""
        _check(_LIBC.timer_settime(self._timer, 0, ctypes.byref(self._limit), None))

    def stop(self) -> None:
        """No limit until the next `move`."""
        _check(_LIBC.timer_settime(self._timer, 0, ctypes.byref(_TimerSpec()), None))

    def __exit__(self, *_: object) -> None:
        _check(_LIBC.timer_delete(self._timer))


def _check(result: int) -> None:
    """Translate what the kernel refuses: timers are counted a user (RLIMIT_SIGPENDING).

    Raises:
        OverloadedError: no timer; the copy has not begun.
    """
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        raise OverloadedError(f"no kernel timer to guard a load with: {reason}")
