"""What every benchmark prints: a table for people, or one JSON object a line for scripts."""

import json
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure.

    Attributes:
        baseline: the same figure of something else, measured in the same run.
        target: what `value` should not exceed; with `is_ratio_target`, what the ratio should reach.
        facts: what else the same measurement says, by name.
    """

    case: str
    metric: str
    value: float
    unit: str
    target: float | None = None
    baseline: float | None = None
    more_is_better: bool = False
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Value over baseline."""
        return None if not self.baseline else self.value / self.baseline

    @property
    def is_ok(self) -> bool | None:
        """Whether the target is held; None without one."""
        if self.target is None:
            return None
        if self.more_is_better:
            return (self.ratio if self.ratio is not None else self.value) >= self.target
        return self.value <= self.target


def commit() -> str:
    """The checked-out commit, with a mark when files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def print_json(bench: str, lines: Iterable[Line]) -> None:
    """One object a line, with the fields that all benchmarks share."""
    where = {"commit": commit(), "host": platform.node()}
    for line in lines:
        row = {
            "bench": bench,
            "case": line.case,
            "metric": line.metric,
            "value": round(line.value, 4),
            "unit": line.unit,
            "baseline": None if line.baseline is None else round(line.baseline, 4),
            "ratio": None if line.ratio is None else round(line.ratio, 3),
            "target": line.target,
            "ok": line.is_ok,
        }
        print(json.dumps(row | dict(line.facts) | where), flush=True)


def print_table(lines: Iterable[Line]) -> None:
    """For people."""
    for line in lines:
        sign = ">=" if line.more_is_better else "<="
        target = "" if line.target is None else f"{sign} {line.target:g}"
        missed = "MISSED" if line.is_ok is False else ""
        beside = "" if line.baseline is None else f"beside {line.baseline:.3f} ({line.ratio:.2f}x)"
        value = f"{line.value:10.3f} {line.unit:9}"
        facts = " ".join(f"{name}={fact}" for name, fact in line.facts.items())
        what = f"{line.case:30} {line.metric:24} {value} {target:9} {beside} {missed} {facts}"
        print(what.rstrip(), flush=True)
