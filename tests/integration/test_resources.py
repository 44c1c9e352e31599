"""Descriptors, memory and threads that run out, clocks that jump: refusals or misses, recovery."""

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import capnp
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
    hello,
    start_daemon,
    status,
    wait_for,
    wire_code,
    wire_ok,
)
from tests.integration.test_lifecycle import run


async def works(engine: Engine, name: str) -> None:
    """Bytes go out and come back equal."""
    before, blob = fill(engine, seed=len(name)), hashes(f"{name} 0", f"{name} 1")
    assert wire_ok(await engine.save(blob, [0, 1], request=name)).savedCount == 2
    found = wire_ok(await engine.query(blob, name))
    assert failed(await engine.load(found.lease, [10, 11])) == []
    assert np.array_equal(engine.memory[0][10:12], before[:2])


# -- descriptors


def descriptors(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


@contextlib.contextmanager
def knocking(daemon: RunningDaemon, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with contextlib.ExitStack() as stack:
        socks = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(5)
            sock.connect(str(daemon.path))
            socks.append(sock)
        yield socks


def test_strangers_cannot_take_all_descriptors(start: Start, tmp_path: Path) -> None:
    """Few descriptors mean few connections: those beyond are closed at once, and counted."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (112, 112))"
    daemon = start_daemon(start, tmp_path, "--heartbeat-seconds", "30", before=few)
    assert any(event["event"] == "descriptors.few" for event in daemon.events())

    async def main() -> None:
        async with attached(daemon.address) as engine:
            before = descriptors(daemon)
            with knocking(daemon, 100) as socks:
                ended = 0
                for sock in socks[-50:]:  # the first ones are kept
                    with contextlib.suppress(ConnectionError):
                        ended += sock.recv(1) == b""
                assert ended == 50
                assert descriptors(daemon) < 112
                await works(engine, "crowded")
                with pytest.raises(capnp.KjException):  # closed in mid-greeting
                    async with asyncio.timeout(PATIENCE_S), connected(daemon.address) as kv:
                        await hello(kv)
            async with asyncio.timeout(PATIENCE_S):
                while descriptors(daemon) > before:  # noqa: ASYNC110  # another process
                    await asyncio.sleep(0.02)
            facts = await status(daemon.address)
            assert facts["counters"]["trikv_connection_refused_total"] >= 50
            async with attached(daemon.address, name="later") as later:
                await works(later, "later")

    asyncio.run(main())
    assert daemon.end() == 0


def test_no_descriptor_left_refuses_newcomers_and_serves_the_others(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, "--heartbeat-seconds", "30")
    pid = daemon.process.pid

    async def main() -> None:
        async with attached(daemon.address) as engine, connected(daemon.address) as idle:
            await idle.status()  # it has been accepted
            _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(daemon), hard))
            assert wire_code(await hello(idle)) == "overloaded", "a process cannot be watched"
            with knocking(daemon, 5):
                await works(engine, "short of descriptors")
                await asyncio.sleep(1.5)
                await engine.session.heartbeat()
                lines = [one for one in daemon.events() if one["event"] == "accept.failed"]
                assert len(lines) == 1, "said once, not at each attempt"
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
            facts = await wait_for(daemon.address, lambda _: True)
            assert facts["counters"]["trikv_connection_refused_total"] >= 1
            wire_ok(await hello(idle))
            async with attached(daemon.address, name="later") as later:
                await works(later, "later")

    asyncio.run(main())
    assert daemon.end() == 0


# -- memory


def pool_file(daemon: RunningDaemon) -> str:
    """The daemon's pool, as a path that another process can open."""
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    return next(str(one) for one in folder.iterdir() if "trikv-pool" in os.readlink(one))


@pytest.mark.parametrize(
    ("limit", "pool_size", "names"),
    [
        ("RLIMIT_AS, (1 << 30,) * 2", "2gb", "--pool-size"),
        ("RLIMIT_FSIZE, (1 << 20,) * 2", "64mb", "--pool-size"),
        ("RLIMIT_AS, (1 << 30,) * 2", "64mb --max-blocks 16777216", "--max-blocks"),
    ],
)
def test_memory_that_cannot_be_had_at_the_start_is_one_line(
    tmp_path: Path, limit: str, pool_size: str, names: str
) -> None:
    before = f"import resource; resource.setrlimit(resource.{limit})"
    command = daemon_command("--pool-size", *pool_size.split(), before=before)
    ended = run("--addr", f"unix:{tmp_path}/s", command=command)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert names in ended.stderr


def test_huge_pages_that_are_not_reserved_are_one_line(tmp_path: Path) -> None:
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    wanted_mb = 2 * (int(rows.get("HugePages_Free", "0")) + 4)
    ended = run("--addr", f"unix:{tmp_path}/s", "--use-hugepages", "--pool-size", f"{wanted_mb}mb")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "vm.nr_hugepages" in ended.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 256 MiB."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / f"trikv-test-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir()
            (folder / name).write_text(f"{256 << 20}")
            break
    else:
        pytest.skip("no control group can be made here")
    yield folder
    deadline_s = time.monotonic() + PATIENCE_S
    while folder.exists() and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):  # its processes are just ending
            folder.rmdir()


def test_a_control_group_bounds_the_pool(start: Start, tmp_path: Path, group: Path) -> None:
    enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid()))"
    command = daemon_command(before=enter)
    ended = run("--addr", f"unix:{tmp_path}/s", "--pool-size", "400mb", command=command)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "--pool-size" in ended.stderr

    daemon = start_daemon(start, tmp_path, "--pool-size", "", before=enter)
    facts = asyncio.run(status(daemon.address))
    assert 32 << 20 < facts["pool"]["capacityBytes"] <= 128 << 20
    assert daemon.end() == 0


