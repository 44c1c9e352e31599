"""What only a machine with two NUMA nodes shows; run inside the guest, as root of it.

Each page of a pool is asked where it lies, by its kind of memory: 4 KiB pages, transparent huge
pages, a pool that is kept.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import trio

from tests.tiers.numa_maps import pages_by_node
from trikv import config
from trikv.core.pages import Pages
from trikv.nursery import populating
from trikv.nursery.keeping import opened
from trikv.tiers import numa
from trikv.tiers.pool import Pool

POOL_BYTES = 256 << 20
SHMEM = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Said:
    pool_fault = ""


def check_pool(name: str, *flags: str) -> None:
    settings = config.load(["--pool-size", str(POOL_BYTES), *flags], {})
    with opened(settings, POOL_BYTES) as made:
        pool, half = made.pool, POOL_BYTES // 2
        pages = Pages(pool.bytes, made.slab_bytes, parts=pool.parts)
        trio.run(populating.populate, pool, pages, Said())
        if settings.numa == "off":
            assert pool.parts == ((0, -1),)
            say(f"ok   {name}: nodes {pages_by_node(pool.address, POOL_BYTES)}, as it comes")
            return
        assert pool.parts == ((0, 0), (half, 1)), pool.parts
        assert "NUMA nodes 0, 1" in pool.backing
        near, far = (shares(pool, begin, half) for begin in (0, half))
        assert near == {0: 1.0}, near
        assert far == {1: 1.0}, far
    say(f"ok   {name}: {pool.backing}")


def shares(pool: Pool, begin: int, size: int) -> dict[int, float]:
    """Of the pages in a range, how many are on which node."""
    counts = pages_by_node(pool.address + begin, size)
    total = sum(counts.values())
    assert total, "nothing was touched"
    return {node: count / total for node, count in counts.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    assert numa.pool_nodes() == (0, 1)
    SHMEM.write_text("never")
    check_pool("4 KiB pages")
    check_pool("off", "--numa", "off")
    SHMEM.write_text("advise")
    check_pool("huge pages")
    for options in ("size=1g", "size=1g,huge=always"):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
            check_pool(f"kept, {options}", "--persist", f"{folder}/k")
            subprocess.run(["umount", folder], check=True)
    bound = "from trikv.tiers import numa; print(numa.pool_nodes())"
    group = Path("/sys/fs/cgroup")
    subprocess.run(["mount", "-t", "cgroup2", "none", str(group)], check=True)
    (group / "cgroup.subtree_control").write_text("+cpuset")
    (group / "one").mkdir()
    (group / "one/cpuset.mems").write_text("1")
    enter = f"echo $$ > {group}/one/cgroup.procs && exec {sys.executable} -c '{bound}'"
    shown = subprocess.run(
        ["sh", "-c", enter], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    assert shown == "()\n", shown
    say("ok   a process that may use one node is left alone")
    say("all checks hold")


if __name__ == "__main__":
    main()
