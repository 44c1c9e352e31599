"""A fake world around the real shell: engines, a clock, and everything that goes wrong.

The daemon's own sessions, copy queues, service, store and core run under a virtual clock; only
memory and processes are fake.
"""

import hashlib
import random
from dataclasses import replace

import trio

from tests.sim.engine import LIFE_S, FakeEngine, Report
from tests.sim.fake_disk import DiskFaults, FakeDisk, Medium
from tests.sim.fakes import FakeMemory, Faults
from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.engines import Engines
from trikv.core.plans import Limits
from trikv.core.spills import Budget, Spills
from trikv.core.windows import Windows
from trikv.nursery.copying import Copying
from trikv.nursery.disks import DiskTier
from trikv.nursery.service import Service, sweep
from trikv.nursery.sessions import Sessions
from trikv.nursery.store import Store
from trikv.nursery.tiers import Tiers


class World:
    """One daemon, some engines, one seed."""

    def __init__(
        self,
        seed: int,
        faults: Faults,
        *,
        slabs: int = 6,
        mediums: tuple[Medium, ...] = (),
        disk_faults: DiskFaults | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.report = Report()
        self._pids = 100
        slab_bytes = 8 * 4096
        limits = Limits(
            lease_s=20.0,
            fill_s=15.0,
            leases_max=64,
            chains_max=32,
            filling_fraction_many_ranks=0.5,
        )
        pool_bytes = slabs * slab_bytes
        self.cache = Cache(pool_bytes, slab_bytes, entries_max=256, seed=seed, limits=limits)
        self.memory = FakeMemory(pool_bytes, self.rng, faults)
        windows = Windows((60.0, 600.0), now_s=trio.current_time())
        store = Store(self.cache, Engines(16), trio.current_time, windows)
        self.tiers = None
        if mediums:
            below = Below(self.cache, [], Spills(Budget(None)))
            store = replace(store, below=below)
            self.tiers = Tiers(store, below)
            self.fake_disks = [
                FakeDisk(medium, self.memory.pool, disk_faults or DiskFaults())
                for medium in mediums
            ]
            for disk in self.fake_disks:
                self.tiers.disks.append(DiskTier(disk, below, 0, 0))
        self.sessions = Sessions(store, 256, 10.0, self.memory.detach)
        self.saving, self.loading = (
            Copying(name, self.memory, self.sessions, jobs_max=2, queue_jobs_max=8)
            for name in ("save", "load")
        )
        parts = (self.sessions, self.saving, self.loading, self.memory, self.tiers)
        self.service = Service(store, *parts)
        self._suffixes = [self.rng.randbytes(32) for _ in range(6)]

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def prompt(self, model: str) -> list[bytes]:
        """A path in a small tree of chained hashes that all engines and models share."""
        del model
        depth = self.rng.randint(1, 12)
        chain, parent = [], b"root"
        for level in range(depth):
            choice = 0 if level < 4 else self.rng.randrange(2)
            parent = hashlib.blake2b(parent + self._suffixes[choice], digest_size=32).digest()
            chain.append(parent)
        return chain

    def note(self, code: str) -> None:
        self.report.errors[code] = self.report.errors.get(code, 0) + 1
        self.report.trace.append((trio.current_time(), code))

    async def run(self, *, engines: int, requests: int) -> Report:
        async with trio.open_nursery() as back:
            self.nursery = self.memory.copiers.nursery = back
            await back.start(self.sessions.run)
            await back.start(self.saving.run)
            await back.start(self.loading.run)
            await back.start(
                lambda task_status: sweep(self.service.store, every_s=0.25, task_status=task_status)
            )
            if self.tiers is not None:
                await back.start(self.tiers.run)
                back.start_soon(self._haunt)
            async with trio.open_nursery() as front:
                front.cancel_scope.deadline = trio.current_time() + LIFE_S
                for number in range(engines):
                    model, ranks, pieces = [("a", 1, 2), ("b", 2, 3), ("b", 2, 3)][number % 3]
                    engine = FakeEngine(self, number, model, ranks, pieces)
                    front.start_soon(engine.live, requests)
            assert not front.cancel_scope.cancelled_caught, "somebody waits for ever"
            await trio.sleep(130)  # leases, half-filled blocks and stalled copies run out
            if self.tiers is None:
                self._count_what_is_left()
            back.cancel_scope.cancel()
        if self.tiers is not None:
            await self._end_disks()
        self.report.trace.append((trio.current_time(), f"{self.report.loads}"))
        return self.report

    async def _haunt(self) -> None:
        while True:
            await trio.sleep(1)
            for disk in self.fake_disks:
                disk.haunt()

    async def _end_disks(self) -> None:
        """A clean end half the time, else a crash; either way nothing is left over."""
        assert self.tiers is not None
        landings = self.cache.landings
        self.report.from_disk = landings.blocks_total
        self.report.quarantined_bytes = self.tiers.below.quarantined_bytes
        if self.rng.random() < 0.5:
            await self.tiers.end()
            assert len(self.tiers.below.spills) == 0
        if not self.report.quarantined_bytes:
            self._count_what_is_left()
            for tier in self.tiers.disks:
                lower = tier.lower
                lower.blocks.check()
                self.report.left[f"disk {tier.number}"] = int(lower.blocks.pins.sum())
                used = lower.blocks.capacity - lower.blocks.counts[0]
                assert used == sum(map(lower.pages.used_slots, range(len(lower.pages._cuts))))
                assert lower.blocks.counts[1] == lower.blocks.counts[2] == 0

    def _count_what_is_left(self) -> None:
        blocks = self.cache.blocks
        blocks.check()
        self.report.left = {
            "pins": int(blocks.pins.sum()),
            "writers": int(blocks.writers.sum()),
            "leases": len(self.cache.leases.active),
            "leased_bytes": self.cache.leases.pinned_bytes,
            "transfers": len(self.cache.transfers),
            "sessions": len(self.sessions.open_sessions),
            "instances": len(self.service.store.engines.by_name),
            "attachments": len(self.memory.copiers.copies),
            "filling_bytes": self.cache.filling_bytes,
            "not_evictable": blocks.counts[1] + blocks.counts[2],
        }
        for namespace in self.service.store.engines.namespaces.by_fingerprint.values():
            assert namespace.instances == 0
            for space in namespace.spaces:
                self.cache.retire_space(space)
        while self.cache.drop_retired():
            pass
        self.report.left["pages"] = self.cache.pages.used_bytes
        self.report.left["keys"] = len(self.cache.index)
