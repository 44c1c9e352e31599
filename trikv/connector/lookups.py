"""Queries of requests: sent in the background, collected when the scheduler asks.

Decided here: how long a request waits for an answer, and for blocks that come up from a disk; and
when it is asked again. Nothing here waits longer than a moment, and only while the engine has
nothing else to do. This file does not know vLLM's answers.

| the daemon says | then |
| --- | --- |
| nothing yet | the request waits, at most `query_s` |
| so many blocks are at hand, none is coming | they are promised |
| more are coming, within `load_wait_s` | asked again, to be answered when they are there |
| more are coming, but not in time | what is at hand is promised |
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Final

from trikv.connector.calls import Answer, Calls
from trikv.connector.jobs import IDLE_S
from trikv.connector.link import CallError
from trikv.connector.tracks import Found, Lookup, Policy, Track
from trikv.wire import BLOCKS_MAX, HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from trikv.connector.forgetting import Forgetting
    from trikv.connector.tally import Tally

MISS_S: Final = 10.0
"""How long "nothing there" is believed; a waiting request is looked up again at half of it."""
LATE_FACTOR: Final = 10
"""While queries are late, requests wait only this part of the usual time."""


class Lookups:
    """Sends and collects the queries of all requests.

    Attributes:
        has_waited: in this step, a moment was waited already.
    """

    def __init__(
        self,
        calls: Calls,
        policy: Policy,
        forgetting: Forgetting,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self.has_waited = False
        self._calls = calls
        self._policy = policy
        self._forgetting = forgetting
        self._tally = tally
        self._clock = clock
        self._is_late = False

    def start(self, track: Track, wait_s: float = 0.0, *, is_alone: bool = False) -> None:
        """Send the query of all full blocks, if there is someone to answer it.

        Args:
            track: of the request.
            wait_s: how long the daemon may wait for blocks that are coming.
            is_alone: the engine computes nothing: what is found will be loaded at once.
        """
        request, attached = track.request, self._calls.attached
        hashes = request.block_hashes[:BLOCKS_MAX]
        if (
            not self._policy.loads
            or attached is None
            or not self._forgetting.is_ready()
            or not hashes
            or len(hashes[0]) not in HASH_BYTES
            or request.num_tokens <= self._policy.block_tokens
        ):
            return
        track.hashes = b"".join(hashes)
        asked = (request.request_id, len(hashes[0]), track.hashes, wait_s)
        future = self._calls.query(*asked, is_alone=is_alone)
        future.add_done_callback(self._note_answer)
        track.lookup = Lookup(future, self._clock(), attached.number, wait_s)
        track.has_spoken = True
        self._tally.add("queries")

    def ask(self, track: Track, *, is_idle: bool) -> tuple[Found | None, bool]:
        """What was found; without an answer None, and whether to ask again later."""
        now_s = self._clock()
        self.collect(track)
        attached = self._calls.attached
        if track.found is not None and (
            attached is None or track.found.attachment != attached.number
        ):
            track.found = None  # its lease has ended with that session, or with its daemon
        if track.found is not None and track.found.coming_count:
            self._wait_for_more(track, track.found, now_s, is_idle=is_idle)
        if track.found is not None and track.found.is_aging(now_s) and track.lookup is None:
            self.start(track, is_alone=is_idle)
            if track.found.lease and track.lookup is not None:
                track.found = None  # the answer may replace the lease: not promised meanwhile
        found = track.found
        if found is None or not found.is_usable(now_s):
            return self._ask_later(track, now_s, is_idle=is_idle)
        track.asked_s = None
        return found, False

    def collect(self, track: Track) -> None:
        """Take the answer of a query that has arrived."""
        lookup = track.lookup
        if lookup is None or not lookup.future.done():
            return
        track.lookup = None
        try:
            answer = lookup.future.result()
        except CallError:
            self._tally.add("queries_failed")
            answer = Answer(0, 0, 0.0)
        lease_s = answer.lease_s if answer.lease else MISS_S
        # The lease began after the query was sent: counted from there it can only seem shorter.
        track.found = Found(
            answer.hit_count,
            answer.lease,
            lookup.sent_s,
            lease_s,
            lookup.attachment,
            answer.coming_count,
            answer.coming_s,
        )
        track.known_count, track.known_attachment = answer.hit_count, lookup.attachment

    def _wait_for_more(self, track: Track, found: Found, now_s: float, *, is_idle: bool) -> None:
        """Ask again for what is coming, once, unless that comes too late or is of no use."""
        if found.hit_count + found.coming_count <= track.local_count:
            return
        if track.wait_until_s is None:
            track.wait_until_s = now_s + self._policy.load_wait_s
        left_s = track.wait_until_s - now_s
        if left_s <= 0 or found.coming_s > left_s or track.lookup is not None:
            return
        self.start(track, left_s, is_alone=is_idle)
        if track.lookup is not None:
            track.found, track.asked_s = None, None
            self._tally.add("queries_waiting")

    def _ask_later(self, track: Track, now_s: float, *, is_idle: bool) -> tuple[Found | None, bool]:
        """No answer is there: wait for one, but never longer than the engine is willing to."""
        if track.lookup is None:
            self.start(track, is_alone=is_idle)
        if track.lookup is None:
            return None, False
        is_first = track.asked_s is None
        if track.asked_s is None:
            track.asked_s = now_s
        if is_idle and not self._is_late and (is_first or not self.has_waited):
            self.has_waited = True
            done, _ = wait((track.lookup.future,), IDLE_S)
            if is_first or done:
                return self.ask(track, is_idle=is_idle)
        patience_s = self._policy.query_s / (LATE_FACTOR if self._is_late else 1)
        if now_s - track.asked_s >= patience_s + track.lookup.wait_s:
            self._tally.add("queries_late")
            self._is_late = True  # until some answer arrives, others wait less
            return None, False
        return None, True

    def _note_answer(self, future: Future[Answer]) -> None:
        """On the client's thread: somebody answers again, so others may wait again."""
        if future.exception() is None:
            self._is_late = False
