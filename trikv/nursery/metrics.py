"""`/metrics` of the daemon: all that `status` knows, as families.

Decided here: names, kinds and labels. Names carry base units, labels come from closed sets; the one
exception, `namespace`, has the values of the few busiest. Each family has a row in docs/metrics.md.
Made anew for each scrape: nothing here is counted twice or kept.
"""

from collections.abc import Iterator
from typing import Final

from trikv import __version__
from trikv.core.blocks import State
from trikv.core.ceiling import TIERS, Case, WindowFacts
from trikv.core.counters import Counters
from trikv.nursery import disk_metrics, peer_metrics
from trikv.nursery.service import Service
from trikv.nursery.status import Facts
from trikv.process.pages import Family, Rows, Shown, plain, split

ALL: Final = "all"
NAMESPACE_DIGITS: Final = 8
STATES: Final = ("serving", "draining", "degraded")
WINDOW: Final = ("window", "namespace")


FAMILIES: Final = {
    "trikv_info": Family("Always 1: which software serves, on what memory", ("version", "backing")),
    "trikv_state": Family("1 for the state that the daemon is in", ("state",)),
    "trikv_uptime_seconds": Family("Since the daemon started"),
    "trikv_stall_max_seconds": Family(
        "Longest processor time of the main thread between two turns of its loop"
    ),
    "trikv_pool_capacity_bytes": Family("Size of the pool"),
    "trikv_pool_used_bytes": Family("Pages of sealed and filling blocks"),
    "trikv_pool_pinned_bytes": Family("Held by leases"),
    "trikv_pool_filling_bytes": Family("Pages of blocks that not all ranks have saved"),
    "trikv_pool_filling_blocks": Family("Blocks that not all ranks have saved"),
    "trikv_pool_slab_bytes": Family("Size of a slab"),
    "trikv_pool_slabs": Family("Slabs of the pool", ("use",)),
    "trikv_cache_blocks": Family("Blocks that can be loaded", ("tier",)),
    "trikv_cache_bytes": Family("Their pages", ("tier",)),
    "trikv_leases": Family("Active promises"),
    "trikv_transfers": Family("Copies that wait or run"),
    "trikv_sessions": Family("Open sessions"),
    "trikv_engines": Family("Attached engines", ("state",)),
    "trikv_namespaces": Family("Known namespaces"),
    "trikv_copiers": Family("Copiers, one a GPU", ("state",)),
    "trikv_copier_ended_total": Family("Copiers that have ended"),
    "trikv_rpc_total": Family("Calls that have ended", ("method", "outcome")),
    "trikv_window_covered_seconds": Family("How much of the window has passed so far", WINDOW),
    "trikv_window_asked_blocks": Family("Blocks asked for in the window", WINDOW),
    "trikv_window_hit_blocks": Family("Of these, found there", (*WINDOW, "tier")),
    "trikv_window_distinct_blocks": Family("Of these, different ones (estimate)", WINDOW),
    "trikv_window_missed_distinct_blocks": Family(
        "Different ones among the missed (estimate)", WINDOW
    ),
    "trikv_window_hit_ratio": Family("Measured: found of all asked for", WINDOW),
    "trikv_window_reachable_ratio": Family(
        "Ceiling: the measured ratio, had every block that was missed twice been kept", WINDOW
    ),
    "trikv_window_fresh_ratio": Family(
        "Ceiling r*: an endless cache that was empty when the window began", WINDOW
    ),
    "trikv_window_case": Family("1 for the case that the window shows", (*WINDOW, "case")),
    **disk_metrics.FAMILIES,
    **peer_metrics.FAMILIES,
}