SHORT_POOL = """
import os
from trikv.tiers import pool
whole = pool.open_pool
def short(size, **more):
    made = whole(size, **more)
    os.ftruncate(made.fd, size // 2)
    return made
pool.open_pool = short
"""


def test_pages_that_cannot_be_given_fail_block_by_block_and_come_back(
    start: Start, tmp_path: Path
) -> None:
    """A pool of which the machine gives half, as far as a process can tell: faults fail."""
    daemon = start_daemon(
        start, tmp_path, "--pool-size", "8mb", "--slab-size", "1mb", before=SHORT_POOL
    )

    async def main() -> None:
        short = await wait_for(daemon.address, lambda facts: "degraded" in facts["state"])
        assert "memory" in short["state"]
        async with attached(daemon.address, block_count=64, page_bytes=1 << 17) as engine:
            before = fill(engine)
            saved = refused = 0
            for n in range(60):
                reply = wire_ok(await engine.save(hashes(f"s-{n}"), [n], request=f"s-{n}"))
                saved, refused = saved + reply.savedCount, refused + reply.refusedCount
            assert saved > 0
            assert refused > 0
            facts = await status(daemon.address)
            assert facts["counters"]["trikv_save_failed_blocks_total"] == refused
            assert facts["pool"]["fillingCount"] == 0
            assert len([one for one in daemon.events() if one["event"] == "save.failed"]) < refused
            hits = 0
            for n in range(60):
                found = wire_ok(await engine.query(hashes(f"s-{n}"), f"s-{n}"))
                if found.hitCount:
                    hits += 1
                    assert failed(await engine.load(found.lease, [63])) == []
                    assert np.array_equal(engine.memory[0][63], before[n]), "a lie"
            assert 0 < hits <= 32

            os.truncate(pool_file(daemon), 8 << 20)  # the machine has memory again
            await wait_for(daemon.address, lambda facts: facts["state"] == "serving")
            for n in range(60):
                reply = wire_ok(await engine.save(hashes(f"t-{n}"), [n], request=f"t-{n}"))
                assert reply.savedCount == 1

    asyncio.run(main())
    assert daemon.end() == 0


def test_a_page_that_is_gone_when_it_is_loaded_is_reported(start: Start, tmp_path: Path) -> None:
    """A pool page that cannot be read fails its block; the daemon is not ended by a SIGBUS."""
    daemon = start_daemon(start, tmp_path, "--pool-size", "8mb", "--slab-size", "1mb")

    async def main() -> None:
        async with attached(daemon.address, block_count=64, page_bytes=1 << 17) as engine:
            before = fill(engine)
            for n in range(48):
                wire_ok(await engine.save(hashes(f"s-{n}"), [n], request=f"s-{n}"))
            os.truncate(pool_file(daemon), 3 << 20)
            lost = 0
            for n in range(48):
                found = wire_ok(await engine.query(hashes(f"s-{n}"), f"s-{n}"))
                assert found.hitCount == 1
                engine.memory[0][63] = 0
                if failed(await engine.load(found.lease, [63])):
                    lost += 1
                else:
                    assert np.array_equal(engine.memory[0][63], before[n])
            assert lost == 24
            facts = await status(daemon.address)
            assert facts["counters"]["trikv_load_failed_blocks_total"] == lost

    asyncio.run(main())
    assert daemon.end() == 0


