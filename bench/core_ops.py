"""Microseconds a block of the pure core: query, save and evict, with few and many blocks resident.

    python -m bench.core_ops [--json] [--resident 10000,1000000,5000000] [--stores bare,cache]

Each size runs in a process of its own, so that resident memory can be told apart. Prefixes are of
512 random hashes, and each is used once: nothing is warm but the hashes, as in a daemon that has
just received them. Times are given in wall time and in processor time of the thread: on a shared
machine only the second says what the code did. The operating system hands out memory when it is
first written, in huge pages, which takes longer than any call here on some virtual machines: that
is measured as the baseline of the calls that fill the store, and over before the others begin.
"""

import argparse
import functools
import gc
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from bench.lines import Line, print_json, print_table
from trikv.core.cache import Cache
from trikv.core.eviction import NEVER, LeafFirstLru
from trikv.core.index import Index
from trikv.core.pages import Pages
from trikv.core.plans import Key, Limits
from trikv.core.tenants import Quota, Rules, Tenants
from trikv.core.words import Entries, InstanceName, RequestId, SpaceId, Words

PREFIX: Final = 512
PAGE_BYTES: Final = (128 * 1024,)
SLAB_BYTES: Final = 64 * 1024 * 1024
SPACE: Final = SpaceId(1)
HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
ROUNDS_TO_WRITE_ALL: Final = 3  # the log of touches has three places an entry

QUERY_US_TARGET: Final = 0.3
SAVE_US_TARGET: Final = 3.0
PAUSE_MS_TARGET: Final = 10.0
BYTES_TARGET: Final = 250.0
SIZE_BLOCKS_MIN: Final = 1_000_000  # with fewer, huge pages that are partly used hide the figure


class Store(Protocol):
    """What is measured; to measure another cache, write its adapter and add it to `STORES`."""

    def query(self, hashes: Words) -> int:
        """Find a prefix, and touch it; returns the number of blocks found."""

    def save(self, hashes: Words) -> int:
        """Take a new prefix in, evicting what must go; returns the number of blocks taken."""


