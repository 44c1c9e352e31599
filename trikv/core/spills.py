"""Which of the pool's blocks are to be written to disk, and which first.

Decided here: what is worth a write, in which order, and how much may be written a day. This file
does not know disks or who writes.

| a request's blocks | are written |
| --- | --- |
| found by a later request | soon: they have had their second use |
| saved | soon with write-through; else when the pool fills up, before they would be evicted |
| saved or used again after they were written | again what is new; the rest counts as used there |

At SIGTERM everything counts as worth it. What is waiting is remembered by request, not by block.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from trikv.core.chains import Chain

CHAINS_MAX: Final = 8_192
BLOCKS_MAX: Final = 1 << 22  # of all of them; a chain takes 8 bytes a block
FILLING_UP: Final = 0.5
"""When less than this part of the pool is free, what no disk holds is written."""
DAY_S: Final = 86_400.0
BURST_S: Final = DAY_S / 8


@dataclass(slots=True, eq=False)
class Waiting:
    """One request's blocks; `is_hot`: worth a write now."""

    chain: Chain
    is_hot: bool
    blocks: int = 0  # counted when it began to wait


class Budget:
    """How much may be written: `day_bytes` a day, an eighth of it at once; None: no limit."""

    def __init__(self, day_bytes: int | None) -> None:
        self.day_bytes = day_bytes
        self._left = (day_bytes or 0) * BURST_S / DAY_S
        self._at_s: float | None = None

    def left(self, *, now_s: float) -> float:
        """Bytes that may be written now."""
        if self.day_bytes is None:
            return float("inf")
        if self._at_s is not None:
            gained = self.day_bytes * (now_s - self._at_s) / DAY_S
            self._left = min(self.day_bytes * BURST_S / DAY_S, self._left + gained)
        self._at_s = now_s
        return self._left

    def spend(self, size: int) -> None:
        """So many bytes are being written; the last batch may overdraw it."""
        self._left -= size


class Spills:
    """Requests whose blocks wait to be written or touched on a disk.

    At the bound: the request that has waited longest is forgotten and counted; blocks of it that
    nobody else has used are lost when the pool evicts them.
    """

    def __init__(
        self, budget: Budget, *, write_through: bool = False, chains_max: int = CHAINS_MAX
    ) -> None:
        self.budget = budget
        self.dropped_total = 0
        self._write_through = write_through
        self._chains_max = chains_max
        self._hot: OrderedDict[int, Waiting] = OrderedDict()
        self._cold: OrderedDict[int, Waiting] = OrderedDict()
        self._blocks = 0

    def __len__(self) -> int:
        return len(self._hot) + len(self._cold)

    @property
    def hot_count(self) -> int:
        """Requests whose blocks are worth a write now."""
        return len(self._hot)

    def saved(self, chain: Chain) -> None:
        """Blocks of a request have become visible."""
        if id(chain) not in self._hot:
            self._add(chain, is_hot=self._write_through)

    def used(self, chain: Chain) -> None:
        """A request has found blocks that others had saved."""
        if id(chain) in self._cold:
            self._take(self._cold, id(chain))
        self._add(chain, is_hot=True)

    def next(self, *, is_full: bool, now_s: float) -> Waiting | None:
        """Take the request to work on; None: nothing is worth a write now.

        Args:
            is_full: the pool fills up, or the daemon ends: saved blocks are written too.
            now_s: seconds on the caller's clock.
        """
        if self.budget.left(now_s=now_s) <= 0:
            return None
        for queue in (self._hot, self._cold) if is_full else (self._hot,):
            if queue:
                return self._take(queue, next(iter(queue)))
        return None

    def put_back(self, waiting: Waiting) -> None:
        """There is more of it to write: it goes on being the first."""
        if id(waiting.chain) not in self._hot:
            self._add(waiting.chain, is_hot=waiting.is_hot)
            queue = self._hot if waiting.is_hot else self._cold
            if id(waiting.chain) in queue:
                queue.move_to_end(id(waiting.chain), last=False)

    def _add(self, chain: Chain, *, is_hot: bool) -> None:
        queue = self._hot if is_hot else self._cold
        if id(chain) in queue:  # it lives as long as its name here
            return
        queue[id(chain)] = Waiting(chain, is_hot, chain.length)
        self._blocks += chain.length
        while len(self) > self._chains_max or (self._blocks > BLOCKS_MAX and len(self) > 1):
            oldest = self._cold or self._hot
            self._take(oldest, next(iter(oldest)))
            self.dropped_total += 1

    def _take(self, queue: OrderedDict[int, Waiting], name: int) -> Waiting:
        waiting = queue.pop(name)
        self._blocks -= waiting.blocks
        return waiting
