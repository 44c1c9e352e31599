"""What a lane notes of the chunks that are under way.

Decided here: nothing; these are its records.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Offsets
from trikv.tiers import gpu
from trikv.tiers.devices import Key
from trikv.tiers.moves import Group


@dataclass(slots=True, eq=False)
class Moving:
    """A chunk under way.

    Attributes:
        end: comes when no byte of it moves any more.
        bytes: in all.
        steps: other events; a part of the staging goes with them, so of a direct one: none.
        kernel: when its kernel could begin and when it had ended, where that is timed.
        kernel_bytes: that it moves.
    """

    end: gpu.Handle
    bytes: int
    steps: tuple[gpu.Handle, ...] = ()
    kernel: tuple[gpu.Handle, gpu.Handle] | None = None
    kernel_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """A chunk that the bus brings, whose kernel has not been launched."""

    moving: Moving
    there: gpu.Handle
    group: Group
    ids: NDArray[np.int32]
    staging: int


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Chunks that the bus brings for a load that has not come yet; in the staging a single part.

    Attributes:
        key: of the load.
        group: of its rank.
        pages: in the pool, ascending.
        staging: address of the first.
        since_s: when they were asked for.
        begun: event before them.
        ended: behind them; these two are timed, and no others: for that the bus pauses.
        chunks: of each how many pages lie before its end, and the event when it is there.
    """

    key: Key
    group: Group
    pages: Offsets
    staging: int
    since_s: float
    begun: gpu.Handle
    ended: gpu.Handle
    chunks: list[tuple[int, gpu.Handle]]

    @property
    def events(self) -> tuple[gpu.Handle, ...]:
        """All of them."""
        return self.begun, self.ended, *(there for _, there in self.chunks)
