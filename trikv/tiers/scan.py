"""What a disk holds, found by reading its tables from front to back.

Decided here: that only the pages that a region's records fill are read, a megabyte at a time,
and that the next ones are read while a thread looks through these. This file does not know what is
done with what it finds.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.pages import PAGE_ALIGN
from trikv.core.slots import (
    NO_SLOTS,
    RECORD,
    RECORDS_A_PAGE,
    Recovered,
    Regions,
    newest,
    picked,
    valid_records,
)
from trikv.tiers.runs import Memory, join
from trikv.tiers.threads import in_thread
from trikv.tiers.transfers import Transfers

CHUNK_BYTES: Final = 1 << 20  # 4,096 records: what a caller takes in without a long pause
CHUNK_REGIONS_MAX: Final = 1_024

Run = Callable[[Transfers], Awaitable[None]]
AreDead = Callable[[NDArray[np.uint8], NDArray[np.int64]], NDArray[np.bool_]]


async def scan(
    regions: Regions, run: Run, limiter: trio.CapacityLimiter, are_dead: AreDead
) -> AsyncIterator[Recovered]:
    """Yield what is found; `regions` learns how each is cut before its blocks are yielded."""
    await _read_headers(regions, run, limiter)
    chunks = list(_chunks(regions))
    size = max(CHUNK_BYTES, regions.layout.records_bytes)
    memories = [Memory(size), Memory(size)]
    if chunks:
        await _read_records(regions, chunks[0], memories[0], run)
    for index, chunk in enumerate(chunks):
        found: list[Recovered] = []
        async with trio.open_nursery() as nursery:
            if index + 1 < len(chunks):
                following = chunks[index + 1], memories[(index + 1) % 2]
                nursery.start_soon(_read_records, regions, *following, run)
            look = partial(_look_through, regions, chunk, memories[index % 2].bytes)
            found.append(await in_thread(look, limiter))
        yield _living(found[0], are_dead)


async def _read_headers(regions: Regions, run: Run, limiter: trio.CapacityLimiter) -> None:
    memory = Memory(CHUNK_BYTES)
    step = CHUNK_BYTES // PAGE_ALIGN
    for first in range(0, regions.layout.region_count, step):
        count = min(step, regions.layout.region_count - first)
        offsets = regions.layout.headers_at(np.arange(first, first + count))
        await _read_pages(offsets, memory, run)
        adopt = partial(regions.adopt, first, memory.bytes[: count * PAGE_ALIGN])
        await in_thread(adopt, limiter)


def _chunks(regions: Regions) -> Iterator[NDArray[np.int64]]:
    """Cut regions, as many at a time as have their records in one chunk, at least one."""
    cut = np.flatnonzero(regions.slot_bytes != NO_SLOTS)
    pages = regions.record_pages(cut)
    room = CHUNK_BYTES // PAGE_ALIGN
    first = filled = 0
    for row, count in enumerate(pages.tolist()):
        if row > first and (filled + count > room or row - first == CHUNK_REGIONS_MAX):
            yield cut[first:row]
            first, filled = row, 0
        filled += count
    if first < len(cut):
        yield cut[first:]


async def _read_records(
    regions: Regions, chunk: NDArray[np.int64], memory: Memory, run: Run
) -> None:
    """The record pages of some regions, one region after another."""
    counts = regions.record_pages(chunk)
    owner, page = np.repeat(chunk, counts), _within(counts)
    await _read_pages(regions.layout.records_at(owner) + page * PAGE_ALIGN, memory, run)


async def _read_pages(offsets: NDArray[np.int64], memory: Memory, run: Run) -> None:
    """Pages into consecutive places; those that cannot be read become zeros."""
    addresses = np.arange(len(offsets), dtype=np.uint64) * np.uint64(PAGE_ALIGN)
    addresses += np.uint64(memory.address)
    transfers, order, of = join(
        offsets, addresses[:, None], (PAGE_ALIGN,), is_write=False, keep=memory
    )
    await run(transfers)
    failed = order[transfers.results[of] != 0]
    memory.bytes[: len(offsets) * PAGE_ALIGN].reshape(-1, PAGE_ALIGN)[failed] = 0


def _look_through(regions: Regions, chunk: NDArray[np.int64], raw: NDArray[np.uint8]) -> Recovered:
    """The valid records of a chunk; in a thread."""
    counts = regions.record_pages(chunk) * RECORDS_A_PAGE
    at, positions = np.repeat(chunk, counts), _within(counts)
    records = raw[: len(at) * RECORD.itemsize].view(RECORD)
    rows = valid_records(regions, at, positions, records)
    records = picked(records, rows)
    kept = newest(records)
    records, rows = picked(records, kept), rows[kept]
    return Recovered(
        chunk,
        regions.slot_bytes[chunk],
        tuple(regions.page_bytes[region] for region in chunk.tolist()),
        at[rows],
        positions[rows],
        records["origin"].copy(),
        records["words"].copy(),
        records["depth"].copy(),
        records["sequence"].copy(),
        records["data_sum"].copy(),
        records["length"].copy(),
    )


def _living(found: Recovered, are_dead: AreDead) -> Recovered:
    """Without what has been declared dead, asked now and not when the thread began."""
    dead = are_dead(found.origins, found.sequences)
    if not dead.any():
        return found
    alive = ~dead
    return Recovered(
        found.cut,
        found.slot_bytes,
        found.page_bytes,
        found.regions[alive],
        found.positions[alive],
        found.origins[alive],
        found.words[alive],
        found.depths[alive],
        found.sequences[alive],
        found.sums[alive],
        found.lengths[alive],
    )


def _within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... for each of the counts in turn."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)
