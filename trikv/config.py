"""The daemon's settings: one table of options feeds flags, environment, file and documentation.

Decided here: names, defaults, units and bounds of every setting, and which source wins: flag, then
environment (`TRIKV_POOL_SIZE`), then file (`pool-size = "30gb"`), then default. This file does not
know what the settings are for.
"""

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NoReturn

from trikv import __version__

UNITS: Final = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}


SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DURATIONS_MAX: Final = 6


class SettingError(ValueError):
    """A setting cannot be used; the message is one line that names it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the daemon runs with; see OPTIONS for meaning and units."""

    addr: str | None
    pool_size: int | None
    slab_size: int | None
    use_hugepages: bool
    max_blocks: int | None
    max_engines: int
    eviction_policy: str
    enable_lfu_admission: bool
    quota_file: str | None
    record_trace: str | None
    trace_block_tokens: int
    copy_threads: int
    gpu_staging: int
    lease_seconds: float
    heartbeat_seconds: float
    fill_seconds: float
    drain_seconds: float
    freeze_seconds: float
    state_dir: str | None
    http_addr: str | None
    metric_hll_windows: tuple[float, ...]
    log_level: str
    log_format: str


def read_bytes(text: str) -> int:
    """Read `30gb`, `512MB`, `4096`; units are 1,024-based.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*([kmgt]?i?b?)\s*", text.lower())
    if match is None:
        raise ValueError("expected a size such as 512mb or 30gb")
    unit = match[2].replace("i", "")
    return int(Fraction(match[1]) * UNITS[unit if unit.endswith("b") or not unit else f"{unit}b"])


def read_bool(text: str) -> bool:
    """Read true/false, yes/no, on/off, 1/0.

    Raises:
        ValueError: none of these.
    """
    word = text.strip().lower()
    if word in {"true", "yes", "on", "1"}:
        return True
    if word in {"false", "no", "off", "0"}:
        return False
    raise ValueError("expected true or false")


def _number(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    def read(text: str) -> Any:  # noqa: ANN401  # int or float, as the option says
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return value

    return read


def _choice(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return read


def _size(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = read_bytes(text)
        if value < low:
            raise ValueError(f"must be at least {low} bytes")
        return value

    return read


def read_durations(text: str) -> tuple[float, ...]:
    """Read `15m,1h,24h`, shortest first.

    Raises:
        ValueError: not one to `DURATIONS_MAX` different times from a minute to 30 days.
    """
    seconds = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*([smhd])\s*", part.lower())
        value = int(match[1]) * SECONDS[match[2]] if match is not None else 0
        if not SECONDS["m"] <= value <= 30 * SECONDS["d"]:
            raise ValueError("expected times from 1m to 30d, such as 15m,1h,24h")
        seconds.append(float(value))
    if len(seconds) > DURATIONS_MAX or len(set(seconds)) < len(seconds):
        raise ValueError(f"expected at most {DURATIONS_MAX} different times")
    return tuple(sorted(seconds))


@dataclass(frozen=True, slots=True)
class Option:
    """One setting."""

    name: str  # as a flag, without the dashes
    read: Callable[[str], Any]
    default: Any
    help: str

    @property
    def key(self) -> str:
        """Its name in `Settings`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"TRIKV_{self.key.upper()}"


