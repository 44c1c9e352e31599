"""What the scheduler's half remembers of one request, and what it was told to do.

Decided here: for how long an answer may be promised. This file does not know who asks or who
answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Iterable

    from trikv.connector.calls import Answer
    from trikv.connector.jobs import LoadJob

MARGIN_S: Final = 1.0
"""A lease nearer to its end than this is not promised: the load must reach the daemon first."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user may set, and what the engine's shape sets."""

    block_tokens: int
    rank_count: int = 1
    query_s: float = 0.1
    load_wait_s: float = 2.0
    hold_s: float = 0.0  # how long a forward may wait for its load; 0: never
    block_bytes: int = 0  # of one block on one rank
    saves: bool = True
    loads: bool = True


@dataclass(slots=True)
class Lookup:
    """One query, out or answered."""

    future: concurrent.futures.Future[Answer]
    sent_s: float
    attachment: int
    wait_s: float = 0.0  # the daemon may take so long more


@dataclass(slots=True)
class Found:
    """What a query found, and until when that may be promised."""

    hit_count: int
    lease: int
    granted_s: float
    lease_s: float
    attachment: int
    coming_count: int = 0  # blocks behind these that the daemon brings up
    coming_s: float = 0.0

    def is_usable(self, now_s: float) -> bool:
        """True while a load that is started now would still find the lease."""
        return now_s < self.granted_s + self.lease_s - min(MARGIN_S, self.lease_s / 4)

    def is_aging(self, now_s: float) -> bool:
        """True in the second half of its life: time to ask again."""
        return now_s >= self.granted_s + self.lease_s / 2


@dataclass(slots=True)
class Track:
    """What is known of one request."""

    request: Any
    is_cacheable: bool
    hashes: bytes = b""  # of the leading blocks, one blob: as the last query had them
    blocks: list[int] = field(default_factory=list)
    local_count: int = 0  # blocks that the engine itself has, at the last ask
    lookup: Lookup | None = None
    found: Found | None = None
    asked_s: float | None = None  # first ask that found no answer
    wait_until_s: float | None = None  # for blocks that come up
    known_count: int = 0  # leading blocks that the daemon has
    known_attachment: int = 0  # and which daemon said so
    saved_count: int = 0  # leading blocks that it has or was given
    attachment: int = 0  # of saved_count
    loading: LoadJob | None = None
    is_held: bool = False  # the load that was promised last: the forward waits for it
    has_failed: bool = False  # a load went wrong: nothing is promised again
    saving: dict[int, int] = field(default_factory=dict)  # number of a save: ranks yet to answer
    has_spoken: bool = False  # the daemon has heard of it
    preemptions: int = 0  # of the request that are known here
    is_stale: bool = False  # what its blocks hold is of before a reset: it is not saved

    @property
    def is_preempted(self) -> bool:
        """Whether it was preempted and nobody said so, as vLLM 0.20 of those that a reset does."""
        return getattr(self.request, "num_preemptions", 0) > self.preemptions

    def preempted(self) -> None:
        """Its blocks are gone."""
        self.preemptions = getattr(self.request, "num_preemptions", 0)
        self.blocks, self.found, self.saved_count, self.is_stale = [], None, 0, False

    def forget(self) -> None:
        """What the daemon has, or said, is wrong, and so is what it computed or loaded."""
        self.is_stale = self.is_stale or bool(self.blocks or self.loading)
        self.found = self.lookup = None
        self.known_count = self.saved_count = 0

    def hashes_of(self, first: int, last: int) -> bytes:
        """The hashes of its blocks from `first` to before `last`, one blob."""
        hashes = self.request.block_hashes
        size = len(hashes[first])
        if size * last <= len(self.hashes):  # a request's hashes are only ever added to
            return self.hashes[size * first : size * last]
        return b"".join(hashes[first:last])


def preempted_of(output: Any, tracks: Iterable[Track]) -> frozenset[str]:  # noqa: ANN401
    """Requests that vLLM says were preempted, and those of `tracks` of which it does not say so."""
    unnamed = {one.request.request_id for one in tracks if one.is_preempted}
    return frozenset(getattr(output, "preempted_req_ids", None) or ()) | unnamed
