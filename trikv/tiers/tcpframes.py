"""What a reader and an owner say to each other on a data stream.

Decided here: how requests and replies become bytes, and what makes either unbelievable. No frame
is trusted: the token, sums and bounds are looked at before anything is allocated or sent.

    reader -> owner   request: head, then (offset, bytes) of each piece; several may be ahead
    owner -> reader   reply, in the order of the requests: head, then the bytes of all pieces
"""

import enum
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES: Final = 16
PIECES_MAX: Final = 512
"""Pieces of one request: they fit into one system call (IOV_MAX is 1,024)."""
FRAME_BYTES_MAX: Final = 16 << 20
"""Bytes of one reply, so that a stream that breaks costs no more."""

_MAGIC: Final = b"TKt1"
_REQUEST: Final = struct.Struct("<4sII16sII")  # magic, number, pieces, token, sum of pieces, of all
_REPLY: Final = struct.Struct("<4sIIQI")  # magic, number, status, bytes, sum
_PIECE_BYTES: Final = 16
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size


class Status(enum.IntEnum):
    """What an owner answers."""

    OK = 0
    UNKNOWN = 1  # the token: never given, released, or its time is over
    OUTSIDE = 2  # a piece that the token does not cover


class BadFrameError(Exception):
    """The other end does not speak as agreed: the stream is closed."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request as far as its head says."""

    number: int
    count: int
    token: bytes
    pieces_sum: int


def pack_request(number: int, token: bytes, pieces: NDArray[np.int64]) -> bytes:
    """A request for pieces (offset, bytes), 1 to `PIECES_MAX` of them."""
    body = np.ascontiguousarray(pieces, np.int64).tobytes()
    head = _REQUEST.pack(_MAGIC, number, len(pieces), token, zlib.crc32(body), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head)) + body


def read_request(data: bytes) -> RequestHead:
    """The head of a request; `REQUEST_BYTES` of it.

    Raises:
        BadFrameError: it is none.
    """
    magic, number, count, token, pieces_sum, own_sum = _REQUEST.unpack(data)
    if magic != _MAGIC or own_sum != zlib.crc32(data[:-4]) or not 0 < count <= PIECES_MAX:
        raise BadFrameError("no request")
    return RequestHead(number, count, token, pieces_sum)


def body_bytes(head: RequestHead) -> int:
    """How many bytes follow the head."""
    return head.count * _PIECE_BYTES


def read_pieces(head: RequestHead, body: bytes) -> NDArray[np.int64]:
    """The pieces of a request, shape (count, 2), positive and together within a frame's bytes.

    Raises:
        BadFrameError: they are not.
    """
    if zlib.crc32(body) != head.pieces_sum:
        raise BadFrameError("pieces of another request")
    pieces = np.frombuffer(body, np.int64).reshape(-1, 2)
    lengths = pieces[:, 1]
    if not ((pieces[:, 0] >= 0) & (lengths > 0) & (lengths <= FRAME_BYTES_MAX)).all():
        raise BadFrameError("a piece that cannot be")
    if lengths.sum() > FRAME_BYTES_MAX:
        raise BadFrameError("too much for one reply")
    return pieces


def pack_reply(number: int, status: Status, size: int) -> bytes:
    """The head of a reply; `size` bytes follow."""
    head = _REPLY.pack(_MAGIC, number, status, size, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def read_reply(data: bytes, number: int, size: int) -> Status:
    """The status of the reply that must come now.

    Args:
        data: `REPLY_BYTES` of it.
        number: of the oldest request that was not answered.
        size: bytes of its pieces.

    Raises:
        BadFrameError: it is another reply, or none.
    """
    magic, found, status, length, own_sum = _REPLY.unpack(data)
    if magic != _MAGIC or own_sum != zlib.crc32(data[:-4]) or found != number:
        raise BadFrameError("no reply, or another one's")
    if status not in Status.__members__.values():
        raise BadFrameError("a status that is not known")
    if length != (size if status == Status.OK else 0):
        raise BadFrameError("a reply of another length")
    return Status(status)
