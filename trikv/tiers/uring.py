"""The kernel's ring, entered by ourselves: three system calls and three mappings.

Decided here: how the ring is set up, and how entries are laid out in its memory. ctypes lets go of
the GIL around each system call. This file does not know Trio.

A disk goes on with what it was given when the process is killed: it reads into the pages, which the
kernel holds, and the files of the operations. So the ring is given the file of the memory as well:
a lock on that is not free before the last byte has come.

With SINGLE_ISSUER and DEFER_TASKRUN the kernel reads entries and writes answers inside our own
calls, so no memory barrier is needed on any processor. A polled submission queue would need one
that Python cannot express, and burns a core: it is not offered.
"""

import ctypes
import errno
import mmap
import os
import struct
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.tiers.transfers import NOBODYS

DEPTHS: Final = (16, 4)

SETUP_CQSIZE: Final = 1 << 3
SETUP_CLAMP: Final = 1 << 4
SETUP_SINGLE_ISSUER: Final = 1 << 12
SETUP_DEFER_TASKRUN: Final = 1 << 13
FLAGS: Final = (SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, 0)  # before Linux 6.1: none

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # on every processor
_ENTER_GETEVENTS: Final = 1 << 0
_FEATURES: Final = 1 << 0 | 1 << 1  # SINGLE_MMAP, NODROP: no answer is ever lost
_OP_READV, _OP_WRITEV, _OP_CANCEL, _OP_READ, _OP_WRITE = 1, 2, 14, 22, 23
_REGISTER_FILES: Final = 2
_REGISTER_EVENTFD: Final = 4
_SQ_CQ_OVERFLOW: Final = 1 << 1
_OFFSET_SQES: Final = 0x10000000
_SQE: Final = struct.Struct("<BBHiQQIIQ24x")
_CQE: Final = struct.Struct("<QiI")
_NO_TICKET: Final = 0

_SYSCALL: Final = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.restype = ctypes.c_long
_SYSCALL.argtypes = (ctypes.c_long, *6 * (ctypes.c_void_p,))  # each a whole register, ints too


