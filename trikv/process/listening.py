"""The daemon's listening socket: which address is taken, and how it is guarded.

Decided here: modes of the socket and its folder, the lock that keeps two daemons off one path, and
what a stale file is. This file does not know connections.
"""

import contextlib
import errno
import fcntl
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from trikv import address as addresses
from trikv.address import Address

BACKLOG = 256
DESCRIPTORS_OWN = 64
"""For the pool, the loops, the log, the copiers, HTTP and what else is open without connections."""


class AddressError(Exception):
    """No address can be listened on; the message is one line."""


def connections_for(wanted: int) -> int:
    """How many connections this process may have, `wanted` at most.

    The soft limit on descriptors is raised as far as it takes and is allowed. A connection takes
    two: the socket, and a watch on the process at its other end.
    """
    needed = 2 * wanted + DESCRIPTORS_OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, (soft - DESCRIPTORS_OWN) // 2))


@contextlib.contextmanager
def bind(given: str | None, environ: Mapping[str, str]) -> Iterator[tuple[Address, socket.socket]]:
    """Listen on the given address, or on the first usual one that can be used.

    The socket file is removed at the end; its lock file stays, for whoever comes next.

    Raises:
        AddressError: it is taken, cannot be made, or would be open to other machines.
    """
    try:
        named = addresses.parse(given) if given else addresses.explicit(environ)
    except ValueError as error:
        raise AddressError(f"--addr: {error}") from None
    with contextlib.ExitStack() as stack:
        if named is not None:
            yield named, _enter(stack, named)
            return
        for path in (addresses.SYSTEM_SOCKET, addresses.runtime_socket(environ)):
            if path is None:
                continue
            try:
                sock = stack.enter_context(_open(Address(path=path)))
            except PermissionError:
                continue  # not ours to write: the next place
            except OSError as error:
                raise AddressError(f"unix:{path}: {error.strerror}") from None
            yield Address(path=path), sock
            return
        loopback = Address(host=addresses.DEFAULT_HOST, port=addresses.DEFAULT_PORT)
        yield loopback, _enter(stack, loopback)


@contextlib.contextmanager
def bind_tcp(address: Address, *, reaches_others: bool) -> Iterator[socket.socket]:
    """Listen on one TCP address.

    Args:
        address: host and port; port 0 takes a free one.
        reaches_others: whether other machines may reach it.

    Raises:
        AddressError: it is taken, cannot be made, or would be open to other machines.
    """
    with contextlib.ExitStack() as stack:
        yield _enter(stack, address, reaches_others=reaches_others)


def _enter(
    stack: contextlib.ExitStack, address: Address, *, reaches_others: bool = False
) -> socket.socket:
    try:
        return stack.enter_context(_open(address, reaches_others=reaches_others))
    except OSError as error:
        raise AddressError(f"--addr {address}: {error.strerror}") from None


@contextlib.contextmanager
def _open(address: Address, *, reaches_others: bool = False) -> Iterator[socket.socket]:
    if address.is_unix:
        opened = _open_unix(Path(address.path))
    else:
        opened = _open_tcp(address, reaches_others=reaches_others)
    with opened as sock:
        sock.setblocking(False)  # noqa: FBT003  # takes no keyword
        yield sock


@contextlib.contextmanager
def _open_tcp(address: Address, *, reaches_others: bool) -> Iterator[socket.socket]:
    if not address.is_loopback and not reaches_others:
        raise AddressError(
            f"--addr {address}: other machines could reach it, and there is no cluster secret yet"
        )
    with socket.socket(address.family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address.target)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise AddressError(f"--addr {address}: {reason}") from None
        sock.listen(BACKLOG)
        yield sock


@contextlib.contextmanager
def _open_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a socket of mode 0600; a folder that is made for it has mode 0700.

    A lock beside the socket tells a running daemon from a stale file, in whatever order two start.

    Raises:
        PermissionError: the folder cannot be written; another place may do.
        AddressError: every other reason.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:
        raise
    except OSError as error:
        if error.errno == errno.EROFS:
            raise PermissionError(error.errno, error.strerror) from None
        raise AddressError(f"--addr unix:{path}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AddressError(f"another trikv-daemon serves unix:{path}") from None
        with socket.socket(socket.AF_UNIX) as sock:
            _bind_private(sock, path)
            try:
                sock.listen(BACKLOG)
                yield sock
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _bind_private(sock: socket.socket, path: Path) -> None:
    if path.exists() and not path.is_socket():
        raise AddressError(f"--addr unix:{path}: a file that is no socket is there")
    path.unlink(missing_ok=True)  # we hold the lock: whoever made it is gone
    before = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        raise AddressError(f"--addr unix:{path}: {error.strerror}") from None
    finally:
        os.umask(before)
