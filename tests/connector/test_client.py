"""The client against a daemon that is absent, slow, frozen, killed, restarted, foreign or mad."""

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.connector.conftest import HASHES, LOG, Clients, declaration, outcome, until
from tests.connector.daemons import FakeDaemon
from trikv.connector import peers
from trikv.connector.calls import Answer, pack
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.jobs import LoadJob
from trikv.connector.link import (
    AbsentError,
    BrokenError,
    CallError,
    LateError,
    RefusedError,
    checked,
)


def test_a_call_is_answered(world: Clients) -> None:
    calls = world.client()
    answer = outcome(calls.query("r", 32, HASHES))
    assert answer == Answer(hit_count=0, lease=0, lease_s=30.0)
    assert world.daemon.counts()["declare"] == 1


def test_nobody_there_fails_at_once_and_is_found_later(
    world: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    world.daemon.kill()
    with caplog.at_level(logging.INFO):
        calls = world.client(wait=False)
        began = time.monotonic()
        assert isinstance(outcome(calls.query("r", 32, HASHES)), AbsentError)
        assert time.monotonic() - began < 10
        time.sleep(0.5)
        world.daemon.start()
        until(lambda: calls.is_ready)
        until(lambda: any("attached to" in record.getMessage() for record in caplog.records))
    lines = [record.getMessage() for record in caplog.records if "TriKV" in record.getMessage()]
    assert len(set(lines)) == len(lines), lines  # nothing is said twice
    assert "no daemon at" in lines[0]
    assert "attached to" in lines[-1]


def test_slow_answers_end_at_their_deadline_and_open_the_circuit(world: Clients) -> None:
    calls = world.client()
    world.daemon.tell(query_s=20)
    began = time.monotonic()
    assert isinstance(outcome(calls.query("r", 32, HASHES)), LateError)
    assert 1.5 < time.monotonic() - began < 15
    world.daemon.tell(query_s=0)
    until(lambda: calls.is_ready, 5)  # the heartbeat is answered: the circuit closes by itself
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert world.daemon.counts()["hello"] == 1


def test_frozen_daemon_costs_one_deadline_and_is_found_again(world: Clients) -> None:
    calls = world.client()
    world.daemon.signal(signal.SIGSTOP)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), LateError)
    began = time.monotonic()
    for _ in range(100):
        assert isinstance(outcome(calls.query("r", 32, HASHES)), AbsentError)
    assert time.monotonic() - began < 10  # not a deadline each
    until(lambda: calls.attached is None)
    world.daemon.signal(signal.SIGCONT)
    until(lambda: calls.is_ready)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)


def test_killed_daemon_is_noticed_and_known_to_be_dead(world: Clients) -> None:
    calls = world.client()
    attached = calls.attached
    assert attached is not None
    assert attached.watch is not None
    assert not attached.watch.is_dead()
    world.daemon.tell(query_s=10)
    future = calls.query("r", 32, HASHES)
    time.sleep(0.05)
    world.daemon.kill()
    assert isinstance(outcome(future, 2), CallError)
    until(lambda: calls.attached is None, 2)
    until(attached.watch.is_dead, 2)


def test_restarted_daemon_has_another_epoch(world: Clients) -> None:
    calls = world.client()
    first = calls.attached
    world.daemon.kill()
    until(lambda: calls.attached is None)
    world.daemon.start()
    until(lambda: calls.is_ready)
    second = calls.attached
    assert first is not None
    assert second is not None
    assert first.epoch != second.epoch
    assert first.number < second.number


def test_calls_of_another_attachment_are_not_sent(world: Clients) -> None:
    calls = world.client()
    first = calls.attached
    world.daemon.tell(drop=True)
    until(lambda: calls.is_ready and calls.attached is not first)
    future = calls.client.call("heartbeat", {}, lambda _: None, via=first)
    assert isinstance(outcome(future), AbsentError)


def test_a_call_that_cannot_be_put_was_not_sent_and_costs_no_connection(world: Clients) -> None:
    calls = world.client()
    first = calls.attached
    assert first is not None
    job = LoadJob("r", 5, 0, pack([1]), signal=1, is_ordered=32)  # type: ignore[arg-type]
    error = calls.load(job, first, 0.0, 0).exception(10)
    assert isinstance(error, AbsentError)
    assert "load" in str(error)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert calls.attached is first


