"""Which paths to another host are left alone after an error, and for how long.

Decided here: twice as long after each further error, until one has worked again. This file does not
know what an error is, or clocks.
"""

import math

PAUSE_S_MAX = 600.0


class Pauses:
    """All paths to one host, by number."""

    def __init__(self, count: int, pause_s: float) -> None:
        """None is left alone yet; the first pause of each takes `pause_s` seconds."""
        self._pause_s = pause_s
        self._until_s = [-math.inf] * count
        self._next_s = [pause_s] * count

    def is_over(self, path: int, *, now_s: float) -> bool:
        """It may be used."""
        return self._until_s[path] <= now_s

    def fail(self, path: int, *, now_s: float) -> bool:
        """An error there; False when it is left alone already, for one before."""
        if not self.is_over(path, now_s=now_s):
            return False
        self._until_s[path] = now_s + self._next_s[path]
        self._next_s[path] = max(min(2 * self._next_s[path], PAUSE_S_MAX), self._pause_s)
        return True

    def work(self, path: int) -> None:
        """It has brought bytes: its next pause is short again."""
        self._next_s[path] = self._pause_s
