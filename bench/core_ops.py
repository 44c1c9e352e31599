"""Microseconds a block of the pure core: query, save and evict, with few and many blocks resident.

    python -m bench.core_ops [--json] [--resident 10000,1000000,5000000] [--calls 2000]

Each size runs in a process of its own, so that resident memory can be told apart. Prefixes are of
512 random hashes, and each is used once: nothing is warm but the hashes, as in a daemon that has
just received them. Longest calls are given in wall time and in processor time of the thread: on a
shared machine only the second says what the code did.
"""

import argparse
import functools
import json
import multiprocessing
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from trikv.core.eviction import NEVER, LeafFirstLru
from trikv.core.index import Index
from trikv.core.pages import Pages
from trikv.core.words import Entries, SpaceId, Words

PREFIX: Final = 512
PAGE_BYTES: Final = (64 * 1024, 64 * 1024)
SLAB_BYTES: Final = 64 * 1024 * 1024
SPACE: Final = SpaceId(1)

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


STORES: Final[dict[str, Callable[[int], Store]]] = {
    "bare": Bare,
    "scattered": functools.partial(Bare, scattered=True),
}


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure."""

    case: str
    metric: str
    value: float
    unit: str
    target: float | None = None


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

    def lines(self, case: str, what: str, us_target: float | None) -> Iterator[Line]:
        """What is worth knowing about these calls."""
        us = np.array(self.wall_s) * 1e6 / PREFIX
        yield Line(case, f"{what}, mean", float(us.mean()), "us/block", us_target)
        yield Line(case, f"{what}, p50", float(np.median(us)), "us/block")
        yield Line(case, f"{what}, p99", float(np.percentile(us, 99)), "us/block")
        yield Line(case, f"{what}, longest call", max(self.wall_s) * 1e3, "ms", PAUSE_MS_TARGET)
        yield Line(case, f"{what}, longest call, cpu", max(self.cpu_s) * 1e3, "ms", PAUSE_MS_TARGET)


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure(name: str, resident: int, calls: int) -> list[Line]:
    """Fill a store with `resident` blocks, query it, then save and query in turn under churn."""
    random = np.random.default_rng(7)
    before = resident_bytes()
    prefixes = max(1, resident // PREFIX)
    store = STORES[name](prefixes * PREFIX)
    fill, query, save, mixed = Clock(), Clock(), Clock(), Clock()
    for prefix in range(prefixes):
        fill.call(store.save, hashes_of(prefix))
    filled = resident_bytes()
    for prefix in random.permutation(prefixes)[:calls].tolist():
        query.call(store.query, hashes_of(prefix))
    # Each save is followed by a query of a recent one, so that eviction is not in order of saves.
    for prefix in range(prefixes, prefixes + max(calls, min(2 * prefixes, 10 * calls))):
        save.call(store.save, hashes_of(prefix))
        recent = int(random.integers(max(prefixes, prefix - prefixes // 4), prefix + 1))
        mixed.call(store.query, hashes_of(recent))
    blocks = prefixes * PREFIX
    case = f"{name}, {resident} resident"
    size_target = BYTES_TARGET if resident >= SIZE_BLOCKS_MIN else None
    return [
        *fill.lines(case, "save into free room", SAVE_US_TARGET),
        *query.lines(case, "query, each prefix once", QUERY_US_TARGET),
        *save.lines(case, "save + evict", SAVE_US_TARGET),
        *mixed.lines(case, "query between saves", QUERY_US_TARGET),
        Line(case, "resident size, filled", (filled - before) / blocks, "bytes/block", size_target),
        Line(
            case,
            "resident size, after churn",
            (resident_bytes() - before) / blocks,
            "bytes/block",
            size_target,
        ),
    ]


def commit() -> str:
    """The checked-out commit, with a mark when files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def print_table(lines: list[Line]) -> None:
    """For people."""
    for line in lines:
        wanted = f"target {line.target:g}" if line.target is not None else ""
        missed = "MISSED" if line.target is not None and line.value > line.target else ""
        print(f"{line.case:30} {line.metric:38} {line.value:9.3f} {line.unit:12} {wanted} {missed}")


def print_json(lines: list[Line]) -> None:
    """For scripts: one object a line."""
    shared = {"baseline": None, "ratio": None, "commit": commit(), "host": platform.node()}
    for line in lines:
        fields = {"bench": "core_ops", "case": line.case, "metric": line.metric}
        result = {"value": round(line.value, 4), "unit": line.unit, "target": line.target}
        ok = None if line.target is None else line.value <= line.target
        print(json.dumps(fields | result | {"ok": ok} | shared), flush=True)


def main() -> None:
    """Measure each store and size in a fresh process and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--resident", default="10000,1000000,5000000", help="blocks, with commas")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each kind, at least")
    parser.add_argument("--stores", default="bare,scattered", help=f"of {', '.join(STORES)}")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for name in options.stores.split(","):
        for resident in options.resident.split(","):
            with context.Pool(1) as pool:
                lines = pool.apply(measure, (name, int(resident), options.calls))
            (print_json if options.json else print_table)(lines)


if __name__ == "__main__":
    main()
