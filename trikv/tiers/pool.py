"""The pool's memory: one shared mapping that other processes of this daemon can map too.

Decided here: what backs the pool (hugetlb, huge pages on request, 4 KiB pages), how it is touched
before use, by how many threads, and how large it may be on this machine. This file does not know
blocks or slabs.
"""

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.banks import WHOLE, Parts
from trikv.tiers import groups
from trikv.tiers.numa import HUGE_PAGE_BYTES, Spread, nowhere

MFD_CLOEXEC: Final = 1
MFD_HUGETLB: Final = 4
MADV_HUGEPAGE: Final = 14
MADV_POPULATE_WRITE: Final = 23
DEFAULT_FRACTION: Final = 0.5
TOUCH_BYTES: Final = 16 << 20
"""Of one system call: the process's other threads get no new memory until it returns, 10 ms."""
TOUCH_THREADS_MAX: Final = 8
ROOM_NAMES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""Limit and use, by the version of control groups."""
SMALL_PAGES: Final = "4 KiB pages"
HUGE_PAGES: Final = "huge pages on request"

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(slots=True)
class Pool:
    """The mapped memory.

    Ownership: the pool owns mapping and descriptor; `close` may run only after the last copy.

    Attributes:
        backing: for people: hugetlb, huge pages on request, or 4 KiB pages.
        memory: uint8[bytes], the pool.
        parts: of it, in the memory of several NUMA nodes.
    """

    bytes: int
    fd: int
    backing: str
    address: int
    memory: NDArray[np.uint8] = field(repr=False)
    _map: mmap.mmap = field(repr=False)
    parts: Parts = WHOLE

    def populate(self, offset: int, length: int) -> None:
        """Give pages to a part of the pool now, so that no copy stops for them; releases the GIL.

        Raises:
            OSError: the machine has no more memory; what was there before is unharmed.
        """
        for begin in range(offset, offset + length, TOUCH_BYTES):
            size = min(TOUCH_BYTES, offset + length - begin)
            if _LIBC.madvise(self.address + begin, size, MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                if code in {errno.EINVAL, errno.ENOSYS}:  # before Linux 5.14 a copy touches it
                    return
                raise OSError(code, os.strerror(code))

    def close(self) -> None:
        """Unmap; the bytes are gone when no other process maps them."""
        self.memory = np.empty(0, np.uint8)
        self._map.close()
        os.close(self.fd)


class Toucher:
    """Touches parts of a pool in a few threads of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.threads = max(1, min(TOUCH_THREADS_MAX, len(os.sched_getaffinity(0)) // 2))
        self._limiter = trio.CapacityLimiter(self.threads)

    async def touch(self, offset: int, length: int) -> str:
        """Give pages to a part; returns why that is not possible, empty when it is done.

        Cancellation: once begun it is waited for, a tenth of a second for 80 MiB.
        """
        try:
            await trio.to_thread.run_sync(
                self._pool.populate, offset, length, limiter=self._limiter
            )
        except OSError as error:
            return error.strerror or "unknown"
        except RuntimeError as error:  # no thread could be started
            return str(error)
        return ""


def open_pool(size_bytes: int, *, use_hugepages: bool, spread: Spread = nowhere) -> Pool:
    """Reserve and map a pool, and say from which NUMA nodes its memory is to come.

    Raises:
        OSError: not so much memory (with huge pages: not so many reserved); nothing is left behind.
    """
    flags = MFD_CLOEXEC | (MFD_HUGETLB if use_hugepages else 0)
    fd = os.memfd_create("trikv-pool", flags)
    try:
        os.ftruncate(fd, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)  # hugetlb pages are reserved here or refused
    except (OSError, ValueError) as error:
        os.close(fd)
        if use_hugepages:
            wanted = size_bytes // HUGE_PAGE_BYTES
            raise OSError(
                f"{wanted} huge pages of 2 MiB are not free: set vm.nr_hugepages"
            ) from error
        raise
    memory = np.frombuffer(mapping, dtype=np.uint8)
    mapping.madvise(mmap.MADV_DONTFORK)
    backing = "hugetlb" if use_hugepages else advise_huge(mapping)
    address = memory.ctypes.data
    return Pool(size_bytes, fd, backing, address, memory, mapping, spread(address, size_bytes))


def advise_huge(mapping: mmap.mmap) -> str:
    """Ask for transparent huge pages where the host allows them for shared memory."""
    try:
        mode = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        mapping.madvise(MADV_HUGEPAGE)
    except OSError:
        return SMALL_PAGES
    allowed = any(f"[{word}]" in mode for word in ("advise", "always", "within_size", "force"))
    return HUGE_PAGES if allowed else SMALL_PAGES


def available_bytes() -> int:
    """Memory that a process may still use: the machine's, less where a control group says so."""
    free = _meminfo("MemAvailable")
    limits = [free, *_cgroup_rooms()]
    return max(0, min(limits))


def default_bytes() -> int:
    """The pool's size when nobody chose one: half of what is available."""
    return max(
        HUGE_PAGE_BYTES,
        int(available_bytes() * DEFAULT_FRACTION) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
    )


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_rooms() -> list[int]:
    """Limit less use of each control group above this process, version 2 and 1."""
    rooms = (_room(folder, *ROOM_NAMES[version]) for folder, version in groups.folders("memory"))
    return [room for room in rooms if room is not None]


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = (folder / usage_name).read_text().strip()
    except OSError:
        return None
    if limit == "max" or int(limit) >= 1 << 60:
        return None
    return int(limit) - int(usage) + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """File pages that the kernel gives back: a group that has read weights looks full."""
    try:
        rows = (folder / "memory.stat").read_text().split("\n")
    except OSError:
        return 0
    facts = dict(row.split(" ", 1) for row in rows if " " in row)
    return int(facts.get("inactive_file", 0))
