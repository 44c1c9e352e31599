"""Counters of what the connector did, for vLLM's statistics and one line in the log.

Decided here: their names. This file does not know vLLM; the facade wraps the dict in vLLM's class.
"""

from collections.abc import Mapping


class Tally:
    """Counts since the last `take`, and since the start."""

    def __init__(self) -> None:
        self.total: dict[str, int] = {}
        self._recent: dict[str, int] = {}

    def add(self, name: str, count: int = 1) -> None:
        """Count something."""
        if count:
            self._recent[name] = self._recent.get(name, 0) + count
            self.total[name] = self.total.get(name, 0) + count

    def take(self) -> dict[str, int]:
        """The counts since the last call."""
        recent, self._recent = self._recent, {}
        return recent


def merged(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The sums of both."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def line(total: Mapping[str, int]) -> str:
    """The counts as a person reads them."""
    return ", ".join(f"{name.replace('_', ' ')} {total[name]}" for name in sorted(total))
