"""What both ends of a capnp connection do alike: sockets to streams, errors to ours.

Needs nothing but pycapnp, so that commands can use it where a daemon's packages are missing.
"""

import socket
from collections.abc import Callable
from typing import Any

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


async def open_stream(sock: socket.socket) -> Any:
    """A connected socket as pycapnp takes it."""
    if sock.family == socket.AF_UNIX:
        return await capnp.AsyncIoStream.create_unix_connection(sock=sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await capnp.AsyncIoStream.create_connection(sock=sock)
