"""Engines that save, load, share, freeze and die, against a real daemon and real memory."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import capnp
import numpy as np
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    UNTIMED,
    Engine,
    RunningDaemon,
    attached,
    connected,
    failed,
    fill,
    hashes,
    hello,
    spawn,
    start_daemon,
    wait_for,
    wire_code,
    wire_ok,
)
from trikv import wire

# -- what it is for


def test_saved_bytes_come_back_to_other_blocks_of_another_engine(daemon: RunningDaemon) -> None:
    blob = hashes(*(f"back-{n}" for n in range(20)))

    async def main() -> None:
        async with attached(daemon.address, name="writer") as writer:
            before = fill(writer)
            saved = wire_ok(await writer.save(blob, list(range(20))))
            assert (saved.savedCount, saved.presentCount, saved.refusedCount) == (20, 0, 0)
        async with attached(daemon.address, name="reader") as reader:
            found = wire_ok(await reader.query(blob))
            assert found.hitCount == 20
            targets = random.Random(1).sample(range(64), 20)
            assert failed(await reader.load(found.lease, targets)) == []
            assert np.array_equal(reader.memory[0][targets], before[:20])
            untouched = sorted(set(range(64)) - set(targets))
            assert not reader.memory[0][untouched].any()

    asyncio.run(main())


def test_a_block_is_visible_only_when_all_ranks_have_saved_it(daemon: RunningDaemon) -> None:
    blob = hashes(*(f"ranks-{n}" for n in range(4)))

    async def main() -> None:
        async with attached(daemon.address, name="two", ranks=2, fields={"model": "2"}) as engine:
            before = [fill(engine, rank) for rank in (0, 1)]
            wire_ok(await engine.save(blob, [0, 1, 2, 3], rank=0))
            assert wire_ok(await engine.query(blob)).hitCount == 0
            wire_ok(await engine.save(blob[:64], [0, 1], rank=1))
            found = wire_ok(await engine.query(blob))
            assert found.hitCount == 2
            for rank in (0, 1):
                engine.memory[rank][:] = 0
                assert failed(await engine.load(found.lease, [8, 9], rank=rank)) == []
                assert np.array_equal(engine.memory[rank][[8, 9]], before[rank][[0, 1]])
            assert wire_code(await engine.load(found.lease, [8, 9])) == "lease-lost"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({}, True),
        ({"label": "another name"}, True),
        ({"weights": "tuned"}, False),
        ({"salt": "tenant"}, False),
        ({"hash_probe": "01"}, False),
    ],
)
def test_who_shares_with_whom(
    daemon: RunningDaemon, change: dict[str, str], *, shares: bool
) -> None:
    blob = hashes(f"share {change}")
    base = {"label": "m", "weights": "base", "salt": "", "hash_probe": "00"}

    async def main() -> None:
        async with attached(daemon.address, name="one", fields=base) as one:
            wire_ok(await one.save(blob, [0], request=f"{change}"))
        async with connected(daemon.address) as kv:
            other = Engine(wire_ok(await hello(kv)).session, name="other", fields=base | change)
            declared = await other.attach()
            assert wire_ok(await other.query(blob)).hitCount == int(shares)
            told = " ".join(declared.notes)
            assert ("PYTHONHASHSEED" in told) == ("hash_probe" in change)

    asyncio.run(main())


def test_two_engines_with_one_request_id_do_not_meet(daemon: RunningDaemon) -> None:
    blob = hashes("same-id")

    async def main() -> None:
        async with attached(daemon.address, name="left") as left:
            wire_ok(await left.save(blob, [0]))
            lease = wire_ok(await left.query(blob)).lease
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", THIEF, daemon.address, str(lease), stdout=subprocess.PIPE
            )
            theft = asyncio.ensure_future(child.communicate())
            while not theft.done():  # a process may take longer to start than silence is allowed
                await left.session.heartbeat()
                await asyncio.wait([theft], timeout=0.5)
            stolen, _ = theft.result()
            assert json.loads(stolen) == {"load": "lease-lost", "query": 1}
            assert failed(await left.load(lease, [5])) == []

    asyncio.run(main())


THIEF = """
import asyncio, json, sys
from tests.integration.daemons import *
async def main(address, lease):
    async with attached(address, name="right") as right:
        load = wire_code(await right.load(int(lease), [0]))
        found = wire_ok(await right.query(hashes("same-id")))
        await right.session.release(["r"])
        print(json.dumps({"load": load, "query": found.hitCount}))
