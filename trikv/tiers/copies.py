"""One copy between an engine's memory and the pool, as everyone who moves bytes is handed it.

Decided here: nothing; it is the record between the shell, which decides, and what moves bytes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trikv.core.layout import GroupLayout
from trikv.core.words import Offsets


class Process(Protocol):
    """What must be known of the process at the other end."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def is_alive(self) -> bool:
        """False for ever once it has ended."""
        ...

    def close(self) -> None:
        """Give back what holds it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Blocks to move.

    Attributes:
        process: whose memory.
        layout: where the pieces of a block lie there, and what kind of memory that is.
        blocks: int32[blocks], which of the engine's.
        offsets: int64[blocks], where their pages begin in the pool.
        into_engine: direction.
        event: number, from 1, of the registered event that the engine's own work on these blocks
            ends with; 0: that work is over.
        signal: number, from 1, of the registered word that shows the end; 0: none.
        value: what that word becomes.
        is_ordered: section after section, and the word shows each.
        lease: whose pages are loaded; 0: it is a save.
    """

    process: Process
    layout: GroupLayout
    blocks: NDArray[np.int32]
    offsets: Offsets
    into_engine: bool
    event: int = 0
    signal: int = 0
    value: int = 0
    is_ordered: bool = False
    lease: int = 0
