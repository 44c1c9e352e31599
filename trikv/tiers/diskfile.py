"""The file or device that a disk of ours is: opened, locked, and never taken from anybody.

Decided here: what may be used (our own, or what is empty), and that all its room is allocated
before the first byte is written. This file does not know what a superblock means, only whether
there is one.

| found at the path | what happens |
| --- | --- |
| nothing, or a folder without our file | made, allocated, formatted |
| empty, or zeros at both ends | allocated, formatted |
| zeros, but for a superblock whose first writing was cut off | the same |
| ours, as large as is asked for | opened; what was cut off is allocated anew |
| ours, smaller | allocated, opened; the rest is used too once the superblock says so |
| ours, larger or of another version; damaged; somebody else's; in use | refused |

A copy of the superblock that cannot be read counts as damaged: a sector may be so after a power
cut, until it is written again. A file is locked; a device, which has as many names as anybody makes
for it, is claimed from the kernel.
"""

import ctypes
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from trikv.core.disklayout import Layout, grow, layout_for, layout_of
from trikv.core.errors import BadRequestError
from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import COPIES, DELETE, Superblock, UnusableDiskError, is_unfinished, read
from trikv.tiers.locks import patiently

FILE_NAME: Final = "trikv.ssd"
ZEROS_FIRST: Final = 4 << 20  # file systems and tables of partitions begin within
ZEROS_LAST: Final = 1 << 20  # or leave a copy at the end
MOUNTED: Final = "in use: mounted, or by another process"
NOT_DIRECT: Final = "its file system has no direct I/O: copies take more"
STATX_DIOALIGN: Final = 0x2000
AT_EMPTY_PATH: Final = 0x1000

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate64.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(slots=True)
class DiskFile:
    """An open, locked, allocated place.

    Ownership: `close` gives the descriptor and with it the lock back.

    Attributes:
        notice: what a person should know, one line; empty when all is well.
    """

    path: str
    fd: int
    superblock: Superblock
    notice: str = ""

    def look(self) -> str:
        """What is wrong with the place now, or was at first, one line; cheap."""
        try:
            is_gone = os.fstat(self.fd).st_nlink == 0
        except OSError as error:
            return error.strerror or "unreadable"
        if is_gone:
            return "its file was deleted: what it holds is lost at the next start"
        return self.notice

    def close(self) -> None:
        """Give the place back."""
        os.close(self.fd)


def open_file(path: str, capacity_bytes: int, *, region_bytes: int = 0) -> DiskFile:
    """Open a place of exactly this capacity; blocks the calling thread.

    Args:
        path: a file, a device, or a folder in which the file is or is to be.
        capacity_bytes: a hard limit of what is used.
        region_bytes: see `disklayout.layout_for`; only a new disk is cut so.

    Raises:
        UnusableDiskError: see the table above; the place is as it was before.
    """
    wanted = Path(path)
    if wanted.is_dir():
        wanted /= FILE_NAME
    try:
        fd, is_new = patiently(partial(_open, wanted))
    except OSError as error:
        what = MOUNTED if error.errno == errno.EBUSY else error.strerror
        raise UnusableDiskError(f"{wanted}: {what}") from error
    try:
        _lock(fd)
    except BaseException as error:  # whoever has it may have found the file that we made
        os.close(fd)
        if isinstance(error, UnusableDiskError):
            raise UnusableDiskError(f"{wanted}: {error}") from error
        raise
    is_new = is_new and os.fstat(fd).st_size == 0  # else somebody had it before us, and has used it
    try:
        superblock = _prepare(fd, capacity_bytes, region_bytes)
    except BaseException as error:
        if is_new:
            wanted.unlink(missing_ok=True)
        os.close(fd)
        if isinstance(error, OSError | UnusableDiskError | BadRequestError):
            what = error.strerror if isinstance(error, OSError) else str(error)
            raise UnusableDiskError(f"{wanted}: {what}") from error
        raise
    is_direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    return DiskFile(str(wanted), fd, superblock, "" if is_direct else NOT_DIRECT)


def _open(path: Path) -> tuple[int, bool]:
    """The descriptor, and whether the file was made by this; without direct I/O where none is."""
    flags = os.O_RDWR | os.O_CLOEXEC
    made = os.O_CREAT | os.O_EXCL
    claimed = os.O_EXCL if path.is_block_device() else 0
    for direct in (os.O_DIRECT, 0):
        try:
            try:
                return os.open(path, flags | direct | made, 0o600), True
            except FileExistsError:
                return os.open(path, flags | direct | claimed), False
        except OSError as error:  # a file may have been made all the same
            if error.errno != errno.EINVAL or not direct:
                raise
    raise AssertionError