class UringQueue:
    """Operations in a ring of our own; see `transfers.Queue`.

    Raises:
        OSError: the kernel has no ring for us (too old, or forbidden).
    """

    name = "uring"
    joins_memory = True

    def __init__(
        self,
        fd: int,
        memory_fd: int = NOBODYS,
        *,
        depths: tuple[int, int] = DEPTHS,
        flags: tuple[int, ...] = FLAGS,
    ) -> None:
        self._fd = fd
        self.depths = depths
        entries = 2 * sum(depths)  # a cancellation each needs room too
        self._ring, params = _set_up(entries, flags)
        self.is_deferred = bool(params[2] & SETUP_DEFER_TASKRUN)
        self._map(params)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            for code, one in ((_REGISTER_EVENTFD, self.event_fd), (_REGISTER_FILES, memory_fd)):
                if one != NOBODYS:
                    number = ctypes.c_int(one)
                    _call(_REGISTER, self._ring, code, ctypes.byref(number), 1)
        except OSError:
            self.close()
            raise

    def push(self, ticket: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> None:
        """Take an operation."""
        if len(pieces) == 1:
            code = _OP_WRITE if is_write else _OP_READ
            address, length = pieces[0].tolist()
            self._put(code, self._fd, offset, address, length, ticket)
        else:
            code = _OP_WRITEV if is_write else _OP_READV
            self._put(code, self._fd, offset, pieces.ctypes.data, len(pieces), ticket)

    def cancel(self, ticket: int) -> None:
        """Ask the kernel to end an operation; a disk's cannot be ended, a pipe's can."""
        self._put(_OP_CANCEL, -1, 0, ticket, 0, _NO_TICKET)

    def submit(self) -> bool:
        """Begin what was taken; false when the kernel takes no more just now."""
        if self._unsubmitted == 0:
            return True
        self._words[self._sq_tail] = self._tail
        try:
            self._unsubmitted -= self._enter(self._unsubmitted)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EBUSY}:  # short of memory; answers pile up
                raise
        return self._unsubmitted == 0

    def reap(self) -> list[tuple[int, int]]:
        """All answers at hand."""
        if self.is_deferred or self._words[self._sq_flags] & _SQ_CQ_OVERFLOW:
            with suppress(BlockingIOError):
                self._enter(0)
        head, tail = self._words[self._cq_head], self._words[self._cq_tail]
        ended = []
        while head != tail:
            at = self._cqes + _CQE.size * (head & self._cq_mask)
            ticket, result, _ = _CQE.unpack_from(self._rings, at)
            if ticket != _NO_TICKET:
                ended.append((ticket, result))
            head = (head + 1) & 0xFFFFFFFF
        self._words[self._cq_head] = head
        return ended

    def close(self) -> None:
        """Close the ring; what hangs in it stays with the kernel."""
        self._words.release()
        self._rings.close()
        self._entries.close()
        os.close(self._ring)
        os.close(self.event_fd)

    # -- the ring's memory

    def _map(self, params: "ctypes.Array[ctypes.c_uint32]") -> None:
        sq, cq = params[10:18], params[20:28]
        self._sq_count = params[0]
        self._sq_mask, self._cq_mask = params[0] - 1, params[1] - 1
        size = max(sq[6] + 4 * params[0], cq[5] + _CQE.size * params[1])
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._rings = mmap.mmap(self._ring, size, flags=shared)
        self._entries = mmap.mmap(
            self._ring, _SQE.size * params[0], flags=shared, offset=_OFFSET_SQES
        )
        self._words = memoryview(self._rings)[: size & ~3].cast("I")
        self._sq_head, self._sq_tail, self._sq_flags = sq[0] // 4, sq[1] // 4, sq[4] // 4
        self._cq_head, self._cq_tail, self._cqes = cq[0] // 4, cq[1] // 4, cq[5]
        for index in range(params[0]):  # entries are used in the order of their places
            self._words[sq[6] // 4 + index] = index
        self._tail = self._words[self._sq_tail]
        self._unsubmitted = 0

    def _put(self, code: int, fd: int, offset: int, address: int, size: int, ticket: int) -> None:
        if (self._tail - self._words[self._sq_head]) & 0xFFFFFFFF == self._sq_count:
            self.submit()
            assert (self._tail - self._words[self._sq_head]) & 0xFFFFFFFF < self._sq_count
        at = _SQE.size * (self._tail & self._sq_mask)
        _SQE.pack_into(self._entries, at, code, 0, 0, fd, offset, address, size, 0, ticket)
        self._tail = (self._tail + 1) & 0xFFFFFFFF
        self._unsubmitted += 1

    def _enter(self, count: int) -> int:
        flags = _ENTER_GETEVENTS if self.is_deferred or count == 0 else 0
        while True:
            try:
                return _call(_ENTER, self._ring, count, 0, flags, None, 0)
            except InterruptedError:
                continue


def _set_up(entries: int, choices: tuple[int, ...]) -> "tuple[int, ctypes.Array[ctypes.c_uint32]]":
    """A ring with the first flags that the kernel knows."""
    flags, *others = choices
    params = (ctypes.c_uint32 * 30)()
    params[1] = 4 * entries  # room for every answer, so that none overflows
    params[2] = flags | SETUP_CLAMP | SETUP_CQSIZE
    try:
        ring = _call(_SETUP, entries, ctypes.byref(params))
    except OSError as error:
        if error.errno != errno.EINVAL or not others:
            raise
        return _set_up(entries, tuple(others))
    os.set_inheritable(ring, False)  # noqa: FBT003  # positional only
    if params[5] & _FEATURES != _FEATURES:
        os.close(ring)
        raise OSError(errno.ENOSYS, "the kernel's ring may lose answers")
    return ring, params


def _call(number: int, *arguments: object) -> int:
    got = int(_SYSCALL(number, *(*arguments, 0, 0, 0, 0)[:6]))
    if got < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return got
