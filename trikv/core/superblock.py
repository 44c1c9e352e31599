"""The first page of a disk, kept twice: whose it is, how it is cut, and what on it is dead.

Decided here: the format of the superblock, which of the two copies counts, and how long a *void*
is remembered. A void says that all records of an origin before a sequence are dead; a reset is one.

| found at the front | answer |
| --- | --- |
| neither copy bears our mark | None: the caller looks whether the place is empty |
| a whole copy of this version | the one with the higher revision |
| a whole copy of another version | refused |
| only damaged copies with our mark | refused, unless its first writing was cut off |

Both copies are written at each change, one after the other, and `newest` last, so that a torn write
leaves a whole one even where the write before it was torn too.
Every version has mark, version and the sum of the page (its last 8 bytes) at these places.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core import sums
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.pages import PAGE_ALIGN

MARK: Final = b"TriKV disk\r\n\x1a\n\0\0"
VERSION: Final = 2
NOT_GROWN: Final = 1  # the version of a disk that never grew, which older daemons read too
COPIES: Final = 2
DELETE: Final = "delete it (a device: blkdiscard --zeroout)"
VOIDS_MAX: Final = 96
GROWN_MAX: Final = 16
EPOCH_SHIFT: Final = 40  # a trillion records an epoch

_FRONT: Final = struct.Struct("<16sI?3x16sQQQQQQI4x")
_VOID: Final = struct.Struct(f"<{ORIGIN_BYTES}sQ")
_GROWN: Final = struct.Struct(f"<{GROWN_MAX}Q")  # zeros: not yet
_GROWN_AT: Final = _FRONT.size + VOIDS_MAX * _VOID.size
_SUM: Final = struct.Struct("<Q")
_BODY_BYTES: Final = PAGE_ALIGN - _SUM.size

assert _GROWN_AT + _GROWN.size <= _BODY_BYTES


class UnusableDiskError(Exception):
    """What lies there must not be used; the message is one line and says what to do."""


@dataclass(slots=True)
class Voids:
    """Which records are dead though they are whole.

    Attributes:
        before: by origin: its records of a smaller sequence are dead.
        floor: records of any origin with a smaller sequence are dead.

    At the bound: with `VOIDS_MAX` origins the oldest void becomes the floor: blocks that are older
    than it are lost at the next start, whosever they are. The lost are never the wrong ones.
    """

    before: dict[bytes, int] = field(default_factory=dict)
    floor: int = 0

    def add(self, origin: bytes, sequence: int) -> None:
        """Declare the origin's records before `sequence` dead."""
        assert len(origin) == ORIGIN_BYTES
        self.before[origin] = max(sequence, self.before.get(origin, 0))
        if len(self.before) > VOIDS_MAX:
            self.floor = max(self.floor, min(self.before.values()))
            self.before = {one: old for one, old in self.before.items() if old > self.floor}

    def are_dead(
        self, origins: NDArray[np.uint8], sequences: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which records are dead.

        Args:
            origins: (n, `ORIGIN_BYTES`).
            sequences: (n,).
        """
        dead = sequences < self.floor
        words = np.ascontiguousarray(origins).view(np.uint64)
        for origin, before in self.before.items():
            wanted = np.frombuffer(origin, np.uint64)
            rows = np.flatnonzero(words[:, 0] == wanted[0])
            rows = rows[(words[rows] == wanted).all(axis=1)]
            dead[rows] |= sequences[rows] < before
        return dead

    def copy(self) -> "Voids":
        """Another one that says the same."""
        return Voids(dict(self.before), self.floor)


@dataclass(slots=True)
class Superblock:
    """What a disk says of itself.

    Attributes:
        uuid: 16 bytes, drawn when it was formatted; all that it holds bears a part of it.
        epoch: grows at each opening; sequences and generations of an epoch begin at
            `first_sequence`, above all earlier ones, also those that a crash has hidden.
        revision: grows with each write of the superblock.
        is_clean: it was closed, and nothing acknowledged was lost.
        region_count: regions that it was made with.
        grown: regions that were added each time it grew; see `disklayout.py`.
        newest: the copy that bears this; the other one may be older, torn or absent.
    """

    uuid: bytes
    capacity_bytes: int
    region_bytes: int
    region_count: int
    epoch: int = 0
    revision: int = 0
    is_clean: bool = True
    voids: Voids = field(default_factory=Voids)
    grown: tuple[int, ...] = ()
    newest: int = field(default=COPIES - 1, compare=False)

    @property
    def tag(self) -> int:
        """What headers and records bear, so that those of another life of the place are told."""
        return int.from_bytes(self.uuid[:8], "little")

    @property
    def first_sequence(self) -> int:
        """The least sequence of this epoch."""
        return self.epoch << EPOCH_SHIFT

    def pack(self) -> bytes:
        """One page."""
        voids = sorted(self.voids.before.items())
        front = _FRONT.pack(
            MARK,
            VERSION if self.grown else NOT_GROWN,
            self.is_clean,
            self.uuid,
            self.capacity_bytes,
            self.region_bytes,
            self.region_count,
            self.epoch,
            self.revision,
            self.voids.floor,
            len(voids),
        )
        body = front + b"".join(_VOID.pack(*void) for void in voids)
        grown = (*self.grown, *[0] * (GROWN_MAX - len(self.grown)))
        body = (body.ljust(_GROWN_AT, b"\0") + _GROWN.pack(*grown)).ljust(_BODY_BYTES, b"\0")
        return body + _SUM.pack(sums.of_bytes(body))


def read(front: bytes) -> Superblock | None:
    """Read the first `COPIES` pages; None when they bear no mark of ours.

    Raises:
        UnusableDiskError: another version's, or damaged.
    """
    pages = _pages(front)
    if not any(page.startswith(MARK) for page in pages):
        return None
    whole = {copy: page for copy, page in enumerate(pages) if _is_whole(page)}
    for page in whole.values():
        (version,) = struct.unpack_from("<I", page, len(MARK))
        if not NOT_GROWN <= version <= VERSION:
            raise UnusableDiskError(
                f"has format {version} and this daemon reads formats up to {VERSION}: "
                f"start the daemon that made it, or {DELETE}"
            )
    if not whole:
        raise UnusableDiskError(f"both copies of its superblock are damaged: {DELETE}")
    found = [_unpack(page, copy) for copy, page in whole.items()]
    return max(found, key=lambda one: one.revision)


def is_unfinished(front: bytes) -> bool:
    """Whether this is what a power cut leaves of the first of all writes.

    Nothing else has ever been written to such a disk: that waits until both copies are whole.
    """
    first, *others = _pages(front)
    return (
        len(front) == COPIES * PAGE_ALIGN
        and not any(map(any, others))
        and any(first)
        and (first.startswith(MARK) or not any(first[: _FRONT.size]))
        and not any(first[_FRONT.size : _BODY_BYTES])
        and not _is_whole(first)
    )


def _pages(front: bytes) -> list[bytes]:
    return [front[at : at + PAGE_ALIGN] for at in range(0, COPIES * PAGE_ALIGN, PAGE_ALIGN)]


def _is_whole(page: bytes) -> bool:
    if len(page) < PAGE_ALIGN or not page.startswith(MARK):
        return False
    (total,) = _SUM.unpack_from(page, _BODY_BYTES)
    return bool(sums.of_bytes(page[:_BODY_BYTES]) == total)


def _unpack(page: bytes, copy: int) -> Superblock:
    front = _FRONT.unpack_from(page)
    _, _, is_clean, uuid, capacity, region_bytes, region_count, epoch, revision, floor, count = (
        front
    )
    at = range(_FRONT.size, _FRONT.size + count * _VOID.size, _VOID.size)
    before = dict(_VOID.unpack_from(page, one) for one in at)
    facts = uuid, capacity, region_bytes, region_count, epoch, revision, is_clean
    grown = tuple(one for one in _GROWN.unpack_from(page, _GROWN_AT) if one)
    return Superblock(*facts, Voids(before, floor), grown, copy)
