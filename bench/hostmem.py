"""How fast blocks move between an engine's process memory and the pool, beside a plain copy.

    python -m bench.hostmem [--json] [--mebibytes 512]

An engine process owns the memory; this process copies it with the daemon's own code
(`tiers/hostmem.py`), blocks in random order, pieces as different layouts have them. The plain
copy is numpy's, warm, inside one process, of the same bytes. Bytes are compared after each case.
"""

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from bench.lines import Line, print_json, print_table
from trikv.core.layout import GroupLayout, Piece, Range
from trikv.tiers.copies import Copy
from trikv.tiers.hostmem import HeldProcess, run

CASES = {"one piece of 2.25 MiB": 1, "18 pieces of 128 KiB": 18, "72 pieces of 32 KiB": 72}
PAGE_BYTES = 2_359_296
ROUNDS = 5


def own(pipe: Connection, size: int, seed: int) -> None:
    """An engine: owns memory, tells its address, answers what its bytes sum up to."""
    memory = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    pipe.send(memory.ctypes.data)
    while pipe.recv() == "sum":
        pipe.send(int(memory.view(np.uint64).sum()))


@contextlib.contextmanager
def engine(size: int) -> Iterator[tuple[Connection, int, HeldProcess]]:
    """A process with `size` bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=own, args=(theirs, size, 1), daemon=True)
    child.start()
    assert child.pid is not None
    process = HeldProcess(child.pid)
    try:
        yield ours, int(ours.recv()), process
    finally:
        ours.send("end")
        child.join()
        process.close()


def measure(mebibytes: int) -> Iterator[Line]:
    """All cases in turns with the plain copy."""
    blocks = (mebibytes << 20) // PAGE_BYTES
    size = blocks * PAGE_BYTES
    pool, other = np.ones(size, np.uint8), np.ones(size, np.uint8)
    offsets = np.arange(blocks, dtype=np.int64) * PAGE_BYTES
    order = np.random.default_rng(2).permutation(blocks).astype(np.int32)
    times: dict[tuple[str, bool], list[float]] = {}
    plain: list[float] = []
    with engine(size) as (pipe, address, process):
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            np.copyto(other, pool)
            plain.append(time.perf_counter() - begin_s)
            for case, count in CASES.items():
                piece_bytes = PAGE_BYTES // count
                pieces = tuple(
                    Piece(0, n * blocks * piece_bytes, piece_bytes, piece_bytes)
                    for n in range(count)
                )
                layout = GroupLayout((Range(address, size),), pieces, blocks, "bytes")
                for into_engine in (False, True):
                    copy = Copy(process, layout, order, offsets, into_engine)
                    begin_s = time.perf_counter()
                    arrived = run(copy, pool.ctypes.data, lambda: False, 20.0)
                    took_s = time.perf_counter() - begin_s
                    times.setdefault((case, into_engine), []).append(took_s)
                    assert arrived.all()
                pipe.send("sum")
                assert pipe.recv() == int(pool.view(np.uint64).sum()), "bytes differ"
    base = size / float(np.median(plain)) / 1e9
    for (case, into_engine), taken in times.items():
        name = "load" if into_engine else "save"
        speed = size / float(np.median(taken)) / 1e9
        yield Line(f"{mebibytes} MiB, {case}", name, speed, "GB/s", None, base, more_is_better=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--mebibytes", type=int, default=512)
    options = parser.parse_args()
    lines = list(measure(options.mebibytes))
    if options.json:
        print_json("hostmem", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