asyncio.run(main(*sys.argv[1:]))
"""


def test_reset_reaches_every_engine_of_the_namespace(daemon: RunningDaemon) -> None:
    blob = hashes("old weights", "old weights 2")
    fields = {"model": "resettable"}

    async def main() -> None:
        async with attached(daemon.address, name="trainer", fields=fields) as engine:
            wire_ok(await engine.save(blob, [0, 1]))
            found = wire_ok(await engine.query(blob))
            assert wire_ok((await engine.session.reset()).reply).droppedCount == 2
            assert wire_code(await engine.load(found.lease, [4, 5])) == "lease-lost"
            assert wire_ok(await engine.query(blob)).hitCount == 0
            assert wire_ok(await engine.save(blob, [0, 1])).savedCount == 2

    asyncio.run(main())


# -- fences


def test_a_raised_fence_makes_a_save_void(daemon: RunningDaemon) -> None:
    blob = hashes("fenced")

    async def main() -> None:
        async with attached(daemon.address, name="fencer") as engine:
            engine.fences[2] = 7
            void = wire_ok(await engine.save(blob, [0], fence=2, generation=6))
            assert (void.savedCount, void.refusedCount) == (0, 1)
            assert wire_ok(await engine.query(blob)).hitCount == 0
            assert wire_ok(await engine.save(blob, [0], fence=2, generation=7)).savedCount == 1

    asyncio.run(main())


# -- versions


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_neighbouring_protocol_versions_are_served(daemon: RunningDaemon, step: int) -> None:
    async def main() -> None:
        async with connected(daemon.address) as kv:
            wire_ok(await hello(kv, wire.PROTOCOL + step))

    asyncio.run(main())


def test_a_distant_version_is_refused_by_name(daemon: RunningDaemon) -> None:
    async def main() -> None:
        async with connected(daemon.address) as kv:
            reply = await hello(kv, wire.PROTOCOL + 2)
            assert wire_code(reply) == "unsupported-version"
            for version in (wire.PROTOCOL, wire.PROTOCOL + 2):
                assert str(version) in reply.error.message

    asyncio.run(main())


# -- ends


def names(facts: dict[str, Any]) -> set[str]:
    return {engine["name"] for engine in facts["engines"]}


@pytest.mark.parametrize("command", ["idle", "save", "load"])
def test_a_killed_engine_is_gone_long_before_it_misses_a_heartbeat(
    start: Start, tmp_path: Path, command: str
) -> None:
    daemon = start_daemon(start, tmp_path, *UNTIMED)
    child = spawn(start, daemon, command)
    name = json.loads(child.stdout.readline())["name"]  # type: ignore[union-attr]
    asyncio.run(wait_for(daemon.address, lambda facts: name in names(facts)))
    os.kill(child.pid, signal.SIGKILL)
    facts = asyncio.run(wait_for(daemon.address, lambda facts: name not in names(facts)))
    assert facts["pool"]["leaseCount"] == 0
    settled = asyncio.run(wait_for(daemon.address, lambda facts: not facts["pool"]["fillingCount"]))
    assert settled["state"] == "serving"


def test_a_frozen_engine_is_forgotten(daemon: RunningDaemon, start: Start) -> None:
    """After the silence that its daemon allows, and not after another one."""

    async def allowed_s() -> float:
        async with connected(daemon.address) as kv:
            return float(wire_ok(await hello(kv)).heartbeatSeconds)

    assert asyncio.run(allowed_s()) == 3.0
    frozen = spawn(start, daemon, "beat")
    name = json.loads(frozen.stdout.readline())["name"]  # type: ignore[union-attr]
    os.kill(frozen.pid, signal.SIGSTOP)
    asyncio.run(wait_for(daemon.address, lambda facts: name not in names(facts)))
    os.kill(frozen.pid, signal.SIGCONT)


def test_a_forked_child_does_not_keep_an_engine_alive(start: Start, tmp_path: Path) -> None:
    """It inherited the socket and keeps the connection open after its parent has died."""
    daemon = start_daemon(start, tmp_path, *UNTIMED)
    code = (
        "import asyncio, os, sys, time; from tests.integration.daemons import attached\n"
        "async def main():\n"
        "    async with attached(sys.argv[1], name='forker'):\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        print('attached', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    forker = start(
        [sys.executable, "-c", code, daemon.address],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert forker.stdout is not None
    forker.stdout.readline()
    os.kill(forker.pid, signal.SIGKILL)
    asyncio.run(wait_for(daemon.address, lambda facts: "forker" not in names(facts)))


def test_a_process_that_reconnects_replaces_its_old_session(daemon: RunningDaemon) -> None:
    blob = hashes("replaced")

    async def main() -> None:
        async with connected(daemon.address) as kv:
            old = Engine(wire_ok(await hello(kv)).session, name="again")
            await old.attach()
            wire_ok(await old.save(blob, [0]))
            new = Engine(wire_ok(await hello(kv)).session, name="again")
            await new.attach()
            assert wire_ok(await new.query(blob)).hitCount == 1
            assert wire_code(await old.query(blob)) == "shutting-down"

    asyncio.run(main())


def test_more_engines_than_allowed_are_refused_and_room_comes_back(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, "--max-engines", "2")

    async def main() -> None:
        async with connected(daemon.address) as kv:
            sessions = [wire_ok(await hello(kv)).session for _ in range(3)]
            engines = [Engine(one, name=f"e{n}") for n, one in enumerate(sessions)]
            await engines[0].attach()
            await engines[1].attach()
            assert wire_code(await engines[2].declare()) == "overloaded"
            del sessions, engines[0]
            await wait_for(daemon.address, lambda facts: len(facts["engines"]) == 1)
            await engines[-1].attach()

    asyncio.run(main())


# -- a daemon that is frozen


def test_a_daemon_frozen_while_it_loads_is_ended_and_one_frozen_at_rest_goes_on(
    start: Start, tmp_path: Path
) -> None:
    """A load's answer is a promise that nothing is written any more: death is an answer too."""
    daemon = start_daemon(
        start, tmp_path, "--freeze-seconds", "2", "--heartbeat-seconds", "6", "--pool-size", "1gb"
    )
    blob = hashes(*(f"frozen-{n}" for n in range(64)))

    async def main() -> None:
        page_bytes, piece_bytes = 1 << 20, 64  # many pieces, so that a load takes a while
        pieces = [
            {"memory": 0, "offset": at, "stride": page_bytes, "bytes": piece_bytes}
            for at in range(0, page_bytes, piece_bytes)
        ]
        group = {"blockCount": 64, "pieces": pieces, "layout": "scattered"}
        async with attached(daemon.address, block_count=64, page_bytes=page_bytes) as engine:
            wire_ok(await engine.register(0, groups=[group]))
            wire_ok(await engine.save(blob, list(range(64))))
            os.kill(daemon.process.pid, signal.SIGSTOP)
            await asyncio.sleep(7)
            os.kill(daemon.process.pid, signal.SIGCONT)
            found = wire_ok(await engine.query(blob))
            assert found.hitCount == 64, "a rest must not cost sessions or blocks"
            call = asyncio.ensure_future(engine.load(found.lease, list(range(64))))
            await asyncio.sleep(0.05)
            os.kill(daemon.process.pid, signal.SIGSTOP)
            with pytest.raises(capnp.KjException):
                await asyncio.wait_for(call, PATIENCE_S)

    asyncio.run(main())
    assert daemon.process.wait(PATIENCE_S) == -signal.SIGKILL
