"""HTTP for callers that want too much, too slowly, or something else."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import RunningDaemon, attached, hashes, start_daemon, status, wire_ok
from tests.integration.pages import ANY_PORT, get, place, serving
from trikv.process import http as module


@pytest.fixture(scope="module")
def daemon(
    start_shared: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    yield from serving(start_shared, tmp_path_factory.mktemp("http"))


def dial(daemon: RunningDaemon, *, receive_bytes: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(40)
    sock.connect(place(daemon))
    return sock


def is_cut_off(sock: socket.socket) -> bool:
    """Read until the daemon hangs up."""
    try:
        while sock.recv(65_536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\nabc",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQ\r\n\r\n",
    ],
)
def test_whatever_a_caller_says_it_is_cut_off_in_time(daemon: RunningDaemon, said: bytes) -> None:
    with dial(daemon) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)
        assert is_cut_off(sock)
    assert get(daemon, "/ready")[0] == 200


def test_a_caller_that_sends_a_byte_at_a_time_is_cut_off(daemon: RunningDaemon) -> None:
    with dial(daemon) as sock:
        began_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began_s < 60:
                sock.sendall(b"G")
                time.sleep(0.5)
        assert time.monotonic() - began_s < 40


def test_as_many_callers_as_want_to_change_nothing_for_engines(daemon: RunningDaemon) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4 * module.CONNECTIONS_MAX):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(0)
            sock.connect_ex(place(daemon))
        waits_s = asyncio.run(query_often(daemon.address))
        descriptors = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
    print(f"slowest of 200 queries beside idle callers: {max(waits_s) * 1e3:.1f} ms")  # noqa: T201
    assert descriptors < 40 + module.CONNECTIONS_MAX
    assert get(daemon, "/ready")[0] == 200


async def query_often(address: str) -> list[float]:
    waits_s = []
    async with attached(address, name=f"engine-{time.monotonic_ns()}") as engine:
        for number in range(200):
            began_s = time.monotonic()
            wire_ok(await engine.query(hashes(*range(64)), f"r{number}"))
            waits_s.append(time.monotonic() - began_s)
    return waits_s


FLOOD = """
import socket, sys, time
host, port, until_s = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
count = 0
while time.monotonic() < until_s:
    try:
        with socket.create_connection((host, port), timeout=15) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
            while sock.recv(65536):
                pass
            count += 1
    except OSError:
        pass
print(count)
"""


def test_a_flood_is_answered_at_a_walking_pace(daemon: RunningDaemon, start: Start) -> None:
    host, port = place(daemon)
    seconds, began_s = 4.0, time.monotonic()
    floods = [
        start([sys.executable, "-c", FLOOD, host, str(port), str(seconds)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    waits_s = asyncio.run(query_often(daemon.address))
    answered = sum(int(one.communicate(timeout=60)[0]) for one in floods)
    print(f"{answered} pages in {seconds} s; slowest of 200 queries: {max(waits_s) * 1e3:.1f} ms")  # noqa: T201
    # Whoever has been let in by the end is still answered: floods wait longer than their time.
    rounds = (time.monotonic() - began_s) / module.HOLD_S + 2
    assert 0 < answered <= rounds * module.CONNECTIONS_MAX


def test_callers_that_do_not_read_do_not_hold_up_the_end(start: Start, tmp_path: Path) -> None:
    daemon = start_daemon(start, tmp_path, "--http-addr", ANY_PORT)
    with contextlib.ExitStack() as stack:
        for _ in range(module.CONNECTIONS_MAX):
            sock = stack.enter_context(dial(daemon, receive_bytes=2_304))
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        assert asyncio.run(status(daemon.address))["state"] == "serving"
        assert daemon.end() == 0
    text = daemon.log.read_text()
    assert "Traceback" not in text
    assert json.loads(text.splitlines()[-1])["event"] == "daemon.ended"


async def large_page() -> tuple[bytes, str]:
    return bytes(64 << 20), "text/plain"


@pytest.mark.parametrize("idle_s", [0.5, 600.0])
async def test_a_page_that_nobody_reads_is_given_up(
    monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """In time, so that the next caller gets the only place; and at once when the daemon ends."""
    monkeypatch.setattr(module, "IDLE_S", idle_s)
    monkeypatch.setattr(module, "LIFE_S", 600.0)
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    with module.listen(ANY_PORT) as sock, trio.fail_after(PATIENCE_S):
        assert sock is not None
        port = sock.getsockname()[1]
        server = module.HttpServer(large_page, lambda: "serving", sock)
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            reads_nothing = await trio.open_tcp_stream("127.0.0.1", port)
            await reads_nothing.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            await trio.sleep(0.2)
            if idle_s < 1:
                async with await trio.open_tcp_stream("127.0.0.1", port) as next_one:
                    await next_one.send_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await next_one.receive_some()).startswith(b"HTTP/1.1 200 ")
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(reads_nothing)
