"""One daemon for all tests of a file that do not end it."""

import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.integration import fake_gpu
from tests.integration.daemons import RunningDaemon, start_daemon, status
from tests.integration.fake_gpu_daemon import Gpu, memfd


@pytest.fixture(scope="module")
def daemon(
    start_shared: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    """It must still be there at the end."""
    folder = tmp_path_factory.mktemp("engines")
    running = start_daemon(start_shared, folder, "--heartbeat-seconds", "3", "--fill-seconds", "5")
    yield running
    facts = asyncio.run(status(running.address))
    assert facts["state"] == "serving"
    assert running.end() == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory; /dev/shm is one on every Linux."""
    made = Path("/dev/shm") / f"trikv-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])  # where copiers find this package
    return Gpu(*memfd(fake_gpu.CONTROL_BYTES))
