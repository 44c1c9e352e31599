"""Who is at the other end of a socket, and whether that process is dead.

Decided here: which daemons an engine trusts (its own user's and root's), and what counts as proof
of death. This file does not know RPC; everything in it is a few system calls.
"""

import contextlib
import ctypes
import os
import select
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SO_PEERPIDFD: Final = 77
PR_SET_PTRACER: Final = 0x59616D61
ROOT: Final = 0


@dataclass(frozen=True, slots=True)
class Peer:
    """Process that listens on a unix socket, as the kernel says; pid 0: not visible from here."""

    pid: int
    uid: int

    @property
    def is_trusted(self) -> bool:
        """True for our own user's processes and root's."""
        return self.uid in {os.getuid(), ROOT}


class Watch:
    """A handle of processes that can tell, for certain, that all of them have ended.

    Ownership: each descriptor is closed with its last reference.
    """

    __slots__ = ("_held",)

    def __init__(self, *held: "_Held") -> None:
        self._held = held

    def is_dead(self) -> bool:
        """True once all threads of all processes have ended: nothing of them writes memory."""
        return all(one.is_dead() for one in self._held)

    def joined(self, pids: Iterable[int]) -> "Watch | None":
        """The same with more processes, which are alive now; None where that is not possible."""
        try:
            return Watch(*self._held, *(_Held(os.pidfd_open(pid)) for pid in pids))
        except OSError:
            return None


class _Held:
    """One process."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def is_dead(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def peer_of(sock: socket.socket) -> Peer:
    """Ask the kernel who listens at the other end of a unix socket."""
    size = struct.calcsize("iII")
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid=pid, uid=uid)


def watch(sock: socket.socket, peer: Peer) -> Watch | None:
    """Open a handle of the peer; None where this kernel or namespace cannot.

    The number of a process may be reused, so call it before the peer is asked anything: when it
    answers afterwards, the handle is its own.
    """
    with contextlib.suppress(OSError):
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
        return Watch(_Held(struct.unpack("i", raw)[0]))
    if peer.pid > 0:
        with contextlib.suppress(OSError):
            return Watch(_Held(os.pidfd_open(peer.pid)))
    return None


def allow_tracing(pid: int) -> None:
    """Let `pid` read and write this process's memory, where Yama asks for it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
