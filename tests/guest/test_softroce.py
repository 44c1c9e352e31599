"""RDMA on the kernel's own verbs, both bindings, in a guest with Soft-RoCE NICs."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTRO = Path("/usr/lib/python3/dist-packages/pyverbs")
CHECKS = 16
"""Of the transports, a binding."""
NODE_CHECKS = 32
LIMIT_S = 560


@pytest.fixture
def distro_path() -> Path:
    """A folder with the distribution's `pyverbs`, and no other of its packages."""
    subprocess.run([str(ROOT / "tools/packages.sh"), "guest"], check=True)
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    assert list(DISTRO.glob(f"qp.{tag}*.so")), f"{DISTRO} is not for this Python ({tag})"
    folder = ROOT / ".cache/pyverbs"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "pyverbs"
    if not link.is_symlink():
        link.symlink_to(DISTRO)
    return folder


def in_guest(module: str, distro_path: Path, *, rails: int) -> list[str]:
    """Run a module in a guest; returns the checks that hold."""
    command = (
        f"PYTHONPATH={ROOT}:{distro_path} PYTHONDONTWRITEBYTECODE=1 "
        f"{sys.executable} -m {module} ibverbs pyverbs"
    )
    begin_s = time.monotonic()
    ran = subprocess.run(
        [str(ROOT / "tools/guest.sh"), command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"GUEST_RAILS": str(rails), "GUEST_LIMIT_S": str(LIMIT_S)},
        timeout=LIMIT_S + 120,
    )
    print(f"{module} in a guest: {time.monotonic() - begin_s:.0f} s")
    print("\n".join(line for line in ran.stdout.splitlines() if line.startswith("     ")))
    assert ran.returncode == 0, ran.stdout
    assert "all checks hold" in ran.stdout
    return [line for line in ran.stdout.splitlines() if line.startswith("ok  ")]


@pytest.mark.rdma
@pytest.mark.timeout(LIMIT_S + 180)
def test_both_bindings_on_soft_roce(distro_path: Path) -> None:
    held = in_guest("tests.guest.checks", distro_path, rails=2)
    assert len(held) == 2 * CHECKS, held


@pytest.mark.rdma
@pytest.mark.timeout(LIMIT_S + 180)
def test_whole_nodes_on_soft_roce(distro_path: Path) -> None:
    """One daemon by each binding."""
    held = in_guest("tests.guest.nodes", distro_path, rails=0)
    assert len(held) == NODE_CHECKS, held
