"""How fast bytes come from another host's pool, beside iperf3 and a plain copy; what Python costs.

    python -m bench.peer [--json] [--mebibytes 1024] [--rounds 10]

Both pools are churned: runs lie in different orders at both ends. TCP goes from one process to
another over loopback, in turns with iperf3 and the same number of streams: as the host has it, for
the target, and, where an owner's streams have another congestion control, with that too.
iperf3 sends one MiB again and again, out of a cache; a fetch goes from memory to memory. RDMA runs
on the double of libibverbs in `tests/double`, which shows what Python costs and no NIC's speed;
`bench.hosts` is for who has NICs. Bytes are compared after each case. Needs iperf3 and a C compiler
(`tools/packages.sh`).
"""

import argparse
import contextlib
import json
import mmap
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import trio
from numpy.typing import NDArray

from bench.hosts import take, timed
from bench.lines import Line, print_json, print_table
from tests.tiers.double import Double, build, write_sysfs
from tests.tiers.peers import Memory, is_right, noise, runs_of
from trikv.address import Address
from trikv.core.words import PeerId
from trikv.tiers import tcp, verbs
from trikv.tiers.nics import list_nics
from trikv.tiers.rails import open_rails
from trikv.tiers.rdma import PIECE_BYTES, RdmaTransport
from trikv.tiers.rdmaowner import RdmaOwner
from trikv.tiers.tcp import TcpTransport
from trikv.tiers.tcpowner import avoid_pacing

MIB = 1 << 20
RUN_BYTES = {"runs of 2 MiB": 2 * MIB, "runs of 64 KiB": 64 << 10}
TCP_TARGET = 0.9
COST_TARGET_US = 1.5
MAP_NORESERVE = 0x4000
COST_REQUESTS = 24_576
"""24 GiB: what a large prefix of a large model is."""


