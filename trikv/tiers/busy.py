"""Whether others use a GPU, read from its own clock: by how late our kernels are.

Decided here: what is late, how long that says something, and which kernels are timed. This file
does not know how that is done.
"""

import math
import time
from typing import Final

LATE_S: Final = 0.0008
"""A kernel that takes so much more than twice its best time waited for the GPU's other users. More
than another thread of ours may have the interpreter between two calls: `SWITCH_S` of `device`."""
TIMED_BYTES_MIN: Final = 1 << 20
TIMED_EACH: Final = 8
BUSY_S: Final = 1.0
"""How long one late kernel makes a GPU busy."""
BUSY_S_MAX: Final = 30.0
"""The same while chunks follow each other without a pause: then not all of them are timed."""
ON_TIME_MAX: Final = 8
"""So many kernels in a row that did not wait end it. Of a GPU that others do use, every second or
third one does not."""


class Busy:
    """What one lane knows of it; used by one thread.

    Attributes:
        until_s: it is busy until then.
        late_at_s: when a kernel was last seen to wait.
        byte_s: of the fastest kernel.
    """

    def __init__(self, late_s: float) -> None:
        """Take what is late; infinite: nothing is."""
        self._late_s = late_s
        self._since_timed = 0  # chunks
        self._on_time = 0  # kernels, since a late one
        self.until_s = -math.inf
        self.late_at_s = -math.inf
        self.byte_s = math.inf

    @property
    def is_now(self) -> bool:
        """Whether others use the GPU."""
        return time.perf_counter() < self.until_s

    def is_turn_to_time(self, *, is_first: bool, into_engine: bool) -> bool:
        """Whether this chunk's kernel is timed: it costs the bus a pause. The first, and some more.

        Of saves only while the bus has nothing to do: else its stream's time is that of the bytes
        before.
        """
        self._since_timed += 1
        is_later = into_engine and self._since_timed >= TIMED_EACH
        if not is_first and not is_later:
            return False
        self._since_timed = 0
        return True

    def time_next(self) -> None:
        """The next chunk of a load is timed: those before it are not."""
        self._since_timed = TIMED_EACH

    def note(self, took_s: float, size: int) -> None:
        """How long after it could begin a kernel had ended, and what it moved."""
        if size >= TIMED_BYTES_MIN and took_s > 0:
            self.byte_s = min(self.byte_s, took_s / size)
        best_s = took_s if math.isinf(self.byte_s) else self.byte_s * size
        if took_s > self._late_s + 2 * best_s:
            self._on_time, self.late_at_s = 0, time.perf_counter()
            self.until_s = max(self.until_s, self.late_at_s + BUSY_S)
            return
        self._on_time += 1
        if self._on_time == ON_TIME_MAX:
            self.until_s = -math.inf

    def go_on(self) -> None:
        """More of a copy follows without a pause: what was seen a moment ago still counts."""
        if self._on_time >= ON_TIME_MAX:
            return
        until_s = min(time.perf_counter() + BUSY_S, self.late_at_s + BUSY_S_MAX)
        self.until_s = max(self.until_s, until_s)
