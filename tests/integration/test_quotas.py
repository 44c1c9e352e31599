"""Floors of tenants in a real daemon, and a file of quotas that changes while it runs."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.integration.daemons import (
    attached,
    daemon_command,
    hashes,
    start_daemon,
    wait_for,
    wire_ok,
)
from trikv.core.tenants import Quota, Rules
from trikv.nursery.quotas import read_rules
from trikv.options import SettingError

PAGE = 1 << 16
POOL_BLOCKS = 64  # 4 MB


def used(facts: dict[str, Any], name: str) -> int:
    return sum(row["usedBytes"] // PAGE for row in facts["tenants"] if row["name"] == name)


def test_a_scan_stops_at_anothers_floor_until_the_file_changes(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "quotas.toml"
    file.write_text("[tenants.a]\nfloor = 0.25\n")
    options = ("--pool-size", "4mb", "--slab-size", "1mb", "--quota-file", str(file))
    daemon = start_daemon(start, tmp_path, *options)
    mine = hashes(*(f"a/{n}" for n in range(32)))

    async def scan(engine: Any, name: str) -> None:
        for turn in range(6):
            blob = hashes(*(f"{name}/{turn}/{n}" for n in range(32)))
            wire_ok(await engine.save(blob, list(range(32)), request=f"{name}{turn}"))
            await engine.session.release([f"{name}{turn}"])

    async def main() -> None:
        given = {"page_bytes": PAGE, "block_count": 32}
        async with (
            attached(daemon.address, name="a", fields={"tenant": "a"}, **given) as a,
            attached(daemon.address, name="b", fields={"tenant": "b"}, **given) as b,
        ):
            wire_ok(await a.save(mine, list(range(32))))
            await a.session.release(["r"])
            await scan(b, "first")
            found = wire_ok(await a.query(mine, request="q"))
            await a.session.release(["q"])
            assert found.hitCount == POOL_BLOCKS // 4
            facts = await wait_for(daemon.address, lambda one: used(one, "a") == 16)
            assert used(facts, "b") == 48
            words = [sys.executable, "-m", "trikv.cli.main", "status", "--addr", daemon.address]
            table = await asyncio.to_thread(subprocess.check_output, words, text=True)
            assert "1.0 MiB     1.0 MiB     4.0 MiB" in table
            file.write_text("[tenants.a]\nfloor = 0.5\nshare = 0.25\n")  # refused: nothing changes
            await asyncio.sleep(2)
            file.write_text("[tenants.a]\nfloor = 0.0625\n")
            await wait_for(
                daemon.address,
                lambda one: (
                    [row["floorBytes"] for row in one["tenants"] if row["name"] == "a"]
                    == [4 * PAGE]
                ),
                10,
            )
            await scan(b, "second")
            assert wire_ok(await a.query(mine, request="q2")).hitCount == 4

    asyncio.run(main())
    assert daemon.log.read_text().count("quotas.refused") == 1
    assert daemon.end() == 0


def test_a_wrong_file_ends_the_start_with_one_line(tmp_path: Path) -> None:
    words = daemon_command("--quota-file", str(tmp_path / "none.toml"), "--pool-size", "4mb")
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith("trikv-daemon: --quota-file: ")


def test_the_file(tmp_path: Path) -> None:
    file = tmp_path / "q.toml"
    file.write_text("[default]\nshare = 0.5\n[tenants.a]\nfloor = 0.25\nshare = 1\n")
    assert read_rules(str(file)) == Rules(Quota(0.0, 0.5), {"a": Quota(0.25, 1)})
    file.write_text("")
    assert read_rules(str(file)) == Rules()


@pytest.mark.parametrize(
    "text",
    [
        "[",
        "x = 1",
        "tenants = 3",
        "[tenants.a]\nfloor = 1.5",
        "[tenants.a]\nfloor = true",
        "[tenants.a]\nfloor = 'much'",
        "[tenants.a]\ncap = 1",
        "[tenants.a]\nfloor = 0.5\nshare = 0.25",
        "[tenants.a]\nfloor = 0.6\n[tenants.b]\nfloor = 0.6",
        "[tenants]\na = 1",
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "q.toml"
    file.write_text(text)
    with pytest.raises(SettingError, match="--quota-file") as caught:
        read_rules(str(file))
    assert "\n" not in str(caught.value)
