"""How fast a disk is through TriKV, beside fio on the same file in the same run.

    python -m bench.ssd [--json] [--folder FOLDER] [--gibibytes 1] [--rounds 5] [--records 1000000]

Three parts: operations of each back end, in turns with fio (io_uring, direct, its buffers on huge
pages as ours are); blocks through a `Disk`, with their sums and records; finding the records of a
disk after a start. The two files, of 2 GiB and some, are removed at the end. Without fio there is
no baseline, and that is said.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import trio

from bench.disks import GIB, MIB, SIZES, Measured, Taken, blocks, compared, recovery, taking
from bench.lines import Line, print_json, print_table
from trikv.tiers.ring import open_ring
from trikv.tiers.rings import BACK_ENDS, make_queue, why_not
from trikv.tiers.runs import Memory
from trikv.tiers.transfers import Queue, Transfers
from trikv.tiers.uring import DEPTHS

FILE_BYTES = 2 * GIB
GAP_S = 20e-6
MADV_NOHUGEPAGE = 15


# -- fio


def fio(path: Path, size: int, total: int, *, is_write: bool, depth: int) -> Taken:
    """The same operations by fio."""
    done = subprocess.run(
        [
            "fio",
            "--name=x",
            f"--filename={path}",
            f"--size={FILE_BYTES}",
            f"--io_size={total}",
            f"--rw={'randwrite' if is_write else 'randread'}",
            f"--bs={size}M",
            f"--iodepth={depth}",
            "--ioengine=io_uring",
            "--direct=1",
            "--output-format=json",
        ],
        env=os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
        capture_output=True,
        text=True,
        check=True,
    )
    job = json.loads(done.stdout)["jobs"][0]
    half = job["write" if is_write else "read"]
    seconds = half["runtime"] / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return Taken(half["io_bytes"] / seconds / 1e9, cpu_s * 1e3 / (half["io_bytes"] / 1e9))


# -- operations


def random_transfers(memory: Memory, size: int, total: int, *, is_write: bool) -> Transfers:
    """Operations all over the file; no two that are under way share memory."""
    count, length = total // (size * MIB), size * MIB
    places = np.random.default_rng(count).integers(0, FILE_BYTES // length, count) * length
    table = np.empty((count, 2), np.uint64)
    table[:, 0] = memory.address + np.arange(count) % (len(memory.bytes) // length) * length
    table[:, 1] = length
    return Transfers(is_write, places, table, np.arange(count + 1))


async def operations(path: Path, kinds: list[str], total: int, rounds: int) -> Measured:
    """Each back end and fio in turns, in another order each time."""
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    memory = Memory(128 * MIB)
    memory.bytes[:] = np.random.default_rng(1).integers(0, 256, len(memory.bytes), np.uint8)
    found: Measured = defaultdict(list)
    whom = [*kinds, *(["fio"] if shutil.which("fio") else [])]
    for index in range(rounds):
        for size in SIZES:
            for is_write in (True, False):
                for who in whom if index % 2 else reversed(whom):
                    if who == "fio":
                        depth = DEPTHS[is_write]
                        taken = fio(path, size, total, is_write=is_write, depth=depth)
                    else:
                        job = random_transfers(memory, size, total, is_write=is_write)
                        taken = await one(who, fd, job, total)
                    found[who, size, is_write].append(taken)
    os.close(fd)
    return found


async def one(who: str, fd: int, job: Transfers, total: int) -> Taken:
    """All operations of a job through one back end."""
    async with open_ring(make_queue(who, fd), fd) as ring:
        with taking(total) as found:
            await ring.run(job)
    assert not job.results.any(), job.results
    return found[0]


# -- how long others wait


class Onlooker(threading.Thread):
    """Wants the GIL all the time, and notes when it did not get it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gaps: list[tuple[float, float]] = []
        self.is_over = False

    def run(self) -> None:
        """Until `is_over`."""
        last = time.perf_counter()
        while not self.is_over:
            now = time.perf_counter()
            if now - last > GAP_S:
                self.gaps.append((last, now))
            last = now


def submits(fd: int, kinds: list[str]) -> Iterator[Line]:
    """How long giving 8 MiB of reads to the kernel takes, and keeps other threads from running."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(GAP_S)
    for pages, advice in (("huge pages", mmap.MADV_HUGEPAGE), ("4 KiB pages", MADV_NOHUGEPAGE)):
        memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(advice)
        bytes_ = np.frombuffer(memory, np.uint8)
        bytes_[:] = 1
        for who in kinds:
            if who == "threads":
                continue  # gives to other threads, which let go of the GIL
            spans, gaps = submitted(BACK_ENDS[who](fd), bytes_.ctypes.data)
            held = [
                max((min(end, last) - max(begin, first) for first, last in gaps), default=0.0)
                for begin, end in spans
            ]
            case, took = f"8 MiB, {pages}, {who}", [end - begin for begin, end in spans]
            yield Line(case, "submit, median", float(np.median(took)) * 1e6, "us")
            yield Line(case, "others wait, median", float(np.median(held)) * 1e6, "us")
    sys.setswitchinterval(before)


def submitted(
    queue: Queue, address: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """When submits began and ended, and when another thread could not run."""
    spans, onlooker = [], Onlooker()
    onlooker.start()
    for turn in range(200):
        for index in range(8):
            pieces = np.array([[address + index * MIB, MIB]], np.uint64)
            queue.push(8 * turn + index + 1, (turn % 100) * 8 * MIB, pieces, is_write=False)
        begin_s = time.perf_counter()
        queue.submit()
        spans.append((begin_s, time.perf_counter()))
        left = 8
        while left:
            left -= len(queue.reap())
    onlooker.is_over = True
    onlooker.join()
    queue.close()
    return spans, onlooker.gaps


def measure(options: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """All three parts."""
    kinds = [kind for kind in BACK_ENDS if not tell(kind, why_not(kind))]
    total = int(options.gibibytes * GIB)
    path = folder / "operations"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
        for _ in range(FILE_BYTES // (64 * MIB)):
            file.write(os.urandom(MIB) * 64)
        os.fsync(file.fileno())
    found = trio.run(operations, path, kinds, total, options.rounds)
    yield from compared(found)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    yield from submits(fd, kinds)
    os.close(fd)
    path.unlink()
    yield from trio.run(blocks, folder, total, options.rounds, found)
    yield from trio.run(recovery, folder, options.records)


def tell(kind: str, reason: str) -> str:
    """Say on stderr what is left out."""
    if reason:
        print(f"{kind} is left out: {reason}", file=sys.stderr)
    return reason


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--folder", help="where the files are made; this is the disk measured")
    parser.add_argument("--gibibytes", type=float, default=1.0, help="moved for each figure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    if not shutil.which("fio"):
        print("fio is absent (apt-get install fio): no baselines, no targets", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="trikv-bench-") as folder:
        lines = list(measure(options, Path(folder)))
    if options.json:
        print_json("ssd", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
