"""Pools that are too small, in a real daemon."""

import asyncio
from pathlib import Path

import numpy as np

from tests.conftest import Start
from tests.integration.daemons import attached, failed, fill, hashes, start_daemon, wire_ok


def test_a_pool_full_of_one_model_gives_another_its_space_within_one_prompt(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "32mb", "--slab-size", "1mb")

    async def one(name: str, page_bytes: int, count: int) -> None:
        options = {"name": name, "fields": {"model": name}, "page_bytes": page_bytes}
        async with attached(daemon.address, **options) as engine:
            for turn in range(count // 64):
                blob = hashes(*(f"{name}/{turn}/{n}" for n in range(64)))
                wire_ok(await engine.save(blob, list(range(64)), request=f"{turn}"))
            last = wire_ok(await engine.query(blob, request="q"))
            assert last.hitCount == 64, f"{name}: its last prompt is not there"

    for name, page_bytes in (("a", 8192), ("b", 65536), ("c", 8192 * 3), ("d", 4096)):
        asyncio.run(one(name, page_bytes, max(64, 2 * (32 << 20) // page_bytes // 64 * 64)))


def test_a_pool_smaller_than_one_prompt_keeps_its_beginning(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--pool-size", "4mb", "--slab-size", "1mb")

    async def main() -> None:
        async with attached(daemon.address, block_count=64, page_bytes=1 << 17) as engine:
            before = fill(engine)
            blob = hashes(*(f"long-{n}" for n in range(64)))
            wire_ok(await engine.query(blob))
            saved = refused = 0
            for first in range(0, 64, 8):
                part = blob[32 * first : 32 * (first + 8)]
                reply = wire_ok(await engine.save(part, list(range(first, first + 8)), first=first))
                saved, refused = saved + reply.savedCount, refused + reply.refusedCount
            assert saved == 32
            assert refused == 32
            found = wire_ok(await engine.query(blob, request="later"))
            assert found.hitCount == 16, "leases may hold half of the pool"
            assert failed(await engine.load(found.lease, list(range(40, 56)))) == []
            assert np.array_equal(engine.memory[0][40:56], before[:16])

    asyncio.run(main())
