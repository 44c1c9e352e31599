"""Hit-rate windows of a real daemon: once a request, over a restart, in a file."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    attached,
    fill,
    hashes,
    start_daemon,
    status,
    wire_ok,
)
from trikv.tiers import statefile
from trikv.tiers.statefile import StateFileError


async def ask(address: str) -> None:
    """Three requests of eight blocks; the second and third find what the first has saved."""
    async with attached(address) as engine:
        fill(engine)
        for number in range(3):
            await request(engine, f"r{number}")


async def request(engine: Engine, name: str) -> None:
    blob = hashes(*range(8))
    for _ in range(4):
        wire_ok(await engine.query(blob, name))
    wire_ok(await engine.save(blob, list(range(8)), request=name))
    await engine.session.release([name])


def windows(daemon: RunningDaemon) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = asyncio.run(status(daemon.address))["windows"]
    return facts


def check(rows: list[dict[str, Any]]) -> None:
    everyone = [row for row in rows if not row["namespace"]]
    assert [row["seconds"] for row in everyone] == [900, 3600, 86400]
    for row in rows:
        hits = {one["tier"]: one["blocks"] for one in row["hits"]}
        assert (row["askedBlocks"], hits) == (24, {"pinned": 16, "ssd": 0, "peer": 0})
        assert (row["distinctBlocks"], row["missedDistinctBlocks"]) == (8, 8)
        assert row["hitRatio"] == row["reachableRatio"] == row["freshRatio"] == pytest.approx(2 / 3)
        assert row["case"] == "at-ceiling"


def kept(daemon: RunningDaemon) -> Path:
    return daemon.path.with_name("trikv.sock.windows")


def test_windows_outlive_a_restart(start: Start, tmp_path: Path) -> None:
    first = start_daemon(start, tmp_path)
    asyncio.run(ask(first.address))
    check(windows(first))
    assert first.end() == 0
    assert kept(first).stat().st_mode & 0o777 == 0o600
    second = start_daemon(start, tmp_path)
    rows = windows(second)
    check(rows)
    assert rows[0]["coveredSeconds"] > 0
    assert not any(event["event"].startswith("windows.") for event in second.events())
    assert second.end() == 0
    assert kept(second).exists()


def test_windows_are_kept_where_the_flag_says(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "deep"
    daemon = start_daemon(start, tmp_path, "--state-dir", str(folder))
    asyncio.run(ask(daemon.address))
    assert daemon.end() == 0
    assert [path.name for path in folder.iterdir()] == ["trikv.sock.windows"]
    assert not kept(daemon).exists()


@pytest.mark.parametrize("harm", ["torn", "foreign", "link", "other windows"])
def test_a_file_that_cannot_be_used_is_said_in_one_line(
    start: Start, tmp_path: Path, harm: str
) -> None:
    first = start_daemon(start, tmp_path)
    asyncio.run(ask(first.address))
    assert first.end() == 0
    path, more = kept(first), []
    if harm == "torn":
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "foreign":
        path.write_bytes(b"\x7fELF" * 1000)
    elif harm == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        more = ["--metric-hll-windows", "5m,10m"]
    second = start_daemon(start, tmp_path, *more)
    said = [event for event in second.events() if event["event"] == "windows.empty"]
    assert len(said) == 1
    assert said[0]["reason"]
    assert all(row["askedBlocks"] == 0 for row in windows(second))
    asyncio.run(ask(second.address))
    assert second.end() == 0
    statefile.read(path)  # whole again


def test_windows_that_cannot_be_saved_cost_nothing_else(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    daemon = start_daemon(start, tmp_path, "--state-dir", str(tmp_path / "file"))
    asyncio.run(ask(daemon.address))
    assert daemon.end() == 0
    said = [event["event"] for event in daemon.events() if event["event"].startswith("windows.")]
    assert said == ["windows.empty", "windows.unsaved"]


THREADLESS = """
import trio
from trikv.nursery import ceiling
ceiling.SAVE_S = 0.1
real = trio.to_thread.run_sync
async def run_sync(function, *given, **options):
    if function.__name__ == "_write":
        raise RuntimeError("can't start new thread")
    return await real(function, *given, **options)
trio.to_thread.run_sync = run_sync
"""


def test_windows_without_a_thread_to_save_them_cost_nothing_else(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path, before=THREADLESS)
    asyncio.run(ask(daemon.address))
    deadline_s = time.monotonic() + PATIENCE_S
    while not (said := [one for one in daemon.events() if one["event"] == "windows.unsaved"]):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert said[0]["reason"] == "can't start new thread"
    check(windows(daemon))
    assert daemon.end() == 0


def test_a_killed_daemon_leaves_what_it_saved_last(start: Start, tmp_path: Path) -> None:
    first = start_daemon(start, tmp_path)
    asyncio.run(ask(first.address))
    assert first.end() == 0
    second = start_daemon(start, tmp_path)
    asyncio.run(ask(second.address))
    second.end(signal.SIGKILL)
    check(windows(start_daemon(start, tmp_path)))


# -- the file itself


def test_a_state_file_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    assert statefile.read(path) is None
    statefile.write(path, [b"one", b"", b"two" * 1000])
    assert statefile.read(path) == b"one" + b"two" * 1000
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at])
        with pytest.raises(StateFileError):
            statefile.read(path)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateFileError):
            statefile.read(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StateFileError):
        statefile.read(path)


def test_a_state_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    statefile.write(path, [b"old"])

    def parts() -> Any:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        statefile.write(path, parts())
    assert statefile.read(path) == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


def test_a_state_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    statefile.write(path, [b"x" * 10_000])  # compresses well: the bound is on what comes out
    monkeypatch.setattr(statefile, "BYTES_MAX", 9_999)
    with pytest.raises(StateFileError):
        statefile.read(path)


def test_a_pipe_is_no_state_file_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    began_s = time.monotonic()
    with pytest.raises(StateFileError):
        statefile.read(tmp_path / "pipe")
    assert time.monotonic() - began_s < 5