# -- the log


def test_a_log_that_nobody_reads_any_more_costs_lines_only(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "run" / "trikv.sock"
    options = ("--addr", f"unix:{path}", "--pool-size", "8mb", "--http-addr", "off")
    command = daemon_command(*options, "--log-level", "debug")
    process = start(command, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert any("daemon.ready" in line for line in process.stderr)
    process.stderr.close()
    daemon = RunningDaemon(process, path, tmp_path / "none")

    async def main() -> None:
        for name in ("one", "two", "three"):
            async with attached(daemon.address, name=name) as engine:
                assert wire_code(await engine.load(99, [1])) == "lease-lost"  # logged
                await works(engine, name)

    asyncio.run(main())
    assert daemon.end() == 0


# -- threads

FEW_THREADS = """
import os, threading
real = threading.Thread.start
def start(thread):
    if os.path.exists(os.environ["NO_THREADS"]):
        raise RuntimeError("can't start new thread")
    real(thread)
threading.Thread.start = start
"""


def test_without_threads_calls_are_refused_or_the_daemon_ends(start: Start, tmp_path: Path) -> None:
    """Copies need threads, and so does Trio's own wait: without, the daemon must not hang."""
    flag = tmp_path / "no-threads"
    daemon = start_daemon(
        start, tmp_path, "--copy-threads", "4", before=FEW_THREADS, NO_THREADS=str(flag)
    )

    async def main() -> None:
        async with attached(daemon.address) as engine:
            await works(engine, "before")
            flag.touch()
            refused = 0
            for turn in range(50):
                calls = [
                    engine.save(hashes(f"{turn} {n}"), [n], request=f"{turn} {n}") for n in range(8)
                ]
                async with asyncio.timeout(PATIENCE_S):
                    replies = await asyncio.gather(*calls, return_exceptions=True)
                if any(isinstance(reply, capnp.KjException) for reply in replies):
                    assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 70
                    assert any(one["event"] == "loop.failed" for one in daemon.events())
                    return
                refused += sum(wire_ok(reply).refusedCount for reply in replies)
            flag.unlink()
            assert refused > 0, "threads were not needed: nothing was shown"
            await works(engine, "again")

    asyncio.run(main())


# -- clocks

JUMPY = """
import random, time
real, step = time.time, random.Random(5)
time.time = lambda: real() + step.uniform(-1e8, 1e8)
time.time_ns = lambda: int(time.time() * 1e9)
"""


def test_the_wall_clock_may_jump(start: Start, tmp_path: Path) -> None:
    """Years back and forth at each look: leases, fills, heartbeats and drains keep their time."""
    daemon = start_daemon(
        start,
        tmp_path,
        *("--lease-seconds", "3", "--fill-seconds", "2", "--heartbeat-seconds", "3"),
        before=JUMPY,
    )
    blob, half = hashes("clock"), hashes("half")

    async def main() -> None:
        async with attached(daemon.address, ranks=2) as engine:
            for rank in (0, 1):
                fill(engine, rank)
                wire_ok(await engine.save(blob, [0], rank=rank))
            began_s = time.monotonic()
            found = wire_ok(await engine.query(blob))
            wire_ok(await engine.save(half, [1], rank=0))
            assert 2.0 < found.leaseSeconds <= 3.0
            facts: dict[str, Any] = {}
            lease_s = fill_s = 0.0
            while not (lease_s and fill_s):
                await engine.session.heartbeat()
                facts = await status(daemon.address)
                now_s = time.monotonic() - began_s
                assert now_s < 30
                lease_s = lease_s or now_s * (facts["pool"]["leaseCount"] == 0)
                fill_s = fill_s or now_s * (facts["pool"]["fillingCount"] == 0)
                await asyncio.sleep(0.02)
            assert lease_s >= 2.9
            assert fill_s >= 1.9
            assert 2 < facts["uptimeSeconds"] < 600
            assert facts["engines"], "the session goes on"
            await asyncio.sleep(4)  # silent
            assert not (await status(daemon.address))["engines"]

    asyncio.run(main())
    assert daemon.end() == 0
