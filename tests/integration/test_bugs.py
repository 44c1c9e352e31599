"""Bugs of the daemon's own: it ends with the story in its log, and keeps nobody waiting."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import capnp
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import Engine, attached, hashes, start_daemon, wire_ok

BROKEN = """
from trikv.core.{module} import {kind}
def broken(*_, **__):
    raise ZeroDivisionError("planted")
{kind}.{method} = broken
"""


FALLEN = """
import os
from {module} import {kind}
real = {kind}.{method}
def broken(*given):
    if os.path.exists(os.environ["FALLEN"]):
        raise {error}("planted")
    return real(*given)
{kind}.{method} = broken
"""


@pytest.mark.parametrize(
    ("module", "kind", "method"),
    [
        ("cache", "Cache", "query"),
        ("cache", "Cache", "prepare_save"),
        ("cache", "Cache", "complete_save"),
        ("cache", "Cache", "prepare_load"),
        ("cache", "Cache", "complete_load"),
        ("cache", "Cache", "expire_leases"),
        ("cache", "Cache", "release_instance"),
        ("engines", "Engines", "register"),
    ],
)
def test_a_bug_ends_the_daemon_with_its_story(
    start: Start, tmp_path: Path, module: str, kind: str, method: str
) -> None:
    before = BROKEN.format(module=module, kind=kind, method=method)
    daemon = start_daemon(start, tmp_path, "--drain-seconds", "1", before=before)

    async def use() -> None:
        async with asyncio.timeout(PATIENCE_S), attached(daemon.address) as engine:
            saves = [engine.save(hashes(n), [n], request=f"{n}") for n in range(16)]
            await asyncio.gather(*saves)
            found = wire_ok(await engine.query(hashes(0)))
            await engine.load(found.lease, [20])
            if method == "release_instance":
                del engine.session
            while daemon.process.poll() is None:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.1)

    with contextlib.suppress(capnp.KjException, OSError, AssertionError):  # or a refusal
        asyncio.run(use())
    assert daemon.process.wait(PATIENCE_S) == 1
    assert "ZeroDivisionError: planted" in daemon.log.read_text()
    assert not daemon.path.exists()


@pytest.mark.parametrize(
    ("module", "kind", "method", "error"),
    [
        ("trikv.process.guest", "Host", "_wait", "RuntimeError"),
        ("trio._core._io_epoll", "EpollIOManager", "process_events", "ZeroDivisionError"),
    ],
    ids=["in a turn", "in Trio's own loop"],
)
def test_a_daemon_whose_trio_fell_ends_and_keeps_nobody_waiting(
    start: Start, tmp_path: Path, module: str, kind: str, method: str, error: str
) -> None:
    flag = tmp_path / "fallen"
    before = FALLEN.format(module=module, kind=kind, method=method, error=error)
    daemon = start_daemon(start, tmp_path, before=before, FALLEN=str(flag))

    async def answered(engine: Engine) -> int:
        saves = [engine.save(hashes(n), [n], request=f"{n}") for n in range(16)]
        replies = await asyncio.gather(*saves, return_exceptions=True)
        said = [one for one in replies if not isinstance(one, capnp.KjException)]
        for reply in said:
            ok = wire_ok(reply)
            assert ok.savedCount + ok.presentCount == 1
        return len(said)

    async def use() -> None:
        async with attached(daemon.address) as engine:
            wire_ok(await engine.save(hashes("before"), [0], request="before"))
            flag.touch()
            async with asyncio.timeout(PATIENCE_S):
                while await answered(engine) == 16:  # what was done before the fall may be said
                    pass
            assert await asyncio.to_thread(daemon.process.wait, PATIENCE_S) == 70

    asyncio.run(use())
    failed = [one for one in daemon.events() if one["event"] == "loop.failed"]
    assert len(failed) == 1
    assert f"{error}: planted" in failed[0]["exception"]


ALONE = """
import asyncio, os
import trio
from trikv.core.errors import ShuttingDownError
from trikv.process import guest as guests

def broken(*given):
    raise RuntimeError("planted")

async def trio_main(open_calls):
    async with trio.open_nursery() as calls:
        open_calls(calls)
        await trio.sleep_forever()

async def main():
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    guest = guests.Guest()
    await guest.start(trio_main)
    calls = [asyncio.create_task(guest.run(trio.sleep_forever)) for _ in range(3)]
    await asyncio.sleep(0.1)
    guests.Host._wait = guests.TRIO.start_thread_soon = broken
    last = asyncio.create_task(guest.run(trio.sleep, 0.01))
    ends = await asyncio.gather(*calls, last, return_exceptions=True)
    assert all(isinstance(end, ShuttingDownError) for end in ends), ends
    await guest.settle()
    assert isinstance((await guest.ended).error, guests.StuckError)
    assert [type(one["exception"]) for one in told] == [guests.StuckError]
    print("all told", flush=True)
    os._exit(0)  # what is left of Trio cannot be unwound

asyncio.run(main())
"""


def test_those_who_wait_for_a_fallen_trio_are_woken() -> None:
    """Also where nobody ends the process; `Guest.settle` does not wait for ever."""
    command = [sys.executable, "-c", ALONE]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert ended.stdout == "all told\n", ended.stderr
