"""A month of one engine over one daemon with disks, on a virtual clock: what would leak, leaks."""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import trio

from tests.sim.fake_disk import DiskFaults, FakeDisk, Medium
from trikv.core.below import Below
from trikv.core.blocks import ABSENT, SEALED
from trikv.core.cache import Cache
from trikv.core.calls import Query
from trikv.core.plans import Key, Limits
from trikv.core.spills import DAY_S, Budget, Spills
from trikv.core.words import Entries, InstanceName, RequestId, SpaceId, Words
from trikv.nursery.disks import DiskTier
from trikv.nursery.prefetching import Prefetching
from trikv.nursery.spilling import Spilling

PAGE = 4096
SLAB = 16 * PAGE
WAIT_S = 5.0
SPACES = {1: (1,), 2: (3,)}  # two models: pages of a block
ME = InstanceName("engine")


@dataclass(slots=True)
class Month:
    """What came of it."""

    hits: int = 0
    asked: int = 0
    from_disk: int = 0
    waited_longest_s: float = 0.0
    orphans: int = 0


class Host:
    """A daemon's core and its tasks for disks; the engine calls the core itself."""

    def __init__(
        self, rng: random.Random, mediums: list[Medium], faults: DiskFaults, spaces: list[int]
    ) -> None:
        self.rng = rng
        self.spaces = spaces
        self.cache = Cache(3 * SLAB, SLAB, entries_max=256, seed=1, limits=Limits())
        self.below = Below(self.cache, [], Spills(Budget(None)))
        self.pool = np.zeros(3 * SLAB, np.uint8)
        self.fakes = [FakeDisk(medium, self.pool, faults) for medium in mediums]
        self.tiers = [DiskTier(fake, self.below, 0, 0) for fake in self.fakes]
        for space in spaces:
            page_bytes = tuple(PAGE * count for count in SPACES[space])
            self.cache.open_space(SpaceId(space), page_bytes)
            self.below.open_space(SpaceId(space), bytes([space]) * 32, page_bytes)
        self.prefetching = Prefetching(self.below, self.tiers)
        self.spilling = Spilling(self.below, self.tiers)

    async def run(self, month: Month, until_s: float, mean_s: float) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.prefetching.run)
            for tier in self.tiers:
                nursery.start_soon(tier.recover)
            nursery.start_soon(self.spilling.run)
            number = 0
            while trio.current_time() < until_s:
                await trio.sleep(self.rng.expovariate(1 / mean_s))
                number += 1
                await self.request(month, RequestId(str(number)))
            nursery.cancel_scope.cancel()

    async def request(self, month: Month, request: RequestId) -> None:
        space = SpaceId(self.rng.choice(self.spaces))
        nodes = list(path(self.rng))
        words = np.array([(node, 0, 0, 1) for node in nodes], np.uint64).reshape(-1, 4)
        key = Key(ME, request, space)
        count = self.query(key, words)
        begin_s = trio.current_time()
        await self.prefetching.wait(
            Query(request, 0, words, WAIT_S), lambda: (0, self.coming(space, words))
        )
        month.waited_longest_s = max(month.waited_longest_s, trio.current_time() - begin_s)
        count = self.query(key, words)
        month.hits += count
        month.asked += len(nodes)
        self.check(space, words[:count])
        plan = self.cache.prepare_save(
            key, words[count:], rank=0, first=count, now_s=trio.current_time()
        )
        for offset, at in zip(plan.offsets.tolist(), plan.positions.tolist(), strict=True):
            self.pool[offset : offset + self.size(space)] = byte(space, nodes[count + at])
        await trio.sleep(0.01)
        done = np.ones(len(plan.entries), np.bool_)
        self.cache.complete_save(plan, done, copied_bytes=0)
        self.spilling.ring()
        self.cache.release(ME, request)
        self.prefetching.released(ME, [request])

    def query(self, key: Key, words: Words) -> int:
        now_s = trio.current_time()
        self.cache.expire_leases(now_s=now_s)
        hit = self.cache.query(key, words, now_s=now_s)
        room = self.cache.leases.room(self.size(key.space))
        self.below.fetch(key.space, words, hit.count, room)
        self.prefetching.begin(ME, key.request)
        return hit.count

    def coming(self, space: SpaceId, words: Words) -> int:
        found = self.resident(space, words)
        count = int(np.argmin(found >= 0)) if (found < 0).any() else len(found)
        return self.below.coming(space, words, count, 8)

    def resident(self, space: SpaceId, words: Words) -> Entries:
        found = self.cache.index.find(space, words)
        found[self.cache.blocks.state[found] != SEALED] = -1
        return found

    def size(self, space: int) -> int:
        return PAGE * sum(SPACES[space])

    def check(self, space: SpaceId, words: Words) -> None:
        """Every byte of what was promised is right."""
        slots = self.cache.blocks.slot[self.resident(space, words)]
        offsets = self.cache.pages.offsets(slots, 0).tolist()
        for offset, node in zip(offsets, words[:, 0].tolist(), strict=True):
            page = self.pool[offset : offset + self.size(space)]
            assert (page == byte(space, node)).all()

    def audit(self) -> int:
        """Nothing is held, no slot is lost; returns how many blocks lie there without a parent."""
        orphans = 0
        assert not self.cache.landings.bytes
        assert not self.cache.landings.is_landing.any()
        assert not self.cache.transfers
        self.cache.blocks.check()
        for tier in self.tiers:
            lower = tier.lower
            lower.blocks.check()
            assert not lower.blocks.pins.any()
            live = np.flatnonzero(lower.blocks.state != ABSENT).astype(np.int32)
            assert (lower.blocks.state[live] == SEALED).all()
            slots = lower.blocks.slot[live]
            assert len(np.unique(slots)) == len(slots)
            used = sum(lower.pages.used_slots(shape) for shape in range(len(self.spaces)))
            assert used == len(live)
            origins = lower.blocks.space[live].tolist()
            nodes = lower.index.hashes_of(live)[:, 0].tolist()
            names = set(zip(origins, nodes, strict=True))
            orphans += sum(1 for one, node in names if node > 1 and (one, node // 2) not in names)
        return orphans


def byte(space: int, node: int) -> int:
    return 1 + zlib.crc32(f"{space}/{node}".encode()) % 250


def path(rng: random.Random) -> Iterator[int]:
    """From the root to some node of a tree; some are far more popular than others."""
    depth = rng.randint(2, 9)
    node = 1
    for _ in range(depth):
        yield node
        node = 2 * node + (rng.random() < 0.4)


async def month_of(
    seed: int, faults: DiskFaults, *, days: int = 30, restarts: bool, spaces: list[int]
) -> Month:
    """Live through it; restarts, when there are any, every other day and rarely in order."""
    rng, month = random.Random(seed), Month()
    mediums = [Medium(rng, 6, 512 << 10)]
    day = 0
    while day < days:
        host = Host(rng, mediums, faults, spaces)
        length = rng.randint(1, 4) if restarts else days
        await host.run(month, trio.current_time() + length * DAY_S, 3_600.0)
        if rng.random() < 0.3:
            await host.spilling.drain()
        month.orphans = host.audit()
        month.from_disk += host.cache.landings.blocks_total
        mediums[0].crash(faults)
        day += length
    return month
