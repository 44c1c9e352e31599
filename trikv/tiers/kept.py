"""A pool that outlives its daemon: two files on a file system that lives in memory.

Decided here: where the pool and its records lie, who may use them, and when they begin anew.

| found | then |
| --- | --- |
| no files | made, with all their memory, so that nothing is short of it later (SIGBUS) |
| our files, same measures | used |
| our files, other measures or version | emptied, and it is said why: a miss is always right |
| anything else | refused; not touched |
| another process uses them, or its disk | waited for: copies must end before a byte is believed |

The lock is on the pool's open file, which the daemon shares with its copiers and with the rings of
its disks (`uring.py`): so it is free when the last one that could write the pool has ended, however
it ended. A disk is refused: what a crash of the machine leaves of a mapped file is anybody's guess.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from trikv.core.ledger import ForeignError, Ledger, StaleError, bytes_for, check_header
from trikv.tiers import locks
from trikv.tiers.locks import patiently
from trikv.tiers.numa import HUGE_PAGE_BYTES, Spread, nowhere
from trikv.tiers.pool import HUGE_PAGES, SMALL_PAGES, Pool

POOL_NAME: Final = "trikv.pool"
RECORDS_NAME: Final = "trikv.records"
BACKINGS: Final = {
    ("hugetlbfs", ""): "hugetlb",
    ("tmpfs", "huge=always"): HUGE_PAGES,
    ("tmpfs", "huge=within_size"): HUGE_PAGES,
    ("tmpfs", ""): SMALL_PAGES,  # huge=advise too: what is allocated here is no mapping that asks
}
"""By file system and mount option; others are not in memory."""
FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600
STAT_UNIT: Final = 512


class KeptError(Exception):
    """The pool cannot be kept there; the message is one line."""


@dataclass(frozen=True, slots=True)
class _Measures:
    pool_bytes: int  # whole slabs
    slab_bytes: int
    unit: int  # of the file system

    @property
    def records_bytes(self) -> int:
        wanted = bytes_for(pool_bytes=self.pool_bytes, slab_bytes=self.slab_bytes)
        return -(-wanted // self.unit) * self.unit


@dataclass(slots=True)
class Kept:
    """A pool with its records.

    Attributes:
        note: why what was there is gone; empty when it was used or nothing was there.
    """

    pool: Pool
    ledger: Ledger
    note: str


def open_kept(folder: Path, size_bytes: int, slab_bytes: int, *, spread: Spread = nowhere) -> Kept:
    """Map the pool that is kept in a folder, or make it.

    Args:
        folder: on tmpfs or hugetlbfs; made with mode 0700 when it is not there.
        size_bytes: of the pool; the slabs' rest is not used.
        slab_bytes: size of a slab.
        spread: says from which NUMA nodes memory is to come; what is there stays where it is.

    Raises:
        KeptError: not there, not ours, in use, or no memory; what was there is as before.
    """
    backing = _prepare(folder)
    unit = HUGE_PAGE_BYTES if backing == "hugetlb" else mmap.PAGESIZE
    size_bytes = size_bytes // unit * unit
    measures = _Measures(size_bytes // slab_bytes * slab_bytes, slab_bytes, unit)
    with contextlib.ExitStack() as stack:
        records_fd = _open(folder / RECORDS_NAME)
        stack.callback(os.close, records_fd)
        pool_fd = _open(folder / POOL_NAME)
        on_failure = stack.enter_context(contextlib.ExitStack())
        on_failure.callback(os.close, pool_fd)
        _lock(pool_fd, folder)
        there_bytes = os.fstat(pool_fd).st_size
        try:
            note = _look(records_fd, measures, is_pool_there=there_bytes > 0)
            if there_bytes not in {0, size_bytes}:
                note = note or "the pool was of another size"
            if note or there_bytes == 0:
                # Zeros: a record of an earlier pool must never be read as one of this. The pool
                # first: killed in between, the next one finds no pool, and empties both.
                os.ftruncate(pool_fd, 0)
                os.ftruncate(records_fd, 0)
                on_failure.callback(os.ftruncate, pool_fd, 0)
            _allocate(records_fd, measures.records_bytes)
            os.ftruncate(pool_fd, size_bytes)  # mapped first: it says where memory comes from
            mapping = mmap.mmap(pool_fd, size_bytes)
            memory = np.frombuffer(mapping, dtype=np.uint8)
            parts = spread(memory.ctypes.data, size_bytes)
            _allocate(pool_fd, size_bytes)
            ledger = _ledger(records_fd, measures)
        except (OSError, ValueError, ForeignError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise KeptError(f"{folder}: {reason}") from error
        on_failure.pop_all()
    mapping.madvise(mmap.MADV_DONTFORK)
    backing = f"{backing}, kept in {folder}"
    pool = Pool(size_bytes, pool_fd, backing, memory.ctypes.data, memory, mapping, parts)
    return Kept(pool, ledger, note)


def kept_bytes(folder: Path) -> int:
    """Bytes of the pool that is kept in a folder; 0 when there is none."""
    try:
        return (folder / POOL_NAME).stat().st_size
    except OSError:
        return 0


def _prepare(folder: Path) -> str:
    """Make the folder; returns what backs files there."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        raise KeptError(f"{folder}: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise KeptError(f"{folder}: no folder of this user")
    kind, options = _file_system(facts.st_dev)
    names = [one for one in options if (kind, one) in BACKINGS] or [""]
    backing = BACKINGS.get((kind, names[0]))
    if backing is None:
        raise KeptError(f"{folder}: on {kind or 'an unknown file system'}, not on tmpfs, hugetlbfs")
    return backing


