"""The families of `/metrics` about what lies below the pool.

Decided here: names and labels, as in `metrics.py`; `disk` has the paths that were set. Without
disks all of them are empty.
"""

from typing import Final

from trikv.nursery.tiers import Tiers
from trikv.process.pages import Family, Rows

DISK: Final = ("disk",)
STATES: Final = ("serving", "scanning", "off")

FAMILIES: Final = {
    "trikv_disk_state": Family("1 for the state that the disk is in", ("disk", "state")),
    "trikv_disk_capacity_bytes": Family("Hard limit of the disk", DISK),
    "trikv_disk_used_bytes": Family("Slots of blocks", DISK),
    "trikv_disk_blocks": Family("Blocks that can be read", DISK),
    "trikv_disk_found_blocks": Family("Blocks that were there when the daemon started", DISK),
    "trikv_disk_written_bytes_total": Family("Pages written", DISK),
    "trikv_disk_read_bytes_total": Family("Pages read", DISK),
    "trikv_disk_written_per_read_ratio": Family("Bytes written for each byte that was read", DISK),
    "trikv_disk_evicted_blocks_total": Family("Blocks that made room for others", DISK),
    "trikv_disk_wrong_blocks_total": Family("Blocks that could not be read, or not right", DISK),
    "trikv_disk_errors_total": Family("Operations that failed", DISK),
    "trikv_spill_blocks_total": Family("Blocks that were written"),
    "trikv_spill_failed_blocks_total": Family("Blocks that could not be written"),
    "trikv_spill_waiting_requests": Family("Requests that wait for a write, and batches under way"),
    "trikv_spill_dropped_requests_total": Family("Requests that had to wait too long for it"),
    "trikv_fetch_blocks_total": Family("Blocks that were brought up"),
    "trikv_fetch_failed_blocks_total": Family("Blocks that were to be brought up and were not"),
    "trikv_fetch_waiting_queries": Family("Queries that wait for blocks"),
    "trikv_fetch_given_up_blocks_total": Family("Reads that nobody wanted any more"),
    "trikv_quarantined_bytes": Family("Pool that a hung disk may still touch: never used again"),
}


def rows(tiers: Tiers | None) -> dict[str, Rows]:
    """The rows of all families."""
    if tiers is None:
        return {name: [] for name in FAMILIES}
    below, spilling, fetching = tiers.below, tiers.spilling, tiers.prefetching
    landings = below.cache.landings
    return _disks(tiers) | {
        "trikv_spill_blocks_total": [((), spilling.spilled_blocks_total)],
        "trikv_spill_failed_blocks_total": [((), spilling.failed_blocks_total)],
        "trikv_spill_waiting_requests": [((), spilling.waiting_count)],
        "trikv_spill_dropped_requests_total": [((), below.spills.dropped_total)],
        "trikv_fetch_blocks_total": [((), landings.blocks_total)],
        "trikv_fetch_failed_blocks_total": [((), landings.failed_blocks_total)],
        "trikv_fetch_waiting_queries": [((), fetching.waits)],
        "trikv_fetch_given_up_blocks_total": [((), fetching.given_up_total)],
        "trikv_quarantined_bytes": [((), below.quarantined_bytes)],
    }


def _disks(tiers: Tiers) -> dict[str, Rows]:
    open_ones = [((one.disk.path,), one) for one in tiers.disks]
    states = {one.disk.path: one.state for one in tiers.disks}
    states |= dict.fromkeys(tiers.broken, "off")
    return {
        "trikv_disk_state": [
            ((path, state), state == now) for path, now in states.items() for state in STATES
        ],
        "trikv_disk_capacity_bytes": [(name, one.capacity_bytes) for name, one in open_ones],
        "trikv_disk_used_bytes": [(name, one.used_bytes) for name, one in open_ones],
        "trikv_disk_blocks": [(name, one.block_count) for name, one in open_ones],
        "trikv_disk_found_blocks": [(name, one.found_blocks) for name, one in open_ones],
        "trikv_disk_written_bytes_total": [
            (name, one.disk.bytes_written) for name, one in open_ones
        ],
        "trikv_disk_read_bytes_total": [(name, one.disk.bytes_read) for name, one in open_ones],
        "trikv_disk_written_per_read_ratio": [
            (name, one.disk.bytes_written / one.disk.bytes_read)
            for name, one in open_ones
            if one.disk.bytes_read
        ],
        "trikv_disk_evicted_blocks_total": [
            (name, one.lower.counters.evicted_blocks_total) for name, one in open_ones
        ],
        "trikv_disk_wrong_blocks_total": [
            (name, one.lower.wrong_blocks_total) for name, one in open_ones
        ],
        "trikv_disk_errors_total": [(name, one.disk.io_error_count) for name, one in open_ones],
    }
