"""How settings are read: one table of options feeds flags, environment, file and documentation.

Decided here: which source wins: flag, then environment (`TRIKV_POOL_SIZE`), then file
(`pool-size = "30gb"`), then default; and how sizes, times and choices are spelt. This file does not
know the settings.
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
SEVERAL_MAX: Final = 16


class SettingError(ValueError):
    """A setting cannot be used; the message is one line that names it."""


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


def number(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], Any]:
    """Reads numbers within bounds."""

    def read(text: str) -> Any:  # noqa: ANN401  # int or float, as the option says
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"expected a number from {low:g} to {high:g}")
        return value

    return read


def choice(*words: str) -> Callable[[str], str]:
    """Reads one of some words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return text

    return read


def size(low: int) -> Callable[[str], int]:
    """Reads sizes that are not too small."""

    def read(text: str) -> int:
        value = read_bytes(text)
        if value < low:
            raise ValueError(f"must be at least {low} bytes")
        return value

    return read


def size_or_auto(low: int) -> Callable[[str], int | None]:
    """Reads sizes that are not too small, or `auto` (None)."""
    read_size = size(low)
    return lambda text: None if text == "auto" else read_size(text)


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


def read_paths(text: str) -> tuple[str, ...]:
    """Read `/mnt/a,/mnt/b`; as a flag it may also be given several times.

    Raises:
        ValueError: none, too many, or one twice.
    """
    return _read_several(text, "paths")


def read_addresses(text: str) -> tuple[str, ...]:
    """Read `host1:50056,host2:50056`; as a flag it may also be given several times.

    Raises:
        ValueError: none, too many, or one twice.
    """
    return _read_several(text, "addresses")


def read_names(text: str) -> tuple[str, ...]:
    """Read `mlx5_0,mlx5_1`; as a flag it may also be given several times.

    Raises:
        ValueError: none, too many, or one twice.
    """
    return _read_several(text, "names")


REPEATABLE: Final = (read_paths, read_addresses, read_names)


def _read_several(text: str, what: str) -> tuple[str, ...]:
    items = tuple(item.strip() for item in text.split(","))
    if not all(items) or len(set(items)) < len(items) or len(items) > SEVERAL_MAX:
        raise ValueError(f"expected 1 to {SEVERAL_MAX} different {what}, separated by commas")
    return items


@dataclass(frozen=True, slots=True)
class Option:
    """One setting."""

    name: str  # as a flag, without the dashes
    read: Callable[[str], Any]
    default: Any
    help: str
    prefix: str = "TRIKV_"  # of its name in the environment

    @property
    def key(self) -> str:
        """Its name in `Settings`."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"{self.prefix}{self.key.upper()}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingError(message)


def parser(program: str, description: str, options: Sequence[Option]) -> argparse.ArgumentParser:
    """The command line of a program."""
    first = options[0]
    made = _Parser(
        prog=program,
        description=description,
        epilog=f"Each setting is also read from the environment (--{first.name}: {first.variable}) "
        "and from --config.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"{program} {__version__}")
    made.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file of settings, named as the flags ({first.prefix}CONFIG)",
    )
    for option in options:
        is_plain = option.default is not None and not isinstance(option.default, tuple)
        shown = f"{option.help} [{option.default}]" if is_plain else option.help
        if option.read is read_bool:
            made.add_argument(
                f"--{option.name}", nargs="?", const="true", metavar="true|false", help=shown
            )
        else:
            action = "append" if option.read in REPEATABLE else "store"
            made.add_argument(f"--{option.name}", metavar="VALUE", action=action, help=shown)
    return made


def load(
    made: argparse.ArgumentParser,
    options: Sequence[Option],
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Read settings from all sources, by their names.

    Raises:
        SettingError: the message is one line and names the setting and where it came from.
    """
    given = {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(made.parse_args(arguments)).items()
    }
    variable = f"{options[0].prefix}CONFIG"
    path = given["config"] or environ.get(variable)
    source = "--config" if given["config"] else variable
    file = _read_file(path, source, {option.name for option in options}) if path else {}
    values = {}
    for option in options:
        source, text = _first(
            (f"--{option.name}", given[option.key]),
            (option.variable, environ.get(option.variable)),
            (f"{path}: {option.name}", file.get(option.name)),
        )
        try:
            values[option.key] = option.default if text is None else option.read(text)
        except ValueError as error:
            raise SettingError(f"{source}: {text!r}: {error}") from None
    return values


def _first(*sources: tuple[str, str | None]) -> tuple[str, str | None]:
    return next(((name, text) for name, text in sources if text not in {None, ""}), ("", None))


def _read_file(path: str, source: str, known: set[str]) -> dict[str, str]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"{source}: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{source}: {path}: {error}") from None
    for name, value in table.items():
        if name not in known:
            raise SettingError(f"{path}: unknown setting {name!r}")
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            table[name] = ",".join(value)
        elif not isinstance(value, str | int | float):
            raise SettingError(f"{path}: {name}: expected a text, a number, true or false")
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in table.items()
    }
