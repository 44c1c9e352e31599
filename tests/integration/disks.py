"""A daemon with disks, and a prompt that is saved, asked for and loaded through it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import Start
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    failed,
    hashes,
    start_daemon,
    status,
    wire_ok,
)

PAGE = 64 << 10
BLOCKS = 32
SMALL = ("--pool-size", "4mb", "--slab-size", "1mb")  # leases take half of it: one prompt
QUIET_S = 60.0


def with_disk(
    start: Start, folder: Path, *arguments: str, paths: int = 1, capacity: str = "64mb", **more: Any
) -> RunningDaemon:
    disks = [part for one in places(folder, paths) for part in ("--ssd-cache-path", str(one))]
    pool = () if "--pool-size" in arguments else SMALL
    return start_daemon(
        start, folder, *pool, *disks, "--ssd-cache-capacity", capacity, *arguments, **more
    )


def places(folder: Path, count: int = 1) -> list[Path]:
    return [folder / f"disk{number}" for number in range(count)]


def prompt(name: object, blocks: int = BLOCKS) -> bytes:
    return hashes(*((name, at) for at in range(blocks)))


def content(name: object, rank: int, blocks: int, page_bytes: int) -> np.ndarray:
    seed = int.from_bytes(hashes(name, rank)[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, (blocks, page_bytes), np.uint8)


async def save(engine: Engine, name: object, blocks: int = BLOCKS) -> None:
    """One request computes a prompt, saves it, and ends."""
    request, ids = f"save {name}", list(range(blocks))
    for rank in range(engine.ranks):
        engine.memory[rank][:blocks] = content(name, rank, blocks, engine.page_bytes)
        reply = await engine.save(prompt(name, blocks), ids, rank, request=request)
        assert wire_ok(reply).savedCount + wire_ok(reply).presentCount == blocks
    await engine.session.release([request])


async def ask(engine: Engine, name: object, request: str, blocks: int = BLOCKS) -> Any:
    """As the connector asks: once at once, then waiting while something is coming."""
    message = {"request": request, "hashBytes": 32, "hashes": prompt(name, blocks)}
    ok = wire_ok((await engine.session.query(message)).reply)
    while ok.comingCount:
        again = message | {"waitSeconds": 30.0}
        ok = wire_ok((await engine.session.query(again)).reply)
    return ok


async def load(engine: Engine, name: object, blocks: int = BLOCKS) -> int:
    """Ask for a prompt and load what is there: right bytes only; returns how many blocks."""
    request = f"load {name}"
    ok = await ask(engine, name, request, blocks)
    count = ok.hitCount
    if count:
        ids = list(range(engine.block_count - count, engine.block_count))
        for rank in range(engine.ranks):
            engine.memory[rank][:] = 0
            assert failed(await engine.load(ok.lease, ids, rank)) == []
            wanted = content(name, rank, blocks, engine.page_bytes)[:count]
            assert np.array_equal(engine.memory[rank][ids], wanted)
    await engine.session.release([request])
    return int(count)


async def quiet(daemon: RunningDaemon, what: Any = lambda facts: True) -> dict[str, Any]:
    """Wait until disks are found and nothing waits to be written, or is filling."""
    async with asyncio.timeout(QUIET_S):
        while True:
            facts = await status(daemon.address)
            disks = facts["disks"]
            is_busy = any(one["waitingCount"] or one["state"] == "scanning" for one in disks)
            if not is_busy and facts["pool"]["fillingCount"] == 0 and what(facts):
                return facts
            await asyncio.sleep(0.05)


def engine_options(**more: Any) -> dict[str, Any]:
    return {"page_bytes": PAGE, "block_count": 2 * BLOCKS} | more
