"""What has happened since the daemon started, in numbers.

Decided here: the closed lists of counters and calls. Each has a row in docs/metrics.md.
"""

from dataclasses import dataclass, field, fields
from typing import Final

OK: Final = "ok"
BROKEN: Final = "broken"
METHODS: Final = (
    "hello",
    "status",
    "declare",
    "register",
    "query",
    "save",
    "load",
    "release",
    "heartbeat",
    "reset",
)


@dataclass(slots=True)
class Counters:
    """Monotonic counts; blocks and bytes are whole blocks over all ranks unless said."""

    query_total: int = 0
    """Answered; those that were told that more is coming count when they ask again."""
    query_blocks_total: int = 0
    query_hit_blocks_total: int = 0
    query_shortened_total: int = 0
    """Queries answered with fewer blocks than are at hand, because leases are at their limit."""
    lease_granted_total: int = 0
    lease_renewed_total: int = 0
    lease_expired_total: int = 0
    load_total: int = 0
    load_blocks_total: int = 0
    load_bytes_total: int = 0
    """Bytes written into engines' memory, per rank."""
    load_far_bytes_total: int = 0
    """Of these, from another NUMA node's memory than the one near the GPU."""
    load_failed_blocks_total: int = 0
    save_total: int = 0
    save_blocks_total: int = 0
    save_bytes_total: int = 0
    """Bytes read from engines' memory, per rank."""
    save_far_bytes_total: int = 0
    """Of these, into another NUMA node's memory than the one near the GPU."""
    save_present_blocks_total: int = 0
    save_refused_blocks_total: int = 0
    """No room: everything is pinned, or too much is filling."""
    save_failed_blocks_total: int = 0
    """Fence raised, engine gone, or copy failed."""
    sealed_blocks_total: int = 0
    recovered_blocks_total: int = 0
    """Found in a pool that an earlier daemon has left (`--persist`)."""
    evicted_blocks_total: int = 0
    evicted_unwritten_blocks_total: int = 0
    """Of these, with an SSD: no copy lay there, so they are gone."""
    reclaimed_slabs_total: int = 0
    fill_expired_blocks_total: int = 0
    """Given up because not all ranks saved their pages in time."""
    dropped_blocks_total: int = 0
    """Forgotten on request (`reset`)."""
    session_opened_total: int = 0
    session_lost_total: int = 0
    """Ended by silence, death of the process or a broken connection, with ranks registered."""
    connection_refused_total: int = 0
    """Closed at once, or not accepted: too many, another user's, or no descriptor is free."""
    error_total: int = 0
    """Calls answered with an error."""

    def uncount_query(self, blocks: int, hit_blocks: int) -> None:
        """The query just counted was not the last word: its request is to ask again."""
        self.query_total -= 1
        self.query_blocks_total -= blocks
        self.query_hit_blocks_total -= hit_blocks

    def items(self) -> list[tuple[str, int]]:
        """Names with the service's prefix, and values."""
        return [(f"trikv_{one.name}", getattr(self, one.name)) for one in fields(self)]


def _no_calls() -> dict[tuple[str, str], int]:
    return {(method, OK): 0 for method in METHODS}


@dataclass(slots=True)
class CallCounts:
    """Calls that have ended, by method and outcome.

    An outcome is `ok`, the code of the error that was answered, or `broken`: the caller had gone.
    """

    by_outcome: dict[tuple[str, str], int] = field(default_factory=_no_calls)

    def note(self, method: str, outcome: str) -> None:
        """One more has ended."""
        key = (method, outcome)
        self.by_outcome[key] = self.by_outcome.get(key, 0) + 1

    def rows(self) -> list[tuple[tuple[str, str], int]]:
        """All of them, by name."""
        return sorted(self.by_outcome.items())
