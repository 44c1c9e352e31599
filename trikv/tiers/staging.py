"""Memory of a GPU that chunks are gathered into on their way, for one direction.

Decided here: when it is made, grows and is given back, and how much there is. This file does not
know what lies in it.
"""

import threading
from typing import Final, Protocol

from trikv.core.chunks import Ring
from trikv.tiers import gpu

BYTES_MIN: Final = 16 << 20


class Giver(Protocol):
    """What it needs of its device."""

    staging_bytes: int  # at most

    def tell(self, event: str, **facts: float | str) -> None:
        """A line for the daemon's log."""
        ...


class Staging:
    """None, until it is made; all but `make` and `drop` are called by the lane's thread.

    Attributes:
        address: on the GPU; 0: there is none.
        ring: which parts of it are taken.
    """

    def __init__(self, owner: Giver, first_bytes: int) -> None:
        """Note how much there is to be at first, and until it grows."""
        self._owner, self._first_bytes = owner, first_bytes
        self.address = 0
        self.ring = Ring(0)
        self._is_short = False
        self._making = threading.Lock()

    def make(self) -> bool:
        """Make it before it is wanted, any thread; whether there is some.

        Within a load that a forward waits for, memory would be asked for while the engine's stream
        stands still, and nobody promises that a driver gives it then.
        """
        with self._making:
            if not self.address and not self._is_short:
                self._allocate(min(self._owner.staging_bytes, self._first_bytes))
            return self.address != 0

    def fits(self, size: int) -> bool:
        """Whether it could hold so much; makes it where that was not done before."""
        return (self.address != 0 or self.make()) and size <= self.ring.size

    def drop(self) -> None:
        """Give the GPU its memory back; nothing staged is under way. Any thread."""
        with self._making:
            if self.address:
                gpu.free(self.address)
                self.address, self.ring = 0, Ring(0)
            self._is_short = False

    def grow(self) -> None:
        """The larger it is, the less a busy engine is slowed; after a copy, never within one.

        The last rank may be gone by then.
        """
        with self._making:
            if self._is_short or not 0 < self.ring.size < self._owner.staging_bytes:
                return
            before = self.address
            self._allocate(self._owner.staging_bytes)
            if self.address != before:
                gpu.free(before)

    def _allocate(self, wanted: int) -> None:
        """So much, or half of it, and so on; what there is stays where there is no more."""
        size = wanted
        while size >= max(min(BYTES_MIN, wanted), self.ring.size + 1):
            address = gpu.allocate(size)
            if address is not None:
                self.ring, self.address = Ring(size), address
                break
            size //= 2
        got = self.ring.size
        self._is_short = got < wanted
        if self._is_short:
            self._owner.tell("staging.short", bytes_wanted=wanted, bytes_got=got)
