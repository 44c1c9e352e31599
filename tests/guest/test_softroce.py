"""The RDMA transport on the kernel's own verbs, both bindings, in a guest with Soft-RoCE."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DISTRO = Path("/usr/lib/python3/dist-packages/pyverbs")
CHECKS = 16
"""A binding."""


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


@pytest.mark.rdma
def test_both_bindings_on_soft_roce(distro_path: Path) -> None:
    command = (
        f"PYTHONPATH={ROOT}:{distro_path} PYTHONDONTWRITEBYTECODE=1 "
        f"{sys.executable} -m tests.guest.checks ibverbs pyverbs"
    )
    ran = subprocess.run(
        [str(ROOT / "tools/guest.sh"), command],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout
    assert "all checks hold" in ran.stdout
    assert ran.stdout.count("\nok  ") == 2 * CHECKS, ran.stdout
