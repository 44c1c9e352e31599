"""A namespace that is to be forgotten: asked for until the daemon has done it.

Decided here: that a reset which did not reach the daemon is owed, and asked for again by itself,
and that from then on this engine's blocks are nobody else's: what it computes is not what its
model's name promises, on this host and on all others, after a restart of the daemon too.
This file does not know what is not promised meanwhile, or why the blocks are wrong.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import uuid
from typing import TYPE_CHECKING, Final

from trikv.connector.link import CallError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trikv.connector.calls import Calls

RETRY_S: Final = 1.0


class Forgetting:
    """At most one reset under way; owed from `demand` until a daemon has answered it.

    Attributes:
        altered: not empty: a daemon has forgotten blocks since the weights were loaded; a text that
            no other engine has, under which it keeps ours from then on.
    """

    def __init__(self, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock
        self.altered = ""
        self._wanted = ""
        self._is_owed = False
        self._asked_s = 0.0
        self._future: concurrent.futures.Future[int] | None = None

    def demand(self, wait_s: float) -> bool:
        """Ask now and wait so long; False: it is still owed."""
        self._is_owed = True
        self._wanted = uuid.uuid4().hex
        self._ask()
        if self._future is not None:
            with contextlib.suppress(CallError, concurrent.futures.TimeoutError):
                self._future.result(wait_s)
        return self.is_settled()

    def is_ready(self) -> bool:
        """True when a call would be sent and nothing is owed; see `is_settled`."""
        return self._calls.is_ready and self.is_settled()

    def is_settled(self) -> bool:
        """True when nothing is owed; else asks again in the background, once a second at most."""
        if not self._is_owed:
            return True
        future = self._future
        if future is None or future.done():
            if future is not None and future.exception() is None:
                self._is_owed, self._future = False, None
                return True
            if self._clock() - self._asked_s >= RETRY_S:
                self._ask()
        return False

    def _ask(self) -> None:
        self._asked_s = self._clock()
        self._future = self._calls.reset(self._wanted)
        self._future.add_done_callback(functools.partial(self._answered, self._wanted))

    def _answered(self, altered: str, future: concurrent.futures.Future[int]) -> None:
        """At once, on the client's thread: its next declaration must say so."""
        if not future.cancelled() and future.exception() is None:
            self.altered = altered
