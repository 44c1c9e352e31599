"""Which back end carries out the operations of a disk.

Decided here: the names, the order in which `auto` tries them, and what a person is told. Our own
ring comes first: it is as fast as the package, enters the kernel without the GIL and takes any
address (`bench.ssd` measures all three). Threads work everywhere.
"""

from collections.abc import Callable, Mapping
from typing import Final

from trikv.core.errors import BadRequestError
from trikv.tiers import uring_package
from trikv.tiers.threads import ThreadQueue
from trikv.tiers.transfers import NOBODYS, Queue
from trikv.tiers.uring import UringQueue

AUTO: Final = "auto"
BACK_ENDS: Final[Mapping[str, Callable[[int, int], Queue]]] = {
    UringQueue.name: UringQueue,
    uring_package.PackageQueue.name: uring_package.PackageQueue,
    ThreadQueue.name: ThreadQueue,
}
CHOICES: Final = (AUTO, *BACK_ENDS)


def why_not(kind: str) -> str:
    """Why a back end cannot even be tried here, one line; blocks the calling thread."""
    if kind not in CHOICES:
        return f"is not one of {', '.join(CHOICES)}"
    return uring_package.why_not() if kind == uring_package.PackageQueue.name else ""


def make_queue(kind: str, fd: int, memory_fd: int = NOBODYS) -> Queue:
    """A back end for a descriptor, for use by the calling thread alone.

    Args:
        kind: one of `CHOICES` that `why_not` has nothing against; `auto` never fails.
        fd: what operations are on.
        memory_fd: the file of the memory that they move; it stays open, and so locked, until the
            kernel has ended the last of them, also when this process was killed long before.

    Raises:
        BadRequestError: it does not work here; the message says why.
    """
    if kind == AUTO:
        try:
            return UringQueue(fd, memory_fd)
        except OSError:  # an old kernel, or a container that forbids it
            return ThreadQueue(fd, memory_fd)
    try:
        return BACK_ENDS[kind](fd, memory_fd)
    except (OSError, ImportError) as error:
        raise BadRequestError(f"{kind} does not work here: {error}") from error
