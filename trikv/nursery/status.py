"""Facts about a running daemon, for people and tools.

Decided here: what `status` says, in the schema's names. Changes nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from trikv import __version__
from trikv.core.blocks import State
from trikv.core.ceiling import TIERS
from trikv.core.counters import CallCounts
from trikv.nursery.copiers import Copiers
from trikv.nursery.peer_status import write_cluster
from trikv.nursery.service import Service
from trikv.nursery.tiers import Tiers
from trikv.process.ticks import Ticks
from trikv.tiers.frames import Direction


@dataclass(slots=True)
class Facts:
    """What does not come from the core.

    Attributes:
        pool_fault: why the pool is not all there, empty while it is.
        pool_notice: what could make it faster.
    """

    epoch: int
    started_s: float
    backing: str
    copiers: Copiers
    tiers: Tiers | None = None
    state: str = "serving"
    http: str = ""
    pool_fault: str = ""
    pool_notice: str = ""
    ticks: Ticks = field(default_factory=Ticks)
    calls: CallCounts = field(default_factory=CallCounts)

    @property
    def shown_state(self) -> str:
        """The state, or what is wrong although the daemon serves."""
        faults = [f"GPU {uuid}: {reason}" for uuid, reason in self.copiers.faults.items()]
        faults += [self.pool_fault] if self.pool_fault else []
        faults += self.tiers.faults if self.tiers is not None else []
        if self.state != "serving" or not faults:
            return self.state
        return f"degraded: {'; '.join(faults)}"


def write_status(status: Any, service: Service, facts: Facts) -> None:
    """Fill in `Status`."""
    status.software = f"trikv-daemon {__version__}"
    status.epoch = facts.epoch
    status.uptimeSeconds = service.store.now_s() - facts.started_s
    status.state = facts.shown_state
    status.stallSeconds = facts.ticks.longest_s
    _write_pool(status.init("pool"), service, facts)
    _write_namespaces(status, service)
    _write_engines(status, service)
    _write_insight(status, service)
    _write_tenants(status, service)
    _write_disks(status, facts)
    if facts.tiers is not None and facts.tiers.peering is not None:
        write_cluster(status.init("cluster"), facts.tiers.peering)
    counters = service.store.cache.counters.items()
    rows = status.init("counters", len(counters))
    for row, (name, value) in zip(rows, counters, strict=True):
        row.name, row.value = name, value
    _write_copiers(status, facts.copiers)
    _write_windows(status, service)
    ended = facts.calls.rows()
    for call, ((method, outcome), count) in zip(
        status.init("calls", len(ended)), ended, strict=True
    ):
        call.method, call.outcome, call.count = method, outcome, count
    status.http = facts.http


def _write_windows(status: Any, service: Service) -> None:
    store = service.store
    store.settle()
    windows = store.windows.read(now_s=store.now_s())
    for row, window in zip(status.init("windows", len(windows)), windows, strict=True):
        row.seconds, row.coveredSeconds = window.length_s, window.covered_s
        row.namespace = window.namespace
        row.askedBlocks = window.asked_blocks
        for hits, tier, blocks in zip(
            row.init("hits", len(TIERS)), TIERS, window.hit_blocks, strict=True
        ):
            hits.tier, hits.blocks = tier, blocks
        row.distinctBlocks = window.distinct_blocks
        row.missedDistinctBlocks = window.distinct_missed_blocks
        row.hitRatio, row.reachableRatio = window.measured, window.reachable
        row.freshRatio = window.fresh
        row.case = window.case.value


def _write_pool(pool: Any, service: Service, facts: Facts) -> None:
    cache = service.store.cache
    pool.capacityBytes = cache.pages.capacity_bytes
    pool.usedBytes = cache.pages.used_bytes
    pool.pinnedBytes = cache.leases.pinned_bytes
    pool.slabBytes = cache.pages.slab_bytes
    pool.slabCount = cache.pages.slab_count
    pool.slabFreeCount = cache.pages.free_slab_count
    pool.blockCount = cache.blocks.counts[State.SEALED]
    pool.fillingCount = cache.blocks.counts[State.FILLING]
    pool.leaseCount = len(cache.leases.active)
    pool.backing, pool.notice = facts.backing, facts.pool_notice


def _write_namespaces(status: Any, service: Service) -> None:
    cache = service.store.cache
    resident = cache.blocks_by_space()
    namespaces = service.store.engines.namespaces.by_fingerprint.values()
    for row, namespace in zip(status.init("namespaces", len(namespaces)), namespaces, strict=True):
        row.fingerprint = namespace.fingerprint.hex()
        row.label = namespace.label
        row.blockCount = sum(resident.get(space, 0) for space in namespace.spaces)
        row.bytes = sum(
            resident.get(space, 0) * cache.spaces[space].block_bytes for space in namespace.spaces
        )
        row.engineCount = namespace.instances
        for item, (name, value) in zip(
            row.init("fields", len(namespace.fields)), namespace.fields, strict=True
        ):
            item.name, item.value = name, value


def _write_engines(status: Any, service: Service) -> None:
    instances = service.store.engines.by_name.values()
    sessions = service.sessions.open_sessions.values()
    for row, instance in zip(status.init("engines", len(instances)), instances, strict=True):
        row.name = instance.name
        row.namespace = instance.namespace.fingerprint.hex() if instance.namespace else ""
        row.rankCount = instance.rank_count
        row.ranksRegistered = len(instance.ranks)
        own = {one.process.pid for one in sessions if one.instance == instance.name and one.process}
        row.pids = sorted(own)
        row.state = instance.missing() or "ready"
        pages = instance.namespace.pages if instance.namespace else ()
        row.pageCounts = [len(group) for group in pages]


def _write_copiers(status: Any, copiers: Copiers) -> None:
    """GPUs with a copier, and those whose last one ended."""
    uuids = sorted(copiers.by_gpu.keys() | copiers.faults.keys())
    for row, uuid in zip(status.init("copiers", len(uuids)), uuids, strict=True):
        copier = copiers.by_gpu.get(uuid)
        row.deviceUuid = uuid
        row.state = copiers.faults.get(uuid, "")
        row.endedCount = copiers.end_count(uuid)
        if copier is not None:
            row.name = str(copier.facts.get("name", ""))
            row.pid = copier.pid
            row.registeredBytes = copier.registered_bytes
            row.saveSeconds = copier.copied_s[Direction.SAVE]
            row.loadSeconds = copier.copied_s[Direction.LOAD]


def _write_disks(status: Any, facts: Facts) -> None:
    """Those that were opened, then those that could not be."""
    tiers = facts.tiers
    rows = status.init("disks", 0 if tiers is None else len(tiers.disks) + len(tiers.broken))
    if tiers is None:
        return
    for row, one in zip(rows, tiers.disks, strict=False):
        row.path, row.ring = one.disk.path, one.disk.ring_name
        row.state = one.shown_state
        row.capacityBytes = one.capacity_bytes
        row.usedBytes, row.blockCount = one.used_bytes, one.block_count
        row.foundCount = one.found_blocks
        row.writtenBytes, row.readBytes = one.disk.bytes_written, one.disk.bytes_read
        row.wrongCount, row.errorCount = one.lower.wrong_blocks_total, one.disk.io_error_count
        row.waitingCount = tiers.spilling.waiting_count
    for at, (path, reason) in enumerate(tiers.broken.items(), len(tiers.disks)):
        rows[at].path, rows[at].state = path, f"off: {reason}"


def _write_insight(status: Any, service: Service) -> None:
    insight = service.store.insight
    if insight is None:
        return
    points = insight.points()
    for row, (capacity_bytes, hit_rate) in zip(
        status.init("curve", len(points)), points, strict=True
    ):
        row.capacityBytes, row.hitRate = capacity_bytes, hit_rate
    rates = insight.shadows.hit_rates()
    for row, (policy, hit_rate) in zip(
        status.init("shadows", len(rates)), rates.items(), strict=True
    ):
        row.policy, row.hitRate = policy, hit_rate


def _write_tenants(status: Any, service: Service) -> None:
    tenants = service.store.cache.tenants
    in_pool = {name: sizes for name, *sizes in tenants.rows()} if tenants is not None else {}
    on_disks = tenants.rows_beside() if tenants is not None else {}
    names = list(in_pool | on_disks)
    for row, name in zip(status.init("tenants", len(names)), names, strict=True):
        row.name = name
        row.usedBytes, row.floorBytes, row.shareBytes = in_pool.get(name, (0, 0, 0))
        row.ssdUsedBytes, row.ssdFloorBytes, row.ssdShareBytes = on_disks.get(name, (0, 0, 0))
