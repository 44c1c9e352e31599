"""The client against a daemon that is absent, slow, frozen, killed, restarted, foreign or mad."""

import gc
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.connector.daemons import ROOT, FakeDaemon, clean_environ
from trikv.connector import peers
from trikv.connector.calls import Answer, Calls
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.link import AbsentError, BrokenError, CallError, LateError, RefusedError, checked
from trikv.connector.runner import RUNNER

LOG = logging.getLogger("test.client")
HASHES = bytes(64)
FIELDS = [{"name": "weights", "value": "w"}]


def declaration() -> dict[str, Any]:
    return {"instance": {"name": f"engine-{os.getpid()}", "rankCount": 1, "fields": FIELDS}}


def until(claim: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def outcome(future: "Future[Any]", seconds: float = 20.0) -> Any:
    try:
        return future.result(seconds)
    except CallError as error:
        return error


class Fixture:
    """A daemon and clients of it."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.clients: list[Client] = []

    def client(self, *, given: str | None = None, wait: bool = True) -> Calls:
        client = Client(Settings("test", given=given or self.daemon.address), LOG)
        self.clients.append(client)
        client.start(Introduction("declare", declaration))
        if wait:
            until(lambda: client.is_ready)
        return Calls(client)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.daemon.child is not None:
            self.daemon.signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.kill()


@pytest.fixture
def world(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr("trikv.connector.client.BACKOFF_S_MIN", 0.02)
    monkeypatch.setattr("trikv.connector.client.BACKOFF_S_MAX", 0.5)
    if daemon.child is None:
        daemon.start()
    daemon.tell(fresh=True)
    world = Fixture(daemon)
    yield world
    world.close()
    assert not [t.name for t in threading.enumerate() if t.name == "trikv-connector"]


def test_a_call_is_answered(world: Fixture) -> None:
    calls = world.client()
    answer = outcome(calls.query("r", 32, HASHES))
    assert answer == Answer(hit_count=0, lease=0, lease_s=30.0)
    assert world.daemon.counts()["declare"] == 1


def test_nobody_there_fails_at_once_and_is_found_later(
    world: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    world.daemon.kill()
    with caplog.at_level(logging.INFO):
        calls = world.client(wait=False)
        began = time.monotonic()
        assert isinstance(outcome(calls.query("r", 32, HASHES)), AbsentError)
        assert time.monotonic() - began < 0.5
        time.sleep(0.5)
        world.daemon.start()
        until(lambda: calls.is_ready)
    lines = [record.getMessage() for record in caplog.records if "TriKV" in record.getMessage()]
    assert len(lines) == 2, lines  # once that it is missing, once that it is there
    assert "no daemon at" in lines[0]
    assert "attached to" in lines[1]


def test_slow_answers_end_at_their_deadline_and_open_the_circuit(world: Fixture) -> None:
    calls = world.client()
    world.daemon.tell(query_s=3)
    began = time.monotonic()
    assert isinstance(outcome(calls.query("r", 32, HASHES)), LateError)
    assert 1.5 < time.monotonic() - began < 2.9
    world.daemon.tell(query_s=0)
    until(lambda: calls.is_ready, 5)  # the heartbeat is answered: the circuit closes by itself
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert world.daemon.counts()["hello"] == 1


def test_frozen_daemon_costs_one_deadline_and_is_found_again(world: Fixture) -> None:
    calls = world.client()
    world.daemon.signal(signal.SIGSTOP)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), LateError)
    began = time.monotonic()
    for _ in range(100):
        assert isinstance(outcome(calls.query("r", 32, HASHES)), AbsentError)
    assert time.monotonic() - began < 0.5
    until(lambda: calls.attached is None)
    world.daemon.signal(signal.SIGCONT)
    until(lambda: calls.is_ready)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)


def test_killed_daemon_is_noticed_and_known_to_be_dead(world: Fixture) -> None:
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


def test_restarted_daemon_has_another_epoch(world: Fixture) -> None:
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


def test_calls_of_another_attachment_are_not_sent(world: Fixture) -> None:
    calls = world.client()
    first = calls.attached
    world.daemon.tell(drop=True)
    until(lambda: calls.is_ready and calls.attached is not first)
    future = calls.client.call("heartbeat", {}, lambda _: None, via=first)
    assert isinstance(outcome(future), AbsentError)


def test_raising_daemon_is_given_up_and_tried_again(world: Fixture) -> None:
    calls = world.client()
    world.daemon.tell(garbage=True)
    for _ in range(3):
        assert isinstance(outcome(calls.query("r", 32, HASHES)), BrokenError)
    until(lambda: world.daemon.counts()["hello"] == 2)
    world.daemon.tell(garbage=False)
    until(lambda: calls.is_ready)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)


def test_refusals_carry_their_code(world: Fixture) -> None:
    calls = world.client()
    world.daemon.tell(refuse="overloaded")
    refused = outcome(calls.query("r", 32, HASHES))
    assert isinstance(refused, RefusedError)
    assert refused.code == "overloaded"
    assert calls.is_ready


def test_not_ready_is_asked_again_for_a_while(world: Fixture) -> None:
    calls = world.client()
    world.daemon.tell(refuse="not-ready")
    future = calls.client.call(
        "query", {"query": {"request": "r", "hashBytes": 32, "hashes": HASHES}},
        lambda response: int(checked(response.reply).hitCount), retry_s=10,
    )
    with pytest.raises(TimeoutError):
        future.result(0.2)
    world.daemon.tell(refuse=None)
    assert outcome(future, 12) == 0


def test_an_older_session_of_ours_is_waited_for(world: Fixture) -> None:
    world.daemon.tell(refuse_declare=3)
    calls = world.client()
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert world.daemon.counts()["declare"] == 4


def test_a_hundred_reconnects_leave_nothing_behind(world: Fixture) -> None:
    calls = world.client()

    def cut() -> None:
        before = calls.attached
        world.daemon.tell(drop=True)
        until(lambda: calls.is_ready and calls.attached is not before)
        assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)

    for _ in range(3):
        cut()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(100):
        cut()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() == threads
    until(lambda: world.daemon.counts()["connections"] == 1)


def test_the_collector_on_other_threads_frees_nothing_of_capnp(world: Fixture) -> None:
    """pycapnp would end the process: collect all the time while calls fail in every way."""
    calls = world.client()
    old = gc.get_threshold()
    gc.set_threshold(10, 2, 2)
    try:
        for number in range(30):
            knobs = [{"refuse": "overloaded"}, {"refuse": None, "garbage": True}, {"drop": True}]
            futures = [calls.query(f"r{i}", 32, HASHES) for i in range(20)]
            world.daemon.tell(**knobs[number % 3])
            futures += [calls.query(f"r{i}", 32, HASHES) for i in range(20)]
            for future in futures:
                outcome(future)
            world.daemon.tell(refuse=None, garbage=False)
    finally:
        gc.set_threshold(*old)
    until(lambda: calls.is_ready)


def test_many_threads_start_it_together(world: Fixture) -> None:
    for _ in range(10):
        barrier = threading.Barrier(8)
        found: list[Any] = []

        def use(barrier: threading.Barrier = barrier, found: list[Any] = found) -> None:
            client = Client(Settings("test", given=world.daemon.address), LOG)
            barrier.wait()
            client.start(Introduction("declare", declaration))
            until(lambda: client.is_ready)
            found.append(outcome(Calls(client).query("r", 32, HASHES)))
            client.close()

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert [type(answer) for answer in found] == [Answer] * 8


def test_closing_does_not_wait_for_a_frozen_daemon(world: Fixture) -> None:
    calls = world.client()
    world.daemon.signal(signal.SIGSTOP)
    futures = [calls.query("r", 32, HASHES) for _ in range(5)]
    began = time.monotonic()
    calls.client.close()
    assert time.monotonic() - began < 4
    assert all(isinstance(outcome(future, 1), CallError) for future in futures)
    assert not calls.is_ready


def child_of_fork(calls: Calls, address: str, answers: Any) -> None:
    before = isinstance(outcome(calls.query("r", 32, HASHES), 5), AbsentError)
    own = Client(Settings("child", given=address), LOG)
    own.start(Introduction("declare", declaration))
    until(lambda: own.is_ready)
    after = isinstance(outcome(Calls(own).query("r", 32, HASHES), 5), Answer)
    gc.collect()
    own.close()
    answers.put((before, after))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_nothing_of_its_parents(world: Fixture) -> None:
    calls = world.client()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=child_of_fork, args=(calls, world.daemon.address, answers))
    child.start()
    assert answers.get(timeout=30) == (True, True)
    child.join(30)
    assert child.exitcode == 0
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    until(lambda: world.daemon.counts()["connections"] == 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_childs_copy_of_the_socket_does_not_keep_the_session(world: Fixture) -> None:
    calls = world.client()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    calls.client.close()
    until(lambda: world.daemon.counts()["connections"] == 0, 5)
    child.kill()
    child.join(30)


PROGRAM = """
import logging, sys, time
sys.path.insert(0, {root!r})
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.calls import Calls
client = Client(Settings("t", given={address!r}), logging.getLogger("t"))
client.start(Introduction("declare", lambda: {{"instance": {{"name": "x", "rankCount": 1}}}}))
while not client.is_ready: time.sleep(0.01)
futures = [Calls(client).query("r", 32, bytes(64)) for _ in range(3)]
{end}
"""


@pytest.mark.parametrize(
    ("end", "is_frozen"),
    [("", False), ("raise SystemExit(3)", False), ("client.close()", True), ("1 / 0", True)],
)
def test_the_interpreter_ends(world: Fixture, end: str, *, is_frozen: bool) -> None:
    if is_frozen:
        end = "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n" + end
    program = PROGRAM.format(root=str(ROOT), address=world.daemon.address, end=end)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=clean_environ(),
    ) as child:
        if is_frozen:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            world.daemon.signal(signal.SIGSTOP)
        try:
            _, errors = child.communicate("\n", timeout=20)
        finally:
            child.kill()
    wanted = 3 if "SystemExit" in end else 1 if "1 / 0" in end else 0
    assert child.returncode == wanted, errors


def test_a_strangers_socket_is_not_used(
    world: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "peer_of", lambda _: peers.Peer(pid=1, uid=os.getuid() + 4_000))
    with caplog.at_level(logging.WARNING):
        calls = world.client(wait=False)
        until(lambda: "neither ours nor root" in caplog.text)
    assert not calls.is_ready
    assert "hello" not in world.daemon.counts()


def test_memory_is_not_offered_over_tcp(
    world: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
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
    world: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIKV_SOCKET", "/nowhere/trikv.sock")
    client = Client(Settings("test"), LOG)
    client.start(Introduction("declare", declaration))
    time.sleep(0.3)
    assert not client.is_ready
    monkeypatch.setenv("TRIKV_SOCKET", str(world.daemon.path))  # looked up at each attempt
    until(lambda: client.is_ready)
    client.close()


def test_nothing_runs_before_and_after(world: Fixture) -> None:
    daemon = world.daemon
    assert RUNNER._loop is None
    client = Client(Settings("test", given=daemon.address), LOG)
    client.close()
    assert RUNNER._loop is None
    client.start(Introduction("declare", declaration))
    until(lambda: client.is_ready)
    client.close()
    client.close()
    assert RUNNER._loop is None
