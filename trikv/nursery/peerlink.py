"""One connection to another node: Cap'n Proto's side, on asyncio.

Decided here: what of an owner's answers is believable. They become plain records here: no capnp
object leaves this file. It does not know when what is called.
"""

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from trikv import wire
from trikv.address import Address
from trikv.core.errors import BadRequestError
from trikv.core.proofs import Secret
from trikv.core.words import Words
from trikv.meta.link import (
    FORBIDDEN,
    LOST,
    OVERLOADED,
    MetaError,
    checked,
    introduce,
    open_client,
    read_answer,
    sent,
)
from trikv.meta.messages import NODE
from trikv.tiers.peer import PeerLostError
from trikv.tiers.tcpframes import TOKEN_BYTES

T = TypeVar("T")
HASHES_MAX: Final = 4_096
"""Of one loan."""
OFFSET_MAX: Final = 1 << 48
SECONDS_MAX: Final = 3_600.0
ANSWER_BYTES_MAX: Final = 1 << 20


class PeerRefusedError(PeerLostError):
    """The owner has answered, and will not do it now; the connection is as good as before."""


class PeerBusyError(PeerRefusedError):
    """Likewise, because it has lent as much as it may: a moment later it may."""


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """What an owner lends.

    Attributes:
        grant: 0: nothing.
        offsets: int64[ranks, n] of all blocks that were asked for; -1: not lent.
    """

    grant: int
    seconds: float
    page_bytes: tuple[int, ...]
    offsets: NDArray[np.int64]
    token: bytes


class PeerLink:
    """A connection on which both sides have proven that they know the secret."""

    def __init__(self, stream: Any, client: Any) -> None:
        self._stream = stream
        self._client = client
        self._session: Any = None
        self.epoch = self.data_port = self.rail_count = 0

    @property
    def _live(self) -> Any:
        if self._session is None:
            raise MetaError(LOST, "the connection is closed")
        return self._session

    async def start(self, own_address: str, secret: Secret | None) -> None:
        """Greet and prove.

        Raises:
            MetaError: refused, by either side.
        """
        door = self._client.bootstrap().cast_as(wire.SCHEMA.Peer)
        reply = await introduce(door, NODE, own_address, secret)
        self._session = reply.session
        self.epoch, self.data_port = int(reply.epoch), int(reply.dataPort)
        self.rail_count = int(reply.railCount)

    async def lend(
        self, origin: bytes, words: Words, *, seconds: float, wants_sums: bool
    ) -> Borrowed:
        """See the schema.

        Raises:
            PeerLostError: refused or lost, or an answer that cannot be, as of all calls here.
        """

        async def call() -> Borrowed:
            width = wire.HASH_BYTES_MAX
            request = self._live.lend_request()
            loan = request.loan
            loan.origin, loan.hashBytes = origin, width
            loan.hashes = wire.words_to_hashes(words, width)
            loan.seconds, loan.wantsSums = seconds, wants_sums
            ok = checked((await sent(request.send())).reply)
            found: Borrowed = read_answer(lambda message: _read_borrowed(message, len(words)), ok)
            return found

        return await _called(call())

    async def release(
        self, grant: int, count: int, *, wants_sums: bool
    ) -> tuple[bool, NDArray[np.uint64]]:
        """See the schema; with a valid grant as many sums as blocks were lent, when wanted."""

        async def call() -> Any:
            call = self._live.release(grant=grant, wantsSums=wants_sums)
            return checked((await sent(call)).reply)

        ok = await _called(call())
        was_valid, blob = bool(ok.wasValid), bytes(ok.sums)
        if len(blob) != (8 * count if was_valid and wants_sums else 0):
            raise PeerLostError("it answered other sums than were asked for")
        return was_valid, np.frombuffer(blob, "<u8")

    async def connect(self, offer: bytes) -> bytes:
        """See the schema."""

        async def call() -> Any:
            return checked((await sent(self._live.connect(offer=offer))).reply)

        ok = await _called(call())
        answer = bytes(ok.answer)
        if len(answer) > ANSWER_BYTES_MAX:
            raise PeerLostError("it answered too much")
        return answer

    def close(self) -> None:
        """Hang up; twice is fine."""
        self._session = None
        self._stream.close()
        self._client.close()


async def dial_peer(address: Address, own_address: str, secret: Secret | None) -> PeerLink:
    """Connect and prove.

    Ownership: the link is the caller's to close.

    Raises:
        PeerLostError: nobody is there, or one of the two sides refused the other.
    """
    link = PeerLink(*await _called(open_client(address)))
    try:
        await _called(link.start(own_address, secret))
    except BaseException:
        link.close()
        raise
    return link


async def _called(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call
    except MetaError as error:
        kind = PeerLostError if error.code in {LOST, FORBIDDEN} else PeerRefusedError
        kind = PeerBusyError if error.code == OVERLOADED else kind
        raise kind(str(error)) from None


def _read_borrowed(ok: Any, asked: int) -> Borrowed:
    grant = int(ok.grant)
    if grant == 0:
        return Borrowed(0, 0.0, (), np.empty((0, asked), np.int64), b"")
    sizes = wire.bounded(ok.pageBytes, "pageBytes", count_max=wire.RANKS_MAX, count_min=1)
    page_bytes = tuple(int(size) for size in sizes)
    blob = bytes(ok.offsets)
    if len(blob) != 8 * asked * len(page_bytes):
        raise BadRequestError("offsets of other blocks than were asked for")
    offsets = np.frombuffer(blob, "<i8").reshape(len(page_bytes), asked)
    if bool((offsets < -1).any() | (offsets > OFFSET_MAX).any()):
        raise BadRequestError("an offset that cannot be")
    seconds, token = float(ok.seconds), bytes(ok.token)
    if not 0 < seconds <= SECONDS_MAX or len(token) != TOKEN_BYTES:
        raise BadRequestError("a grant that cannot be")
    return Borrowed(grant, seconds, page_bytes, offsets, token)
