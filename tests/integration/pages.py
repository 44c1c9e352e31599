"""Asking a real daemon for its pages over HTTP."""

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import RunningDaemon, start_daemon

ANY_PORT = "127.0.0.1:0"


def ready(daemon: RunningDaemon) -> dict[str, Any]:
    return next(event for event in daemon.events() if event["event"] == "daemon.ready")


def serving(start: Start, folder: Path) -> Iterator[RunningDaemon]:
    """A daemon with pages; at the end it still answers, ends in order, and has logged no bug."""
    running = start_daemon(start, folder, "--http-addr", ANY_PORT)
    yield running
    assert get(running, "/health")[0] == 200
    assert running.end() == 0
    assert "Traceback" not in running.log.read_text()


def place(daemon: RunningDaemon) -> tuple[str, int]:
    host, _, port = ready(daemon)["http"].removeprefix("http://").rpartition(":")
    return host.strip("[]"), int(port)


def get(daemon: RunningDaemon, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(*place(daemon), timeout=PATIENCE_S)
    try:
        connection.request(method, path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()
    finally:
        connection.close()


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(daemon: RunningDaemon) -> Samples:
    code, text = get(daemon, "/metrics")
    assert code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