class Families:
    """Asks the daemon's parts at each scrape."""

    def __init__(self, service: Service, facts: Facts) -> None:
        self._service = service
        self._facts = facts

    def read(self) -> Iterator[Shown]:
        """All families: the plain counters, then those of `FAMILIES`."""
        store = self._service.store
        yield from plain(store.cache.counters.items())
        store.settle()
        tiers = self._facts.tiers
        rows: dict[str, Rows] = {
            **self._daemon(),
            **self._pool(),
            **self._callers(),
            **disk_metrics.rows(tiers),
            **peer_metrics.rows(tiers.peering if tiers is not None else None),
            **windows_rows(store.windows.read(now_s=store.now_s())),
        }
        yield from split(FAMILIES, rows)

    def _daemon(self) -> dict[str, Rows]:
        facts = self._facts
        state = facts.shown_state.partition(":")[0]
        return {
            "trikv_info": [((__version__, facts.backing), 1)],
            "trikv_state": [((one,), one == state) for one in STATES],
            "trikv_uptime_seconds": [((), self._service.store.now_s() - facts.started_s)],
            "trikv_stall_max_seconds": [((), facts.ticks.longest_s)],
        }

    def _pool(self) -> dict[str, Rows]:
        cache = self._service.store.cache
        pages, counts, free = cache.pages, cache.blocks.counts, cache.pages.free_slab_count
        sealed_bytes = pages.used_bytes - cache.filling_bytes
        tiers = self._facts.tiers
        disks = tiers.disks if tiers is not None else []
        return {
            "trikv_pool_capacity_bytes": [((), pages.capacity_bytes)],
            "trikv_pool_used_bytes": [((), pages.used_bytes)],
            "trikv_pool_pinned_bytes": [((), cache.leases.pinned_bytes)],
            "trikv_pool_filling_bytes": [((), cache.filling_bytes)],
            "trikv_pool_filling_blocks": [((), counts[State.FILLING])],
            "trikv_pool_slab_bytes": [((), pages.slab_bytes)],
            "trikv_pool_slabs": [(("used",), pages.slab_count - free), (("free",), free)],
            "trikv_cache_blocks": [
                (("pinned",), counts[State.SEALED]),
                (("ssd",), sum(one.block_count for one in disks)),
            ],
            "trikv_cache_bytes": [
                (("pinned",), sealed_bytes),
                (("ssd",), sum(one.used_bytes for one in disks)),
            ],
            "trikv_leases": [((), len(cache.leases.active))],
            "trikv_transfers": [((), len(cache.transfers))],
        }

    def _callers(self) -> dict[str, Rows]:
        store, copiers = self._service.store, self._facts.copiers
        instances = store.engines.by_name.values()
        ready = sum(1 for one in instances if one.namespace is not None)
        gpus = copiers.by_gpu.keys() | copiers.faults.keys()
        running = len(copiers.by_gpu)
        return {
            "trikv_sessions": [((), len(self._service.sessions.open_sessions))],
            "trikv_engines": [(("ready",), ready), (("incomplete",), len(instances) - ready)],
            "trikv_namespaces": [((), len(store.engines.namespaces.by_fingerprint))],
            "trikv_copiers": [(("running",), running), (("ended",), len(gpus) - running)],
            "trikv_copier_ended_total": [((), sum(copiers.end_count(gpu) for gpu in gpus))],
            "trikv_rpc_total": self._facts.calls.rows(),
        }


def windows_rows(windows: list[WindowFacts]) -> dict[str, Rows]:
    """Rows of the hit-rate windows."""
    named = [
        ((span(one.length_s), one.namespace[:NAMESPACE_DIGITS] or ALL), one) for one in windows
    ]
    return {
        "trikv_window_covered_seconds": [(name, one.covered_s) for name, one in named],
        "trikv_window_asked_blocks": [(name, one.asked_blocks) for name, one in named],
        "trikv_window_hit_blocks": [
            ((*name, tier), blocks)
            for name, one in named
            for tier, blocks in zip(TIERS, one.hit_blocks, strict=True)
        ],
        "trikv_window_distinct_blocks": [(name, one.distinct_blocks) for name, one in named],
        "trikv_window_missed_distinct_blocks": [
            (name, one.distinct_missed_blocks) for name, one in named
        ],
        # A ratio of nothing is no number: the row appears with the first block asked for.
        "trikv_window_hit_ratio": [(name, one.measured) for name, one in named if one.asked_blocks],
        "trikv_window_reachable_ratio": [
            (name, one.reachable) for name, one in named if one.asked_blocks
        ],
        "trikv_window_fresh_ratio": [(name, one.fresh) for name, one in named if one.asked_blocks],
        "trikv_window_case": [
            ((*name, case.value), case is one.case) for name, one in named for case in Case
        ],
    }


def span(seconds: float) -> str:
    """`15m`, `24h`: the length of a window as in the setting."""
    for unit, size in (("h", 3_600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def names() -> list[str]:
    """Every family's name, as in docs/metrics.md."""
    return [*(name for name, _ in Counters().items()), *FAMILIES]
