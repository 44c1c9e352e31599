"""The part of `trikv status` that says how far the cache is from the best possible.

Decided here: the words for the cases, and what a person should do about each. This file does not
know how the windows are made.
"""

from collections.abc import Sequence
from typing import Any, Final

Row = dict[str, Any]

CASES: Final = {
    "idle": "nothing asked",
    "at-ceiling": "at the ceiling",
    "far-below": "far below it",
    "low-ceiling": "low ceiling",
}
ADVICE: Final = {
    "at-ceiling": (
        "At the ceiling: what could be found was found. More room would not help;",
        "only requests that repeat more would.",
    ),
    "far-below": (
        "Far below it: {lost} of the blocks asked for were missed a second time: evicted,",
        "or never kept. More room would help: raise --pool-size.",
    ),
    "low-ceiling": (
        "Low ceiling: hardly a block is asked for twice, so no cache could help. Should",
        "they repeat? `trikv status --json` shows what keeps engines' namespaces apart.",
    ),
}
COVERED: Final = 0.9
MINUTE_S: Final = 60
HOUR_S: Final = 3_600


def render_ceiling(windows: Sequence[Row]) -> list[str]:
    """The lines, or none while nothing was asked in any window."""
    if not any(row["askedBlocks"] for row in windows):
        return []
    own = {row["namespace"]: row for row in windows if row["namespace"]}  # the longest window's
    lines = ["", f"{'hit rates':<14}{'blocks':>11}  measured  reachable     r*   case"]
    lines += [_line(row, _window(row)) for row in windows if not row["namespace"]]
    if len(own) > 1:
        lines += [_line(row, f"  {name[:8]}") for name, row in own.items()]
    return [*lines, *_advice(windows)]


def _line(row: Row, name: str) -> str:
    count, case = row["askedBlocks"], CASES.get(row["case"], row["case"])
    if count == 0:
        return f"{name:<14}{count:>11}{'':<29}   {case}"
    rates = f"{row['hitRatio']:>10.1%}{row['reachableRatio']:>11.1%}{row['freshRatio']:>8.1%}"
    return f"{name:<14}{count:>11}{rates}   {case}"


def _window(row: Row) -> str:
    """Its length, with a mark while it is not full yet."""
    mark = "" if row["coveredSeconds"] > COVERED * row["seconds"] else " so far"
    return f"{_span(row['seconds'])}{mark}"


def _span(seconds: float) -> str:
    is_hours = seconds % HOUR_S == 0
    return f"{seconds / HOUR_S:.0f} h" if is_hours else f"{seconds / MINUTE_S:.0f} min"


def _advice(windows: Sequence[Row]) -> list[str]:
    """What the cases mean that everyone's windows show, that of the longest window first.

    A longer window sees losses that a shorter one takes for first sights, so it speaks first.
    """
    lines: list[str] = []
    said: set[str] = set()
    for row in reversed([row for row in windows if not row["namespace"]]):
        if row["case"] in ADVICE and row["case"] not in said:
            said.add(row["case"])
            lost = f"{row['reachableRatio'] - row['hitRatio']:.1%}"
            lines += ["", *(line.format(lost=lost) for line in ADVICE[row["case"]])]
    return lines
