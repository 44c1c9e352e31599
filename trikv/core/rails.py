"""What two hosts tell each other before one reads the other's pool, and which NICs talk.

Decided here: which NIC pairs with which, by which address a port is named, and how offers and
answers become bytes. What comes from another host is checked here, field by field, before it gets
near a NIC. This file does not know verbs.

A *rail* is a NIC, by its number on its host; a *path* joins a rail here to one at the owner; a
*seat* is one queue pair of a path. Keys of memory regions (rkeys) let who holds them read the pool:
they are in answers only, and in no log.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PATHS_MAX: Final = 32
PAIRS_A_PATH: Final = 2
"""Queue pairs of one path: a second one is worth 20 % on 400 Gb NICs, a third nothing."""
SEATS_MAX: Final = PATHS_MAX * PAIRS_A_PATH
RAILS_MAX: Final = 32
REGIONS_MAX: Final = 4_096
NUMBER_24_MAX: Final = (1 << 24) - 1
MTU_MAX: Final = 5  # code of 4,096 bytes
ADDRESS_MAX: Final = (1 << 63) - 1

ROCE_2: Final = "RoCE v2"

_MAPPED_IPV4: Final = bytes(10) + b"\xff\xff"
_LINK_LOCAL: Final = (b"\xfe\x80", _MAPPED_IPV4 + b"\xa9\xfe")  # fe80::/64, 169.254.0.0/16
_MAGIC: Final = b"TKr1"
_OFFER: Final = struct.Struct("<4sI")
_ANSWER: Final = struct.Struct("<4sIIIQQ")
_PAIR: Final = struct.Struct("<IIH16sBB")
_SEAT: Final = struct.Struct("<II")
_NO_PAIR: Final = bytes(_PAIR.size)


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses.

    Attributes:
        kind: as sysfs names it.
        is_up: its network device is up, or it has none.
    """

    index: int
    kind: str
    gid: bytes
    is_up: bool


@dataclass(frozen=True, slots=True)
class PairFacts:
    """One end of a queue pair: what the other end needs."""

    qpn: int
    psn: int
    lid: int
    gid: bytes
    mtu: int
    rd_atomic: int


@dataclass(frozen=True, slots=True)
class Seat:
    """A queue pair that a reader offers: its number there, the owner's rail, and its end."""

    number: int
    rail: int
    pair: PairFacts


@dataclass(frozen=True, slots=True)
class Reach:
    """What an owner lends: its pool, region by region, with one key a region on each rail.

    Attributes:
        address: of the pool in the owner's process.
        begins: offsets of the regions in the pool, ascending, the first 0.
        bytes: of the pool.
        keys: of each rail, of each region.
    """

    address: int
    bytes: int
    begins: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """The owner's ends, in the order of the offer's seats; None: it could not be joined."""

    reach: Reach
    pairs: tuple[PairFacts | None, ...]


def choose_gid(table: Sequence[Gid], *, is_ib: bool, wanted: int | None = None) -> Gid | None:
    """By which address a port is named; None: by none, the NIC is not used.

    RoCE v2 with an IPv4 address, then any that crosses routers, then link-local; RoCE v1 never.

    Args:
        table: entries that are set.
        is_ib: the port's link is InfiniBand, which routes by LID.
        wanted: an index to use and no other.
    """
    if wanted is not None:
        return next((one for one in table if one.index == wanted), None)
    if is_ib:
        return min(table, key=lambda one: one.index, default=None)
    usable = [one for one in table if one.kind == ROCE_2 and one.is_up]
    return min(usable, key=_rank, default=None)


def _rank(one: Gid) -> tuple[bool, bool, int]:
    return (
        one.gid.startswith(_LINK_LOCAL),
        not one.gid.startswith(_MAPPED_IPV4),
        one.index,
    )


def pair_rails(near: int, far: int) -> list[tuple[int, int]]:
    """The rails that each path joins: rail i with rail i, modulo what either end has.

    So every NIC of both ends is used, and in a fabric of rails no path leaves its own.
    """
    count = min(max(near, far), PATHS_MAX) if near and far else 0
    return [(number % near, number % far) for number in range(count)]


def pack_offer(seats: Sequence[Seat]) -> bytes:
    """Bytes of an offer."""
    parts = [_OFFER.pack(_MAGIC, len(seats))]
    parts += [_SEAT.pack(one.number, one.rail) + _pack_pair(one.pair) for one in seats]
    return b"".join(parts)


