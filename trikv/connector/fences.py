"""Generation words that the daemon reads: raising one voids the saves that named it.

Decided here: how many there are and who holds which. This file does not know requests or saves.
"""

from collections import deque
from typing import Final

import numpy as np

COUNT: Final = 1_024


class Fences:
    """An array of uint64 words at a fixed address.

    At the bound: `take` returns None, and the save that wanted a word is not done.
    """

    def __init__(self, count: int = COUNT) -> None:
        self._words = np.zeros(count, dtype=np.uint64)  # aligned, so that a word is stored at once
        self._free = deque(range(count))

    @property
    def address(self) -> int:
        """Where the words lie in this process, for as long as this object lives."""
        return int(self._words.ctypes.data)

    @property
    def count(self) -> int:
        """How many words there are."""
        return len(self._words)

    def take(self) -> int | None:
        """A word that nobody else raises."""
        return self._free.popleft() if self._free else None

    def give_back(self, word: int) -> None:
        """Let others take the word; its generation stays, so old saves stay void."""
        self._free.append(word)

    def generation(self, word: int) -> int:
        """What a save that starts now has to name."""
        return int(self._words[word])

    def lift(self, word: int) -> None:
        """Raise a word: saves that named it become worthless before the next instruction."""
        self._words[word] += np.uint64(1)

    def lift_all(self) -> None:
        """Raise every word; any thread."""
        self._words += np.uint64(1)
