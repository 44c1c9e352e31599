"""The pool's memory: on which NUMA nodes, of which pages, touched by how many."""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import trio

from tests.conftest import PATIENCE_S
from tests.tiers.numa_maps import pages_by_node, policies
from trikv.core.banks import ANY_BANK, WHOLE, divide
from trikv.core.pages import Pages
from trikv.nursery import keeping, populating
from trikv.tiers import numa, pool
from trikv.tiers.pool import Pool, Toucher, open_pool

MIB = 1 << 20
GPU, NIC = ("0x10de", "0x030200"), ("0x15b3", "0x020700")


def write_machine(
    root: Path, memory: str, allowed: str, devices: list[tuple[str, str, int]] | None = None
) -> Path:
    """Sysfs of a made-up machine, and a process's status beside it."""
    (root / "devices/system/node").mkdir(parents=True)
    (root / "devices/system/node/has_memory").write_text(f"{memory}\n")
    for number, (vendor, kind, node) in enumerate(devices or []):
        device = root / f"bus/pci/devices/0000:{number:02x}:00.0"
        device.mkdir(parents=True)
        for name, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (device / name).write_text(f"{value}\n")
    status = root / "status"
    status.write_text(f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
    return status


@pytest.mark.parametrize(
    ("memory", "allowed", "devices", "nodes"),
    [
        ("0", "0", [(*GPU, 0)], ()),
        ("0", "0", [(*GPU, -1)], ()),  # as virtual machines say it
        ("0-1", "0-1", [(*GPU, 0), (*GPU, 1), (*GPU, 1)], (0, 1)),
        ("0-1", "0-1", [(*GPU, 1), (*GPU, 1)], (1,)),
        ("0-1", "0-1", [(*NIC, 1)], (0, 1)),
        ("0-1", "0-1", [(*GPU, -1)], (0, 1)),
        ("0-1", "1", [(*GPU, 0), (*GPU, 1)], ()),  # numactl, cpuset: the choice is made
        ("0-3,8", "0-8", [(*GPU, 8), (*GPU, 2)], (2, 8)),
        ("0,2", "0-3", [(*GPU, 1)], (0, 2)),  # near the GPU there is no memory
        ("", "", [], ()),
    ],
)
def test_the_pool_lies_in_the_nodes_that_have_gpus(
    tmp_path: Path,
    memory: str,
    allowed: str,
    devices: list[tuple[str, str, int]],
    nodes: tuple[int, ...],
) -> None:
    status = write_machine(tmp_path, memory, allowed, devices)
    assert numa.pool_nodes(tmp_path, status) == nodes


def test_a_machine_that_says_nothing_is_left_alone(tmp_path: Path) -> None:
    assert numa.pool_nodes(tmp_path, tmp_path / "none") == ()
    assert numa.node_of("0000:00:00.0", tmp_path) == ANY_BANK


def test_a_gpu_is_found_by_its_place_on_the_bus(tmp_path: Path) -> None:
    write_machine(tmp_path, "0-1", "0-1", [(*GPU, 1), (*GPU, -1)])
    assert numa.node_of("0000:00:00.0", tmp_path) == 1
    assert numa.node_of("0000:01:00.0", tmp_path) == ANY_BANK


@pytest.fixture
def opened() -> Iterator[list[Pool]]:
    pools: list[Pool] = []
    yield pools
    for one in pools:
        one.close()


def test_the_kernel_is_told_where_each_part_is_to_come_from(opened: list[Pool]) -> None:
    """Node 0 twice, as two nodes: every machine has that one."""
    made = open_pool(
        9 * MIB, use_hugepages=False, spread=lambda at, size: numa.spread(at, size, (0, 0))
    )
    opened.append(made)
    assert made.parts == divide(9 * MIB, (0, 0), unit=2 * MIB) == ((0, 0), (4 * MIB, 0))
    assert {policy for _, policy in policies(made.address, made.bytes)} == {"prefer:0"}
    made.populate(0, made.bytes)
    assert sum(pages_by_node(made.address, made.bytes).values()) == 9 * MIB // mmap.PAGESIZE
    plain = open_pool(4 * MIB, use_hugepages=False)
    opened.append(plain)
    assert plain.parts == WHOLE
    assert policies(plain.address, plain.bytes) == [(0, "default")]


def test_a_node_that_is_not_there_is_refused_and_the_pool_goes_on_without(
    opened: list[Pool],
) -> None:
    with structlog.testing.capture_logs() as lines:
        made = open_pool(
            4 * MIB,
            use_hugepages=False,
            spread=lambda at, size: keeping.spread_over((0, 63), at, size),
        )
    opened.append(made)
    assert made.parts == WHOLE
    assert [(line["event"], line["nodes"]) for line in lines] == [("numa.off", (0, 63))]
    assert "mbind" in lines[0]["reason"]


def test_all_of_the_pool_is_touched_by_several_threads_at_once(
    opened: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = open_pool(64 * MIB, use_hugepages=False)
    opened.append(made)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(populating, "STEP_BYTES", 3 * MIB)
    monkeypatch.setattr(pool, "TOUCH_BYTES", MIB)
    touched: list[tuple[int, int]] = []
    at_once, together = [0, 0], threading.Event()
    whole = Pool.populate

    def populate(self: Pool, offset: int, length: int) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        if at_once[0] > 1:
            together.set()
        together.wait(PATIENCE_S)
        whole(self, offset, length)
        touched.append((offset, length))
        at_once[0] -= 1

    monkeypatch.setattr(Pool, "populate", populate)
    pages = Pages(made.bytes, 8 * MIB, parts=((0, 0), (32 * MIB, 1)))
    with structlog.testing.capture_logs() as lines:
        trio.run(populating.populate, made, pages, Said())
    assert 1 < at_once[1] <= pool.TOUCH_THREADS_MAX
    assert sum(length for _, length in touched) == 64 * MIB
    ends = sorted((offset, offset + length) for offset, length in touched)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert resident_bytes(made) == 64 * MIB
    assert lines[-1]["event"] == "pool.touched"
    assert lines[-1]["threads"] == pool.TOUCH_THREADS_MAX
    assert lines[-1]["gib"] == lines[-1]["gib_wanted"] == 0.06


class Said:
    pool_fault = ""


def resident_bytes(made: Pool) -> int:
    """Of the pool's mapping, by the kernel's own count."""
    vector = (ctypes.c_ubyte * (made.bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(made.address), ctypes.c_size_t(made.bytes), vector) == 0
    return sum(one & 1 for one in vector) * mmap.PAGESIZE


@pytest.mark.parametrize("banks", [(), (0, 1)])
def test_slabs_are_touched_in_the_order_in_which_they_are_given_away(
    banks: tuple[int, ...],
) -> None:
    parts = divide(8 * MIB, banks, unit=MIB)
    pages = Pages(8 * MIB, MIB, parts=parts)
    steps = [offset for offset, _ in populating._steps(pages)]
    shape = pages.add_shape((MIB,))
    given = [int(pages.offsets(pages.allocate(shape, 1), 0)[0]) for _ in range(8)]
    assert steps == given


async def test_progress_is_told_now_and_then(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of 100 GiB, a slab of one GiB every 0.3 s: a line each tenth, no more."""

    class Slow:
        threads = 1

        def __init__(self, _: object) -> None:
            pass

        async def touch(self, _offset: int, _length: int) -> str:
            await trio.sleep(0.3)
            return ""

    monkeypatch.setattr(populating, "Toucher", Slow)
    monkeypatch.setattr(populating, "STEP_BYTES", 1 << 30)
    pages = Pages(100 << 30, 1 << 30)
    with structlog.testing.capture_logs() as lines:
        await populating.populate(None, pages, Said())  # type: ignore[arg-type]
    told = [(line["event"], line["gib"], line["gib_wanted"]) for line in lines]
    assert told[:2] == [("pool.touching", 10.0, 100.0), ("pool.touching", 20.0, 100.0)]
    assert told[-1] == ("pool.touched", 100.0, 100.0)
    assert len(told) == 10
    assert lines[0]["gib_per_s"] == 3.33
    assert lines[-1]["took_s"] == 30.0


async def test_several_that_find_no_memory_say_so_once_and_all_come_back(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, seen = Said(), []

    class Short:
        threads = 3

        def __init__(self, _: object) -> None:
            pass

        async def touch(self, offset: int, _length: int) -> str:
            await trio.sleep(0.1)
            seen.append((offset, said.pool_fault))
            is_there = trio.current_time() > begin_s + offset / MIB
            return "" if is_there else "no memory"

    monkeypatch.setattr(populating, "Toucher", Short)
    begin_s = trio.current_time()
    with structlog.testing.capture_logs() as lines:
        await populating.populate(None, Pages(6 * MIB, MIB), said)  # type: ignore[arg-type]
    events = [line["event"] for line in lines if line["event"] != "pool.touching"]
    assert events == ["pool.short", "pool.touched"]
    assert said.pool_fault == ""
    waiting = [fault for offset, fault in seen if offset == 5 * MIB]
    assert all("no memory" in fault for fault in waiting[1:]), "forgotten while one still waits"


def test_a_toucher_needs_a_thread_even_on_one_processor(
    opened: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = open_pool(4 * MIB, use_hugepages=False)
    opened.append(made)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    assert Toucher(made).threads == 1


KEPT = """
import sys
from pathlib import Path
from trikv.tiers import kept, numa

found = kept.open_kept(
    Path(sys.argv[1]), 16 << 20, 2 << 20, spread=lambda at, size: numa.spread(at, size, (0, 0))
)
found.pool.populate(0, 16 << 20)
mappings = Path("/proc/self/smaps").read_text().split("VmFlags")
mine = [row for one in mappings if "trikv.pool" in one for row in one.splitlines()]
huge = sum(int(row.split()[1]) for row in mine if row.startswith("ShmemPmdMapped"))
rows = Path("/proc/self/numa_maps").read_text().splitlines()
print(huge, *{row.split()[1] for row in rows if "trikv.pool" in row}, len(found.pool.parts))
print(found.pool.backing)
"""


@pytest.mark.parametrize(
    ("options", "huge_kib", "backing"),
    [
        ("size=1g", 0, "4 KiB pages"),
        ("huge=advise", 0, "4 KiB pages"),
        ("huge=within_size", 16 << 10, "huge pages on request"),
        ("huge=always", 16 << 10, "huge pages on request"),
    ],
)
def test_a_kept_pool_has_the_pages_of_its_file_system_where_it_was_told(
    tmp_path: Path, options: str, huge_kib: int, backing: str
) -> None:
    """On a file system that is mounted for this test alone."""
    (tmp_path / "program.py").write_text(KEPT)
    (tmp_path / "mount").mkdir()
    command = f"mount -t tmpfs -o {options} none mount && {sys.executable} program.py $PWD/mount/k"
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    if os.geteuid() != 0 and ran.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {ran.stderr.strip()}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        f"{huge_kib} prefer:0 2",
        f"{backing}, kept in {tmp_path}/mount/k",
    ]