def _prepare(fd: int, capacity_bytes: int, region_bytes: int) -> Superblock:
    facts = os.fstat(fd)
    if facts.st_nlink == 0:
        raise UnusableDiskError("was deleted meanwhile")
    if not stat.S_ISREG(facts.st_mode) and not stat.S_ISBLK(facts.st_mode):
        raise UnusableDiskError("neither a file nor a disk")
    if alignment(fd) > PAGE_ALIGN:
        raise UnusableDiskError(f"needs I/O in units of {alignment(fd)} bytes, we use {PAGE_ALIGN}")
    size = os.lseek(fd, 0, os.SEEK_END)
    front = b"".join(_read_copy(fd, copy) for copy in range(COPIES))
    is_cut_off = is_unfinished(front) and _is_blank(fd, len(front), size)
    found = None if is_cut_off else read(front)
    if found is None:
        if size and not is_cut_off and (any(front) or not _is_blank(fd, len(front), size)):
            raise UnusableDiskError("holds something that is not ours: it is left alone")
        layout = layout_for(capacity_bytes, region_bytes)
        found = Superblock(os.urandom(16), capacity_bytes, layout.region_bytes, layout.region_count)
    elif capacity_bytes < found.capacity_bytes:
        raise UnusableDiskError(
            f"has {found.capacity_bytes} bytes and {capacity_bytes} are asked for: it can grow but "
            f"not shrink: ask for {found.capacity_bytes} or more, or {DELETE}"
        )
    else:
        layout = layout_of(found)
        if capacity_bytes > found.capacity_bytes:
            used, layout = layout.end, grow(found, capacity_bytes)
            if not _is_blank(fd, used, min(size, layout.end)):
                raise UnusableDiskError("something that is not ours is behind it: it cannot grow")
    _allocate(fd, size, layout, is_file=stat.S_ISREG(facts.st_mode))
    return found


def _lock(fd: int) -> None:
    try:
        patiently(partial(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        raise UnusableDiskError("in use by another process") from None


def _allocate(fd: int, size: int, layout: Layout, *, is_file: bool) -> None:
    """Make sure that no write can find the place full later; what is there stays."""
    wanted = layout.end
    if not is_file:
        if size < wanted:
            raise UnusableDiskError(f"has {size} bytes and {layout.capacity_bytes} are asked for")
        return
    if _LIBC.fallocate64(fd, 0, 0, wanted) == 0:
        return
    code = ctypes.get_errno()
    os.ftruncate(fd, size)
    facts = os.fstatvfs(fd)
    free = facts.f_bavail * facts.f_frsize
    if code in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        reason = os.strerror(code)
        raise UnusableDiskError(f"{wanted} bytes cannot be allocated, {free} are free: {reason}")
    if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
        raise UnusableDiskError("its file system cannot allocate room ahead (fallocate)")
    raise OSError(code, os.strerror(code))


def _is_blank(fd: int, start: int, end: int) -> bool:
    """Nothing but zeros where anybody would have left a mark."""
    first = _read(fd, start, max(0, min(ZEROS_FIRST, end - start)))
    late = max(start, end - ZEROS_LAST) // PAGE_ALIGN * PAGE_ALIGN
    last = _read(fd, late, max(0, min(ZEROS_LAST + PAGE_ALIGN, end - late)))
    return first.count(0) == len(first) and last.count(0) == len(last)


def _read_copy(fd: int, copy: int) -> bytes:
    try:
        return _read(fd, copy * PAGE_ALIGN, PAGE_ALIGN)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return bytes(PAGE_ALIGN)


def _read(fd: int, offset: int, size: int) -> bytes:
    """What is there of these bytes, with or without direct I/O."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # any buffer and any end will do
    try:
        return os.pread(fd, size, offset)
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def alignment(fd: int) -> int:
    """What memory and offsets of direct I/O have to be multiples of here; 0: unknown."""
    facts = (ctypes.c_uint8 * 256)()
    try:
        failed = _LIBC.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, facts)
    except AttributeError:
        return 0
    if failed or not int.from_bytes(bytes(facts[0:4]), "little") & STATX_DIOALIGN:
        return 0
    memory, offset = bytes(facts[152:156]), bytes(facts[156:160])
    return max(int.from_bytes(memory, "little"), int.from_bytes(offset, "little"))
