"""One connection to a metaserver: Cap'n Proto's side, on asyncio.

Decided here: the proof before anything else, and what a failed call is called. Answers become plain
records here: no capnp object leaves this file. It does not know when what is called.
"""

import asyncio
import secrets
import socket
from typing import Any, Final

import capnp

from trikv import __version__, wire
from trikv.address import Address
from trikv.core.adverts import Part
from trikv.core.errors import KvError
from trikv.core.proofs import NONCE_BYTES, Party, Secret, is_proven, prove
from trikv.core.words import Words
from trikv.meta import messages
from trikv.meta.messages import Beat, Greeting, Located
from trikv.process.edges import first_line, open_stream

LOST: Final = "lost"
FORBIDDEN: Final = "forbidden"
OVERLOADED: Final = "overloaded"


class MetaError(Exception):
    """A metaserver did not do what was asked; the message is one line.

    Attributes:
        code: that of the refusal, or `lost`: there is no connection any more.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Link:
    """A connection on which both sides have proven that they know the secret."""

    def __init__(self, stream: Any, client: Any) -> None:
        self._stream = stream
        self._client = client
        self._session: Any = None
        self.epoch = 0
        self.silence_s = 0.0

    @property
    def _live(self) -> Any:
        """The session.

        Raises:
            MetaError: we have hung up.
        """
        if self._session is None:
            raise MetaError(LOST, "the connection is closed")
        return self._session

    async def start(self, role: str, address: str, secret: Secret | None) -> None:
        """Greet and prove.

        Raises:
            MetaError: refused, by either side.
        """
        meta = self._client.bootstrap().cast_as(wire.SCHEMA.Meta)
        reply = await introduce(meta, role, address, secret)
        self._session = reply.session
        self.epoch, self.silence_s = int(reply.epoch), float(reply.silenceSeconds)

    async def join(self, epoch: int, rails: list[str]) -> bool:
        """See the schema; returns whether all was announced already.

        Raises:
            MetaError: refused or lost, as all calls here.
        """
        ok = checked((await sent(self._live.join(epoch=epoch, rails=rails))).reply)
        return bool(ok.isComplete)

    async def begin(self) -> None:
        """See the schema."""
        checked((await sent(self._live.begin())).reply)

    async def finish(self) -> None:
        """See the schema."""
        checked((await sent(self._live.finish())).reply)

    async def announce(self, parts: list[Part]) -> int:
        """See the schema; returns how many were declined."""
        request = self._live.announce_request()
        messages.write_adverts(request.init("adverts", len(parts)), parts)
        return int(checked((await sent(request.send())).reply).declinedCount)

    async def locate(self, origin: bytes, words: Words) -> list[Located]:
        """See the schema."""
        width = wire.HASH_BYTES_MAX
        call = self._live.locate(
            origin=origin, hashBytes=width, hashes=wire.words_to_hashes(words, width)
        )
        ok = checked((await sent(call)).reply)
        return list(read_answer(lambda message: messages.read_plan(message, len(words)), ok))

    async def heartbeat(self, lent: int) -> Beat:
        """See the schema."""
        ok = checked((await sent(self._live.heartbeat(lentBlocks=lent))).reply)
        return messages.read_beat(ok)

    async def leave(self) -> None:
        """See the schema."""
        await sent(self._live.leave())

    async def status(self) -> dict[str, Any]:
        """See the schema."""
        reply = await sent(self._live.status())
        facts: dict[str, Any] = reply.status.to_dict()
        return facts

    def close(self) -> None:
        """Hang up; twice is fine."""
        self._session = None
        self._stream.close()
        self._client.close()


async def introduce(door: Any, role: str, address: str, secret: Secret | None) -> Any:
    """Greet whoever listens behind a gate, prove, and have it prove.

    Returns:
        What it answers to the proof.

    Raises:
        MetaError: refused, by either side.
    """
    party = Party(role, address, secrets.token_bytes(NONCE_BYTES))
    request = door.hello_request()
    messages.write_greeting(request.greeting, Greeting(party, f"trikv {__version__}"))
    challenge = checked((await sent(request.send())).reply)
    theirs = read_answer(messages.read_greeting, challenge.greeting).party
    if secret is None and challenge.needsProof:
        raise MetaError(FORBIDDEN, "it asks for the secret: give --cluster-secret-file")
    if secret is not None and not challenge.needsProof:
        raise MetaError(FORBIDDEN, "it has no secret, and ours is not for it")
    proof = b"" if secret is None else prove(secret, party, theirs, is_dialer=True)
    reply = checked((await sent(door.prove(proof=proof))).reply)
    if secret is not None and not is_proven(
        secret, party, theirs, bytes(reply.proof), is_dialer=False
    ):
        raise MetaError(FORBIDDEN, "it does not know the secret of this cluster")
    return reply


async def dial(address: Address, role: str, own_address: str, secret: Secret | None) -> Link:
    """Connect and prove.

    Ownership: the link is the caller's to close.

    Raises:
        MetaError: nobody is there, or one of the two sides refused the other.
    """
    link = Link(*await open_client(address))
    try:
        await link.start(role, own_address, secret)
    except BaseException:
        link.close()
        raise
    return link


async def open_client(address: Address) -> tuple[Any, Any]:
    """A connection on which nothing was said: its stream and pycapnp's client, both to close.

    Raises:
        MetaError: nobody is there.
    """
    try:
        sock = await _connect(address)
    except OSError as error:
        raise MetaError(LOST, error.strerror or str(error)) from None
    try:
        stream = await open_stream(sock)
    except OSError as error:
        sock.close()
        raise MetaError(LOST, error.strerror or str(error)) from None
    except BaseException:
        sock.close()
        raise
    limit = messages.MESSAGE_WORDS_MAX
    return stream, capnp.TwoPartyClient(stream, traversal_limit_in_words=limit)


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, target = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)  # noqa: FBT003  # takes no keyword
    try:
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


async def sent(call: Any) -> Any:
    """Wait for an answer.

    Raises:
        MetaError: there will be none.
    """
    try:
        return await call
    except capnp.KjException as error:
        raise MetaError(LOST, first_line(error.description)) from None


def checked(reply: Any) -> Any:
    """The good half of a reply.

    Raises:
        MetaError: it is the other half.
    """
    if reply.which() == "error":
        raise MetaError(str(reply.error.code), str(reply.error.message))
    return reply.ok


def read_answer(function: Any, message: Any) -> Any:
    """Read what a metaserver says, which may be wrong.

    Raises:
        MetaError: it is.
    """
    try:
        return function(message)
    except KvError as error:
        raise MetaError(error.code, str(error)) from None
