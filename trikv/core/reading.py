"""For whom rows of the pool are being read from disks: nobody, other nodes, or requests here.

Decided here: that what a request wants is read for it, whoever has asked first. This file does not
know disks, or in which order they are read.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.words import Entries

NOBODY: Final = 0
PEERS: Final = 1
REQUESTS: Final = 2


class Reading:
    """A mark of each row.

    Attributes:
        marks: uint8 of all rows: `NOBODY`, `PEERS` or `REQUESTS`.
        peer_rows: rows that are read for other nodes only.
        has_promoted: some of these became a request's: whoever orders reads takes note.
    """

    def __init__(self, capacity: int) -> None:
        self.marks = np.zeros(capacity, np.uint8)
        self.peer_rows = 0
        self.has_promoted = False

    def begin(self, entries: Entries, reader: int) -> None:
        """Rows that nobody read are being read now."""
        self.marks[entries] = reader
        self.peer_rows += len(entries) * (reader == PEERS)

    def end(self, entries: Entries) -> None:
        """They are not any more; distinct."""
        self.peer_rows -= int(np.count_nonzero(self.marks[entries] == PEERS))
        self.marks[entries] = NOBODY

    def is_any(self, entries: Entries) -> NDArray[np.bool_]:
        """Which of these are being read, for whomever."""
        found: NDArray[np.bool_] = self.marks[entries] != NOBODY
        return found

    def promote(self, entries: Entries) -> None:
        """A request wants these rows, read or not; may repeat."""
        mine = np.unique(entries)
        mine = mine[self.marks[mine] == PEERS]
        if len(mine):
            self.end(mine)
            self.begin(mine, REQUESTS)
            self.has_promoted = True

    def is_wanted(self, entries: Entries) -> bool:
        """Whether a request here wants some of these."""
        return bool((self.marks[entries] == REQUESTS).any())
