"""Prompts, pages and disks of several sizes."""

import asyncio
import signal
from pathlib import Path

from tests.conftest import Start
from tests.integration.daemons import attached, wire_ok
from tests.integration.disks import (
    BLOCKS,
    PAGE,
    content,
    engine_options,
    load,
    prompt,
    quiet,
    save,
    with_disk,
)

THROUGH = "--ssd-write-through"
STEP = BLOCKS // 4


def test_of_a_prompt_too_long_for_a_lease_the_beginning_is_found(
    start: Start, tmp_path: Path
) -> None:
    """Half the pool may be leased: of 48 blocks 32, whether they come from disk or are there."""
    blocks, most = 3 * BLOCKS // 2, BLOCKS

    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            ids = list(range(blocks))
            engine.memory[0][:blocks] = content("long", 0, blocks, PAGE)
            for first in range(0, blocks, STEP):  # as an engine computes it
                part = prompt("long", blocks)[32 * first : 32 * (first + STEP)]
                reply = await engine.save(part, ids[first : first + STEP], first=first)
                assert wire_ok(reply).savedCount == STEP
            await engine.session.release(["r"])
            await quiet(daemon)
            assert await load(engine, "long", blocks) == most

    async def second() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for _ in range(2):
                assert await load(engine, "long", blocks) == most

    daemon = with_disk(start, tmp_path, THROUGH)
    asyncio.run(first())
    assert daemon.end() == 0
    daemon = with_disk(start, tmp_path, THROUGH)
    asyncio.run(second())


def test_a_disk_grows_at_the_next_start(start: Start, tmp_path: Path) -> None:
    """It keeps what it has, and has room for more than before."""

    async def run(names: str) -> int:
        async with attached(daemon.address, **engine_options()) as engine:
            found = [await load(engine, name) for name in names]
            for name, count in zip(names, found, strict=True):
                if count < BLOCKS:
                    await save(engine, name)
                    await quiet(daemon)
        return sum(count == BLOCKS for count in found)

    daemon = with_disk(start, tmp_path, THROUGH, capacity="8mb")
    assert asyncio.run(run("abc")) == 0
    daemon.end(signal.SIGKILL)
    daemon = with_disk(start, tmp_path, THROUGH, capacity="48mb")
    assert asyncio.run(run("abc")) > 0
    assert asyncio.run(run("defghi")) == 0
    facts = asyncio.run(quiet(daemon))
    assert facts["disks"][0]["capacityBytes"] == 48 << 20
    assert daemon.end() == 0
    daemon = with_disk(start, tmp_path, THROUGH, capacity="48mb")
    assert asyncio.run(run("abcdefghi")) == 9


def test_two_sizes_of_pages_share_a_disk(start: Start, tmp_path: Path) -> None:
    sizes = {"large": 128 << 10, "small": 8 << 10}

    async def run(*, saves: bool) -> None:
        for name, page_bytes in sizes.items():
            options = engine_options(page_bytes=page_bytes, fields={"model": name})
            async with attached(daemon.address, name=name, **options) as engine:
                if saves:
                    await save(engine, name, 12)
                    await quiet(daemon)
                assert await load(engine, name, 12) == 12

    daemon = with_disk(start, tmp_path, THROUGH, "--pool-size", "8mb")
    asyncio.run(run(saves=True))
    assert daemon.end() == 0
    daemon = with_disk(start, tmp_path, THROUGH, "--pool-size", "8mb")
    asyncio.run(run(saves=False))
