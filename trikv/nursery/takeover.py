"""`trikv-daemon --takeover`: the daemon that runs is asked to end, and this one takes its place.

Decided here: which process is meant, and when it is gone. It is the one at the other end of the
unix socket, as the kernel says, held by a pidfd, so that no other process is ever ended. It drains
as at any SIGTERM. This file does not know what either of them keeps.
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trikv import address as addresses
from trikv.address import Address
from trikv.core.errors import ForbiddenError
from trikv.process.callers import peer_pid

CONNECT_S: Final = 5.0
PATIENCE_S: Final = 30.0


class TakeoverError(Exception):
    """The running daemon could not be ended; the message is one line."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A daemon that was there."""

    pid: int
    address: Address


def take_over(
    given: str | None, environ: Mapping[str, str], *, drain_s: float = 0.0
) -> Ended | None:
    """End the daemon whose place this one will have, and wait until its process is gone.

    Args:
        given: the address that this daemon was told to listen on, if any.
        environ: for the address, as when listening.
        drain_s: what calls in flight may take; on top of it the other has `PATIENCE_S`.

    Returns:
        Who it was; None when nobody serves there.

    Raises:
        TakeoverError: it is another user's, or does not end; it goes on.
    """
    for address in _candidates(given, environ):
        with contextlib.ExitStack() as stack:
            pidfd, pid = _hold(stack, address)
            if pidfd is None:
                continue
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            waiting = select.poll()
            waiting.register(pidfd, select.POLLIN)
            if not waiting.poll((PATIENCE_S + drain_s) * 1e3):
                patience = f"{PATIENCE_S + drain_s:g} s"
                raise TakeoverError(f"--takeover: process {pid} does not end in {patience}")
            return Ended(pid, address)
    return None


def _candidates(given: str | None, environ: Mapping[str, str]) -> list[Address]:
    try:
        named = addresses.parse(given) if given else addresses.explicit(environ)
    except ValueError:
        return []  # refused in clearer words when it is to be listened on
    if named is not None:
        if not named.is_unix:
            raise TakeoverError(
                f"--takeover: {named} is no unix socket: who serves it is not known"
            )
        return [named]
    paths = (addresses.SYSTEM_SOCKET, addresses.runtime_socket(environ))
    return [Address(path=path) for path in paths if path is not None]


def _hold(stack: contextlib.ExitStack, address: Address) -> tuple[int | None, int]:
    """The process that listens there, held so that its number cannot become another's."""
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.settimeout(CONNECT_S)
    try:
        sock.connect(address.path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        return None, 0
    except OSError as error:
        raise TakeoverError(f"--takeover: {address}: {error.strerror or error}") from None
    try:
        pid = peer_pid(sock)
        assert pid is not None
        pidfd = os.pidfd_open(pid)
    except ForbiddenError as error:
        raise TakeoverError(f"--takeover: {address}: {error}") from None
    except OSError as error:  # it runs in another pid namespace, or has just ended
        raise TakeoverError(f"--takeover: {address}: process of it: {error.strerror}") from None
    stack.callback(os.close, pidfd)
    if not _is_open(sock):  # it ended meanwhile: the number may be another's by now
        return None, 0
    return pidfd, pid


def _is_open(sock: socket.socket) -> bool:
    sock.settimeout(0)
    try:
        return sock.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
