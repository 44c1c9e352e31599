"""What the rounds of `bench.ttft` say, as lines: figures, and whether tokens and bytes are equal.

This file starts nothing and reads no clock.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.lines import Line
from bench.ttft_engine import Measured

OWN: Final = "own"
COLD, WARM, RESTARTED = "cold", "warm", "restarted"
TITLES: Final = {WARM: "warm", RESTARTED: "warm, engine restarted", COLD: "cold", OWN: "own"}
TARGETS_MS: Final = {("trikv-held", WARM): 38.0}
PEER: Final = "pegaflow"

Digests = dict[tuple[int, int], str]
"""By prompt and position of the block in it."""


def checked(name: str) -> str:
    """The round beside a timed one, in which bytes are looked at."""
    return f"checked-{name}"


@dataclass
class Bytes:
    """What the blocks held, by round."""

    saved: dict[str, Digests] = field(default_factory=dict)
    loaded: dict[str, Digests] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)  # blocks that a forward waited for

    def add(self, notes: Iterable[Mapping[str, Any]]) -> None:
        """Take what a connector has noted; of a block that was saved twice, the first time."""
        for note in notes:
            name, prompt, _ = note["request"].split("/", 2)
            self.held[name] += note["is_held"]
            rounds = self.saved if note["kind"] == "save" else self.loaded
            rounds.setdefault(name, {}).setdefault(
                (int(prompt), int(note["position"])), note["digest"]
            )

    def equal(self, name: str, expected: Sequence[tuple[int, int]]) -> bool:
        """Whether every block that is expected was loaded in a round, as it was saved when cold.

        Blocks of different tokens must differ, or nothing was looked at.
        """
        saved = self.saved.get(checked(COLD), {})
        loaded = self.loaded.get(checked(name), {})
        if len(set(saved.values())) < len(saved):
            return False
        return bool(expected) and all(
            place in saved and loaded.get(place) == saved[place] for place in expected
        )


@dataclass
class Verdict:
    """Takes rounds connector by connector; the first output of a prompt is what all must equal.

    Attributes:
        block_tokens: of the engines.
        tokens: of a prompt.
        looked_at: places of the blocks that are compared.
        has_targets: the model is the one that targets are given for.
    """

    block_tokens: int
    tokens: int
    looked_at: Sequence[tuple[int, int]]
    has_targets: bool = True
    failures: list[str] = field(default_factory=list)
    _outputs: dict[int, list[int]] = field(default_factory=dict)
    _own: dict[int, list[int]] = field(default_factory=dict)
    _peer_ms: dict[str, float] = field(default_factory=dict)

    @property
    def hit_tokens(self) -> int:
        """All but the last block's."""
        return (self.tokens - 1) // self.block_tokens * self.block_tokens

    def lines(
        self, connector: str, rounds: Sequence[Measured], seen: Bytes | None
    ) -> Iterator[Line]:
        """A line for each timed round; `seen` is None where no bytes are looked at."""
        by_name = {one.name: one for one in rounds}
        for name, measured in by_name.items():
            if name not in TITLES:
                continue
            beside = by_name.get(checked(name))
            both = [measured] if beside is None else [measured, beside]
            if name == OWN:
                self._own = _by_prompt(measured)
            is_same = self._are_same(both)
            facts: dict[str, object] = {
                "p50": round(statistics.median(measured.ttft_ms), 1),
                "max": round(max(measured.ttft_ms), 1),
                "cached_tokens": min(measured.cached_tokens),
                "cached_tokens_wanted": 0 if name == COLD else self.hit_tokens,
                "same_outputs": is_same,
                "same_as_own": self._is_own(measured),
            }
            self._expect(is_same, connector, name, "outputs differ")
            self._expect(self._has_hits(name, both), connector, name, "cached tokens differ")
            if seen is not None and name != COLD:
                facts["bytes_equal"] = seen.equal(name, self.looked_at)
                facts["blocks_compared"] = len(self.looked_at)
                facts["blocks_held"] = seen.held[checked(name)]
                self._expect(facts["bytes_equal"] is True, connector, name, "bytes differ")
            yield self._line(connector, name, measured, facts)

    def _line(
        self, connector: str, name: str, measured: Measured, facts: Mapping[str, object]
    ) -> Line:
        mean_ms = statistics.mean(measured.ttft_ms)
        if connector == PEER:
            self._peer_ms[name] = mean_ms
        return Line(
            f"{connector} {TITLES[name]}",
            "ttft mean",
            mean_ms,
            "ms",
            TARGETS_MS.get((connector, name)) if self.has_targets else None,
            None if connector == PEER else self._peer_ms.get(name),
            facts=facts,
        )

    def _are_same(self, rounds: Iterable[Measured]) -> bool:
        made = [pair for one in rounds for pair in _by_prompt(one).items()]
        for prompt, output in made:
            self._outputs.setdefault(prompt, output)
        return all(self._outputs[prompt] == output for prompt, output in made)

    def _is_own(self, measured: Measured) -> bool | None:
        return _by_prompt(measured) == self._own if self._own else None

    def _has_hits(self, name: str, rounds: Iterable[Measured]) -> bool:
        cached = [tokens for one in rounds for tokens in one.cached_tokens]
        if name == COLD:
            return not any(cached)
        return all(self.hit_tokens <= tokens < self.tokens for tokens in cached)

    def _expect(self, is_so: bool, connector: str, name: str, otherwise: str) -> None:  # noqa: FBT001
        if not is_so:
            self.failures.append(f"{connector} {TITLES[name]}: {otherwise}")


def _by_prompt(measured: Measured) -> dict[int, list[int]]:
    return dict(enumerate(measured.outputs, measured.first))


def places(prompts: Iterable[int], block_count: int, every: int) -> list[tuple[int, int]]:
    """Which blocks are compared, by prompt and position."""
    return [(prompt, at) for prompt in prompts for at in range(0, block_count, every)]
