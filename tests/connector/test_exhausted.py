"""The client in a process that has no descriptor left, and before a daemon of another version."""

import asyncio
import contextlib
import logging
import resource
import threading
import time
import tracemalloc  # noqa: F401  # warnings import it, and could not in here
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from tests.connector.conftest import HASHES, LOG, Clients, declaration, outcome, until
from trikv.connector import link, runner
from trikv.connector.calls import Answer, Calls
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.link import AbsentError
from trikv.connector.runner import RunnerStoppedError
from trikv.wire import PROTOCOL


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened; what is open stays so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_it_goes_on_looking(
    world: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    calls = world.client()
    with caplog.at_level(logging.WARNING), no_descriptors():
        assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)  # what is open serves on
        world.daemon.tell(drop=True)
        until(lambda: "Too many open files" in caplog.text)
        time.sleep(0.3)
        assert calls.attached is None
        assert isinstance(outcome(calls.query("r", 32, HASHES)), AbsentError)
    until(lambda: calls.is_ready)
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
    assert caplog.text.count("Too many open files") == 1


@pytest.mark.filterwarnings("ignore:unclosed event loop:ResourceWarning")  # asyncio's, half made
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_thread_that_cannot_start_is_an_error_and_not_a_state(world: Clients) -> None:
    client = Client(Settings("test", given=world.daemon.address), LOG)
    world.clients.append(client)
    introduction = Introduction("declare", declaration)
    with no_descriptors(), pytest.raises(RunnerStoppedError):
        client.start(introduction)
    client.start(introduction)
    until(lambda: client.is_ready)
    assert isinstance(outcome(Calls(client).query("r", 32, HASHES)), Answer)


def test_whatever_fails_in_the_search_does_not_end_it(
    world: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr("trikv.connector.client.address.search", broken)
        calls = world.client(wait=False)
        until(lambda: "ZeroDivisionError: planted; still looking" in caplog.text)
    until(lambda: calls.is_ready)


@pytest.mark.parametrize("step", [-2, -1, 0, 1, 2])
def test_a_greeting_of_a_distant_version_is_not_accepted(
    world: Clients, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: int
) -> None:
    """Also when the daemon itself does not mind."""
    ours = PROTOCOL + 5
    monkeypatch.setattr(link, "PROTOCOL", ours)
    world.daemon.tell(protocol=ours + step)
    with caplog.at_level(logging.WARNING):
        calls = world.client(wait=abs(step) < 2)
        if abs(step) < 2:
            return
        until(lambda: "unsupported-version" in caplog.text)
    assert f"speaks protocol {ours + step} (fake), this engine {ours}" in caplog.text
    assert not calls.is_ready
    assert "declare" not in world.daemon.counts()


def test_a_call_is_answered_although_its_task_never_began(
    world: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled before its first line runs none of its `finally`."""
    calls = world.client()
    spawn = link.Link.spawn

    def cancelled(one: link.Link, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = spawn(one, work)
        if "_ask_again" in str(work):
            task.cancel()
        return task

    monkeypatch.setattr(link.Link, "spawn", cancelled)
    world.daemon.tell(refuse="not-ready")
    query = {"request": "r", "group": 0, "hashBytes": 32, "hashes": HASHES}

    def read(response: Any) -> None:
        link.checked(response.reply)

    asked = calls.client.call("query", {"query": query}, read, retry_s=10)
    assert isinstance(outcome(asked, 5), link.LostError)


def test_a_stuck_thread_is_given_no_more_than_its_bound(
    world: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "INBOX_MAX", 10)
    calls = world.client()
    stuck = threading.Event()
    runner.RUNNER.post(lambda: bool(stuck.wait(20)))
    time.sleep(0.2)
    futures = [calls.query(f"r{number}", 32, HASHES) for number in range(30)]
    refused = [future for future in futures if future.done()]
    assert len(refused) == 20
    assert all(isinstance(outcome(future), AbsentError) for future in refused)
    stuck.set()
    assert sum(isinstance(outcome(future), Answer) for future in futures) == 10


def test_a_task_that_fails_does_not_take_the_next_one_along(world: Clients) -> None:
    calls = world.client()
    runner.RUNNER.post(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert isinstance(outcome(calls.query("r", 32, HASHES)), Answer)
