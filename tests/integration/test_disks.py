"""Blocks that outlive the pool and the daemon, on real files."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import capnp
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    RunningDaemon,
    attached,
    daemon_command,
    status,
)
from tests.integration.disks import (
    BLOCKS,
    PAGE,
    Faults,
    engine_options,
    flip,
    load,
    places,
    quiet,
    save,
    shown,
    with_disk,
)
from tests.integration.pages import ANY_PORT, scrape
from trikv.nursery.disk_metrics import FAMILIES

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
            await quiet(daemon)  # what is not found yet is a miss
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


def test_three_prompts_come_back_whole_through_a_pool_for_one(start: Start, tmp_path: Path) -> None:
    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for name in "abc":
                await save(engine, name)
                await quiet(daemon)
            for name in "abc":
                assert await load(engine, name) == BLOCKS

    async def second() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await quiet(daemon)  # what is not found yet is a miss
            for name in "abcabc":
                assert await load(engine, name) == BLOCKS
        facts = await quiet(daemon)
        assert facts["windows"][0]["hitRatio"] == 1
        assert facts["disks"][0]["wrongCount"] == 0

    daemon = with_disk(start, tmp_path)
    asyncio.run(first())
    assert daemon.end() == 0
    daemon = with_disk(start, tmp_path)
    asyncio.run(second())
    assert "Traceback" not in daemon.log.read_text()
    assert daemon.end() == 0


def test_a_clean_end_writes_what_was_saved(start: Start, tmp_path: Path) -> None:
    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await save(engine, "a", 8)  # the pool is nearly empty: nothing is written yet

    async def second() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await quiet(daemon)  # what is not found yet is a miss
            assert await load(engine, "a", 8) == 8

    daemon = with_disk(start, tmp_path, "--pool-size", "64mb")
    asyncio.run(first())
    assert daemon.end() == 0
    assert "spill.unfinished" not in daemon.log.read_text()
    daemon = with_disk(start, tmp_path, "--pool-size", "64mb")
    asyncio.run(second())


def test_a_clean_end_says_what_it_had_no_time_to_write(start: Start, tmp_path: Path) -> None:
    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for name in "ab":
                await save(engine, name)
            faults.set("slow")

    async def second() -> int:
        facts = await quiet(daemon)
        async with attached(daemon.address, **engine_options()) as engine:
            found = [await load(engine, name) for name in "ab"]
        assert sum(found) <= facts["disks"][0]["blockCount"]
        return int(facts["disks"][0]["blockCount"])

    faults = Faults(tmp_path)
    impatient = f"{faults.before}\nfrom trikv.nursery import tiers\ntiers.FLUSH_S = 0.3"
    arguments = ("--ssd-ring", "threads", "--pool-size", "16mb", "--slab-size", "1mb")
    daemon = with_disk(start, tmp_path, *arguments, "--drain-seconds", "0.3", before=impatient)
    asyncio.run(first())
    assert daemon.end() == 0
    (line,) = [one for one in daemon.events() if one["event"] == "spill.unfinished"]
    assert 0 < line["block_count"] <= 2 * BLOCKS
    assert line["bytes"] == line["block_count"] * PAGE
    daemon = with_disk(start, tmp_path, *arguments)
    assert asyncio.run(second()) + line["block_count"] == 2 * BLOCKS


def test_killed_in_the_midst_of_writes_nothing_wrong_comes_back(
    start: Start, tmp_path: Path
) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    rng = random.Random(seed)
    print("seed", seed)  # noqa: T201  # told when it fails

    async def run(daemon: RunningDaemon) -> int:
        async with attached(daemon.address, **engine_options()) as engine:
            found = sum([await load(engine, name) for name in range(6)])  # compares every byte
            with contextlib.suppress(Exception):  # it is killed in the midst of this
                asyncio.get_running_loop().call_later(rng.random() / 2, daemon.process.kill)
                while True:
                    await save(engine, rng.randrange(6))
        return found

    found = []
    for _ in range(4):
        daemon = with_disk(start, tmp_path, THROUGH, capacity="24mb")
        with contextlib.suppress(capnp.KjException):
            found.append(asyncio.run(run(daemon)))
        daemon.process.wait(PATIENCE_S)
    assert len(found) == 4
    assert sum(found) > 0


def test_several_ranks_come_back(start: Start, tmp_path: Path) -> None:
    options = engine_options(ranks=2, page_bytes=PAGE // 2)

    async def both(run: int) -> None:
        async with attached(daemon.address, **options) as engine:
            await quiet(daemon)  # what is not found yet is a miss
            if run == 0:
                await save(engine, "a", 16)
            assert await load(engine, "a", 16) == 16

    for run in range(2):
        daemon = with_disk(start, tmp_path, "--pool-size", "16mb")
        asyncio.run(both(run))
        assert daemon.end() == 0


def test_flipped_bits_are_misses(start: Start, tmp_path: Path) -> None:
    async def first() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await save(engine, "a")

    async def second() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            assert await load(engine, "a") < BLOCKS
            facts = await quiet(daemon)
            assert facts["disks"][0]["wrongCount"] > 0
            await save(engine, "a")
            assert await load(engine, "a") == BLOCKS

    daemon = with_disk(start, tmp_path)
    asyncio.run(first())
    assert daemon.end() == 0
    assert flip(places(tmp_path)[0], 1000) == BLOCKS
    daemon = with_disk(start, tmp_path)
    asyncio.run(second())
    assert any("blocks wrong" in line for line in shown(daemon))
    assert daemon.end() == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("eio", "errors within a minute, the last: Input/output error"),
        ("full", "errors within a minute, the last: No space left on device"),
        ("read-only", "errors within a minute, the last: Read-only file system"),
        ("hang", "the disk does not answer"),
    ],
)
def test_a_disk_that_fails_is_off_and_the_engine_is_served(
    start: Start, tmp_path: Path, fault: str, said: str
) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            await save(engine, "a", 8)
            assert await load(engine, "a", 8) == 8
            await quiet(daemon)
            faults.set(fault)
            number = 0
            while not (await status(daemon.address))["disks"][0]["state"].startswith("off"):
                await save(engine, number := number + 1)
                assert await load(engine, number) == BLOCKS
                await load(engine, number - 1)
                await asyncio.sleep(0.05)
            await save(engine, "b")
            assert await load(engine, "b") == BLOCKS
            facts = await status(daemon.address)
            assert facts["state"].startswith("degraded: SSD ")
            assert said in facts["state"]

    faults = Faults(tmp_path)
    arguments = ("--ssd-ring", "threads", THROUGH)
    daemon = with_disk(start, tmp_path, *arguments, before=faults.before)
    asyncio.run(asyncio.wait_for(serve(), 100))
    (line,) = [line for line in shown(daemon) if line.startswith("ssd ")]
    assert "off: " in line
    assert "Traceback" not in daemon.log.read_text()
    assert daemon.end() == 0


def test_a_slow_disk_holds_up_no_save(start: Start, tmp_path: Path) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for number in range(12):
                await save(engine, number)
            facts = await status(daemon.address)
            assert facts["counters"]["trikv_evicted_unwritten_blocks_total"] > 0
            assert await load(engine, 11) == BLOCKS

    faults = Faults(tmp_path)
    faults.set("slow")
    daemon = with_disk(start, tmp_path, "--ssd-ring", "threads", before=faults.before)
    asyncio.run(serve())
    assert daemon.end() == 0


def test_a_deleted_file_serves_on_and_says_so(start: Start, tmp_path: Path) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            places(tmp_path)[0].unlink()
            for name in "abc":
                await save(engine, name)
                await quiet(daemon)
            for name in "abc":
                assert await load(engine, name) == BLOCKS

    daemon = with_disk(start, tmp_path)
    asyncio.run(serve())
    assert any("its file was deleted" in line for line in shown(daemon))
    assert daemon.end() == 0


def test_all_families_of_a_disk_are_shown(start: Start, tmp_path: Path) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for name in "abc":
                await save(engine, name)
                await quiet(daemon)
            for name in "abc":
                assert await load(engine, name) == BLOCKS

    daemon = with_disk(start, tmp_path, "--http-addr", ANY_PORT)
    asyncio.run(serve())
    page = scrape(daemon)
    assert {name for name, _ in page} >= FAMILIES.keys()
    disk = (("disk", str(tmp_path / "disk0")),)
    assert page["trikv_disk_state", (*disk, ("state", "serving"))] == 1
    assert page["trikv_disk_written_bytes_total", disk] >= 2 * BLOCKS * PAGE
    assert page["trikv_query_blocks_total", ()] == page["trikv_query_hit_blocks_total", ()]
    assert page["trikv_cache_blocks", (("tier", "ssd"),)] == page["trikv_disk_blocks", disk]
    assert daemon.end() == 0


def test_of_two_disks_one_fails(start: Start, tmp_path: Path) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **engine_options()) as engine:
            for name in "abc":
                await save(engine, name)
                await quiet(daemon)
            facts = await status(daemon.address)
            assert all(one["blockCount"] > BLOCKS for one in facts["disks"])
            for name in "abc":
                assert await load(engine, name) == BLOCKS
            faults.set("eio", "disk0")
            for name in "abcabcabcabc":
                await load(engine, name)
            await quiet(daemon, lambda facts: "off" in facts["disks"][0]["state"])
            for name in "de":
                await save(engine, name)
                await quiet(daemon)
            for name in "de":
                assert await load(engine, name) == BLOCKS

    faults = Faults(tmp_path)
    arguments = ("--ssd-ring", "threads", THROUGH)
    daemon = with_disk(start, tmp_path, *arguments, paths=2, before=faults.before)
    asyncio.run(asyncio.wait_for(serve(), 100))
    lines = [line for line in shown(daemon) if line.startswith("ssd ")]
    assert len(lines) == 2
    assert "off" in lines[0]
    assert daemon.end() == 0


@pytest.mark.parametrize(
    ("make", "arguments", "said"),
    [
        (lambda path: path.write_bytes(b"not ours" * 4096), (), "is left alone"),
        (lambda path: path.mkdir(mode=0o500), ("--ssd-cache-capacity", "7tb"), "cannot be"),
        (lambda path: None, ("--ssd-cache-capacity", "8191kb"), "--ssd-cache-capacity"),
        (lambda path: None, ("--ssd-write-budget", "x"), "--ssd-write-budget"),
    ],
)
def test_what_must_not_be_used_is_refused_by_one_line(
    tmp_path: Path, make: Any, arguments: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "disk0"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    command = daemon_command(
        "--addr", f"unix:{tmp_path}/s", "--pool-size", "4mb", "--http-addr", "off",
        "--ssd-cache-path", str(path), "--ssd-cache-capacity", "64mb", *arguments,
    )  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("trikv-daemon: --ssd-")
    assert said in line
    assert (path.read_bytes() if path.is_file() else b"") == before
