"""A pool that outlives its daemon: whatever ends it, blocks come back as they were, or do not."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    attached,
    connected,
    daemon_command,
    failed,
    fill,
    hashes,
    start_daemon,
    status,
    wire_ok,
)
from tests.integration.test_lifecycle import run

IMPATIENT = "from trikv.tiers import locks; locks.LOCK_S = 0.5"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small tmpfs")


def daemon_on(start: Start, tmp_path: Path, folder: Path, *more: str) -> RunningDaemon:
    return start_daemon(start, tmp_path, "--persist", str(folder), *more)


async def save_all(address: str, blocks: int, **options: object) -> np.ndarray:
    async with attached(address, **options) as engine:
        for rank in range(engine.ranks):
            fill(engine, rank)
        written = np.stack(engine.memory).copy()
        blob = hashes(*range(blocks))
        for rank in range(engine.ranks):
            wire_ok(await engine.save(blob, list(range(blocks)), rank))
        return written


async def load_all(engine: Engine, blocks: int) -> np.ndarray:
    for rank in range(engine.ranks):
        engine.memory[rank][:] = 0
    found = wire_ok(await engine.query(hashes(*range(blocks))))
    for rank in range(engine.ranks):
        assert failed(await engine.load(found.lease, list(range(found.hitCount)), rank)) == []
    return np.stack(engine.memory)[:, : found.hitCount]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_blocks_of_several_models_come_back_whole(
    start: Start, tmp_path: Path, folder: Path, number: signal.Signals
) -> None:
    models: list[dict[str, object]] = [
        {"name": "a", "fields": {"model": "a"}},
        {"name": "b", "fields": {"model": "b"}, "ranks": 3, "page_bytes": 20_480},
    ]
    daemon = daemon_on(start, tmp_path, folder)
    saved = [asyncio.run(save_all(daemon.address, 40, **options)) for options in models]
    daemon.end(number)
    begin_s = time.monotonic()
    daemon = daemon_on(start, tmp_path, folder)

    async def compare() -> None:
        for options, written in zip(models, saved, strict=True):
            async with attached(daemon.address, **options) as engine:
                assert np.array_equal(await load_all(engine, 40), written[:, :40])
        facts = await status(daemon.address)
        assert facts["counters"]["trikv_recovered_blocks_total"] == 80
        assert f"kept in {folder}" in facts["pool"]["backing"]

    asyncio.run(compare())
    print(f"all blocks back {time.monotonic() - begin_s:.2f} s after the end")  # noqa: T201


def pattern(name: str, page_bytes: int) -> np.ndarray:
    """Bytes that only this block has."""
    return np.frombuffer(hashes(name) * (page_bytes // 32), np.uint8)


async def save_until_it_ends(address: str, life: int, page_bytes: int) -> None:
    async with attached(address, page_bytes=page_bytes) as engine:
        for turn in range(10_000):
            blob = b""
            for block in range(engine.block_count):
                engine.memory[0][block] = pattern(f"{life}/{turn}/{block}", page_bytes)
                blob += hashes(f"{life}/{turn}/{block}")
            await engine.save(blob, list(range(engine.block_count)), request=f"r{turn}")


def test_killed_in_the_midst_of_saves_every_block_is_whole_or_absent(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    rng, page_bytes, found_blocks = random.Random(5), 65_536, 0
    for life in range(6):
        daemon = daemon_on(start, tmp_path, folder, "--pool-size", "16mb")
        found_blocks += asyncio.run(check_all(daemon.address, life, page_bytes))

        async def race(daemon: RunningDaemon = daemon, life: int = life) -> None:
            async with connected(daemon.address):  # the loop for both tasks
                saving = asyncio.create_task(save_until_it_ends(daemon.address, life, page_bytes))
                while (await status(daemon.address))["counters"]["trikv_evicted_blocks_total"] == 0:
                    assert not saving.done()
                    await asyncio.sleep(0.05)
                await asyncio.sleep(rng.uniform(0, 0.2))
                daemon.end(signal.SIGKILL)
                await asyncio.wait([saving])
                assert saving.exception() is not None

        asyncio.run(race())
    assert found_blocks > 0


async def check_all(address: str, life: int, page_bytes: int) -> int:
    """Load whatever is there of earlier lives, and compare; returns how many blocks there were."""
    count = 0
    async with attached(address, name="reader", page_bytes=page_bytes) as engine:
        for before in range(life):
            for turn in range(500):  # a fast engine gets far before it evicts
                root = f"{before}/{turn}/0"
                if wire_ok(await engine.query(hashes(root), root)).hitCount == 0:
                    continue  # leaves go first
                for block in range(engine.block_count):
                    name = f"{before}/{turn}/{block}"
                    found = wire_ok(await engine.query(hashes(name), name))
                    if found.hitCount:
                        assert failed(await engine.load(found.lease, [0])) == []
                        assert np.array_equal(engine.memory[0][0], pattern(name, page_bytes)), name
                        count += 1
    return count


def test_what_was_reset_never_comes_back(start: Start, tmp_path: Path, folder: Path) -> None:
    daemon = daemon_on(start, tmp_path, folder)

    async def forget() -> None:
        await save_all(daemon.address, 10, name="other", fields={"model": "other"})
        async with attached(daemon.address) as engine:
            wire_ok(await engine.save(hashes(*range(10)), list(range(10))))
            assert wire_ok((await engine.session.reset()).reply).droppedCount == 10

    asyncio.run(forget())
    daemon.end(signal.SIGKILL)
    daemon = daemon_on(start, tmp_path, folder)

    async def look() -> tuple[int, int]:
        async with (
            attached(daemon.address) as engine,
            attached(daemon.address, name="other", fields={"model": "other"}) as other,
        ):
            counts = [wire_ok(await one.query(hashes(*range(10)))) for one in (engine, other)]
            return counts[0].hitCount, counts[1].hitCount

    assert asyncio.run(look()) == (0, 10)


def test_takeover_ends_the_other_and_goes_on_with_its_blocks(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    first = daemon_on(start, tmp_path, folder)
    saved = asyncio.run(save_all(first.address, 20))
    begin_s = time.monotonic()
    second = daemon_on(start, tmp_path, folder, "--takeover")
    took_s = time.monotonic() - begin_s
    assert first.process.wait(PATIENCE_S) == 0
    assert first.events()[-1]["event"] == "daemon.ended"
    (replaced,) = [one for one in second.events() if one["event"] == "daemon.replaced"]
    assert replaced["pid"] == first.process.pid

    async def compare() -> None:
        async with attached(second.address) as engine:
            assert np.array_equal(await load_all(engine, 20), saved[:, :20])

    asyncio.run(compare())
    print(f"another daemon serves after {took_s:.2f} s")  # noqa: T201


def test_takeover_of_nobody_and_of_one_who_does_not_end(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    frozen = daemon_on(start, tmp_path, folder, "--takeover")
    frozen.process.send_signal(signal.SIGSTOP)
    command = [
        *("import sys", "from trikv.nursery import serve, takeover", "takeover.PATIENCE_S = 0.3"),
        "sys.argv[0] = 'trikv-daemon'",
        "serve.main()",
    ]
    arguments = ["--addr", frozen.address, "--takeover", "--drain-seconds", "0"]
    said = run(*arguments, command=[sys.executable, "-c", "\n".join(command)])
    assert said.returncode == 2
    (line,) = said.stderr.splitlines()
    assert f"process {frozen.process.pid} does not end in 0.3 s" in line
    frozen.process.send_signal(signal.SIGCONT)
    frozen.process.wait(PATIENCE_S)  # it was asked to end, and does now


def test_another_size_begins_anew_and_says_so(start: Start, tmp_path: Path, folder: Path) -> None:
    daemon = daemon_on(start, tmp_path, folder)
    asyncio.run(save_all(daemon.address, 10))
    daemon.end()
    daemon = daemon_on(start, tmp_path, folder, "--pool-size", "32mb")
    (emptied,) = [one for one in daemon.events() if one["event"] == "pool.emptied"]
    assert "another size" in emptied["reason"]

    async def look() -> int:
        async with attached(daemon.address) as engine:
            return int(wire_ok(await engine.query(hashes(*range(10)))).hitCount)

    assert asyncio.run(look()) == 0


def test_without_a_size_the_kept_pool_keeps_its_own(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    daemon = daemon_on(start, tmp_path, folder)
    asyncio.run(save_all(daemon.address, 10))
    daemon.end()
    (tmp_path / "settings.toml").write_text("")
    log = tmp_path / "second.log"
    with log.open("w") as stderr:
        second = start(
            daemon_command(
                "--addr", daemon.address, "--persist", str(folder), "--http-addr", "off"
            ),
            stderr=stderr,
        )
    until_s = time.monotonic() + PATIENCE_S
    while '"daemon.ready"' not in log.read_text():
        assert second.poll() is None, log.read_text()
        assert time.monotonic() < until_s
        time.sleep(0.02)
    found = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["block_count"] for one in found if one["event"] == "pool.found"] == [10]


def refused(*arguments: str, before: str = "") -> str:
    """The one line of a daemon that does not start."""
    code = f"{before}\nfrom trikv.nursery import serve\nserve.main()"
    socket = f"unix:/tmp/trikv-test-{uuid.uuid4().hex[:8]}/trikv.sock"
    said: subprocess.CompletedProcess[str] = run(
        "--addr",
        socket,
        "--pool-size",
        "16mb",
        *arguments,
        command=[sys.executable, "-c", code],
    )
    assert said.returncode != 0
    (line,) = said.stderr.splitlines()
    return line


def test_what_cannot_keep_a_pool_is_refused_and_left_alone(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    assert "not on tmpfs, hugetlbfs" in refused("--persist", str(tmp_path / "disk"))
    assert "--persist" in refused("--persist", "relative/folder")
    assert "hugetlbfs" in refused("--persist", str(folder), "--use-hugepages")
    folder.mkdir(mode=0o700)
    foreign = folder / "trikv.pool"
    foreign.write_bytes(b"somebody's")
    assert "not ours" in refused("--persist", str(folder))
    assert foreign.read_bytes() == b"somebody's"
    foreign.unlink()
    records = folder / "trikv.records"
    records.write_bytes(b"somebody's" * 1_000)
    assert "something else is there" in refused("--persist", str(folder))
    assert records.read_bytes() == b"somebody's" * 1_000
    records.unlink()
    (folder / "trikv.pool").unlink(missing_ok=True)
    daemon_on(start, tmp_path, folder)
    line = refused("--persist", str(folder), before=IMPATIENT)
    assert "another process has used the pool" in line


def test_disks_hold_the_kept_pool_that_they_read_into(
    start: Start, tmp_path: Path, folder: Path
) -> None:
    """They go on when the daemon is killed, so the pool must stay locked as long."""
    disk = ("--ssd-cache-path", str(tmp_path / "disk"), "--ssd-cache-capacity", "64mb")
    daemon = daemon_on(start, tmp_path, folder, *disk)
    files = Path(f"/proc/{daemon.process.pid}/fdinfo").iterdir()
    rings = [text for text in (one.read_text() for one in files) if "SqMask" in text]
    if not rings:
        pytest.skip("this kernel has no rings for us")
    assert all("trikv.pool" in text for text in rings)


@needs_root
def test_a_file_system_without_room_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(small)], check=True)
    try:
        line = refused("--persist", str(small / "pool"))
        assert "no room for 16777216 bytes" in line
    finally:
        subprocess.run(["umount", str(small)], check=True)
