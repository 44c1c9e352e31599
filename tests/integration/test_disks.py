"""Blocks that outlive the pool and the daemon, on real files."""

import asyncio
import signal
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.integration.daemons import attached
from tests.integration.disks import BLOCKS, engine_options, load, quiet, save, with_disk

THROUGH = "--ssd-write-through"


@pytest.mark.parametrize("ring", ["threads", "uring"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_written_is_found_after_the_daemon(
    start: Start, tmp_path: Path, ring: str, end: signal.Signals
) -> None:
    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await save(engine, "a")
            if end is signal.SIGKILL:
                await quiet(daemon)

    async def second() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            assert await load(engine, "a") == BLOCKS
            facts = await quiet(daemon)
            assert facts["disks"][0]["foundCount"] == BLOCKS
            assert facts["windows"][0]["hits"][1] == {"tier": "ssd", "blocks": BLOCKS}

    daemon = with_disk(start, tmp_path, "--ssd-ring", ring, THROUGH)
    asyncio.run(first())
    daemon.end(end)
    daemon = with_disk(start, tmp_path, "--ssd-ring", ring, THROUGH)
    asyncio.run(second())
    assert daemon.end() == 0
