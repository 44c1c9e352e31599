"""Bugs of the daemon's own: it ends with the story in its log, and keeps nobody waiting."""

import asyncio
import contextlib
from pathlib import Path

import capnp
import pytest

from tests.conftest import Start
from tests.integration.daemons import attached, hashes, start_daemon, wire_ok

BROKEN = """
from trikv.core.{module} import {kind}
def broken(*_, **__):
    raise ZeroDivisionError("planted")
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
        async with asyncio.timeout(15), attached(daemon.address) as engine:
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
    assert daemon.process.wait(10) == 1
    assert "ZeroDivisionError: planted" in daemon.log.read_text()
    assert not daemon.path.exists()
