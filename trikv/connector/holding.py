"""Which loads a forward may wait for, instead of its request waiting for turns of the scheduler.

Decided here: only a load that holds up nobody else. The engine must have nothing to compute and no
load under way, and the load must be short: whoever comes next waits for it too. This file does not
know how anybody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trikv.connector.jobs import SIGNAL_COUNT
from trikv.wire import SECTIONS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

LOAD_BYTES_S: Final = 40e9
"""What a bus brings at least, to judge how long a load takes."""


class Holding:
    """Knows who is computed, and gives each load that a forward waits for its word and value."""

    def __init__(self, hold_s: float, block_bytes: int) -> None:
        """Make it.

        Args:
            hold_s: how long a forward may wait; 0: never.
            block_bytes: of one block on one rank.
        """
        self._blocks_max = int(hold_s * LOAD_BYTES_S / max(1, block_bytes))
        self._computing: set[str] = set()  # scheduled and not ended
        self._loading: set[str] = set()  # with a load that no forward waits for
        self._is_taken = False  # by a load of this step
        self._count = 0

    @property
    def is_computing(self) -> bool:
        """Whether some request has been scheduled and has not ended."""
        return bool(self._computing)

    def may_hold(self, count: int) -> bool:
        """Whether a forward may wait for so many blocks now."""
        is_free = not (self._is_taken or self._computing or self._loading)
        return is_free and count <= self._blocks_max

    def take(self) -> tuple[int, int]:
        """Number of a word and its value for a load of this step."""
        self._is_taken = True
        self._count += 1
        round_, at = divmod(self._count, SIGNAL_COUNT)
        # Words begin at 0, and one is tried with 1; sections have the values before the load's.
        return at + 1, (round_ + 1) * SECTIONS_MAX + 1

    def began_load(self, request_id: str) -> None:
        """A load of a request is under way that no forward waits for."""
        self._loading.add(request_id)

    def ended_load(self, request_id: str) -> None:
        """It has ended."""
        self._loading.discard(request_id)

    def stepped(self, scheduled: Iterable[str]) -> None:
        """A step was made up of these requests."""
        self._is_taken = False
        self._computing.update(scheduled)

    def stopped(self, request_id: str) -> None:
        """A request has ended or lost its blocks."""
        self._computing.discard(request_id)