class Bare:
    """Index, pages and eviction put together without states, leases or messages."""

    def __init__(self, capacity: int, *, scattered: bool = False) -> None:
        slots_per_slab = SLAB_BYTES // sum(PAGE_BYTES)
        self.index = Index(capacity, seed=1)
        self.pages = Pages(-(-capacity // slots_per_slab) * SLAB_BYTES, SLAB_BYTES)
        self.shape = self.pages.add_shape(PAGE_BYTES)
        self.recency = np.full(capacity, NEVER, np.int64)
        self.policy = LeafFirstLru(self.recency)
        self.slot = np.zeros(capacity, np.int64)
        self.evictable = np.ones(capacity, np.bool_)
        self.unused = np.arange(capacity, dtype=np.int32)[::-1].copy()
        if scattered:
            np.random.default_rng(2).shuffle(self.unused)
        self.unused_count = capacity
        self.stamp = 0

    def query(self, hashes: Words) -> int:
        """As `Store` says."""
        entries = self.index.find_prefix(SPACE, hashes)
        self._touch(entries)
        return len(entries)

    def save(self, hashes: Words) -> int:
        """As `Store` says."""
        known = self.index.find_prefix(SPACE, hashes)
        fresh = hashes[len(known) :]
        room = min(self.unused_count, self.pages.free_count(self.shape))
        if room < len(fresh):
            self._evict(len(fresh) - room)
        slots = self.pages.allocate(self.shape, len(fresh))
        entries = self._take(len(slots))
        self.slot[entries] = slots
        self.pages.set_owner(slots, entries)
        self.index.insert(SPACE, fresh[: len(slots)], entries)
        self._touch(np.concatenate([known, entries]))
        return len(slots)

    def _touch(self, entries: Entries) -> None:
        self.stamp += 1
        self.policy.touch(entries, self.stamp)
        self.pages.used(self.slot[entries], self.stamp)

    def _evict(self, count: int) -> None:
        victims = self.policy.victims(count, self.evictable)
        self.index.remove(victims)
        self.pages.free(self.slot[victims])
        self.unused[self.unused_count : self.unused_count + len(victims)] = np.sort(victims)[::-1]
        self.unused_count += len(victims)

    def _take(self, count: int) -> Entries:
        self.unused_count -= count
        return self.unused[self.unused_count : self.unused_count + count][::-1]


class Whole:
    """The cache of a daemon: as `Bare`, and states, chains of requests, leases and counters."""

    def __init__(self, capacity: int, *, has_quotas: bool = False) -> None:
        pool_bytes = -(-capacity * sum(PAGE_BYTES) // SLAB_BYTES) * SLAB_BYTES
        self.cache = Cache(
            pool_bytes,
            SLAB_BYTES,
            entries_max=capacity,
            seed=1,
            limits=Limits(filling_fraction=1.0),
            tenants=Tenants(pool_bytes, Rules(Quota(0.1, 0.5))) if has_quotas else None,
        )
        self.cache.open_space(SPACE, PAGE_BYTES)
        self.requests = 0
        self.now_s = 0.0

    def query(self, hashes: Words) -> int:
        """A request that finds its blocks, gets a lease on them, and ends."""
        key = self._new_request()
        hit = self.cache.query(key, hashes, now_s=self.now_s)
        self.cache.settle()
        self.cache.release(key.instance, key.request)
        return hit.count

    def save(self, hashes: Words) -> int:
        """A request that finds nothing, saves its blocks, and ends."""
        key = self._new_request()
        plan = self.cache.prepare_save(key, hashes, rank=0, first=0, now_s=self.now_s)
        self.cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        self.cache.release(key.instance, key.request)
        return len(plan.entries)

    def _new_request(self) -> Key:
        self.requests += 1
        self.now_s += 0.05
        self.cache.expire_fills(now_s=self.now_s)
        return Key(InstanceName("engine"), RequestId(f"request-{self.requests}"), SPACE)


STORES: Final[dict[str, Callable[[int], Store]]] = {
    "bare": Bare,
    "scattered": functools.partial(Bare, scattered=True),
    "cache": Whole,
    "quotas": functools.partial(Whole, has_quotas=True),
}


def hashes_of(prefix: int) -> Words:
    """The same random hashes for the same number: splitmix64 of (prefix, block, word)."""
    x = np.arange(PREFIX * 4, dtype=np.uint64) + np.uint64(prefix * PREFIX * 4)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(PREFIX, 4)


class Clock:
    """Time of calls of one kind."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def call(self, method: Callable[[Words], int], hashes: Words) -> None:
        """Call and time a method that must find or take the whole prefix."""
        cpu, wall = time.thread_time(), time.perf_counter()
        count = method(hashes)
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.thread_time() - cpu)
        assert count == PREFIX

    def lines(self, case: str, what: str, us_target: float) -> Iterator[Line]:
        """Figures of calls that write no memory for the first time."""
        for kind, times_s in (("", self.wall_s), (", cpu", self.cpu_s)):
            us = np.array(times_s) * 1e6 / PREFIX
            yield Line(case, f"{what}, mean{kind}", float(us.mean()), "us/block", us_target)
            yield Line(case, f"{what}, p50{kind}", float(np.median(us)), "us/block")
            longest_ms = max(times_s) * 1e3
            yield Line(case, f"{what}, longest call{kind}", longest_ms, "ms", PAUSE_MS_TARGET)

    def first_lines(self, case: str, what: str) -> Iterator[Line]:
        """Figures of calls that do, next to what the operating system takes for that alone."""
        us = float(np.median(self.wall_s)) * 1e6 / PREFIX
        yield Line(case, f"{what}, p50", us, "us/block", SAVE_US_TARGET)
        first_write_ms = huge_page_s() * 1e3
        longest_ms = max(self.cpu_s) * 1e3
        yield Line(case, f"{what}, longest call, cpu", longest_ms, "ms", baseline=first_write_ms)


def huge_page_s() -> float:
    """Processor time of the first write to a huge page of memory."""
    memory = np.empty(32 * HUGE_PAGE_BYTES, np.uint8)
    times_s = []
    for start in range(0, len(memory), HUGE_PAGE_BYTES):
        before = time.thread_time()
        memory[start] = 1
        times_s.append(time.thread_time() - before)
    return float(np.median(times_s))


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure(name: str, resident: int, calls: int) -> list[Line]:
    """Fill a store with `resident` blocks, query it, then save and query in turn under churn."""
    gc.collect()
    gc.freeze()  # as the daemon does: what is loaded now need not be walked again
    random = np.random.default_rng(7)
    before = resident_bytes()
    prefixes = max(1, resident // PREFIX)
    store = STORES[name](prefixes * PREFIX)
    fill, query, save, mixed = Clock(), Clock(), Clock(), Clock()
    for prefix in range(prefixes):
        fill.call(store.save, hashes_of(prefix))
    filled = resident_bytes()
    for prefix in list(range(prefixes)) * ROUNDS_TO_WRITE_ALL:
        store.query(hashes_of(prefix))
    for prefix in random.permutation(prefixes)[:calls].tolist():
        query.call(store.query, hashes_of(prefix))
    # Each save is followed by a query of a recent one, so that eviction is not in order of saves.
    for prefix in range(prefixes, prefixes + max(calls, min(2 * prefixes, 10 * calls))):
        save.call(store.save, hashes_of(prefix))
        recent = int(random.integers(max(prefixes, prefix - prefixes // 4), prefix + 1))
        mixed.call(store.query, hashes_of(recent))
    blocks = prefixes * PREFIX
    case = f"{name}, {resident} resident"
    target = BYTES_TARGET if resident >= SIZE_BLOCKS_MIN else None
    filled_bytes, churned_bytes = filled - before, resident_bytes() - before
    return [
        *fill.first_lines(case, "save into free room"),
        *query.lines(case, "query, each prefix once", QUERY_US_TARGET),
        *save.lines(case, "save + evict", SAVE_US_TARGET),
        *mixed.lines(case, "query between saves", QUERY_US_TARGET),
        Line(case, "resident size, filled", filled_bytes / blocks, "bytes/block", target),
        Line(case, "resident size, churned", churned_bytes / blocks, "bytes/block", target),
    ]


def main() -> None:
    """Measure each store and size in a fresh process and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--resident", default="10000,1000000,5000000", help="blocks, with commas")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each kind, at least")
    parser.add_argument("--stores", default="bare,scattered,cache", help=f"of {', '.join(STORES)}")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in options.stores.split(","):
        for resident in options.resident.split(","):
            with context.Pool(1) as pool:
                lines = pool.apply(measure, (name, int(resident), options.calls))
            if options.json:
                print_json("core_ops", lines)
            else:
                print_table(lines)


if __name__ == "__main__":
    main()