@contextlib.contextmanager
def owner_process(size: int) -> Iterator[Address]:
    """An owner in a process of its own."""
    command = [sys.executable, "-m", "bench.hosts", "own", "127.0.0.1:0"]
    command += ["--mebibytes", str(size // MIB)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield Address(host="127.0.0.1", port=int(child.stdout.readline()))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def congestion_controls() -> tuple[str, str]:
    """The host's, which iperf3 has, and that of an owner's streams."""
    with socket.socket() as one:
        names = []
        for choose in (lambda _: None, avoid_pacing):
            choose(one)
            name = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            names.append(name.split(b"\0")[0].decode())
    return names[0], names[1]


def iperf_gb_s(seconds: int, congestion_control: str) -> float:
    """What iperf3 moves over loopback with as many streams as a fetch has."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], **quiet)
    client = ["iperf3", "-c", "127.0.0.1", "-p", port, "-P", str(tcp.STREAMS)]
    client += ["-l", "1M", "-t", str(seconds), "-C", congestion_control, "-J"]
    try:
        for _ in range(100):
            told = subprocess.run(client, capture_output=True, text=True, check=False).stdout
            facts = json.loads(told) if told else {}
            if "end" in facts and "sum_received" in facts["end"]:
                return float(facts["end"]["sum_received"]["bits_per_second"]) / 8e9
            time.sleep(0.05)  # it does not listen yet
    finally:
        server.kill()
        server.wait()
    sys.exit("iperf3 does not measure: is another one running?")


async def tcp_lines(size: int, rounds: int) -> list[Line]:
    """Fetches in turns with iperf3 as the host has it, and with our congestion control."""
    pool = Memory(np.ones(size, np.uint8))
    taken: dict[str, list[float]] = {case: [] for case in RUN_BYTES}
    usual, ours = congestion_controls()
    beside: dict[str, list[float]] = {name: [] for name in (usual, ours)}
    with owner_process(size) as address:
        async with await trio.open_tcp_stream(address.host, address.port) as stream:
            facts = json.loads(await take(stream))
        token, there = bytes.fromhex(facts["token"]), Address(host=address.host, port=facts["port"])
        transport = TcpTransport(there, pool, limiter=trio.CapacityLimiter(8))
        orders = {case: runs_of(pool, size // step, step) for case, step in RUN_BYTES.items()}
        for _ in range(rounds):
            for name, speeds in beside.items():
                speeds.append(await trio.to_thread.run_sync(iperf_gb_s, 1, name))
            for case, runs in orders.items():
                times = [await timed(transport, runs, token) for _ in range(3)]
                taken[case].append(size / median(times) / 1e9)
                assert is_right(runs, noise(size), pool), "bytes differ"
        await transport.aclose()
    return [
        Line(
            f"TCP, {size // MIB} MiB, {case}, {tcp.STREAMS} streams, beside iperf3 -C {name}",
            "fetch",
            median(speeds),
            "GB/s",
            TCP_TARGET if name == usual else None,
            median(base),
            more_is_better=True,
        )
        for name, base in beside.items()
        for case, speeds in taken.items()
    ]


@contextlib.asynccontextmanager
async def rdma_ends(
    root: Path, source: NDArray[np.uint8], pool: NDArray[np.uint8]
) -> AsyncIterator[RdmaTransport]:
    """Both ends on the double, in this process."""
    nics, open_nic = list_nics(root), verbs.load("ibverbs")
    far, near = [
        await open_rails(
            open_nic, nics, address=int(one.ctypes.data), size=len(one), slab_bytes=64 * MIB
        )
        for one in (source, pool)
    ]
    owner = RdmaOwner(far)

    async def dial(offer: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return owner.connect(PeerId(1), offer)

    transport = RdmaTransport(near, len(far.rails), dial)
    try:
        yield transport
    finally:
        await transport.aclose()
        owner.close()
        near.close()
        far.close()


async def cost_lines(double: Double, root: Path, rounds: int) -> list[Line]:
    """Time of whole fetches whose reads take none: all of it is Python's."""
    size = COST_REQUESTS * PIECE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE  # it is never touched
    source, pool = (np.frombuffer(mmap.mmap(-1, size, flags), np.uint8) for _ in range(2))
    runs = runs_of(Memory(pool), size // (2 * MIB), 2 * MIB)
    for number in range(2):
        double.set(number, sync=1, nocopy=1)
    async with rdma_ends(root, source, pool) as transport:
        await timed(transport, runs, b"")  # dials
        before = double.get("requests")
        begin_s = time.thread_time()  # of the processor: others may use it too
        for _ in range(rounds):
            await timed(transport, runs, b"")
        took_s = time.thread_time() - begin_s
        count = (double.get("requests") - before) / rounds
    case = f"RDMA on the double, {size // MIB} MiB, runs of 2 MiB, no bytes moved"
    cost_us = took_s / rounds / count * 1e6
    return [Line(case, "Python a work request", cost_us, "us", COST_TARGET_US)]


async def copy_lines(double: Double, root: Path, size: int, rounds: int) -> list[Line]:
    """Fetches whose reads are copies, beside one copy of as many bytes."""
    source, pool = noise(size).copy(), np.zeros(size, np.uint8)
    runs = runs_of(Memory(pool), size // (2 * MIB), 2 * MIB)
    for number in range(2):
        double.set(number, sync=0, nocopy=0)
    times, plain = [], []
    async with rdma_ends(root, source, pool) as transport:
        for _ in range(rounds):
            times.append(await timed(transport, runs, b""))
            assert is_right(runs, source, Memory(pool)), "bytes differ"
            begin_s = time.perf_counter()
            np.copyto(pool, source)
            plain.append(time.perf_counter() - begin_s)
    case = f"RDMA on the double, {size // MIB} MiB, runs of 2 MiB, beside one copy"
    speed, base = size / median(times) / 1e9, size / median(plain) / 1e9
    return [Line(case, "fetch", speed, "GB/s", None, base, more_is_better=True)]


def measure(size: int, rounds: int) -> Iterator[Line]:
    """All cases."""
    yield from trio.run(tcp_lines, size, rounds)
    with tempfile.TemporaryDirectory() as folder:
        double = Double(build(Path(folder)))
        double.reset()
        root = write_sysfs(Path(folder), 2)
        yield from trio.run(cost_lines, double, root, rounds)
        yield from trio.run(copy_lines, double, root, size, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--mebibytes", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    size = options.mebibytes * MIB
    if shutil.which("iperf3") is None:
        sys.exit("iperf3 is not here: tools/packages.sh bench installs it")
    lines = list(measure(size, options.rounds))
    if options.json:
        print_json("peer", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
