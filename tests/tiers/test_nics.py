"""Which NICs are found, and that a machine without any loads no library."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.double import write_sysfs
from trikv.tiers import verbs
from trikv.tiers.nics import list_nics


def names(root: Path, **options: object) -> list[str]:
    return [nic.name for nic in list_nics(root, **options)]  # type: ignore[arg-type]


def test_a_machine_without_rdma_has_none(tmp_path: Path) -> None:
    assert list_nics(tmp_path / "infiniband") == []
    (tmp_path / "infiniband").mkdir()
    assert list_nics(tmp_path / "infiniband") == []


def test_and_imports_no_binding(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from trikv.tiers import rdma, rdmaowner, verbs
from trikv.tiers.nics import list_nics
assert list_nics(Path({str(tmp_path)!r})) == []
print([name for name in sys.modules if "verbs" in name and not name.startswith("trikv")])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_rails_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, 11)
    assert names(root) == [f"fake{number}" for number in range(11)]
    assert names(root, names=("fake7", "fake2")) == ["fake7", "fake2"]


def test_a_nic_says_where_it_is_and_what_it_is_called(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, 2, nodes=(0, 1))
    first, second = list_nics(root)
    assert (first.node, second.node) == (0, 1)
    assert second.gid.index == 1
    assert second.gid.gid.hex() == "00000000000000000000ffff0a000101"
    assert not second.is_ib
    assert list_nics(root, gid_index=0)[0].gid.gid.hex().startswith("fe80")


def test_a_port_that_is_down_is_no_rail(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, 3)
    (root / "fake1/ports/1/state").write_text("1: DOWN\n")
    for entry in ("0", "1"):  # a table that says nothing
        (root / f"fake2/ports/1/gids/{entry}").write_text(":".join(["0000"] * 8))
    assert names(root) == ["fake0"]
    with pytest.raises(ValueError, match="no port of RDMA NIC 'fake1' is up"):
        list_nics(root, names=("fake1",))
    with pytest.raises(ValueError, match="'fake2' has no address"):
        list_nics(root, names=("fake2",))
    with pytest.raises(ValueError, match="there is no RDMA NIC 'mlx5_0'"):
        list_nics(root, names=("mlx5_0",))


def test_an_address_of_a_device_that_is_down_is_not_used(tmp_path: Path) -> None:
    states = ("down", "up", "lowerlayerdown", "unknown")
    root = write_sysfs(tmp_path, len(states))
    for number, state in enumerate(states):
        (root / f"fake{number}/ports/1/gid_attrs/ndevs/1").write_text(f"eth{number}\n")
        (tmp_path / f"net/eth{number}").mkdir(parents=True)
        (tmp_path / f"net/eth{number}/operstate").write_text(f"{state}\n")
    assert names(root) == ["fake1", "fake3"]


def test_the_first_port_that_can_be_used_is(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, 2)
    shutil.copytree(root / "fake0/ports/1", root / "fake0/ports/2")
    shutil.copytree(root / "fake1/ports/1", root / "fake1/ports/2")
    (root / "fake0/ports/1/state").write_text("1: DOWN\n")
    (root / "fake1/ports/1/gid_attrs/types/1").write_text("IB/RoCE v1\n")
    assert [nic.port for nic in list_nics(root)] == [2, 2]


def test_infiniband_is_named_by_its_first_address(tmp_path: Path) -> None:
    root = write_sysfs(tmp_path, 1)
    (root / "fake0/ports/1/link_layer").write_text("InfiniBand\n")
    (nic,) = list_nics(root)
    assert nic.is_ib
    assert nic.gid.index == 0


def test_without_a_binding_one_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*verbs.BINDINGS, "pyverbs.enums"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(verbs.NoVerbsError) as told:
        verbs.load()
    assert "ibverbs: " in str(told.value)
    assert "pyverbs: " in str(told.value)
    assert "\n" not in str(told.value)
