"""What has happened since a metaserver started, in numbers.

Decided here: the closed lists of counters and calls. Each has a row in docs/metrics.md.
"""

from dataclasses import dataclass, fields
from typing import Final

METHODS: Final = (
    "hello",
    "prove",
    "join",
    "begin",
    "announce",
    "finish",
    "locate",
    "heartbeat",
    "leave",
    "status",
)


@dataclass(slots=True)
class Counters:
    """Monotonic counts."""

    advertised_blocks_total: int = 0
    """By nodes, also what they had advertised before."""
    withdrawn_blocks_total: int = 0
    declined_blocks_total: int = 0
    """Not remembered: the index is full."""
    crowded_blocks_total: int = 0
    """Not remembered: enough other nodes own the block."""
    locate_total: int = 0
    locate_blocks_total: int = 0
    locate_found_blocks_total: int = 0
    node_joined_total: int = 0
    node_lost_total: int = 0
    """Forgotten by silence or a lost connection, not by their own word."""
    proof_refused_total: int = 0
    """Callers without the cluster secret."""
    connection_refused_total: int = 0
    """Closed at once: too many, another user's, or no descriptor is free."""
    error_total: int = 0
    """Calls answered with an error."""

    def items(self) -> list[tuple[str, int]]:
        """Names with the service's prefix, and values."""
        return [(f"trikv_meta_{one.name}", getattr(self, one.name)) for one in fields(self)]
