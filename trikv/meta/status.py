"""Facts about a running metaserver, for people and tools, and as metrics.

Decided here: what `status` says, and names, kinds and labels of the metrics; each has a row in
docs/metrics.md. Changes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from trikv import __version__
from trikv.core.counters import OK, CallCounts
from trikv.meta.counters import METHODS, Counters
from trikv.meta.service import MetaService
from trikv.process.pages import Family, Rows, Shown, plain, split
from trikv.process.ticks import Ticks

FULL: Final = "full"
SERVING: Final = "serving"
DRAINING: Final = "draining"
STATES: Final = (SERVING, DRAINING, FULL)


def _calls() -> CallCounts:
    return CallCounts({(method, OK): 0 for method in METHODS})


@dataclass(slots=True)
class Facts:
    """What does not come from the nodes."""

    epoch: int
    is_open: bool
    started_s: float = 0.0
    is_draining: bool = False
    http: str = ""
    ticks: Ticks = field(default_factory=Ticks)
    calls: CallCounts = field(default_factory=_calls)


def state_of(service: MetaService, facts: Facts) -> str:
    """One of `STATES`."""
    if facts.is_draining:
        return DRAINING
    return SERVING if service.state.owners.free_count else FULL


def write_status(status: Any, service: MetaService, facts: Facts) -> None:
    """Fill in `MetaStatus`."""
    state = service.state
    status.software = f"trikv-meta {__version__}"
    status.epoch = facts.epoch
    status.uptimeSeconds = service.now_s() - facts.started_s
    status.state = state_of(service, facts)
    status.entryCount, status.capacity = len(state.owners), state.owners.capacity
    status.memoryBytes, status.originCount = state.owners.memory_bytes, state.owners.origin_count
    status.stallSeconds = facts.ticks.longest_s
    status.http, status.isOpen = facts.http, facts.is_open
    nodes = list(state.by_number.values())
    for row, node in zip(status.init("nodes", len(nodes)), nodes, strict=True):
        row.address, row.epoch, row.isComplete = node.address, node.epoch, node.is_complete
        row.heldCount, row.lentBlocks = state.held(node), node.lent
        row.declinedCount, row.crowdedCount = node.declined, node.crowded
    counters = service.counters.items()
    for row, (name, value) in zip(status.init("counters", len(counters)), counters, strict=True):
        row.name, row.value = name, value
    ended = facts.calls.rows()
    for call, ((method, outcome), count) in zip(
        status.init("calls", len(ended)), ended, strict=True
    ):
        call.method, call.outcome, call.count = method, outcome, count


FAMILIES: Final = {
    "trikv_meta_info": Family("Always 1: which software serves", ("version",)),
    "trikv_meta_state": Family("1 for the state that the metaserver is in", ("state",)),
    "trikv_meta_uptime_seconds": Family("Since the metaserver started"),
    "trikv_meta_stall_max_seconds": Family(
        "Longest processor time of the main thread between two turns of its loop"
    ),
    "trikv_meta_entries": Family("Blocks that are known"),
    "trikv_meta_entries_capacity": Family("Blocks that can be known"),
    "trikv_meta_index_bytes": Family("Memory of the index when all entries are used"),
    "trikv_meta_origins": Family("Cache groups of namespaces of which a block is known"),
    "trikv_meta_nodes": Family("Nodes that are alive", ("state",)),
    "trikv_meta_rpc_total": Family("Calls that have ended", ("method", "outcome")),
}


class Families:
    """Asks the metaserver's parts at each scrape."""

    def __init__(self, service: MetaService, facts: Facts) -> None:
        self._service = service
        self._facts = facts

    def read(self) -> Iterator[Shown]:
        """All families: the plain counters, then those of `FAMILIES`."""
        service, facts, state = self._service, self._facts, self._service.state
        yield from plain(service.counters.items())
        said = state_of(service, facts)
        partial = len(state.by_number) - state.complete_count
        rows: dict[str, Rows] = {
            "trikv_meta_info": [((__version__,), 1)],
            "trikv_meta_state": [((one,), one == said) for one in STATES],
            "trikv_meta_uptime_seconds": [((), service.now_s() - facts.started_s)],
            "trikv_meta_stall_max_seconds": [((), facts.ticks.longest_s)],
            "trikv_meta_entries": [((), len(state.owners))],
            "trikv_meta_entries_capacity": [((), state.owners.capacity)],
            "trikv_meta_index_bytes": [((), state.owners.memory_bytes)],
            "trikv_meta_origins": [((), state.owners.origin_count)],
            "trikv_meta_nodes": [
                (("complete",), state.complete_count),
                (("announcing",), partial),
            ],
            "trikv_meta_rpc_total": facts.calls.rows(),
        }
        yield from split(FAMILIES, rows)


def names() -> list[str]:
    """Every family's name, as in docs/metrics.md."""
    return [*(name for name, _ in Counters().items()), *FAMILIES]
