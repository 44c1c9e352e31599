"""The pool on a machine with two NUMA nodes, in a guest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = 6


@pytest.mark.rdma
def test_each_part_of_the_pool_lies_on_its_node() -> None:
    command = (
        f"PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1 {sys.executable} -m tests.guest.numa_checks"
    )
    ran = subprocess.run(
        [str(ROOT / "tools/guest.sh"), command],
        check=False,
        env=os.environ | {"GUEST_NODES": "2", "GUEST_RAILS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout
    assert "all checks hold" in ran.stdout
    assert ran.stdout.count("\nok  ") == CHECKS, ran.stdout
