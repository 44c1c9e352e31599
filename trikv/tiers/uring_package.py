"""The kernel's ring by the package `liburing`, an extra of ours.

Decided here: how its faults are kept away from us. Found in its release 2026.3.30:

| fault | what is done |
| --- | --- |
| a list of pieces keeps each view in it for ever | a view is made once for each page and kept |
| it kills the process on some processors (SIGILL) | tried in a child process first |
| it holds the GIL while it enters the kernel | nothing in it is ever waited for |
| an entry that was got and not filled repeats the old one | entries are filled apart, and put |

This file does not know Trio.
"""

import errno
import os
import subprocess
import sys
import tempfile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.tiers.runs import Memory, view
from trikv.tiers.transfers import NOBODYS
from trikv.tiers.uring import DEPTHS

PROBE_S_MAX: Final = 20.0
PROBE_BYTES: Final = 8_192
_NO_TICKET: Final = 0


class PackageQueue:
    """Operations by the package; see `transfers.Queue`.

    Raises:
        ImportError: it is not installed.
        OSError: the kernel has no ring for us.
    """

    name = "liburing"
    joins_memory = False

    def __init__(
        self, fd: int, memory_fd: int = NOBODYS, *, depths: tuple[int, int] = DEPTHS
    ) -> None:
        import liburing  # noqa: PLC0415  # an extra, and deadly on some processors

        self.depths = depths
        self._lib = liburing
        self._fd = fd
        self._ring = liburing.Ring()
        flags = liburing.IORING_SETUP_SINGLE_ISSUER | liburing.IORING_SETUP_DEFER_TASKRUN
        entries = 2 * sum(depths)  # a cancellation each; the kernel gives twice as many answers
        try:
            liburing.io_uring_queue_init(entries, self._ring, flags)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            liburing.io_uring_queue_init(entries, self._ring, 0)  # before Linux 6.1
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._views: dict[tuple[int, int], memoryview] = {}
        self._lists: dict[int, object] = {}  # by ticket: what the kernel reads
        try:
            liburing.io_uring_register_eventfd(self._ring, self.event_fd)
            if memory_fd != NOBODYS:  # see `uring.py`
                liburing.io_uring_register_files(self._ring, liburing.FileIndex([memory_fd]))
        except OSError:
            self.close()
            raise
        self._is_unsubmitted = False
        self._answer = liburing.Cqe()

    def push(self, ticket: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> None:
        """Take an operation."""
        lib = self._lib
        views = [self._view(address, length) for address, length in pieces.tolist()]
        self._lists[ticket] = pieces_list = lib.Iovec(views)
        entry = lib.Sqe()
        prepare = lib.io_uring_prep_writev if is_write else lib.io_uring_prep_readv
        prepare(entry, self._fd, pieces_list, offset)
        self._put(entry, ticket)

    def cancel(self, ticket: int) -> None:
        """Ask the kernel to end an operation."""
        entry = self._lib.Sqe()
        self._lib.io_uring_prep_cancel64(entry, ticket, 0)
        self._put(entry, _NO_TICKET)

    def submit(self) -> bool:
        """Begin what was taken; false when the kernel takes no more just now."""
        if self._is_unsubmitted:
            try:
                self._lib.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EBUSY, errno.EINTR}:
                    raise
                return False
            self._is_unsubmitted = False
        return True

    def reap(self) -> list[tuple[int, int]]:
        """All answers at hand."""
        lib, ended = self._lib, []
        try:
            lib.io_uring_get_events(self._ring)
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.EBUSY, errno.EINTR}:
                raise
        for _ in range(lib.io_uring_cq_ready(self._ring)):
            lib.io_uring_peek_cqe(self._ring, self._answer)
            answer = self._answer[0]
            ticket = answer.user_data
            try:
                result = answer.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            lib.io_uring_cq_advance(self._ring, 1)
            if ticket != _NO_TICKET:
                self._lists.pop(ticket, None)
                ended.append((ticket, result))
        return ended

    def close(self) -> None:
        """Close the ring; what hangs in it stays with the kernel."""
        _KEPT.append(self._lists)
        self._lib.io_uring_queue_exit(self._ring)
        os.close(self.event_fd)

    def _view(self, address: int, length: int) -> memoryview:
        found = self._views.get((address, length))
        if found is None:
            found = self._views[address, length] = view(address, length)
        return found

    def _put(self, entry: object, ticket: int) -> None:
        entry.user_data = ticket  # type: ignore[attr-defined]
        if not self._lib.put_sqe(self._ring, entry):
            self.submit()
            if not self._lib.put_sqe(self._ring, entry):
                raise BlockingIOError(errno.EAGAIN, "the ring takes no entry")
        self._is_unsubmitted = True


_KEPT: Final[list[dict[int, object]]] = []


def why_not() -> str:
    """Why it cannot be used here, one line, empty when it can: tried in a child process."""
    try:
        tried = subprocess.run(
            [sys.executable, "-m", __name__],
            capture_output=True,
            text=True,
            timeout=PROBE_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode < 0:
        return f"kills its process with signal {-tried.returncode} on this processor"
    lines = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
    return lines[-1] if tried.returncode else ""


def main() -> None:
    """Write and read a file through it."""
    memory = Memory(2 * PROBE_BYTES)
    memory.bytes[:PROBE_BYTES] = np.arange(PROBE_BYTES) % 251
    pieces = np.array([[memory.address, PROBE_BYTES]], np.uint64)
    with tempfile.TemporaryFile() as file:
        queue = PackageQueue(file.fileno())
        for ticket, is_write in ((1, True), (2, False)):
            queue.push(ticket, 0, pieces, is_write=is_write)
            queue.submit()
            ended: list[tuple[int, int]] = []
            while not ended:
                ended = queue.reap()
            if ended != [(ticket, PROBE_BYTES)]:
                raise OSError(errno.EIO, f"unexpected answers {ended}")
            pieces[0, 0] = memory.address + PROBE_BYTES
        queue.close()
    if not np.array_equal(memory.bytes[:PROBE_BYTES], memory.bytes[PROBE_BYTES:]):
        raise OSError(errno.EIO, "read other bytes than were written")


if __name__ == "__main__":
    main()
