"""Messages of metaserver and nodes, and plain records.

Decided here: every bound that such a message must keep, on both sides.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trikv import address as addresses
from trikv import wire
from trikv.core.adverts import PORTION_KEYS_MAX, PORTION_PARTS_MAX, Part
from trikv.core.errors import BadRequestError, UnsupportedVersionError
from trikv.core.nodes import Plan
from trikv.core.owners import ORIGIN_BYTES
from trikv.core.proofs import Party, check_nonce
from trikv.core.words import Words

MESSAGE_WORDS_MAX: Final = 1 << 17  # 1 MiB: the largest message here has 0.5 MiB
LOCATE_MAX: Final = 16_384
RAILS_OF_A_NODE_MAX: Final = 16
SHORT_BYTES_MAX: Final = 64
OWNERS_OF_A_PLAN_MAX: Final = 64
SEGMENT_INTS: Final = 3
NODE: Final = "node"
META: Final = "meta"
TOOL: Final = "tool"


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who speaks, by its own words."""

    party: Party
    software: str


@dataclass(frozen=True, slots=True)
class Located:
    """One segment of a plan: fetch these blocks from that node."""

    address: str
    epoch: int
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Beat:
    """What a metaserver answers to a heartbeat; see the schema."""

    digest: int
    node_count: int
    nodes_digest: int
    declined_count: int
    free_count: int


def write_greeting(message: Any, greeting: Greeting) -> None:
    """Fill in `Greeting`."""
    message.protocol = wire.PROTOCOL
    message.software = greeting.software
    message.role = greeting.party.role
    message.address = greeting.party.address
    message.nonce = greeting.party.nonce


def read_greeting(message: Any) -> Greeting:
    """Read `Greeting`.

    Raises:
        UnsupportedVersionError: the two sides share no version.
        BadRequestError: a bound is broken, or a node has no address that others could dial.
    """
    theirs = int(message.protocol)
    if abs(theirs - wire.PROTOCOL) > 1:
        raise UnsupportedVersionError(
            f"this side speaks protocol {wire.PROTOCOL}, the other {theirs}: upgrade the older one"
        )
    short = {"bytes_max": wire.NAME_BYTES_MAX, "bytes_min": 0}
    software = wire.text(message.software, "software", **short)
    role = wire.text(message.role, "role", bytes_max=SHORT_BYTES_MAX)
    address = wire.text(message.address, "address", **short)
    if role == NODE:
        check_node_address(address)
    return Greeting(Party(role, address, check_nonce(bytes(message.nonce))), software)


def check_node_address(text: str) -> None:
    """A node's address must be one that somebody can dial.

    Raises:
        BadRequestError: it is no host:port, or names every interface.
    """
    try:
        address = addresses.parse(text)
    except ValueError as error:
        raise BadRequestError(f"a node's address: {error}") from None
    if address.is_unix or address.port == 0 or address.is_wildcard:
        raise BadRequestError(f"a node's address: {text!r} cannot be dialled by others")


def read_rails(message: Any) -> list[str]:
    """Read the names of rails.

    Raises:
        BadRequestError: a bound is broken.
    """
    rails = wire.bounded(message, "rails", count_max=RAILS_OF_A_NODE_MAX)
    return [wire.text(rail, "a rail", bytes_max=SHORT_BYTES_MAX) for rail in rails]


def read_origin(blob: bytes) -> bytes:
    """Read an origin.

    Raises:
        BadRequestError: it has the wrong size.
    """
    if len(blob) != ORIGIN_BYTES:
        raise BadRequestError(f"an origin has {ORIGIN_BYTES} bytes, not {len(blob)}")
    return bytes(blob)


def write_adverts(message: Any, parts: list[Part], hash_bytes: int = wire.HASH_BYTES_MAX) -> None:
    """Fill in a list of `Advert`."""
    for row, part in zip(message, parts, strict=True):
        row.origin, row.isHeld, row.isBelow = part.origin, part.is_held, part.is_below
        row.hashBytes, row.hashes = hash_bytes, wire.words_to_hashes(part.words, hash_bytes)


def read_adverts(message: Any) -> list[Part]:
    """Read a list of `Advert`.

    Raises:
        BadRequestError: a bound is broken.
    """
    rows = wire.bounded(message, "adverts", count_max=PORTION_PARTS_MAX)
    parts = []
    count = 0
    for row in rows:
        words = wire.hashes_to_words(row.hashes, int(row.hashBytes))
        count += len(words)
        if count > PORTION_KEYS_MAX:
            raise BadRequestError(f"a call has at most {PORTION_KEYS_MAX} hashes")
        kind = bool(row.isHeld), bool(row.isHeld and row.isBelow)
        parts.append(Part(read_origin(row.origin), words, *kind))
    return parts


def read_locate(message: Any) -> tuple[bytes, Words]:
    """Read the parameters of `locate`.

    Raises:
        BadRequestError: a bound is broken.
    """
    words = wire.hashes_to_words(message.hashes, int(message.hashBytes))
    if len(words) > LOCATE_MAX:
        raise BadRequestError(f"a call has at most {LOCATE_MAX} hashes, not {len(words)}")
    return read_origin(message.origin), words


def write_plan(message: Any, plan: Plan) -> None:
    """Fill in the plan of `LocateReply`."""
    place = {number: at for at, number in enumerate(plan.nodes)}
    for row, node in zip(message.init("owners", len(place)), plan.nodes.values(), strict=True):
        row.address, row.epoch = node.address, node.epoch
    rows = [(place[one.node], one.first, one.count) for one in plan.segments]
    message.segments = np.array(rows, "<i4").tobytes()


def read_plan(message: Any, asked: int) -> list[Located]:
    """Read the plan of `LocateReply`.

    Args:
        message: from a metaserver that may be wrong.
        asked: how many blocks were asked for.

    Raises:
        BadRequestError: it does not say what a plan says; to be treated as a miss.
    """
    owners = wire.bounded(message.owners, "owners", count_max=OWNERS_OF_A_PLAN_MAX)
    named = [
        (wire.text(one.address, "address", bytes_max=wire.NAME_BYTES_MAX), int(one.epoch))
        for one in owners
    ]
    ints = wire.ids_to_array(message.segments, "segments").tolist()
    if len(ints) % SEGMENT_INTS:
        raise BadRequestError("segments are of three numbers each")
    plan: list[Located] = []
    end = 0
    for at in range(0, len(ints), SEGMENT_INTS):
        owner, first, count = ints[at : at + SEGMENT_INTS]
        if not 0 <= owner < len(named) or first != end or not 0 < count <= asked - end:
            raise BadRequestError("a plan has a gap, or more blocks or owners than there are")
        address, epoch = named[owner]
        plan.append(Located(address, epoch, first, count))
        end += count
    return plan


def read_beat(message: Any) -> Beat:
    """Read the answer to a heartbeat."""
    return Beat(
        int(message.digest),
        int(message.nodeCount),
        int(message.nodesDigest),
        int(message.declinedCount),
        int(message.freeCount),
    )


def write_beat(message: Any, beat: Beat) -> None:
    """Fill in the answer to a heartbeat."""
    message.digest = beat.digest
    message.nodeCount = beat.node_count
    message.nodesDigest = beat.nodes_digest
    message.declinedCount = beat.declined_count
    message.freeCount = beat.free_count
