"""A daemon with disks, and a prompt that is saved, asked for and loaded through it."""

import asyncio
import subprocess
import sys
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


class Faults:
    """What is wrong with the disks of a daemon that runs `before`; changed by writing a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fault"

    @property
    def before(self) -> str:
        """Python that makes operations of the thread ring go wrong as the file says."""
        return f"""
import errno, fcntl, os, time
from trikv.tiers import ssd, threads
ssd.open_disk.__wrapped__.__kwdefaults__["io_s_max"] = 2.0
real = threads.move
def move(fd, offset, pieces, *, is_write):
    try:
        words = open({str(self._file)!r}).read().split()
    except OSError:
        words = []
    place = os.readlink(f"/proc/self/fd/{{fd}}")
    if len(words) > 1 and words[1] not in place:
        words = []
    what = words[0] if words else ""
    if what == "hang":
        time.sleep(600)
    if what == "slow" and is_write:
        time.sleep(0.2)
    if what == "full" and is_write:
        return -errno.ENOSPC
    if what == "read-only" and is_write:
        return -errno.EROFS
    if what == "eio" or what == "eio-read" and not is_write:
        return -errno.EIO
    return real(fd, offset, pieces, is_write=is_write)
threads.move = move
"""

    def set(self, what: str, disk: str = "") -> None:
        part = self._file.with_suffix(".part")
        part.write_text(f"{what} {disk}")
        part.replace(self._file)


def flip(path: Path, count: int) -> int:
    """Turn one bit in each of the last `count` blocks' worth of what is not zero; how many."""
    flipped = 0
    with path.open("r+b") as file:
        size = path.stat().st_size
        for at in range(size // PAGE * PAGE - PAGE, 1 << 20, -PAGE):
            file.seek(at)
            found = file.read(1)
            if found and found != b"\0" and flipped < count:
                file.seek(at)
                file.write(bytes([found[0] ^ 1]))
                flipped += 1
    return flipped


def shown(daemon: RunningDaemon) -> list[str]:
    """What `trikv status` prints, at most 80 columns."""
    command = [sys.executable, "-m", "trikv.cli.main", "status", "--addr", daemon.address]
    told = subprocess.run(command, check=False, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert max(len(line) for line in lines[1:]) <= 80
    return lines