OPTIONS: Final = (
    Option(
        "addr",
        str,
        None,
        "unix:/path or host:port to listen on; default: TRIKV_SOCKET, TRIKV_HOST and TRIKV_PORT, "
        "/run/trikv/trikv.sock, the user's runtime directory, 127.0.0.1:50055: "
        "the first that can be used",
    ),
    Option(
        "pool-size",
        _size(4 << 20),
        None,
        "host memory for blocks, e.g. 30gb; default: half of what is available",
    ),
    Option(
        "slab-size",
        _size(1 << 20),
        None,
        "unit in which models take room from each other; default: a 64th of the pool, 2mb to 1gb",
    ),
    Option(
        "use-hugepages",
        read_bool,
        default=False,
        help="back the pool with reserved 2 MiB pages (vm.nr_hugepages)",
    ),
    Option(
        "max-blocks",
        _number(int, 1, 1 << 30),
        None,
        "rows of the index; default: one a 4 KiB page of the pool, at most 16 million",
    ),
    Option("max-engines", _number(int, 1, 4096), 64, "engines that may be attached at once"),
    Option(
        "eviction-policy",
        _choice("leaf-first-lru", "s3-fifo"),
        "leaf-first-lru",
        "which blocks go when room is needed: leaf-first-lru or s3-fifo",
    ),
    Option(
        "enable-lfu-admission",
        read_bool,
        default=False,
        help="new blocks stay only when used more often than what they displace (W-TinyLFU before "
        "leaf-first-lru); for pools that are tiny beside what is asked for",
    ),
    Option(
        "quota-file",
        str,
        None,
        "TOML file with floor and share of the pool by tenant; read again when it changes",
    ),
    Option(
        "record-trace",
        str,
        None,
        "file for what engines ask for and save, without content, for `trikv replay`; at most 1gb",
    ),
    Option(
        "trace-block-tokens",
        _number(int, 1, 1 << 20),
        16,
        "tokens of a block, as the recorded trace says",
    ),
    Option(
        "copy-threads",
        _number(int, 1, 64),
        2,
        "threads that copy in each direction, for engines without a GPU",
    ),
    Option(
        "gpu-staging",
        _size(1 << 20),
        384 << 20,
        "GPU memory in which scattered pieces of blocks are gathered, on each GPU with engines; "
        "both directions together",
    ),
    Option(
        "lease-seconds",
        _number(float, 1, 3600),
        30.0,
        "how long blocks found by a query stay loadable",
    ),
    Option(
        "heartbeat-seconds",
        _number(float, 0.5, 3600),
        10.0,
        "silence after which an engine counts as gone",
    ),
    Option(
        "fill-seconds",
        _number(float, 1, 3600),
        30.0,
        "time in which all ranks must have saved a block",
    ),
    Option(
        "drain-seconds", _number(float, 0, 600), 5.0, "time that calls in flight get at SIGTERM"
    ),
    Option(
        "freeze-seconds",
        _number(float, 0, 3600),
        20.0,
        "a daemon frozen in the middle of a load is killed by the kernel after this time, so that "
        "the engine knows that nothing is written any more; 0: the engine waits",
    ),
    Option(
        "state-dir",
        str,
        None,
        "folder for the small file of hit-rate windows that outlives the daemon; default: beside "
        "the unix socket; a daemon on TCP keeps none",
    ),
    Option(
        "http-addr",
        str,
        None,
        "host:port of /metrics, /health and /ready, or off; default: 127.0.0.1:9091, and without "
        "HTTP when that is taken",
    ),
    Option(
        "metric-hll-windows",
        read_durations,
        (900.0, 3600.0, 86400.0),
        "how far back hit rates and their ceilings look [15m,1h,24h]",
    ),
    Option(
        "log-level",
        _choice("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error",
    ),
    Option(
        "log-format",
        _choice("auto", "console", "json"),
        "auto",
        "console, json, or auto: console on a terminal",
    ),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


def parser() -> argparse.ArgumentParser:
    """The command line of `trikv-daemon`."""
    made = _Parser(
        prog="trikv-daemon",
        description="Keeps vLLM's KV blocks on this host while engines come and go.",
        epilog="Each setting is also read from the environment (--pool-size: TRIKV_POOL_SIZE) "
        "and from --config.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"trikv-daemon {__version__}")
    made.add_argument(
        "--config", metavar="FILE", help="TOML file of settings, named as the flags (TRIKV_CONFIG)"
    )
    for option in OPTIONS:
        is_plain = option.default is not None and not isinstance(option.default, tuple)
        shown = f"{option.help} [{option.default}]" if is_plain else option.help
        if option.read is read_bool:
            made.add_argument(
                f"--{option.name}", nargs="?", const="true", metavar="true|false", help=shown
            )
        else:
            made.add_argument(f"--{option.name}", metavar="VALUE", help=shown)
    return made


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read settings from all sources.

    Raises:
        SettingError: the message is one line and names the setting and where it came from.
    """
    given = vars(parser().parse_args(arguments))
    path = given["config"] or environ.get("TRIKV_CONFIG")
    source = "--config" if given["config"] else "TRIKV_CONFIG"
    file = _read_file(path, source) if path else {}
    values = {}
    for option in OPTIONS:
        source, text = _first(
            (f"--{option.name}", given[option.key]),
            (option.variable, environ.get(option.variable)),
            (f"{path}: {option.name}", file.get(option.name)),
        )
        try:
            values[option.key] = option.default if text is None else option.read(text)
        except ValueError as error:
            raise SettingError(f"{source}: {text!r}: {error}") from None
    return Settings(**values)


def _first(*sources: tuple[str, str | None]) -> tuple[str, str | None]:
    return next(((name, text) for name, text in sources if text not in {None, ""}), ("", None))


def _read_file(path: str, source: str) -> dict[str, str]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{source}: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{source}: {path}: {error}") from None
    known = {option.name for option in OPTIONS}
    for name, value in table.items():
        if name not in known:
            raise SettingError(f"{path}: unknown setting {name!r}")
        if not isinstance(value, str | int | float):
            raise SettingError(f"{path}: {name}: expected a text, a number, true or false")
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in table.items()
    }
