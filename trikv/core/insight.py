"""What another size or another order of eviction would give: fed by calls, worked off in the idle.

Decided here: what of the engines' calls the curve and the shadow caches see, how much is worked off
at once, and how old uses fade. This file does not know how either of them counts.
"""

from collections import deque
from typing import Final

from trikv.core.curve import Curve
from trikv.core.policies import MAKERS
from trikv.core.shadows import Shadows
from trikv.core.words import SpaceId, Words

REACH: Final = 16  # the curve reaches so many times the pool
PENDING_MAX: Final = 512  # calls noted; further ones are not seen, and counted
HALVE_S: Final = 3600.0
MORE_BYTES: Final = 200 << 30  # "what would 200 GiB more give?"
FACTORS: Final = (0.25, 0.5, 1, 1.5, 2, 4, 8)  # capacities of the curve, in pools


class Insight:
    """The curve and the shadows of one pool.

    At the bound: with `PENDING_MAX` calls waiting, a call is left out and counted; `digest` works
    off a few at a time, so that no turn of the loop is long.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self.curve = Curve(REACH * pool_bytes)
        self.shadows = Shadows(MAKERS, pool_bytes)
        self.skipped_total = 0
        self._halved_s: float | None = None
        self._pending: deque[tuple[SpaceId, Words, int, bool]] = deque()

    def note(self, space: SpaceId, words: Words, block_bytes: int, *, is_ask: bool) -> None:
        """A request asks for blocks, from its first on and for the first time, or saves some.

        Ownership: `words` must not change before it has been worked off.

        Cost: 1 µs.
        """
        if len(self._pending) >= PENDING_MAX:
            self.skipped_total += 1
        elif len(words):
            self._pending.append((space, words, block_bytes, is_ask))

    def digest(self, limit: int, *, now_s: float) -> bool:
        """Work off up to `limit` calls; True when more are waiting."""
        for _ in range(min(limit, len(self._pending))):
            space, words, block_bytes, is_ask = self._pending.popleft()
            self.curve.use(space, words, block_bytes, is_ask=is_ask)
            self.shadows.use(space, words, block_bytes, is_ask=is_ask)
        if self._halved_s is None:
            self._halved_s = now_s
        if now_s - self._halved_s >= HALVE_S:
            self._halved_s = now_s
            self.curve.halve()
            self.shadows.halve()
        return bool(self._pending)

    def points(self) -> list[tuple[int, float]]:
        """The curve: capacities in bytes and hit rates; empty before the first request."""
        if self.curve.asked_count == 0:
            return []
        sizes = [int(factor * self.pool_bytes) for factor in FACTORS]
        sizes = sorted({*sizes, self.pool_bytes + MORE_BYTES})
        return list(zip(sizes, self.curve.hit_rates(sizes), strict=True))
