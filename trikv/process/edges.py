"""What both ends of a capnp connection do alike: sockets to streams, errors to ours.

Needs nothing but pycapnp, so that commands can use it where a daemon's packages are missing.
"""

import socket
from collections.abc import Callable
from typing import Any, Final

import capnp

from trikv.core.errors import BadRequestError


def read(function: Callable[[Any], Any], message: Any) -> Any:
    """Read a message; what pycapnp cannot read is the sender's fault.

    Raises:
        BadRequestError: the message is malformed or breaks a bound.
    """
    try:
        return function(message)
    except (capnp.KjException, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise BadRequestError(f"unreadable message: {first_line(str(error))}") from None


def first_line(text: str) -> str:
    """What of pycapnp's errors can be shown."""
    return text.partition("\n")[0][:200]


KEEPALIVE: Final = {
    socket.TCP_KEEPIDLE: 5,  # seconds without a byte until the other end's kernel is asked
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_KEEPCNT: 3,
}
"""A host that lost its power says nothing: else its connection would be kept for ever, until there
is room for no other. One whose process stands still is there, as its kernel answers."""


UNANSWERED_MS: Final = 11_000
"""The same where it is gone in the midst of a message: then keepalive does not ask."""


async def open_stream(sock: socket.socket) -> Any:
    """A connected socket as pycapnp takes it."""
    if sock.family == socket.AF_UNIX:
        return await capnp.AsyncIoStream.create_unix_connection(sock=sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return await capnp.AsyncIoStream.create_connection(sock=sock)
