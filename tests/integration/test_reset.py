"""Resets and disks: what was reset is never found again, also after a kill while it is dropped.

In the test that kills, the same keys have other bytes after each reset, so that a block of an
earlier life shows.
"""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.integration import disks
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    attached,
    failed,
    start_daemon,
    wire_code,
    wire_ok,
)
from tests.integration.disks import ask, prompt, with_disk

PAGE = 4096
BLOCKS = 1024
PROMPTS = 5
KILLS = int(os.environ.get("TRIKV_RESET_KILLS", "4"))
LATER_S = 0.5  # in this time all is dropped


def byte(name: int, version: int) -> int:
    return (16 * version + name) % 251 + 1


async def save(engine: Engine, name: int, version: int) -> None:
    request = f"save {name}"
    engine.memory[0][:] = byte(name, version)
    reply = await engine.save(prompt(name, BLOCKS), list(range(BLOCKS)), request=request)
    assert wire_ok(reply).savedCount > 0
    await engine.session.release([request])


async def found(engine: Engine, name: int, version: int) -> int:
    """Blocks that come back; none of them is of another version."""
    request = f"load {name}"
    ok = await ask(engine, name, request, BLOCKS)
    if ok.hitCount:
        engine.memory[0][:] = 0
        assert failed(await engine.load(ok.lease, list(range(ok.hitCount)))) == []
        assert (engine.memory[0][: ok.hitCount] == byte(name, version)).all()
    await engine.session.release([request])
    return int(ok.hitCount)


async def live(daemon: RunningDaemon, rng: random.Random, version: int) -> tuple[int, int, int]:
    """Look, save, reset, save again, be killed; returns what was found, and the version now."""
    facts = {"page_bytes": PAGE, "block_count": BLOCKS}
    async with attached(daemon.address, **facts) as engine:
        if version % 2:  # what the life before has left is on the disk, and is to come back
            await disks.quiet(daemon)
        old = sum([await found(engine, name, version) for name in range(PROMPTS)])
        for name in range(PROMPTS):
            if await found(engine, name, version) < BLOCKS:
                await save(engine, name, version)
        await asyncio.sleep(rng.uniform(0, LATER_S))
        reply = (await engine.session.reset()).reply
        assert wire_ok(reply).droppedCount >= 0
        version += 1
        gone = sum([await found(engine, name, version) for name in range(PROMPTS)])
        count = max(version % 2, rng.randrange(3))
        for name in rng.sample(range(PROMPTS), count):
            await save(engine, name, version)
        await asyncio.sleep(rng.uniform(0, LATER_S))
        if version % 2:
            await disks.quiet(daemon)
        daemon.end(signal.SIGKILL)
    return old, gone, version


@pytest.mark.parametrize("persists", [False, True])
def test_killed_while_it_forgets(
    start: Start,
    tmp_path: Path,
    folder: Path,
    persists: bool,  # noqa: FBT001
) -> None:
    rng, version, came_back = random.Random(1), 0, 0
    arguments = ["--ssd-write-through", "--pool-size", "16mb", "--slab-size", "1mb"]
    if persists:
        arguments += ["--persist", str(folder)]
    for _ in range(KILLS):
        daemon = with_disk(start, tmp_path, *arguments, capacity="256mb")
        old, gone, version = asyncio.run(live(daemon, rng, version))
        assert gone == 0
        came_back += old
    assert came_back > 0  # or this shows nothing


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_reset_never_returns(start: Start, tmp_path: Path, end: signal.Signals) -> None:
    async def first() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            await disks.save(engine, "a")
            await disks.save(engine, "b", 8)
            await disks.quiet(daemon)
            assert wire_ok((await engine.session.reset()).reply).droppedCount > 0
            assert await disks.load(engine, "a") == 0
            await disks.save(engine, "b", 4)
            await disks.quiet(daemon, lambda facts: facts["disks"][0]["blockCount"] == 4)

    async def second() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            assert await disks.load(engine, "a") == 0
            assert await disks.load(engine, "b", 8) == 4

    daemon = with_disk(start, tmp_path, "--ssd-write-through", "--pool-size", "16mb")
    asyncio.run(first())
    daemon.end(end)
    daemon = with_disk(start, tmp_path, "--ssd-write-through", "--pool-size", "16mb")
    asyncio.run(second())


