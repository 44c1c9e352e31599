"""Ranks of one engine: one never saves, one never loads, some hold the same bytes."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import Start
from tests.integration.daemons import (
    Engine,
    attached,
    failed,
    fill,
    hashes,
    start_daemon,
    status,
    wait_for,
    wire_code,
    wire_ok,
)

PAGE = 8192
TWO: dict[str, Any] = {"ranks": 2, "fields": {"model": "of two ranks"}}


async def resting(address: str) -> dict[str, Any]:
    """Wait until nothing is promised and nothing half there; returns the pool's facts."""

    def rests(facts: dict[str, Any]) -> bool:
        pool = facts["pool"]
        return not (pool["leaseCount"] or pool["pinnedBytes"] or pool["fillingCount"])

    facts = await wait_for(address, rests)
    pool: dict[str, Any] = facts["pool"]
    return pool


async def saved_by_both(engine: Engine, blob: bytes, blocks: list[int], request: str) -> None:
    for rank in (0, 1):
        wire_ok(await engine.save(blob, blocks, rank=rank, request=request))


def test_a_rank_that_never_saves_costs_its_blocks_and_nothing_else(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, "--fill-seconds", "1", "--heartbeat-seconds", "30")
    lazy = hashes(*(f"lazy-{n}" for n in range(8)))
    whole = hashes(*(f"whole-{n}" for n in range(8)))

    async def main() -> None:
        async with attached(daemon.address, **TWO) as engine:
            before = [fill(engine, rank) for rank in (0, 1)]
            await saved_by_both(engine, whole, list(range(8, 16)), "whole")
            start_bytes = (await resting(daemon.address))["usedBytes"]
            wire_ok(await engine.save(lazy, list(range(8)), rank=0, request="lazy"))
            filling = (await status(daemon.address))["pool"]
            assert filling["fillingCount"] == 8
            assert filling["usedBytes"] == start_bytes + 8 * 2 * PAGE
            assert wire_ok(await engine.query(lazy, request="lazy")).hitCount == 0

            pool = await resting(daemon.address)
            assert pool["usedBytes"] == start_bytes, "the pages of half a block are free again"
            counters = (await status(daemon.address))["counters"]
            assert counters["trikv_fill_expired_blocks_total"] == 8

            found = wire_ok(await engine.query(whole, request="whole"))
            assert found.hitCount == 8, "another request's blocks are unaffected"
            for rank in (0, 1):
                engine.memory[rank][:] = 0
                assert failed(await engine.load(found.lease, list(range(8)), rank=rank)) == []
                assert np.array_equal(engine.memory[rank][:8], before[rank][8:16])

            # The late rank's save finds nothing to join: both save anew, and then it is whole.
            late = wire_ok(await engine.save(lazy, list(range(8)), rank=1, request="lazy"))
            assert late.savedCount == 8
            assert wire_ok(await engine.query(lazy, request="lazy")).hitCount == 0
            wire_ok(await engine.save(lazy, list(range(8)), rank=0, request="lazy"))
            assert wire_ok(await engine.query(lazy, request="lazy")).hitCount == 8

    asyncio.run(main())


def test_a_rank_that_never_loads_holds_its_blocks_until_the_lease_ends(
    start: Start, tmp_path: Path
) -> None:
    # A pool of 32 blocks, of which leases may hold 16.
    daemon = start_daemon(
        start,
        tmp_path,
        *("--lease-seconds", "5", "--heartbeat-seconds", "30"),
        *("--pool-size", "4mb", "--slab-size", "4mb"),
    )
    page_bytes = 64 << 10
    held = hashes(*(f"held-{n}" for n in range(8)))

    async def save_each(engine: Engine, what: str, count: int) -> int:
        """Save blocks one by one, as prompts of their own; returns how many are there then."""
        for n in range(count):
            await saved_by_both(engine, hashes(f"{what}-{n}"), [n], f"{what}-{n}")
        present = 0
        for n in range(count):
            request = f"ask-{what}-{n}"
            present += wire_ok(await engine.query(hashes(f"{what}-{n}"), request)).hitCount
            await engine.session.release([request])
        return present

    async def main() -> None:
        async with attached(daemon.address, **TWO, page_bytes=page_bytes) as engine:
            before = [fill(engine, rank) for rank in (0, 1)]
            for n in range(8):
                await saved_by_both(engine, held[32 * n : 32 * n + 32], [n], "held")
            found = wire_ok(await engine.query(held, "held"))
            assert found.hitCount == 8
            assert failed(await engine.load(found.lease, list(range(20, 28)), rank=0)) == []
            assert np.array_equal(engine.memory[0][20:28], before[0][:8])
            pool = (await status(daemon.address))["pool"]
            assert (pool["leaseCount"], pool["pinnedBytes"]) == (1, 8 * 2 * page_bytes)

            # 32 less the 8 that are promised; eviction makes room for 3 at a time.
            assert 22 <= await save_each(engine, "early", 40) <= 24
            await resting(daemon.address)
            counters = (await status(daemon.address))["counters"]
            assert counters["trikv_lease_expired_total"] == 1
            assert wire_code(await engine.load(found.lease, [1], rank=1)) == "lease-lost"
            assert await save_each(engine, "late", 40) >= 30, "and now the 8 may go too"
            assert wire_ok(await engine.query(held, "again")).hitCount == 0

    asyncio.run(main())


def test_status_shows_that_ranks_with_the_same_bytes_are_stored_once(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path)
    blob = hashes(*(f"once-{n}" for n in range(8)))

    def shown() -> str:
        command = [sys.executable, "-m", "trikv.cli.main", "status"]
        environ = os.environ | {"TRIKV_SOCKET": str(daemon.path)}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    async def main() -> None:
        async with attached(daemon.address, ranks=4, replicas=2, name="pairs") as engine:
            before = [fill(engine, rank, seed=rank // 2 - rank) for rank in range(4)]
            for rank in range(4):
                assert wire_ok(await engine.save(blob, list(range(8)), rank=rank)).savedCount == 4
            found = wire_ok(await engine.query(blob))
            assert found.hitCount == 8
            for rank in range(4):
                engine.memory[rank][:] = 0
                assert failed(await engine.load(found.lease, list(range(8)), rank=rank)) == []
                assert np.array_equal(engine.memory[rank][:8], before[rank][:8])
            facts = await status(daemon.address)
            (row,), (namespace,) = facts["engines"], facts["namespaces"]
            assert (row["rankCount"], row["pageCounts"]) == (4, [2])
            assert namespace["bytes"] == facts["pool"]["usedBytes"] == 8 * 2 * PAGE
            assert re.search(r"^pairs +[0-9a-f]{8} +4/4 +2 +ready$", shown(), re.MULTILINE)

    asyncio.run(main())
