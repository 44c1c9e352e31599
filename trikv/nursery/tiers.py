"""What lies below the pool, put together: disks, reads, writes, and their order at start and end.

Decided here: without which disks a daemon does not start, and that a clean end writes what is worth
keeping before it closes them. This file does not know what a disk does.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from trikv.config import Settings
from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.calls import Query
from trikv.core.errors import BadRequestError, NotReadyError
from trikv.core.spills import Budget, Spills
from trikv.core.superblock import UnusableDiskError
from trikv.core.words import InstanceName, RequestId
from trikv.nursery.disks import DiskTier
from trikv.nursery.lifting import Lifter
from trikv.nursery.peering import Peering, first_of
from trikv.nursery.prefetching import Prefetching
from trikv.nursery.spilling import Spilling
from trikv.nursery.store import Store
from trikv.options import SettingError
from trikv.tiers.front import DiskFailedError
from trikv.tiers.pool import Pool
from trikv.tiers.ssd import open_disk
from trikv.tiers.transfers import NOBODYS

log = structlog.get_logger()

CLOSE_S: Final = 30.0  # a disk gives up by itself before
FLUSH_S: Final = 2.0  # what is worth keeping gets at least so long at the end


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """What the settings say about disks; `capacity_bytes` is of each."""

    paths: tuple[str, ...]
    capacity_bytes: int
    ring: str = "auto"


@dataclass(slots=True)
class Tiers:
    """The disks of a daemon and the tasks around them.

    Attributes:
        broken: paths that could not be opened, and why.
    """

    store: Store
    below: Below
    disks: list[DiskTier] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    until_s: float = 0.0
    peering: Peering | None = None
    prefetching: Prefetching = field(init=False)
    spilling: Spilling = field(init=False)

    def __post_init__(self) -> None:
        self.prefetching = Prefetching(self.below, self.disks)
        self.spilling = Spilling(self.below, self.disks)
        if self.peering is not None:
            self.prefetching.others_s = self.peering.fetching.seconds
            self.peering.fetching.tell = self.prefetching.tell
            self.peering.owner.lifter = Lifter(self.peering.lifting, self.prefetching)

    @property
    def faults(self) -> list[str]:
        """What is wrong with the disks, one line each."""
        off = {one.disk.path: one.fault for one in self.disks if one.fault}
        return [f"SSD {path} is off: {reason}" for path, reason in (self.broken | off).items()]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find what the disks hold, read and write, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.prefetching.run)
            for one in self.disks:
                nursery.start_soon(one.recover)
            nursery.start_soon(self.spilling.run)
            if self.peering is not None:
                await nursery.start(self.peering.run)
            task_status.started()

    def close_calls(self, until_s: float) -> None:
        """The daemon ends: queries that wait are answered with what is there.

        Args:
            until_s: when calls and copies are to have ended, and what is kept to be written.
        """
        self.until_s = until_s
        self.prefetching.close()

    async def end(self) -> None:
        """Write what is worth keeping, then close the disks; `run` must have ended.

        Cancellation: none; writing stops at the deadline, or `FLUSH_S` from now.
        """
        with trio.CancelScope(shield=True):
            with trio.move_on_at(max(self.until_s, trio.current_time() + FLUSH_S)):
                await self.spilling.drain()
            self._tell_unwritten()
            with trio.move_on_after(CLOSE_S):
                async with trio.open_nursery() as nursery:
                    for one in self.disks:
                        nursery.start_soon(one.close)

    def _tell_unwritten(self) -> None:
        """One line about what ends with the pool, or, where that is kept, is not on a disk yet."""
        blocks, size = self.below.unwritten()
        if blocks:
            kept = self.store.keeper is not None
            tell = log.info if kept else log.warning
            tell("spill.unfinished", block_count=blocks, bytes=size, is_kept_in_pool=kept)

    # -- for the service

    def queried(self, instance: InstanceName | None, request: RequestId) -> None:
        """A query was answered: begin to read what it has asked for."""
        if self.below.begun or self.below.reading.has_promoted:
            self.prefetching.begin(instance, request)
        if self.below.spills.hot_count:
            self.spilling.ring()
        if self.peering is not None:
            self.peering.fetching.ring()

    def released(self, instance: InstanceName | None, requests: list[RequestId]) -> None:
        """Requests have ended: what was begun for them has no hurry, or is not wanted."""
        self.prefetching.released(instance, requests)
        if self.store.remote is not None:
            self.store.remote.ended(instance, requests)

    def seconds(self) -> float:
        """An estimate of how long what is coming takes."""
        return self.prefetching.seconds()

    async def wait(self, instance: InstanceName | None, call: Query) -> None:
        """Until a query is worth answering; see `Prefetching.wait`."""
        await self.prefetching.wait(call, lambda: self.store.coming(instance, call))

    async def void(self) -> None:
        """Make durable what `reset` has dropped: on each disk that works, whatever others do.

        Raises:
            NotReadyError: that is not certain on each disk; those that are certain are not asked
                again.
        """
        failed: NotReadyError | None = None
        for one in self.disks:
            for origin, told in list(self.below.voids.items()):
                if one.number in told:
                    continue
                try:
                    await one.void(origin)
                except NotReadyError as error:
                    failed = failed or error
                    break
                told.add(one.number)
        if failed is not None:
            raise failed
        if self.below.voids and self.broken:
            path, reason = next(iter(self.broken.items()))
            raise NotReadyError(f"the SSD at {path} cannot be told to forget: it is off: {reason}")
        for origin, told in list(self.below.voids.items()):
            if len(told) == len(self.disks):
                del self.below.voids[origin]


def disks_of(settings: Settings) -> DiskPlan:
    """What the settings say about disks.

    Raises:
        SettingError: they contradict each other.
    """
    if not settings.ssd_cache_path:
        for name in ("ssd_cache_capacity", "ssd_write_through", "ssd_write_budget"):
            if getattr(settings, name):
                flag = name.replace("_", "-")
                raise SettingError(f"--{flag}: needs --ssd-cache-path")
        return DiskPlan((), 0)
    if settings.ssd_cache_capacity is None:
        raise SettingError("--ssd-cache-path: needs --ssd-cache-capacity, the limit of each path")
    return DiskPlan(settings.ssd_cache_path, settings.ssd_cache_capacity, settings.ssd_ring)


def below_of(settings: Settings, cache: Cache) -> Below | None:
    """The core of what lies below a pool, without disks yet; None without any, and other nodes."""
    if not settings.ssd_cache_path and not settings.metaserver_addr:
        return None
    spills = Spills(Budget(settings.ssd_write_budget), write_through=settings.ssd_write_through)
    return Below(cache, [], spills, has_disks=bool(settings.ssd_cache_path))


@asynccontextmanager
async def open_disks(plan: DiskPlan, tiers: Tiers, pool: Pool) -> AsyncIterator[None]:
    """Open all disks for as long as the block runs; a broken one is left out and told about.

    Raises:
        SettingError: a path must not be used; what lies there is as it was.
    """
    refusal = ""
    async with AsyncExitStack() as stack:
        for path in plan.paths:
            # Only of a kept pool: another process cannot open any other, and its memory would be
            # free some time after this process has ended, instead of at once.
            memory_fd = NOBODYS if tiers.store.keeper is None else pool.fd
            try:
                opened = open_disk(path, plan.capacity_bytes, ring=plan.ring, memory_fd=memory_fd)
                disk = await stack.enter_async_context(opened)
            except (BadRequestError, UnusableDiskError, DiskFailedError, ExceptionGroup) as raised:
                error = first_of(raised)
                if isinstance(error, BadRequestError):
                    refusal = f"--ssd-ring: {error}"
                    break
                if isinstance(error, UnusableDiskError):
                    refusal = f"--ssd-cache-path {path}: {error}"
                    break
                if not isinstance(error, DiskFailedError):
                    raise
                tiers.broken[path] = str(error)
                log.warning("disk.failed", path=path, reason=str(error))
            else:
                tier = DiskTier(disk, tiers.below, pool.address, plan.capacity_bytes)
                tiers.disks.append(tier)
                if tiers.peering is not None:
                    tiers.peering.shared.watch(tier.lower)
        if not refusal:
            yield
    if refusal:  # raised out here: on its way through the other disks it would become a group
        raise SettingError(refusal)
