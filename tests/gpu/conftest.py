"""Tests that need an NVIDIA GPU; elsewhere they are skipped, and the run says so."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.integration.daemons import RunningDaemon, start_daemon

torch = pytest.importorskip("torch", reason="needs torch")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(scope="module")
def daemon(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> RunningDaemon:
    """One daemon with room for what these tests save; its staging cannot grow by much."""
    folder = tmp_path_factory.mktemp("gpu")
    return start_daemon(start_shared, folder, "--pool-size", "2gb", "--gpu-staging", "384mb")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.getLogger("bench").setLevel(logging.ERROR)
    yield
    torch.cuda.empty_cache()
