"""Copies between an engine's process memory and the pool, for engines without a GPU.

Decided here: how pieces become `process_vm_readv` and `process_vm_writev` calls, when a copy stops
early, and what counts as arrived. This file does not know blocks, leases or sessions; addresses
come checked.

Both calls need the right to trace the process: same user, and where Yama restricts it the engine's
worker names the daemon with PR_SET_PTRACER. They release the GIL, so they run in threads.
"""

import contextlib
import ctypes
import errno
import os
import select
from collections.abc import Callable
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.errors import EngineLostError, ForbiddenError, OverloadedError
from trikv.tiers.copies import Copy, Process
from trikv.tiers.freeze import FreezeGuard

IOV_MAX: Final = 1_024
CALL_BYTES_MAX: Final = 64 << 20
"""Bytes of one system call, so that stopping early is seen within milliseconds."""

NO_THREAD: Final = "can't start new thread"
"""What Python says when the machine or a limit on processes refuses one."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
for _function in (_LIBC.process_vm_readv, _LIBC.process_vm_writev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


class _Piece(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class HeldProcess:
    """One engine process, held by a descriptor so that its number cannot come to mean another.

    Ownership: `close` gives the descriptor back; the shell may wait for it to become readable,
    which means that the process has ended.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        """False for ever once the process has ended."""
        ended = select.poll()  # of its own: several threads ask at once
        ended.register(self.pidfd, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.pidfd)


def run(
    copy: Copy, pool_address: int, is_stopped: Callable[[], bool], freeze_s: float = 0.0
) -> NDArray[np.bool_]:
    """Move the bytes; blocks the calling thread, releases the GIL while bytes move.

    Args:
        copy: what to move; the engine's addresses are made a step at a time.
        pool_address: where the pool begins in this process.
        is_stopped: asked before each system call; blocks not begun by then do not arrive.
        freeze_s: a copy into an engine ends this process when one step takes longer; 0: never.

    Returns:
        bool[blocks]: which blocks are whole. When this returns, no byte is touched any more.

    Raises:
        ForbiddenError: the kernel does not let this process touch that one.
        EngineLostError: the process has ended.
    """
    count = len(copy.blocks)
    arrived = np.zeros(count, np.bool_)
    page_bytes = copy.layout.page_bytes
    step = max(1, min(IOV_MAX // len(copy.layout.length), CALL_BYTES_MAX // page_bytes, IOV_MAX))
    is_guarded = copy.into_engine and freeze_s > 0
    with FreezeGuard(freeze_s) if is_guarded else contextlib.nullcontext() as guard:
        for first in range(0, count, step):
            if guard is not None:
                guard.move()
            if is_stopped():
                break
            if not copy.process.is_alive():
                raise EngineLostError(f"process {copy.process.pid} has ended")
            last = min(first + step, count)
            whole = _move(copy, pool_address, first, last) // page_bytes
            arrived[first : first + whole] = True
            if first + whole < last:
                break  # a piece's memory is gone: what follows would be too
    return arrived


def _move(copy: Copy, pool_address: int, first: int, last: int) -> int:
    """Move blocks `first` to `last` - 1; returns the bytes moved: fewer when memory is gone."""
    local = np.empty((last - first, 2), np.uint64)
    local[:, 0] = copy.offsets[first:last] + pool_address
    local[:, 1] = copy.layout.page_bytes
    table = np.empty((last - first, len(copy.layout.length), 2), np.uint64)
    table[:, :, 0] = copy.layout.addresses(copy.blocks[first:last])
    table[:, :, 1] = copy.layout.length
    remote = table.reshape(-1, 2)
    if len(remote) <= IOV_MAX:
        return _call(copy.process.pid, local, remote, into_engine=copy.into_engine)
    return _move_in_parts(copy, local, remote)


def _move_in_parts(copy: Copy, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> int:
    """One block of more pieces than a call takes."""
    moved = 0
    for first in range(0, len(remote), IOV_MAX):
        part = remote[first : first + IOV_MAX]
        wanted = int(part[:, 1].sum())
        here = np.array([[int(local[0, 0]) + moved, wanted]], np.uint64)
        got = _call(copy.process.pid, here, part, into_engine=copy.into_engine)
        moved += got
        if got < wanted:
            break
    return moved


def _call(
    pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64], *, into_engine: bool
) -> int:
    function = _LIBC.process_vm_writev if into_engine else _LIBC.process_vm_readv
    got: int = function(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if got < 0:
        code = ctypes.get_errno()
        if code == errno.EPERM:
            raise ForbiddenError(
                f"the kernel refuses access to process {pid}: run engine and daemon as one user, "
                "in one pid namespace, with kernel.yama.ptrace_scope at most 1"
            )
        if code == errno.ESRCH:
            raise EngineLostError(f"process {pid} has ended")
        if code == errno.ENOMEM:
            raise OverloadedError("the kernel has no memory for a copy")
        if code != errno.EFAULT:  # the first piece is not mapped
            raise EngineLostError(f"process {pid}: {os.strerror(code)}")
        return 0
    return got


def read_word(process: Process, address: int) -> int | None:
    """One uint64 of the engine's memory, or None when it cannot be read."""
    value = ctypes.c_uint64()
    size = ctypes.sizeof(value)
    local, remote = _Piece(ctypes.addressof(value), size), _Piece(address, size)
    here, there = ctypes.byref(local), ctypes.byref(remote)
    got = _LIBC.process_vm_readv(process.pid, here, 1, there, 1, 0)
    return value.value if got == size else None


class HostMemory:
    """Copies of process memory in a few threads a direction; what the shell hands its jobs to."""

    def __init__(self, pool_address: int, *, threads: int, freeze_s: float) -> None:
        self._freeze_s = freeze_s
        self._pool_address = pool_address
        self._saves, self._loads = trio.CapacityLimiter(threads), trio.CapacityLimiter(threads)

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        """Move; see `run`.

        Cancellation: not cancellable, the thread is waited for; `is_stopped` ends it early.

        Raises:
            OverloadedError: no thread can be started, or no timer; nothing was moved.
            ForbiddenError, EngineLostError: see `run`.
        """
        limiter = self._loads if copy.into_engine else self._saves
        try:
            return await trio.to_thread.run_sync(
                run, copy, self._pool_address, is_stopped, self._freeze_s, limiter=limiter
            )
        except RuntimeError as error:
            if str(error) != NO_THREAD:
                raise
            raise OverloadedError("no thread could be started for a copy") from error
