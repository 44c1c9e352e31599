"""How far the cache is from the best possible: two ceilings, and the three cases an operator meets.

Decided here: what a ceiling is, and when a cache counts as being at it. This file does not know how
blocks are counted.

N blocks were asked for in a window, each request's once; M of them were not at hand; U are distinct
among the N, D among the M. Then M >= D, and

| rate | formula | meaning |
| --- | --- | --- |
| measured | (N - M) / N | what was at hand |
| reachable | (N - D) / N | had nothing been lost that was missed in this window: above the measured one, however old the cache |
| fresh, r* | (N - U) / N | an endless cache that was empty when the window began; an old one may exceed it |
"""  # noqa: E501  # a table

import enum
from dataclasses import dataclass
from typing import Final

TIERS: Final = ("pinned", "ssd", "peer")
"""Where a hit can be served from, in the order in which `WindowFacts.hit_blocks` counts."""

LOW_CEILING: Final = 0.2
FAR_BELOW: Final = 0.05


class Case(enum.Enum):
    """What a window says; the values are names on the wire and in metrics."""

    IDLE = "idle"  # nothing was asked
    LOW_CEILING = "low-ceiling"  # hardly a block is asked for twice: no cache could help
    FAR_BELOW = "far-below"  # blocks came back after they had been lost: more room would help
    AT_CEILING = "at-ceiling"  # nearly all that could be found was found


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """What was asked in one window.

    Attributes:
        length_s: how far back the window looks at most.
        covered_s: how much of that has passed since counting began.
        namespace: whose requests, a fingerprint in hex; empty: everyone's.
        asked_blocks: N.
        hit_blocks: a tier: blocks promised from there; their sum is N - M.
        distinct_blocks: U, an estimate, never above N.
        distinct_missed_blocks: D, an estimate, never above M and U.
    """

    length_s: float
    covered_s: float
    namespace: str
    asked_blocks: int
    hit_blocks: tuple[int, ...]
    distinct_blocks: int
    distinct_missed_blocks: int

    @property
    def measured(self) -> float:
        """Share of the blocks that were at hand."""
        return self._share(sum(self.hit_blocks))

    @property
    def reachable(self) -> float:
        """The measured rate, had every block that was missed twice been kept."""
        return self._share(self.asked_blocks - self.distinct_missed_blocks)

    @property
    def fresh(self) -> float:
        """r*: what an endless cache would reach that was empty when the window began."""
        return self._share(self.asked_blocks - self.distinct_blocks)

    @property
    def case(self) -> Case:
        """Which of the cases applies."""
        if self.asked_blocks == 0:
            return Case.IDLE
        if self.reachable < LOW_CEILING:
            return Case.LOW_CEILING
        return Case.FAR_BELOW if self.reachable - self.measured > FAR_BELOW else Case.AT_CEILING

    def _share(self, blocks: int) -> float:
        return blocks / self.asked_blocks if self.asked_blocks else 0.0
