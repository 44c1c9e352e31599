"""How long the daemon's one thread was busy without looking at its connections.

Decided here: what counts as a stall: processor time of this thread between two turns of its loop,
so that neither an idle loop nor a busy machine counts. This file does not know what ran.
"""

import asyncio
import time
from typing import Final

EVERY_S: Final = 0.02


class Ticks:
    """Measures from `start` on, at a cost of some microseconds every 20 ms.

    Attributes:
        longest_s: the longest stall seen.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._at_s = 0.0

    def start(self) -> None:
        """Begin; must be called inside the running loop."""
        self._at_s = time.thread_time()
        asyncio.get_running_loop().call_later(EVERY_S, self._tick)

    def _tick(self) -> None:
        now_s = time.thread_time()
        self.longest_s = max(self.longest_s, now_s - self._at_s)
        self._at_s = now_s
        asyncio.get_running_loop().call_later(EVERY_S, self._tick)
