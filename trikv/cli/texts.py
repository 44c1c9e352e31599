"""Numbers and names as people read them, in few columns.

Decided here: units, and what is left of a text that is too long.
"""

import textwrap
from typing import Final

KIB: Final = 1024
WIDTH: Final = 80


def size(count: int) -> str:
    """Bytes as people read them."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < KIB:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= KIB
    return f"{value:.1f} TiB"


def span(seconds: float) -> str:
    """A time as people read it."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (rest, "s"))
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0 s"


def end_of(text: str, width: int) -> str:
    """The end of a text that is too long, as of a path."""
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def cut(text: str, width: int) -> str:
    """A text that fits."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def indented(text: str) -> list[str]:
    """A text under a row of a table whose first column is ten wide."""
    return textwrap.wrap(text, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)
