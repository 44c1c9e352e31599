"""Engines that lie, and strangers that speak no protocol, against a real daemon."""

import asyncio
import contextlib
import ctypes
import json
import mmap
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Start
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    attached,
    connected,
    failed,
    fill,
    hashes,
    hello,
    spawn,
    wire_code,
    wire_ok,
)

LIES: dict[str, dict[str, Any]] = {
    "block out of bounds": {"blocks": [64]},
    "negative block": {"blocks": [-1]},
    "more blocks than hashes": {"blocks": [1, 2]},
    "half a hash": {"hashes": b"x" * 33},
    "hash size": {"hashBytes": 20},
    "no hash size": {"hashBytes": 0},
    "foreign rank": {"rank": 1},
    "foreign group": {"group": 3},
    "no request": {"request": ""},
    "long request": {"request": "x" * 513},
    "fence out of bounds": {"fence": 4},
    "position overflow": {"first": 2**32 - 1},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_answered_and_changes_nothing(daemon: RunningDaemon, lie: str) -> None:
    change = dict(LIES[lie])
    blob = hashes(f"lie {lie}")
    blocks = change.pop("blocks", [0])

    async def main() -> None:
        async with attached(daemon.address, name="liar") as engine:
            reply = await engine.save(blob, blocks, **change)
            assert wire_code(reply) == "bad-request"
            assert reply.error.message
            assert wire_ok(await engine.query(blob)).hitCount == 0
            assert wire_ok(await engine.save(blob, [0])).savedCount == 1

    asyncio.run(main())


def test_a_hash_that_stands_twice_is_refused(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with attached(daemon.address, name="twice") as engine:
            assert wire_code(await engine.save(hashes("t", "t"), [0, 1])) == "bad-request"

    asyncio.run(main())


@pytest.mark.parametrize("first", [0, 1, 2**31])
def test_a_load_beyond_its_lease_is_refused(daemon: RunningDaemon, first: int) -> None:
    blob = hashes("beyond", "beyond 2")

    async def main() -> None:
        async with attached(daemon.address, name="beyond") as engine:
            wire_ok(await engine.save(blob, [0, 1]))
            lease = wire_ok(await engine.query(blob)).lease
            blocks = [10, 11, 12] if first == 0 else [10, 11]
            assert wire_code(await engine.load(lease, blocks, first=first)) == "bad-request"
            assert wire_code(await engine.load(lease, [3, 3])) == "bad-request"
            assert wire_code(await engine.load(lease + 1, [3])) == "lease-lost"
            assert failed(await engine.load(lease, [10, 11])) == []

    asyncio.run(main())


FAR = {"bytes": 1, "stride": 2**63}
OVERLAPPING = [{"bytes": 8}, {"bytes": 8, "offset": 4}]


@pytest.mark.parametrize(
    "change",
    [
        {"memories": []},
        {"groups": []},
        {"instance": ""},
        {"memories": [{"process": {"address": 2**63, "bytes": 1 << 20}}]},
        {"memories": [{"process": {"address": 4096, "bytes": 0}}]},
        {"memories": [{"process": {"address": 4096, "bytes": 4096}}]},
        {"memories": [{"cudaIpc": {"handle": b"x" * 64, "allocationBytes": 4096}}]},
        {"groups": [{"blockCount": 0, "pieces": [{"bytes": 1}], "layout": "x"}]},
        {"groups": [{"blockCount": 1, "pieces": [], "layout": "x"}]},
        {"groups": [{"blockCount": 1, "pieces": [{"memory": 9, "bytes": 1}], "layout": "x"}]},
        {"groups": [{"blockCount": 2**32 - 1, "pieces": [FAR], "layout": "x"}]},
        {"groups": [{"blockCount": 2, "pieces": [{"bytes": 8, "stride": 4}], "layout": "x"}]},
        {"groups": [{"blockCount": 1, "pieces": OVERLAPPING, "layout": "x"}]},
        {"groups": [{"blockCount": 1, "pieces": [{"bytes": 8}], "layout": ""}]},
        {"fences": {"address": 0, "count": 65_537}},
    ],
)
def test_a_wrong_registration_is_refused(daemon: RunningDaemon, change: dict[str, Any]) -> None:
    async def main() -> None:
        async with connected(daemon.address) as kv:
            engine = Engine(wire_ok(await hello(kv)).session, name="wrong")
            engine.memory.append(np.zeros((64, 8192), np.uint8))
            assert wire_code(await engine.register(0, **change)) == "bad-request"
            wire_ok(await engine.register(0))

    asyncio.run(main())


def test_memory_that_is_not_there_fails_block_by_block(daemon: RunningDaemon) -> None:
    """Registered addresses beyond what is mapped: nothing saved, loads fail, nothing crashes."""
    blob = hashes("hole 0", "hole 1")

    async def main() -> None:
        async with attached(daemon.address, name="hole") as engine:
            fill(engine)
            wire_ok(await engine.save(blob, [0, 1]))
            found = wire_ok(await engine.query(blob))
            area = mmap.mmap(-1, 64 * 8192)
            whole = np.frombuffer(area, np.uint8)
            gone = whole.ctypes.data + 8 * 8192
            libc = ctypes.CDLL(None)
            libc.mprotect(ctypes.c_void_p(gone), 56 * 8192, 0)
            process = {"address": whole.ctypes.data, "bytes": whole.nbytes}
            wire_ok(await engine.register(0, memories=[{"process": process}]))
            assert failed(await engine.load(found.lease, [7, 8])) == [1]
            assert np.array_equal(whole[7 * 8192 : 8 * 8192], engine.memory[0][0])
            other = hashes("hole 2", "hole 3")
            saved = wire_ok(await engine.save(other, [0, 20]))
            assert (saved.savedCount, saved.refusedCount) == (1, 1)
            libc.mprotect(ctypes.c_void_p(gone), 56 * 8192, mmap.PROT_READ | mmap.PROT_WRITE)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_and_huge_frames_end_that_connection_only(
    daemon: RunningDaemon, seed: int
) -> None:
    rng = random.Random(seed)
    junk = {
        0: b"\x00\x00\x00\x00" + (1 << 27).to_bytes(4, "little") + b"\0" * 64,  # a 1 GiB frame
        1: (1 << 20).to_bytes(4, "little") + b"\xff" * 4096,  # a million segments
    }.get(seed, rng.randbytes(rng.randint(1, 65536)))

    async def main() -> None:
        async with attached(daemon.address, name=f"bystander {seed}") as engine:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(daemon.path))
                sock.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    sock.sendall(junk)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(65536):
                        pass
            blob = hashes(f"bystander {seed}")
            assert wire_ok(await engine.save(blob, [0])).savedCount == 1

    asyncio.run(main())
    rss_kb = int(Path(f"/proc/{daemon.process.pid}/statm").read_text().split()[1]) * 4
    assert rss_kb < 600_000


def test_one_session_speaks_for_one_engine_and_names_cannot_be_taken(
    daemon: RunningDaemon, start: Start
) -> None:
    child = spawn(start, daemon, "beat")
    name = json.loads(child.stdout.readline())["name"]  # type: ignore[union-attr]

    async def main() -> None:
        async with attached(daemon.address, name="mine") as engine:
            engine.name = "somebody else"
            assert wire_code(await engine.declare()) == "bad-request"
        async with connected(daemon.address) as kv:
            thief = Engine(wire_ok(await hello(kv)).session, name=name)
            thief.memory.append(np.zeros((64, 8192), np.uint8))
            assert wire_code(await thief.declare()) == "conflict"
            assert wire_code(await thief.register(0)) == "conflict"

    asyncio.run(main())
