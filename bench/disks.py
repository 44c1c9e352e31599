"""Parts of `bench.ssd`: blocks through a `Disk`, and the search for a disk's records."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import trio
from numpy.typing import NDArray

from bench.lines import Line
from trikv.core.disklayout import layout_for
from trikv.core.slots import Reads, Regions, Writes, make_header, make_records
from trikv.core.superblock import Superblock
from trikv.tiers.ring import open_ring
from trikv.tiers.rings import make_queue
from trikv.tiers.runs import Memory
from trikv.tiers.ssd import Disk, open_disk

MIB, GIB = 1 << 20, 1 << 30
SIZES = (1, 4)
READ_TARGET, WRITE_TARGET, CPU_TARGET = 0.9, 0.85, 2.0
CHOSEN = "uring"
"""What `auto` takes where it works; the targets are for it."""


class Taken(NamedTuple):
    """What moving some bytes took."""

    speed: float  # GB/s
    cpu: float  # ms a GB


Key = tuple[str, int, bool]  # who, MiB, is it a write
Measured = dict[Key, list[Taken]]


def name(size: int, who: str, *, is_write: bool) -> str:
    """What a case is called."""
    return f"{size} MiB {'write' if is_write else 'read'}, {who}"


@contextlib.contextmanager
def taking(total: int) -> Iterator[list[Taken]]:
    """Times what is done inside."""
    found: list[Taken] = []
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    yield found
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    found.append(Taken(total / seconds / 1e9, cpu_s * 1e3 / (total / 1e9)))


def compared(found: Measured) -> Iterator[Line]:
    """Medians, beside fio's where there are any."""
    for (who, size, is_write), taken in found.items():
        if who == "fio":
            continue
        base = found.get(("fio", size, is_write))
        speed, cpu = np.median(np.array(taken), axis=0).tolist()
        base_speed, base_cpu = np.median(np.array(base), axis=0).tolist() if base else (None, None)
        target = (WRITE_TARGET if is_write else READ_TARGET) if base and who == CHOSEN else None
        case = name(size, who, is_write=is_write)
        yield Line(case, "throughput", speed, "GB/s", target, base_speed, more_is_better=True)
        limit = CPU_TARGET * base_cpu if base_cpu and who == CHOSEN else None
        yield Line(case, "cpu", cpu, "ms/GB", limit, base_cpu)


@contextlib.asynccontextmanager
async def watching() -> AsyncIterator[list[float]]:
    """How late a task of the same thread is woken, in ms."""
    late: list[float] = []

    async def look() -> None:
        while True:
            begin_s = trio.current_time()
            await trio.sleep(0.001)
            late.append((trio.current_time() - begin_s - 0.001) * 1e3)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        yield late
        nursery.cancel_scope.cancel()


# -- blocks