def _file_system(device: int) -> tuple[str, list[str]]:
    """Kind and mount options."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            at = fields.index("-")
            return fields[at + 1], fields[at + 3].split(",")
    return "", []


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, FILE_MODE)
    except OSError as error:
        raise KeptError(f"{path}: {error.strerror}") from None
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
        os.close(fd)
        raise KeptError(f"{path}: no file of this user")
    return fd


def _lock(fd: int, folder: Path) -> None:
    try:
        patiently(partial(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        raise KeptError(
            f"{folder}: another process has used the pool for {locks.LOCK_S:g} s: end it; if it "
            "has ended, a disk still reads for it: use another folder until that is over"
        ) from None


def _look(fd: int, measures: _Measures, *, is_pool_there: bool) -> str:
    """Why the records that are there cannot be used; empty when they can, or there are none.

    Raises:
        ForeignError: a pool that is not ours.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        if is_pool_there:
            raise ForeignError(f"{POOL_NAME} has no records beside it, so it is not ours")
        return ""
    header = np.frombuffer(os.pread(fd, mmap.PAGESIZE, 0), np.uint8)
    try:
        check_header(header, pool_bytes=measures.pool_bytes, slab_bytes=measures.slab_bytes)
    except StaleError as error:
        return str(error)
    return "" if size == measures.records_bytes else "its records are of another length"


def _ledger(fd: int, measures: _Measures) -> Ledger:
    mapping = mmap.mmap(fd, measures.records_bytes)
    mapping.madvise(mmap.MADV_DONTFORK)
    memory = np.frombuffer(mapping, np.uint8)
    return Ledger(memory, pool_bytes=measures.pool_bytes, slab_bytes=measures.slab_bytes)


def _allocate(fd: int, size_bytes: int) -> None:
    """Have all memory now.

    What is all there is left alone: to be told so page by page takes seconds for a large pool.

    Raises:
        OSError: there is not so much.
    """
    facts = os.fstat(fd)
    if facts.st_size == size_bytes and facts.st_blocks * STAT_UNIT >= size_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(error.errno, f"no room for {size_bytes} bytes") from None
