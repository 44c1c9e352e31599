"""A daemon starts, refuses, drains and ends as an operator expects."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    Engine,
    RunningDaemon,
    connected,
    daemon_command,
    hello,
    start_daemon,
    status,
    wire_code,
    wire_ok,
)
from trikv.tiers import pool


def run(
    *arguments: str, command: list[str] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a daemon (or `command`, with the same arguments) that is expected to end by itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRIKV_")}
    return subprocess.run(
        [*(command or daemon_command()), *arguments],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


def as_nobody(module: str, *arguments: str) -> list[str]:
    """A command that loads `module` and then runs its `main` as another user."""
    code = (
        f"import os, sys, encodings.idna; from {module} import main; os.setgroups([]); "
        f"os.setgid({NOBODY}); os.setuid({NOBODY}); sys.argv = [{module!r}, *sys.argv[1:]]; main()"
    )
    return [sys.executable, "-c", code, *arguments]


def test_sigterm_ends_it_with_zero_and_leaves_no_socket(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path)
    assert daemon.path.stat().st_mode & 0o777 == 0o600
    assert daemon.path.parent.stat().st_mode & 0o777 == 0o700
    assert daemon.end() == 0
    assert not daemon.path.exists()
    named = [event["event"] for event in daemon.events()]
    about_pool = {"pool.slow", "pool.touching", "pool.touched", "numa.off"}  # by machine
    assert [one for one in named if one not in about_pool] == ["daemon.ready", "daemon.ended"]


@pytest.mark.parametrize(
    ("arguments", "environ", "names"),
    [
        (["--pool-size", "3x"], {}, "--pool-size"),
        (["--pool-size", "9000tb"], {}, "--pool-size"),
        ([], {"TRIKV_POOL_SIZE": "lots"}, "TRIKV_POOL_SIZE"),
        (["--log-level", "loud"], {}, "--log-level"),
        (["--slab-size", "128mb", "--pool-size", "64mb"], {}, "--slab-size"),
        (["--lease-seconds", "0"], {}, "--lease-seconds"),
        (["--config", "/nonexistent.toml"], {}, "/nonexistent.toml"),
        (["--nonsense"], {}, "--nonsense"),
        (["stray"], {}, "stray"),
    ],
)
def test_a_wrong_setting_gives_one_line_and_exit_2(
    arguments: list[str], environ: dict[str, str], names: str
) -> None:
    ended = run(*arguments, **environ)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("trikv-daemon: ")
    assert names in ended.stderr


@pytest.mark.parametrize(
    "addr", ["nowhere", "unix:relative", "0.0.0.0:50055", "192.0.2.1:1", "unix:/proc/x/y.sock"]
)
def test_an_address_that_cannot_be_used_gives_one_line_and_exit_1(addr: str) -> None:
    ended = run("--addr", addr, "--pool-size", "8mb")
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert addr in ended.stderr


def test_a_second_daemon_is_refused_and_the_first_goes_on(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path)
    ended = run("--addr", daemon.address, "--pool-size", "8mb")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "another trikv-daemon" in ended.stderr
    assert asyncio.run(status(daemon.address))["state"] == "serving"


def test_a_stale_socket_is_replaced_and_a_stranger_s_file_is_not(
    start: Start, tmp_path: Path
) -> None:
    killed = start_daemon(start, tmp_path)
    killed.end(signal.SIGKILL)
    assert killed.path.exists()
    again = start_daemon(start, tmp_path)
    assert asyncio.run(status(again.address))["pool"]["blockCount"] == 0
    again.end()
    again.path.write_text("mine")
    ended = run("--addr", again.address, "--pool-size", "8mb")
    assert ended.returncode == 1
    assert again.path.read_text() == "mine"


@needs_root
def test_without_an_address_the_runtime_directory_is_found_by_all(
    start: Start, tmp_path: Path
) -> None:
    """As a user who may not write /run: daemon, CLI and search agree on the place."""
    os.chmod(tmp_path, 0o777)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o5 != 0o5:
            os.chmod(parent, parent.stat().st_mode | 0o5)
    log = tmp_path / "log"
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    with log.open("w") as stderr:
        command = as_nobody("trikv.nursery.serve", "--pool-size", "8mb")
        process = start(command, stderr=stderr, env=environ)
    path = tmp_path / "trikv" / "trikv.sock"
    for _ in range(500):
        if path.exists() or process.poll() is not None:
            break
        signal.sigtimedwait([], 0.02)
    assert path.exists(), log.read_text()
    found = subprocess.run(
        as_nobody("trikv.cli.main", "status"),
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert f"unix:{path}" in found.stdout, found.stderr


def test_settings_come_from_file_environment_and_flag_in_this_order(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "trikv.toml"
    file.write_text('pool-size = "32mb"\nslab-size = "4mb"\nlease-seconds = 7\n')
    daemon = start_daemon(
        start, tmp_path, "--config", str(file), "--pool-size", "16mb", TRIKV_SLAB_SIZE="8mb"
    )
    pool = asyncio.run(status(daemon.address))["pool"]
    assert (pool["capacityBytes"], pool["slabBytes"]) == (16 << 20, 8 << 20)


def test_the_pool_fits_a_control_group_s_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text(f"{256 << 20}\n")
    (group / "memory.current").write_text(f"{56 << 20}\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("0\n")
    assert pool._room(group, "memory.max", "memory.current") == 200 << 20
    assert pool._room(tmp_path, "memory.max", "memory.current") is None
    monkeypatch.setattr(pool, "_cgroup_rooms", lambda: [200 << 20])
    assert pool.default_bytes() == 100 << 20


@needs_root
def test_clients_cannot_reach_a_daemon_over_tcp_of_another_user_or_register_memory(
    start: Start, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = start_daemon(start, tmp_path, "--addr", f"127.0.0.1:{port}")
    address = f"127.0.0.1:{port}"
    assert asyncio.run(status(address))["state"] == "serving"
    (warned,) = (one for one in daemon.events() if one["event"] == "engines.unreachable")
    assert address in str(warned["reason"])

    async def register() -> str:
        async with connected(address) as kv:
            engine = Engine(wire_ok(await hello(kv)).session)
            engine.memory.append(np.zeros((64, 8192), np.uint8))
            return wire_code(await engine.register(0))

    assert asyncio.run(register()) == "forbidden"
    stranger = subprocess.run(
        as_nobody("trikv.cli.main", "status", "--addr", address, "--timeout", "5"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert stranger.returncode == 1
    assert any("65534" in str(event.get("reason")) for event in daemon.events())


@needs_root
def test_another_uid_is_refused_even_when_the_file_modes_let_it_in(
    start: Start, tmp_path: Path
) -> None:
    daemon = start_daemon(start, tmp_path)

    def stranger() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            as_nobody("trikv.cli.main", "status", "--addr", daemon.address),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    by_mode = stranger()
    assert by_mode.returncode == 1
    assert "Permission denied" in by_mode.stderr
    for path in (daemon.path, *daemon.path.parents):
        with_all = path.stat().st_mode | (0o777 if path == daemon.path else 0o5)
        os.chmod(path, with_all)
    by_peer = stranger()
    assert by_peer.returncode == 1
    assert any("65534" in str(event.get("reason")) for event in daemon.events())


def test_example_and_status_work_and_the_second_run_finds_the_first_s_blocks(
    start: Start, tmp_path: Path
) -> None:
    daemon: RunningDaemon = start_daemon(start, tmp_path)
    root = Path(__file__).resolve().parents[2]
    outputs = [
        subprocess.run(
            [sys.executable, str(root / "examples" / "client.py"), daemon.address],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert "save      4 blocks copied" in outputs[0]
    assert "save      0 blocks copied, 4 were there" in outputs[1]
    assert all("load      4 of 4 blocks, bytes equal" in output for output in outputs)
    table = subprocess.run(
        [sys.executable, "-m", "trikv.cli.main", "status"],
        env=os.environ | {"TRIKV_SOCKET": str(daemon.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    assert max(map(len, table.splitlines())) <= 80 + len(str(daemon.path))
    assert "8 blocks" in table
    assert "hit rate 100.0%" in table
