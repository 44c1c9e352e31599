"""A fake daemon for a module, told to forget everything before each test, and its clients."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.connector.daemons import PATIENCE_S, FakeDaemon
from trikv.connector.calls import Calls
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.link import CallError

LOG = logging.getLogger("test.client")
HASHES = bytes(64)
FIELDS = [{"name": "weights", "value": "w"}]


def declaration() -> dict[str, Any]:
    return {"instance": {"name": f"engine-{os.getpid()}", "rankCount": 1, "fields": FIELDS}}


def until(claim: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.005)


def outcome(future: Future[Any], seconds: float = PATIENCE_S) -> Any:
    try:
        return future.result(seconds)
    except CallError as error:
        return error


class Clients:
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
def world(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    monkeypatch.setattr("trikv.connector.client.BACKOFF_S_MIN", 0.02)
    monkeypatch.setattr("trikv.connector.client.BACKOFF_S_MAX", 0.5)
    if daemon.child is None:
        daemon.start()
    daemon.tell(fresh=True)
    world = Clients(daemon)
    yield world
    world.close()
    assert not [t.name for t in threading.enumerate() if t.name == "trikv-connector"]
