"""Who is at the other end of a connection, as the kernel says.

Decided here: whose processes are served: this user's and root's. This file does not read a byte of
what they send.
"""

import errno
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from trikv.core.errors import ForbiddenError, OverloadedError

Held = TypeVar("Held")

TCP_ESTABLISHED: Final = "01"
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


def peer_pid(sock: socket.socket) -> int | None:
    """The process at the other end of a unix socket, None over TCP.

    Raises:
        ForbiddenError: it belongs to another user.
    """
    allowed = {os.geteuid(), 0}
    if sock.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        pid, uid, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if uid not in allowed:
            raise ForbiddenError(
                f"process {pid} of user {uid} is refused: this daemon serves user {os.geteuid()}"
            )
        return int(pid)
    uid = _tcp_peer_uid(sock)
    if uid not in allowed:
        raise ForbiddenError(
            f"a TCP caller of user {uid} is refused: this daemon serves user {os.geteuid()}"
        )
    return None


def watched(pid: int | None, open_process: Callable[[int], Held]) -> Held | None:
    """The process at the other end, held for a session; None over TCP.

    Raises:
        OverloadedError: no descriptor is free for it.
        ForbiddenError: it cannot be seen from here, or has ended.
    """
    try:
        return open_process(pid) if pid is not None else None
    except OSError as error:
        kind = OverloadedError if error.errno in EXHAUSTED else ForbiddenError
        raise kind(f"process {pid} cannot be watched: {error.strerror}") from None


def _tcp_peer_uid(sock: socket.socket) -> int | None:
    """Who owns the other end of a loopback connection, from the kernel's own table.

    Only a row of exactly these two ends counts, established and owned by a socket: rows that wait
    for their end say user 0.
    """
    ends = (_as_in_table(sock.getpeername()), _as_in_table(sock.getsockname()))
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            columns = row.split()
            is_alive = columns[3] == TCP_ESTABLISHED and columns[9] != "0"
            if is_alive and (columns[1], columns[2]) == ends:
                return int(columns[7])
    return None


def _as_in_table(name: tuple[Any, ...]) -> str:
    """An address as /proc/net/tcp spells it: 32-bit words in this machine's byte order."""
    host, port = str(name[0]), int(name[1])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    raw = socket.inet_pton(family, host)
    words = struct.unpack(f"={len(raw) // 4}I", raw)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
