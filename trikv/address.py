"""Where the daemon listens, and the order in which clients look for it.

Decided here: the spelling of addresses and the search order, the same for daemon, connector and
CLI. This file does not know sockets or RPC; it must stay importable in an engine's process.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_SOCKET = "/run/trikv/trikv.sock"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50055
PORT_MAX = 65_535
UNIX_PATH_BYTES_MAX = 107  # sun_path of Linux, less the terminating zero


@dataclass(frozen=True, slots=True)
class Address:
    """A unix socket (`path`) or a TCP endpoint (`host`, `port`)."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """True for a unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach it."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may mean anything
            return False

    @property
    def is_wildcard(self) -> bool:
        """True when it names every interface, and so none that could be dialled."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    @property
    def family(self) -> socket.AddressFamily:
        """The socket family to create."""
        if self.is_unix:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def target(self) -> str | tuple[str, int]:
        """What `connect` and `bind` take."""
        return self.path if self.is_unix else (self.host, self.port)

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str) -> Address:
    """Read `unix:/path`, `/path`, `host:port`, `[v6]:port` or `tcp:host:port`.

    Raises:
        ValueError: the message is one line and says what is expected.
    """
    rest = text.strip()
    if rest.startswith(("unix:", "/")):
        path = rest.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{text!r}: a unix socket needs an absolute path")
        if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
            raise ValueError(
                f"{text!r}: a unix socket path has at most {UNIX_PATH_BYTES_MAX} bytes"
            )
        return Address(path=path)
    host, colon, port = rest.removeprefix("tcp:").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= PORT_MAX:
        raise ValueError(f"{text!r} is no address: expected unix:/path or host:port")
    return Address(host=host, port=int(port))


def explicit(environ: Mapping[str, str]) -> Address | None:
    """The address that the environment names, if it does.

    `TRIKV_SOCKET` (a path) comes before `TRIKV_HOST` and `TRIKV_PORT`.

    Raises:
        ValueError: a value cannot be read.
    """
    if path := environ.get("TRIKV_SOCKET"):
        return parse(path if path.startswith(("unix:", "/")) else f"unix:{path}")
    if environ.get("TRIKV_HOST") or environ.get("TRIKV_PORT"):
        host = environ.get("TRIKV_HOST") or DEFAULT_HOST
        port = environ.get("TRIKV_PORT") or str(DEFAULT_PORT)
        return parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return None


def runtime_socket(environ: Mapping[str, str]) -> str | None:
    """The socket path in the user's own runtime directory, where there is one."""
    folder = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return f"{folder}/trikv/trikv.sock" if _is_there(folder, is_folder=True) else None


def search(environ: Mapping[str, str], given: str | None = None) -> list[Address]:
    """Addresses to try, best first: the given or the environment's alone, else the usual places.

    Raises:
        ValueError: `given` or the environment cannot be read.
    """
    named = parse(given) if given else explicit(environ)
    if named is not None:
        return [named]
    paths = [SYSTEM_SOCKET, runtime_socket(environ)]
    found = [Address(path=path) for path in paths if path and _is_there(path)]
    return [*found, Address(host=DEFAULT_HOST, port=DEFAULT_PORT)]


def _is_there(path: str, *, is_folder: bool = False) -> bool:
    try:
        return Path(path).is_dir() if is_folder else Path(path).exists()
    except OSError:  # a folder of another user: whatever is in it is not for us
        return False
