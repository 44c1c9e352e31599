"""A metaserver with a secret, which all tests of a module use."""

from collections.abc import Iterator

import pytest

from tests.conftest import Start, started
from tests.meta.callers import SECRET
from tests.meta.metas import RunningMeta, start_meta


@pytest.fixture(scope="module")
def start_here() -> Iterator[Start]:
    yield from started()


@pytest.fixture(scope="module")
def guarded(start_here: Start, tmp_path_factory: pytest.TempPathFactory) -> RunningMeta:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_bytes(SECRET + b"\n")
    return start_meta(start_here, folder, "--cluster-secret-file", str(folder / "secret"))
