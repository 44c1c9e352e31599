"""A daemon's pool from the start: served while it is touched, warned of, placed."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import attached, start_daemon, status
from tests.integration.test_resources import works
from trikv.address import Address
from trikv.cli.status import fetch_status, render

HELD = """
import os, time
from trikv.tiers.pool import Pool
whole = Pool.populate
def populate(pool, offset, length):
    while offset > 0 and not os.path.exists(os.environ["GO_ON"]):
        time.sleep(0.01)
    whole(pool, offset, length)
Pool.populate = populate
"""


def test_the_daemon_serves_while_most_of_the_pool_is_not_touched(
    start: Start, tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    options = ("--pool-size", "64mb", "--slab-size", "1mb")
    daemon = start_daemon(start, tmp_path, *options, before=HELD, GO_ON=str(flag))

    async def main() -> None:
        async with attached(daemon.address, page_bytes=1 << 17) as engine:
            await works(engine, "early")
            assert not [one for one in daemon.events() if one["event"] == "pool.touched"]
            flag.touch()
            async with asyncio.timeout(PATIENCE_S):
                while "pool.touched" not in daemon.log.read_text():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await works(engine, "late")

    asyncio.run(main())
    (line,) = [one for one in daemon.events() if one["event"] == "pool.touched"]
    assert line["gib"] == line["gib_wanted"] == 0.06
    assert line["took_s"] > 0
    assert daemon.end() == 0


@pytest.mark.parametrize("pages", ["4 KiB pages", "huge pages on request"])
def test_small_pages_are_warned_of_in_the_log_and_in_the_status(
    start: Start, tmp_path: Path, pages: str
) -> None:
    given = f"from trikv.tiers import pool; pool.advise_huge = lambda _: {pages!r}"
    daemon = start_daemon(start, tmp_path, before=given)
    facts = fetch_status([Address(path=str(daemon.path))], timeout_s=5)
    events = [one["event"] for one in daemon.events()]
    shown = render(facts)
    text = " ".join(" ".join(shown).split())
    words = ("shmem_enabled=advise", "vm.nr_hugepages and --use-hugepages", "third of their speed")
    if pages.startswith("huge"):
        assert "pool.slow" not in events
        assert facts["pool"]["notice"] == ""
        assert words[0] not in text
    else:
        lines = [one for one in daemon.events() if one["event"] == "pool.slow"]
        assert [(one["level"], one["reason"]) for one in lines] == [
            ("warning", facts["pool"]["notice"])
        ]
        assert events.index("daemon.ready") < events.index("pool.slow")
        assert all(word in text for word in words)
    assert all(len(line) <= 80 for line in shown[1:])  # the first has a long address
    assert daemon.end() == 0


@pytest.mark.parametrize(
    ("nodes", "flag", "backing"),
    [("(0,)", "auto", ", NUMA nodes 0"), ("(0,)", "off", ""), ("(0, 63)", "auto", "")],
)
def test_the_pool_lies_where_it_can_be_placed(
    start: Start, tmp_path: Path, nodes: str, flag: str, backing: str
) -> None:
    given = f"from trikv.tiers import numa; numa.pool_nodes = lambda: {nodes}"
    daemon = start_daemon(start, tmp_path, "--numa", flag, before=given)

    async def main() -> None:
        async with attached(daemon.address) as engine:
            await works(engine, "placed")
        assert (await status(daemon.address))["pool"]["backing"].endswith(f"pages{backing}")

    asyncio.run(main())
    refused = [one["nodes"] for one in daemon.events() if one["event"] == "numa.off"]
    assert refused == ([[0, 63]] if "63" in nodes else [])
    assert daemon.end() == 0
