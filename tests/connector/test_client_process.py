"""The client's thread inside a process: threads, forks, endings, leaks, garbage collection."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.connector.conftest import HASHES, LOG, Clients, declaration, outcome, until
from tests.connector.daemons import PATIENCE_S, ROOT, clean_environ
from trikv.connector.calls import Answer, Calls
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.link import AbsentError
from trikv.connector.runner import RUNNER


def test_a_hundred_reconnects_leave_nothing_behind(world: Clients) -> None:
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


def test_the_collector_on_other_threads_frees_nothing_of_capnp(world: Clients) -> None:
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


def test_many_threads_start_it_together(world: Clients) -> None:
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
            thread.join(PATIENCE_S)
        assert [type(answer) for answer in found] == [Answer] * 8


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
def test_a_forked_child_has_nothing_of_its_parents(world: Clients) -> None:
    calls = world.client()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=child_of_fork, args=(calls, world.daemon.address, answers))
    child.start()
    assert answers.get(timeout=PATIENCE_S) == (True, True)
    child.join(PATIENCE_S)
    assert child.exitcode == 0
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    until(lambda: world.daemon.counts()["connections"] == 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_childs_copy_of_the_socket_does_not_keep_the_session(world: Clients) -> None:
    calls = world.client()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    calls.client.close()
    until(lambda: world.daemon.counts()["connections"] == 0, 5)
    child.kill()
    child.join(PATIENCE_S)


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
def test_the_interpreter_ends(world: Clients, end: str, *, is_frozen: bool) -> None:
    if is_frozen:
        end = "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.readline()\n" + end
    program = PROGRAM.format(root=str(ROOT), address=world.daemon.address, end=end)
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environ(),
    ) as child:
        if is_frozen:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            world.daemon.signal(signal.SIGSTOP)
        try:
            _, errors = child.communicate("\n", timeout=PATIENCE_S)
        finally:
            child.kill()
    wanted = 3 if "SystemExit" in end else 1 if "1 / 0" in end else 0
    assert child.returncode == wanted, errors


def test_nothing_runs_before_and_after(world: Clients) -> None:
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
