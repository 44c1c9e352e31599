"""What a daemon and its copiers say to each other, over a socket that only they hold.

Decided here: how orders and reports become bytes. Both ends are of one version and one user, so
nothing is checked twice; what an engine said was checked before.
"""

import enum
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trikv.core.layout import Piece
from trikv.core.words import Offsets

HEADER: Final = struct.Struct("<IIq")  # bytes of the body, kind, number
_COPY: Final = struct.Struct("<qqIIIIIII")
_TOOK: Final = struct.Struct("<d")


class Kind(enum.IntEnum):
    """What a frame says; its number names an attachment or a copy.

    Over the control socket all but COPY, STOP, SOON, AHEAD, ENDED and ALIVE, which have one a
    direction.
    """

    ATTACH = 1  # to the copier: map this memory; answered by MAPPED or REFUSED
    DETACH = 2  # unmap it; its copies have ended
    COPY = 3  # answered by ENDED
    STOP = 4  # start no more of this copy
    SOON = 5  # a copy is about to come
    AHEAD = 6  # this load is, to blocks that are not known yet: its first bytes may be brought near
    READY = 10  # from the copier: the GPU is open (facts)
    MAPPED = 11
    REFUSED = 12  # why, as a text
    ENDED = 13  # which blocks are whole
    ALIVE = 14  # there is work to do, and its loop goes round
    FAILED = 15  # why this process gives up, as a text; the last frame
    NOTE = 16  # something for the log (facts)


class Direction(enum.IntEnum):
    """Which way bytes go."""

    SAVE = 0
    LOAD = 1


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """One cache group: pieces in page order, memories by their index; where its sections end."""

    block_count: int
    pieces: tuple[Piece, ...]
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AttachOrder:
    """Memory to map."""

    handles: tuple[bytes, ...]
    events: tuple[bytes, ...]
    groups: tuple[GroupOrder, ...]
    signals: tuple[int, int] | None = None  # memory and offset of the first word


@dataclass(frozen=True, slots=True, eq=False)
class CopyOrder:
    """Blocks to move; all that has a default as in `Copy`."""

    attachment: int
    group: int
    direction: Direction
    event: int
    blocks: NDArray[np.int32]
    offsets: Offsets
    signal: int = 0
    value: int = 0
    is_ordered: bool = False
    lease: int = 0


Frame: TypeAlias = tuple[Kind, int, bytes]


def pack(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """One frame."""
    return HEADER.pack(len(body), kind, number) + body


def pack_attach(order: AttachOrder) -> bytes:
    """The body of ATTACH."""
    facts = {
        "handles": [one.hex() for one in order.handles],
        "events": [one.hex() for one in order.events],
        "groups": [
            [
                one.block_count,
                [[p.memory, p.offset, p.stride, p.bytes] for p in one.pieces],
                one.sections,
            ]
            for one in order.groups
        ],
        "signals": order.signals,
    }
    return json.dumps(facts).encode()


def read_attach(body: bytes) -> AttachOrder:
    """What `pack_attach` took."""
    facts = json.loads(body)
    return AttachOrder(
        tuple(bytes.fromhex(one) for one in facts["handles"]),
        tuple(bytes.fromhex(one) for one in facts["events"]),
        tuple(
            GroupOrder(count, tuple(Piece(*numbers) for numbers in pieces), tuple(sections))
            for count, pieces, sections in facts["groups"]
        ),
        facts["signals"] and tuple(facts["signals"]),
    )


def pack_copy(order: CopyOrder) -> bytes:
    """The body of COPY."""
    head = _COPY.pack(
        order.attachment,
        order.lease,
        order.group,
        order.direction,
        order.event,
        order.signal,
        order.value,
        len(order.blocks),
        order.is_ordered,
    )
    blocks = np.ascontiguousarray(order.blocks, np.int32)
    return head + blocks.tobytes() + np.ascontiguousarray(order.offsets, np.int64).tobytes()


def read_copy(body: bytes) -> CopyOrder:
    """What `pack_copy` took; the arrays are views of `body`."""
    attachment, lease, group, direction, event, *rest = _COPY.unpack_from(body)
    signal, value, count, is_ordered = rest
    blocks = np.frombuffer(body, np.int32, count, _COPY.size)
    offsets = np.frombuffer(body, np.int64, count, _COPY.size + 4 * count)
    way = Direction(direction)
    shown = (signal, value, bool(is_ordered))
    return CopyOrder(attachment, group, way, event, blocks, offsets, *shown, lease)


def pack_facts(**facts: Any) -> bytes:  # noqa: ANN401  # numbers and texts for a log line
    """The body of READY and NOTE."""
    return json.dumps(facts).encode()


def read_facts(body: bytes) -> dict[str, Any]:
    """What `pack_facts` took."""
    facts: dict[str, Any] = json.loads(body)
    return facts


def pack_ended(arrived: NDArray[np.bool_], took_s: float) -> bytes:
    """The body of ENDED: which blocks are whole, and the time since the order came."""
    return _TOOK.pack(took_s) + arrived.tobytes()


def read_ended(body: bytes) -> tuple[NDArray[np.bool_], float]:
    """What `pack_ended` took; the array is the caller's."""
    return np.frombuffer(body, np.bool_, offset=_TOOK.size).copy(), _TOOK.unpack_from(body)[0]


class Frames:
    """Bytes as they arrive, cut into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes, take: Callable[[Kind, int, bytes], None]) -> None:
        """Hand each frame that is complete now to `take`."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= HEADER.size:
            size, kind, number = HEADER.unpack_from(self._rest, at)
            end = at + HEADER.size + size
            if len(self._rest) < end:
                break
            take(Kind(kind), number, bytes(self._rest[at + HEADER.size : end]))
            at = end
        del self._rest[:at]