def read_offer(data: bytes, *, rails: int) -> tuple[Seat, ...]:
    """What `pack_offer` made, checked.

    Args:
        data: from another host.
        rails: how many there are here.

    Raises:
        ValueError: it is no offer, or names what there is not; one line.
    """
    _check(len(data) >= _OFFER.size, "no offer of queue pairs")
    magic, count = _OFFER.unpack_from(data)
    _check(magic == _MAGIC, "an offer of another version")
    _check(0 < count <= SEATS_MAX, f"an offer of {count} queue pairs")
    size = _SEAT.size + _PAIR.size
    _check(len(data) == _OFFER.size + count * size, "an offer of another length")
    seats = []
    for at in range(_OFFER.size, len(data), size):
        number, rail = _SEAT.unpack_from(data, at)
        _check(number < SEATS_MAX, f"seat {number}")
        _check(rail < rails, f"rail {rail} of {rails}")
        seats.append(Seat(number, rail, _read_pair(data, at + _SEAT.size)))
    _check(len({one.number for one in seats}) == count, "a seat is offered twice")
    return tuple(seats)


def pack_answer(answer: Answer) -> bytes:
    """Bytes of an answer."""
    reach = answer.reach
    head = _ANSWER.pack(
        _MAGIC,
        len(answer.pairs),
        len(reach.keys),
        len(reach.begins),
        reach.address,
        reach.bytes,
    )
    parts = [head, struct.pack(f"<{len(reach.begins)}Q", *reach.begins)]
    parts += [struct.pack(f"<{len(keys)}I", *keys) for keys in reach.keys]
    parts += [_NO_PAIR if pair is None else _pack_pair(pair) for pair in answer.pairs]
    return b"".join(parts)


def read_answer(data: bytes) -> Answer:
    """What `pack_answer` made, checked.

    Raises:
        ValueError: it is no answer, or contradicts itself; one line.
    """
    _check(len(data) >= _ANSWER.size, "no answer with queue pairs")
    magic, pairs, rails, regions, address, size = _ANSWER.unpack_from(data)
    _check(magic == _MAGIC, "an answer of another version")
    _check(pairs <= SEATS_MAX, f"an answer of {pairs} queue pairs")
    _check(0 < rails <= RAILS_MAX, f"an owner of {rails} rails")
    _check(0 < regions <= REGIONS_MAX, f"a pool of {regions} regions")
    _check(address + size <= ADDRESS_MAX, "a pool that ends nowhere")
    wanted = _ANSWER.size + regions * 8 + rails * regions * 4 + pairs * _PAIR.size
    _check(len(data) == wanted, "an answer of another length")
    begins = struct.unpack_from(f"<{regions}Q", data, _ANSWER.size)
    is_ascending = all(a < b for a, b in zip(begins, (*begins[1:], size), strict=True))
    _check(begins[0] == 0 and is_ascending, "regions out of order")
    at = _ANSWER.size + regions * 8
    step = regions * 4
    keys = tuple(
        struct.unpack_from(f"<{regions}I", data, at + rail * step) for rail in range(rails)
    )
    at += rails * step
    places = range(at, at + pairs * _PAIR.size, _PAIR.size)
    ends = tuple(
        None if data[place:].startswith(_NO_PAIR) else _read_pair(data, place) for place in places
    )
    return Answer(Reach(address, size, begins, keys), ends)


def _pack_pair(pair: PairFacts) -> bytes:
    return _PAIR.pack(pair.qpn, pair.psn, pair.lid, pair.gid, pair.mtu, pair.rd_atomic)


def _read_pair(data: bytes, at: int) -> PairFacts:
    pair = PairFacts(*_PAIR.unpack_from(data, at))
    _check(0 < pair.qpn <= NUMBER_24_MAX, "a queue pair's number")
    _check(pair.psn <= NUMBER_24_MAX, "a packet's number")
    _check(1 <= pair.mtu <= MTU_MAX, f"mtu {pair.mtu}")
    _check(pair.rd_atomic >= 1, "a NIC without RDMA READ")
    return pair


def _check(is_right: bool, what: str) -> None:  # noqa: FBT001
    if not is_right:
        raise ValueError(f"the other host sent {what}")