def test_a_reset_that_the_disk_does_not_take_is_not_answered_as_done(
    start: Start, tmp_path: Path
) -> None:
    async def serve() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            await disks.save(engine, "a", 8)
            await disks.quiet(daemon)
            faults.set("full")
            reply = (await engine.session.reset()).reply
            assert wire_code(reply) == "not-ready"
            assert "cannot be told to forget" in reply.error.message
            assert await disks.load(engine, "a", 8) == 0

    faults = disks.Faults(tmp_path)
    arguments = ("--ssd-ring", "threads", "--ssd-write-through")
    daemon = with_disk(start, tmp_path, *arguments, before=faults.before)
    asyncio.run(serve())


def test_a_reset_beside_a_disk_that_could_not_be_opened_is_not_answered_as_done(
    start: Start, tmp_path: Path
) -> None:
    """It may work again at the next start, with all that it had."""

    async def save_some() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            await disks.save(engine, "a", 8)
            await disks.quiet(daemon)

    async def reset(error: str) -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            reply = (await engine.session.reset()).reply
            if error:
                assert wire_code(reply) == "not-ready"
                assert error in reply.error.message
            else:
                await disks.quiet(daemon)
                assert wire_ok((await engine.session.reset()).reply).droppedCount >= 0
            assert await disks.load(engine, "a", 8) == 0

    arguments = ("--ssd-ring", "threads", "--ssd-write-through", "--pool-size", "16mb")
    daemon = with_disk(start, tmp_path, *arguments)
    asyncio.run(save_some())
    daemon.end(signal.SIGTERM)
    faults = disks.Faults(tmp_path)
    faults.set("full")
    daemon = with_disk(start, tmp_path, *arguments, before=faults.before)
    asyncio.run(reset("cannot be told to forget: it is off: its superblock cannot be written"))
    daemon.end(signal.SIGKILL)
    daemon = with_disk(start, tmp_path, *arguments)
    asyncio.run(reset(""))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reset_is_told_to_each_disk_that_works(
    start: Start,
    tmp_path: Path,
    *,
    is_late: bool,
) -> None:
    """Whatever another one does: its answer is that it is not certain, and nothing comes back."""

    async def save_some() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            for name in range(4):
                await disks.save(engine, name, 8)
                await disks.quiet(daemon)

    async def reset() -> None:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            if is_late:
                await disks.quiet(daemon)
                faults.set("full", "/disk0")
            for _ in range(2):
                assert wire_code((await engine.session.reset()).reply) == "not-ready"

    async def look() -> list[int]:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            await disks.quiet(daemon)
            return [await disks.load(engine, name, 8) for name in range(4)]

    def life() -> RunningDaemon:
        arguments = ("--ssd-ring", "threads", "--ssd-write-through", "--pool-size", "16mb")
        return with_disk(start, tmp_path, *arguments, paths=2, before=faults.before)

    faults = disks.Faults(tmp_path)
    faults.set("full", "/disk0")  # so all blocks are on the other one
    daemon = life()
    asyncio.run(save_some())
    daemon.end(signal.SIGTERM)
    daemon = life()
    assert asyncio.run(look()) == 4 * [8]
    daemon.end(signal.SIGKILL)
    if is_late:
        faults.set("none")
    daemon = life()
    asyncio.run(reset())
    daemon.end(signal.SIGKILL)
    daemon = life()
    assert asyncio.run(look()) == 4 * [0]


def test_a_save_that_was_planned_before_a_reset_is_refused_after(
    start: Start, tmp_path: Path
) -> None:
    """However late it comes, as one that was asked again; of one that does not say nobody knows."""

    async def serve() -> list[str]:
        async with attached(daemon.address, **disks.engine_options()) as engine:
            answers = []
            for number, resets in enumerate(("", "one", "", "two")):
                if resets:
                    wire_ok((await engine.session.reset(altered=resets)).reply)
                for said in ({"altered": ""}, {"altered": "one"}, {"altered": "two"}, {}):
                    name = f"{number} {said}"
                    reply = await engine.save(prompt(name, 1), [0], request=name, **said)
                    answers.append(reply.which())
                    if answers[-1] == "error":
                        assert reply.error.code == "bad-request"
                        assert "before a reset" in reply.error.message
            return answers

    daemon = start_daemon(start, tmp_path, "--pool-size", "16mb")
    first = ["ok", "error", "error", "ok"]
    one, two = ["error", "ok", "error", "ok"], ["error", "error", "ok", "ok"]
    assert asyncio.run(serve()) == [*first, *one, *one, *two]
