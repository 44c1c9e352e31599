"""Reads from disks for loans: how long a loan waits for them.

Decided here: that a peer is answered after `LIFT_S` at the latest with what has come by then, and
that what was not begun is not read in vain. Which blocks, and how many, is the core's. This file
does not know who asks.
"""

from typing import Final

import trio

from trikv.core.lending import Loan
from trikv.core.lifting import Lift, Lifting
from trikv.core.words import PeerId, Words
from trikv.nursery.prefetching import Prefetching

LIFT_S: Final = 2.0
"""Well within the time in which a reader expects the answer to its call."""
TTL_SHARE: Final = 0.25
"""Of a loan's time, that is spent on reading at most."""


class Lifter:
    """Waits for what `Lifting` has begun."""

    def __init__(self, lifting: Lifting, prefetching: Prefetching) -> None:
        self.lifting = lifting
        self._prefetching = prefetching

    async def lift(self, peer: PeerId, origin: bytes, words: Words, ttl_s: float) -> Lift | None:
        """Have disks read what a peer asks for; None: nothing had to be.

        Returns:
            For `end`, once, whether a loan is made or not.

        Cancellation: what was read, or is being read, is given back as if the loan were over.
        """
        lift = self.lifting.begin(peer, origin, words)
        if lift is None:
            return None
        try:
            self._prefetching.lift(lift.parts)
            with trio.move_on_after(min(LIFT_S, ttl_s * TTL_SHARE)):
                while self.lifting.is_waiting(lift):
                    await self._prefetching.moved()
        except BaseException:
            self.lifting.end(lift)
            raise
        finally:
            self._prefetching.forgo(lift.parts)
        return lift

    def lent(self, lift: Lift, loan: Loan) -> None:
        """A loan was made with it."""
        self.lifting.lent(lift, loan)

    def end(self, lift: Lift) -> None:
        """Its loan is over, or was not made."""
        self.lifting.end(lift)
