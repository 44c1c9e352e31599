"""The metaserver's settings: names, defaults, units and bounds of each.

This file does not know how they are read (`options.py`), or what they are for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trikv import address as addresses
from trikv import options
from trikv.address import Address
from trikv.core.nodes import NODES_MAX
from trikv.core.proofs import Secret, read_secret
from trikv.options import Option, SettingError, choice, number, read_bool, size

PORT: Final = 50_056
PREFIX: Final = "TRIKV_META_"
MEMORY_BYTES_MIN: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """What the metaserver runs with; see OPTIONS for meaning and units."""

    addr: str
    advertise_addr: str | None
    memory: int
    max_nodes: int
    node_seconds: float
    cluster_secret_file: str | None
    insecure: bool
    http_addr: str | None
    log_level: str
    log_format: str


OPTIONS: Final = (
    Option("addr", str, f"127.0.0.1:{PORT}", "host:port to listen on", PREFIX),
    Option(
        "advertise-addr",
        str,
        None,
        "host:port by which nodes reach it, part of the proofs; default: --addr",
        PREFIX,
    ),
    Option(
        "memory",
        size(MEMORY_BYTES_MIN),
        1 << 30,
        "memory for the index, a hard limit: 68 to 76 bytes a block; when it is full, further "
        "blocks are not found on other nodes",
        PREFIX,
    ),
    Option(
        "max-nodes",
        number(int, 1, NODES_MAX),
        1_024,
        "daemons that may join; further ones are refused",
        PREFIX,
    ),
    Option(
        "node-seconds",
        number(float, 0.5, 3_600),
        5.0,
        "silence after which a node counts as dead",
        PREFIX,
    ),
    Option(
        "cluster-secret-file",
        str,
        None,
        "file whose first line, 16 bytes or more, all nodes of the cluster know",
        PREFIX,
    ),
    Option(
        "insecure",
        read_bool,
        default=False,
        help="listen without a secret where other machines can reach it",
        prefix=PREFIX,
    ),
    Option(
        "http-addr",
        str,
        None,
        "host:port of /metrics, /health and /ready, or off; default: 127.0.0.1:9092, and without "
        "HTTP when that is taken",
        PREFIX,
    ),
    Option(
        "log-level",
        choice("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error",
        PREFIX,
    ),
    Option(
        "log-format",
        choice("auto", "console", "json"),
        "auto",
        "console, json, or auto: console on a terminal",
        PREFIX,
    ),
)


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read settings from all sources.

    Raises:
        SettingError: the message is one line and names the setting and where it came from.
    """
    description = "Knows which host's trikv-daemon holds which block."
    made = options.parser("trikv-meta", description, OPTIONS)
    return Settings(**options.load(made, OPTIONS, arguments, environ))


def address_of(settings: Settings) -> Address:
    """Where to listen.

    Raises:
        SettingError: no address, or one that others can reach without a secret.
    """
    address = read_tcp(settings.addr, "--addr")
    if not (address.is_loopback or settings.cluster_secret_file or settings.insecure):
        raise SettingError(
            f"--addr {address}: other machines can reach it: give --cluster-secret-file, "
            "or --insecure where the network is yours alone"
        )
    return address


def read_tcp(text: str, name: str) -> Address:
    """Read host:port.

    Raises:
        SettingError: it is something else.
    """
    try:
        address = addresses.parse(text)
    except ValueError as error:
        raise SettingError(f"{name}: {error}") from None
    if address.is_unix:
        raise SettingError(f"{name}: {text!r} is no host:port")
    return address


def load_secret(path: str | None) -> Secret | None:
    """The cluster secret, None without a file.

    Raises:
        SettingError: the message is one line, names the file and does not show the secret.
    """
    if path is None:
        return None
    try:
        return read_secret(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingError(f"--cluster-secret-file {path}: {reason}") from None
