"""Many calls of engines that come and go: memory must stay flat, and the loop must not stall.

    python -m bench.soak [--json] [--calls 1000000]

One engine at a time asks, loads, saves and releases prompts of a drifting tree, a quarter of them
aborted in between; every so many calls it is replaced by another one, which finds the blocks of
those before. Each prompt's bytes are checked after each load. The daemon's memory is read after a
warm-up and at the end.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench import daemons
from bench.lines import Line, print_json, print_table
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob, SaveJob

CHECKPOINTS = 20
WARM_UP = 4  # checkpoints before which memory may grow: tables are touched for the first time
BLOCKS = 64
PAGE_BYTES = 8_192
POOL = "64mb"
GROWTH_MIB = 8.0
SETTLE_S = 1.0
STALL_MS = 50.0
ENGINES = 40
KEPT = 0.75  # of the loads and saves; the others are given up


def resident_mib(pid: int) -> float:
    """Memory of a process that is its own, without the pool."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(status["RssAnon"].split()[0]) / 1024


def descriptors(pid: int) -> int:
    """Open files of a process: the fewest in a second, as an engine's end takes a moment."""
    folder, until_s = Path(f"/proc/{pid}/fd"), time.monotonic() + SETTLE_S
    fewest = len(list(folder.iterdir()))
    while time.monotonic() < until_s:
        time.sleep(0.02)
        fewest = min(fewest, len(list(folder.iterdir())))
    return fewest


class Load:
    """The calls of engines on one daemon."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.random = random.Random(1)
        self.calls = 0
        self.loaded = 0
        self.wrong = 0
        self.turns = itertools.count()

    def run(self, calls: int) -> None:
        """One engine, until so many calls are made in all."""
        with daemons.engine(self.address, blocks=BLOCKS, page_bytes=PAGE_BYTES, pieces=4) as engine:
            while self.calls < calls:
                self.request(engine)

    def request(self, engine: daemons.Engine) -> None:
        """One prompt: ask, load what is there, check it, compute the rest, save, release."""
        turn = next(self.turns)
        name = f"r{turn}"
        trunk = daemons.hashes(f"trunk {turn // 5_000} {self.random.randrange(40)}", 16)
        leaf = daemons.hashes(f"leaf {self.random.randrange(4_000)}", self.random.randint(1, 16))
        blob = trunk + leaf
        count = len(blob) // 32
        seeds = np.frombuffer(blob, "<u8").reshape(count, 4)[:, 0]
        answer = engine.scheduler.query(name, 32, blob).result(30)
        self.calls += 1
        blocks = self.random.sample(range(BLOCKS), count)
        done = 0
        if answer.hit_count and self.random.random() < KEPT:
            attached = engine.worker.attached
            assert attached is not None
            job = LoadJob(name, answer.lease, 0, pack(blocks[: answer.hit_count]))
            failed = engine.worker.load(job, attached, 10.0, 0).result(30)
            self.calls += 1
            done = answer.hit_count if not failed else min(failed)
            rows = engine.memory[blocks[:done]].view(np.uint64)
            self.loaded += done
            self.wrong += int((rows != seeds[:done, None]).any(axis=1).sum())
        computed = np.repeat(seeds[done:, None], PAGE_BYTES // 8, axis=1)
        engine.memory[blocks[done:]] = computed.view(np.uint8)
        if done < count and self.random.random() < KEPT:
            save = SaveJob(0, name, done, 32, blob[32 * done :], pack(blocks[done:]))
            engine.worker.save(save, 0, 0, 0).result(30)
            self.calls += 1
        engine.scheduler.release([name])
        self.calls += 1


def soak(calls: int) -> Iterator[Line]:
    """Run, read memory at checkpoints, and say what came out."""
    with daemons.daemon("--pool-size", POOL) as address:
        pid = daemons.pid_of(address)
        load = Load(address)
        resident, files = [], []
        begin_s = time.monotonic()
        for checkpoint in range(CHECKPOINTS):
            for part in range(ENGINES // CHECKPOINTS):
                share = checkpoint * (ENGINES // CHECKPOINTS) + part + 1
                load.run(calls * share // ENGINES)
            resident.append(resident_mib(pid))
            files.append(descriptors(pid))
            print(f"{load.calls:9} calls, {resident[-1]:.1f} MiB", file=sys.stderr, flush=True)
        took_s = time.monotonic() - begin_s
        facts = daemons.status(address)
        growth = resident[-1] - resident[WARM_UP - 1]
        case = f"{load.calls} calls, {ENGINES} engines"
        yield Line(case, "growth after warm-up", growth, "MiB", GROWTH_MIB, resident[WARM_UP - 1])
        yield Line(case, "descriptors left", files[-1] - files[0], "", 0)
        yield Line(case, "longest stall of the loop", facts["stallSeconds"] * 1e3, "ms", STALL_MS)
        yield Line(case, "blocks with wrong bytes", load.wrong, "", 0)
        yield Line(case, "blocks loaded", load.loaded, "", 1, more_is_better=True)
        yield Line(case, "leases left", facts["pool"]["leaseCount"], "", 0)
        yield Line(case, "calls", load.calls / took_s, "calls/s")


def main() -> int:
    """Run and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--calls", type=int, default=1_000_000)
    options = parser.parse_args()
    lines = list(soak(options.calls))
    if options.json:
        print_json("soak", lines)
    else:
        print_table(lines)
    return int(any(line.is_ok is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
