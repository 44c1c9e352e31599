"""`/metrics`, `/health` and `/ready` of a real daemon, for friendly and hostile callers."""

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    RunningDaemon,
    attached,
    daemon_command,
    failed,
    fill,
    hashes,
    start_daemon,
    status,
    wire_code,
    wire_ok,
)
from tests.integration.pages import ANY_PORT, get, place, ready, scrape, serving
from trikv.core.counters import METHODS
from trikv.nursery.disk_metrics import FAMILIES as DISKS
from trikv.nursery.metrics import FAMILIES, names
from trikv.nursery.peer_metrics import FAMILIES as PEERS
from trikv.process import http as module


@pytest.fixture(scope="module")
def daemon(
    start_shared: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    yield from serving(start_shared, tmp_path_factory.mktemp("http"))


# -- what the page says


async def work(address: str) -> tuple[dict[str, Any], dict[str, Any]]:
    async with attached(address) as engine:
        fill(engine)
        blob = hashes(*range(6))
        assert wire_ok(await engine.save(blob, list(range(6)))).savedCount == 6
        answer = wire_ok(await engine.query(blob + hashes("absent")))
        assert failed(await engine.load(answer.lease, list(range(10, 16)))) == []
        assert wire_code(await engine.load(12345, [1])) == "lease-lost"
        wire_ok(await engine.query(hashes(*range(4)), "other"))
        facts = await status(address)
        page = await asyncio.to_thread(get_samples, address)
        return facts, page


PAGES: dict[str, RunningDaemon] = {}


def get_samples(address: str) -> Any:
    return scrape(PAGES[address])


def test_the_page_agrees_with_status_while_an_engine_works(daemon: RunningDaemon) -> None:
    PAGES[daemon.address] = daemon
    facts, page = asyncio.run(work(daemon.address))
    for name, value in facts["counters"].items():
        assert page[name, ()] == value, name
    pool = facts["pool"]
    assert page["trikv_pool_capacity_bytes", ()] == pool["capacityBytes"] == 64 << 20
    assert page["trikv_pool_used_bytes", ()] == pool["usedBytes"] > 0
    assert page["trikv_pool_pinned_bytes", ()] == pool["pinnedBytes"] > 0
    assert page["trikv_pool_slabs", (("use", "free"),)] == pool["slabFreeCount"]
    assert page["trikv_cache_blocks", (("tier", "pinned"),)] == pool["blockCount"] == 6
    assert page["trikv_cache_bytes", (("tier", "pinned"),)] == 6 * 8192
    assert page["trikv_leases", ()] == pool["leaseCount"] == 1
    assert page["trikv_sessions", ()] == 1
    assert page["trikv_engines", (("state", "ready"),)] == 1
    assert page["trikv_namespaces", ()] == 1
    assert page["trikv_state", (("state", "serving"),)] == 1
    ended = {(row["method"], row["outcome"]): row["count"] for row in facts["calls"]}
    assert ended["query", "ok"] == 2
    assert ended["load", "ok"] == ended["load", "lease-lost"] == 1
    for (method, outcome), count in ended.items():
        found = page["trikv_rpc_total", (("method", method), ("outcome", outcome))]
        assert found == count + (method == "status")  # the call that asked had not ended
    for row in facts["windows"]:
        labels = (
            ("namespace", row["namespace"][:8] or "all"),
            ("window", {900: "15m", 3600: "1h", 86400: "24h"}[row["seconds"]]),
        )
        assert page["trikv_window_asked_blocks", labels] == row["askedBlocks"] == 11
        assert page["trikv_window_hit_ratio", labels] == row["hitRatio"] == pytest.approx(10 / 11)
        assert page["trikv_window_reachable_ratio", labels] == row["reachableRatio"]
        assert page["trikv_window_fresh_ratio", labels] == row["freshRatio"]
        assert page["trikv_window_case", (("case", row["case"]), *labels)] == 1


def test_the_page_has_exactly_the_names_and_labels_of_the_table(daemon: RunningDaemon) -> None:
    _, text = get(daemon, "/metrics")
    families = list(text_string_to_metric_families(text))
    shown = [
        f"{one.name}_total" if one.type == "counter" else one.name
        for one in families
        if one.samples
    ]
    may_be_empty = {name for name in FAMILIES if name.endswith("_ratio")}
    may_be_empty |= DISKS.keys() | PEERS.keys()
    assert [name for name in names() if name not in may_be_empty - set(shown)] == shown
    for family in families:
        labels = FAMILIES[family.name].labels if family.name in FAMILIES else None
        for sample in family.samples:
            expected = labels if labels is not None else FAMILIES.get(sample.name, ((), ()))[1]
            assert sample.labels.keys() == set(expected), sample.name
    methods = {
        sample.labels["method"]
        for one in families
        if one.name == "trikv_rpc"
        for sample in one.samples
    }
    assert methods == set(METHODS)


def test_pages_that_are_not_there(daemon: RunningDaemon) -> None:
    assert get(daemon, "/")[0] == 404
    assert get(daemon, "/metrics/")[0] == 404
    assert get(daemon, "/metrics", "POST")[0] == 405
    assert get(daemon, "/health") == (200, "ok\n")
    assert get(daemon, "/ready") == (200, "serving\n")


# -- where it listens


def test_by_default_only_this_machine_reaches_it() -> None:
    assert module.DEFAULT.startswith("127.0.0.1:")


def test_it_can_be_switched_off(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--http-addr", "off")
    assert ready(daemon)["http"] == ""
    assert asyncio.run(status(daemon.address))["http"] == ""
    assert daemon.end() == 0


def test_a_named_port_that_is_taken_is_one_line_and_exit_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run("--http-addr", where, "--addr", f"unix:{tmp_path}/s", "--pool-size", "8mb")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"trikv-daemon: --http-addr {where}: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("where", ["9091", "nowhere", "unix:/x/y", "127.0.0.1:70000", ":9091"])
def test_a_wrong_address_is_one_line_and_exit_1(tmp_path: Path, where: str) -> None:
    ended = run("--http-addr", where, "--addr", f"unix:{tmp_path}/s", "--pool-size", "8mb")
    assert ended.returncode == 1
    assert ended.stderr.startswith("trikv-daemon: --http-addr")
    assert ended.stderr.count("\n") == 1


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        daemon_command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_the_usual_port_may_be_taken_and_engines_are_served(start: Start, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken already: so much the better
            taken.bind(("127.0.0.1", 9091))
            taken.listen()
        daemon = start_daemon(start, tmp_path, "--http-addr", "")
        assert ready(daemon)["http"] == ""
        said = [event for event in daemon.events() if event["event"] == "http.off"]
        assert [event["level"] for event in said] == ["warning"]
        assert asyncio.run(status(daemon.address))["state"] == "serving"
        assert daemon.end() == 0


# -- its end


async def ask(port: int, path: str) -> bytes:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return b"".join([part async for part in stream])


async def test_what_a_probe_sees_of_a_daemon_that_drains_or_fails() -> None:
    async def page() -> tuple[bytes, str]:
        raise ZeroDivisionError

    state = "draining"
    with module.listen(ANY_PORT) as sock:
        assert sock is not None
        port = sock.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(module.HttpServer(page, lambda: state, sock).run)
            assert (await ask(port, "/ready")).startswith(b"HTTP/1.1 503 ")
            state = "degraded: no memory"
            reply = await ask(port, "/ready")
            assert reply.startswith(b"HTTP/1.1 200 ")
            assert reply.endswith(b"\r\n\r\ndegraded: no memory\n")
            with structlog.testing.capture_logs() as said:
                assert (await ask(port, "/metrics")).startswith(b"HTTP/1.1 500 ")
            assert [event["event"] for event in said] == ["http.failed"]
            assert (await ask(port, "/health")).startswith(b"HTTP/1.1 200 ")
            nursery.cancel_scope.cancel()


def test_it_dies_with_the_daemon(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--http-addr", ANY_PORT)
    where = place(daemon)
    assert get(daemon, "/ready")[0] == 200
    assert daemon.end() == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=PATIENCE_S)


def test_a_killed_daemon_takes_it_along(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--http-addr", ANY_PORT)
    where = place(daemon)
    daemon.end(signal.SIGKILL)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=PATIENCE_S)
    again = start_daemon(start, tmp_path, "--http-addr", f"{where[0]}:{where[1]}")
    assert get(again, "/ready")[0] == 200
    assert again.end() == 0
