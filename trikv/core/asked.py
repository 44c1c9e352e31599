"""What of a request's blocks has been counted, when some of them were still on their way.

Decided here: each block that a request asks for is counted once, as a hit or a miss, when that is
known: blocks that are coming from below count when the request asks again, or as missed when it
ends without. This file does not know how anything is counted.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trikv.core.plans import Hit, Key
from trikv.core.words import InstanceName, RequestId, Words

BLOCKS_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Blocks to count now: `words[first:end]`, of which some were found, those first.

    Attributes:
        by_tier: a tier of `TIERS`: how many were found there.
    """

    key: Key
    words: Words
    first: int
    end: int
    by_tier: tuple[int, ...]


class Asked:
    """Requests with blocks whose fate is open.

    At the bound: with `BLOCKS_MAX` blocks open, those of the request that has waited longest count
    as missed.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Key, Counted] = OrderedDict()
        self._open_blocks = 0

    def answered(self, key: Key, words: Words, hit: Hit) -> Iterator[Counted]:
        """A query of `words` was answered: what of it, and of others, is to be counted."""
        before = self._close(key)
        first = before.first if before is not None else hit.asked_before
        end = max(first, hit.count) if hit.coming else len(words)
        if end > first:
            yield Counted(key, words, first, end, _by_tier(hit, max(0, hit.count - first)))
        if hit.coming:
            self._open[key] = Counted(key, words, end, len(words), ())
            self._open_blocks += max(0, len(words) - end)
            while self._open_blocks > BLOCKS_MAX:
                missed = self._close(next(iter(self._open)))
                if missed is not None:
                    yield missed

    def ended(self, instance: InstanceName, request: RequestId | None = None) -> Iterator[Counted]:
        """A request, or all of an engine, has ended: what is still open was missed."""
        for key in [one for one in self._open if one.instance == instance]:
            if request in {None, key.request}:
                missed = self._close(key)
                if missed is not None:
                    yield missed

    def _close(self, key: Key) -> Counted | None:
        found = self._open.pop(key, None)
        if found is not None:
            self._open_blocks -= max(0, found.end - found.first)
        return found


def _by_tier(hit: Hit, count: int) -> tuple[int, ...]:
    """So many hits by where they came from: the first tier has what came from no other."""
    left, landed = count, []
    for blocks in hit.landed:
        landed.append(min(blocks, left))
        left -= landed[-1]
    return left, *landed
