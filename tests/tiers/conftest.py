"""The double of libibverbs: built and loaded once, set back for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.double import SLAB_BYTES, Double, build, write_sysfs
from trikv.tiers import rails


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Double:
    return Double(build(tmp_path_factory.mktemp("double")))


@pytest.fixture
def double(loaded: Double) -> Iterator[Double]:
    """No test leaves a queue pair, a region or a descriptor behind."""
    loaded.reset()
    yield loaded
    loaded.reset()
    assert set(loaded.alive.values()) == {0}, loaded.alive


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return write_sysfs(tmp_path, 2)


@pytest.fixture
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of several regions, so that requests must not cross from one to the next."""
    monkeypatch.setattr(rails, "REGION_BYTES_MAX", 3 * SLAB_BYTES)