async def blocks(folder: Path, total: int, rounds: int, found: Measured) -> list[Line]:
    """Blocks through a disk: sums made, records written, sums compared."""
    lines: list[Line] = []
    memory = Memory(128 * MIB)
    memory.bytes[:] = np.random.default_rng(1).integers(0, 256, len(memory.bytes), np.uint8)
    late: list[float] = []
    for size in SIZES:
        path = folder / "blocks"
        async with open_disk(str(path), total + GIB // 4) as disk:
            async for _ in disk.scan():
                pass
            for region in range(disk.region_count):
                assert await disk.cut(region, (size * MIB,))
            for _ in range(rounds):
                async with watching() as some:
                    sums = await put(disk, memory, size, total, found)
                    await get(disk, memory, size, total, sums, found)
                late += some
        path.unlink()
    mine = {key: taken for key, taken in found.items() if key[0] in {"disk", "fio"}}
    lines += [replace(line, metric=f"{line.metric}, with sums") for line in compared(mine)]
    worst = np.percentile(late, 99).item()
    lines.append(Line("a task beside it", "woken late, p99", worst, "ms"))
    return lines


def places(disk: Disk, size: int, total: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slots in a random order: regions and positions."""
    per = disk.region_bytes // (size * MIB)
    order = np.random.default_rng(size).permutation(total // (size * MIB))
    return order // per, order % per


def addresses(memory: Memory, size: int, first: int, count: int) -> NDArray[np.uint64]:
    """Where so many blocks are in memory, which they take in turns."""
    slots = (first + np.arange(count)) % (len(memory.bytes) // (size * MIB))
    return (memory.address + slots * size * MIB).astype(np.uint64)[:, None]


async def put(
    disk: Disk, memory: Memory, size: int, total: int, found: Measured
) -> NDArray[np.uint64]:
    """Write all, four callers at a time; returns the sums."""
    regions, positions = places(disk, size, total)
    count, step = len(regions), max(1, 32 // size)
    sums = np.zeros(count, np.uint64)
    limit = trio.CapacityLimiter(4)

    async def some(first: int) -> None:
        async with limit:
            rows = slice(first, first + step)
            n = len(regions[rows])
            writes = Writes(
                regions[rows],
                positions[rows],
                addresses(memory, size, first, n),
                (size * MIB,),
                np.zeros((n, 32), np.uint8),
                np.zeros((n, 4), np.uint64),
                np.zeros(n, np.int32),
                disk.first_sequence + first + np.arange(n),
            )
            assert (await disk.write(writes)).all()
            sums[rows] = writes.sums

    with taking(total) as taken:
        async with trio.open_nursery() as nursery:
            for first in range(0, count, step):
                nursery.start_soon(some, first)
    found["disk", size, True] += taken
    return sums


async def get(
    disk: Disk, memory: Memory, size: int, total: int, sums: NDArray[np.uint64], found: Measured
) -> None:
    """Read all, four callers at a time."""
    regions, positions = places(disk, size, total)
    step = max(1, 32 // size)
    limit = trio.CapacityLimiter(4)
    into = Memory(len(memory.bytes))
    into.bytes[:] = 1

    async def some(first: int) -> None:
        async with limit:
            rows = slice(first, first + step)
            place = addresses(into, size, first, len(regions[rows]))
            reads = Reads(regions[rows], positions[rows], place, (size * MIB,), sums[rows])
            assert (await disk.read(reads)).all()

    with taking(total) as taken:
        async with trio.open_nursery() as nursery:
            for first in range(0, len(regions), step):
                nursery.start_soon(some, first)
    found["disk", size, False] += taken


# -- recovery


def synthetic(path: Path, records: int) -> Superblock:
    """A file whose tables are full; its regions are holes."""
    page = (32768,)
    per = layout_for(1 << 40).region_bytes // page[0]
    regions_wanted = -(-records // per)
    layout = layout_for(int(regions_wanted * (per * page[0] * 1.01) + GIB), per * page[0])
    assert layout.region_count >= regions_wanted
    superblock = Superblock(
        bytes(range(16)), layout.capacity_bytes, layout.region_bytes, layout.region_count
    )
    regions = Regions(layout, superblock.tag)
    rng = np.random.default_rng(1)
    with path.open("wb") as file:
        file.truncate(layout.end)
        for region in range(regions_wanted):
            regions.cut(region, 1, page)
            file.seek(layout.headers_at(np.array(region)).item())
            file.write(make_header(superblock.tag, region, 1, page))
            file.seek(layout.records_at(np.array(region)).item())
            file.write(make_records(regions, random_writes(rng, region, per, page)).tobytes())
        file.flush()
        os.fsync(file.fileno())
    return superblock


def random_writes(
    rng: np.random.Generator, region: int, count: int, page: tuple[int, ...]
) -> Writes:
    """A region full of blocks that nobody wrote."""
    return Writes(
        np.full(count, region),
        np.arange(count),
        np.zeros((count, 1), np.uint64),
        page,
        np.zeros((count, 32), np.uint8),
        rng.integers(0, 1 << 63, (count, 4)).astype(np.uint64),
        np.zeros(count, np.int32),
        region * count + np.arange(count),
    )


async def recovery(folder: Path, records: int) -> list[Line]:
    """From the first read to the last record, and how others fare meanwhile."""
    path = folder / "tables"
    superblock = synthetic(path, records)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    count, first_s = 0, 0.0
    async with open_ring(make_queue(CHOSEN, fd), fd) as ring, watching() as late:
        disk = Disk(ring, superblock)
        begin_s = time.perf_counter()
        async for found in disk.scan():
            first_s = first_s or time.perf_counter() - begin_s
            count += len(found.regions)
        took_s = time.perf_counter() - begin_s
    os.close(fd)
    path.unlink()
    assert count >= records, count
    case, million = f"{count} records", count / 1e6
    return [
        Line(case, "found", took_s / million, "s/million", 2.0),
        Line(case, "first ones served", first_s * 1e3, "ms"),
        Line(case, "a task woken late, p99", np.percentile(late, 99).item(), "ms"),
        Line(case, "a task woken late, max", max(late), "ms"),
    ]