def test_raising_daemon_is_given_up_and_tried_again(world: Clients) -> None:
    calls = world.client()
    world.daemon.tell(garbage=True)
    for _ in range(3):
        assert isinstance(outcome(calls.query("r", 32, HASHES)), BrokenError)
    until(lambda: world.daemon.counts()["hello"] == 2)
    world.daemon.tell(garbage=False)
    until(lambda: calls.is_ready)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)


def test_refusals_carry_their_code(world: Clients) -> None:
    calls = world.client()
    world.daemon.tell(refuse="overloaded")
    refused = outcome(calls.query("r", 32, HASHES))
    assert isinstance(refused, RefusedError)
    assert refused.code == "overloaded"
    assert calls.is_ready


def test_not_ready_is_asked_again_for_a_while(world: Clients) -> None:
    calls = world.client()
    world.daemon.tell(refuse="not-ready")
    future = calls.client.call(
        "query",
        {"query": {"request": "r", "hashBytes": 32, "hashes": HASHES}},
        lambda response: int(checked(response.reply).hitCount),
        retry_s=10,
    )
    with pytest.raises(TimeoutError):
        future.result(0.2)
    world.daemon.tell(refuse=None)
    assert outcome(future, 12) == 0


def test_an_older_session_of_ours_is_waited_for(world: Clients) -> None:
    world.daemon.tell(refuse_declare=3)
    calls = world.client()
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert world.daemon.counts()["declare"] == 4


def test_closing_does_not_wait_for_a_frozen_daemon(world: Clients) -> None:
    calls = world.client()
    world.daemon.signal(signal.SIGSTOP)
    futures = [calls.query("r", 32, HASHES) for _ in range(5)]
    began = time.monotonic()
    calls.client.close()
    assert time.monotonic() - began < 4
    assert all(isinstance(outcome(future, 1), CallError) for future in futures)
    assert not calls.is_ready


def test_a_strangers_socket_is_not_used(
    world: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "peer_of", lambda _: peers.Peer(pid=1, uid=os.getuid() + 4_000))
    with caplog.at_level(logging.WARNING):
        calls = world.client(wait=False)
        until(lambda: "neither ours nor root" in caplog.text)
    assert not calls.is_ready
    assert "hello" not in world.daemon.counts()


def test_memory_is_not_offered_over_tcp(world: Clients, caplog: pytest.LogCaptureFixture) -> None:
    """A relay stands for a daemon that listens on TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    relay = threading.Thread(target=relay_one, args=(listener, str(world.daemon.path)), daemon=True)
    relay.start()
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    client = Client(Settings("test", given=where), LOG)
    with caplog.at_level(logging.WARNING):
        client.start(Introduction("register", dict, offers_memory=True))
        until(lambda: "takes a unix socket" in caplog.text)
    client.close()
    assert "register" not in world.daemon.counts()
    listener.close()


def relay_one(listener: socket.socket, path: str) -> None:
    near, _ = listener.accept()
    far = socket.socket(socket.AF_UNIX)
    far.connect(path)

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
        except OSError:
            pass
        for end in (source, target):
            end.close()

    threading.Thread(target=pump, args=(far, near), daemon=True).start()
    pump(near, far)


def test_mad_daemons_do_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise, silence and endings instead of capnp; then a sane daemon on the same socket."""
    monkeypatch.setattr("trikv.connector.client.BACKOFF_S_MAX", 0.2)
    path = tmp_path / "trikv.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    listener.settimeout(20)
    client = Client(Settings("test", given=f"unix:{path}"), LOG)
    client.start(Introduction("declare", declaration))
    for noise in (b"", b"\0" * 64, b"\xff" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(10_000)):
        there, _ = listener.accept()
        there.sendall(noise)
        there.shutdown(socket.SHUT_WR)
        time.sleep(0.05)
        there.close()
    assert not client.is_ready
    listener.close()
    daemon = FakeDaemon(tmp_path)
    until(lambda: client.is_ready, 30)
    client.close()
    daemon.kill()


def test_the_search_follows_the_environment(
    world: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIKV_SOCKET", "/nowhere/trikv.sock")
    client = Client(Settings("test"), LOG)
    client.start(Introduction("declare", declaration))
    time.sleep(0.3)
    assert not client.is_ready
    monkeypatch.setenv("TRIKV_SOCKET", str(world.daemon.path))  # looked up at each attempt
    until(lambda: client.is_ready)
    client.close()
