"""What has happened since the daemon started, in numbers.

Decided here: the closed list of counters. Each has a row in docs/metrics.md.
"""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Monotonic counts; blocks and bytes are whole blocks over all ranks unless said."""

    query_total: int = 0
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
    load_failed_blocks_total: int = 0
    save_total: int = 0
    save_blocks_total: int = 0
    save_bytes_total: int = 0
    """Bytes read from engines' memory, per rank."""
    save_present_blocks_total: int = 0
    save_refused_blocks_total: int = 0
    """No room: everything is pinned, or too much is filling."""
    save_failed_blocks_total: int = 0
    """Fence raised, engine gone, or copy failed."""
    sealed_blocks_total: int = 0
    evicted_blocks_total: int = 0
    reclaimed_slabs_total: int = 0
    fill_expired_blocks_total: int = 0
    """Given up because not all ranks saved their pages in time."""
    dropped_blocks_total: int = 0
    """Forgotten on request (`reset`)."""
    session_opened_total: int = 0
    session_lost_total: int = 0
    """Ended by silence, death of the process or a broken connection, with ranks registered."""
    error_total: int = 0
    """Calls answered with an error."""

    def items(self) -> list[tuple[str, int]]:
        """Names with the service's prefix, and values."""
        return [(f"trikv_{field.name}", getattr(self, field.name)) for field in fields(self)]
