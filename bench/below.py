"""From SSD through the pool into an engine, and what other engines' queries wait meanwhile.

    python -m bench.below [--json] [--folder .] [--prompts 24] [--ring auto]

A daemon with a pool for a few prompts and an SSD cache; one engine saves many more prompts than the
pool holds, and then asks for them one after another: waits, loads, compares every byte. Beside it
another engine, a process of its own, asks for a prompt that is always in the pool, 512 blocks,
first while the SSD is at rest and then while it is written and read all the time.
"""

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench import daemons
from bench.lines import Line, print_json, print_table
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob, SaveJob

PAGE_BYTES = 2 << 20
PROMPT = 64
POOL_PROMPTS = 6
WAIT_S = 60.0
QUERY_MS = 2.0
PAUSE_S = 0.005
SMALL_PAGE_BYTES = 4_096
RESIDENT = 512


def blob_of(prompt: int) -> bytes:
    """The hashes of a prompt."""
    return daemons.hashes(f"below {prompt}", PROMPT)


def save(engine: daemons.Engine, prompt: int) -> None:
    """Save a prompt whose bytes follow from its hashes."""
    words = np.frombuffer(blob_of(prompt), "<u8").reshape(PROMPT, 4)[:, :1]
    engine.memory.view(np.uint64)[:] = words
    name = f"save {prompt}"
    job = SaveJob(0, name, 0, 32, blob_of(prompt), pack(range(PROMPT)))
    engine.worker.save(job, 0, 0, 0).result(WAIT_S)
    engine.scheduler.release([name])


def load(engine: daemons.Engine, prompt: int) -> tuple[float, float, int]:
    """Bring a prompt into the engine; returns seconds waited, seconds loaded, right blocks."""
    name = f"load {prompt} {time.perf_counter_ns()}"
    begin_s = time.perf_counter()
    answer = engine.scheduler.query(name, 32, blob_of(prompt)).result(WAIT_S)
    while answer.hit_count < PROMPT and answer.coming_count:
        answer = engine.scheduler.query(name, 32, blob_of(prompt), WAIT_S).result(2 * WAIT_S)
    there_s = time.perf_counter()
    count = answer.hit_count
    if count:
        attached = engine.worker.attached
        assert attached is not None
        job = LoadJob(name, answer.lease, 0, pack(range(count)))
        failed = engine.worker.load(job, attached, WAIT_S, 0).result(WAIT_S)
        count -= len(failed)
    end_s = time.perf_counter()
    engine.scheduler.release([name])
    words = np.frombuffer(blob_of(prompt), "<u8").reshape(PROMPT, 4)[:, :1]
    right = (engine.memory.view(np.uint64) == words).all(axis=1)[: answer.hit_count]
    return there_s - begin_s, end_s - there_s, min(count, int(right.sum()))


@dataclass
class Asker:
    """Another engine, in a process of its own as engines are, that asks for the same prompt."""

    pipe: Connection

    def lines(self, case: str) -> Iterator[Line]:
        """What came out since the last time."""
        self.pipe.send("report")
        waits_ms = np.array(self.pipe.recv()) * 1e3
        metric = f"query of {RESIDENT} resident"
        yield Line(case, f"{metric}, p50", float(np.median(waits_ms)), "ms")
        yield Line(case, f"{metric}, p99", float(np.quantile(waits_ms, 0.99)), "ms", QUERY_MS)

    def stop(self) -> int:
        """End it; returns how often the prompt was not whole."""
        self.pipe.send("stop")
        return int(self.pipe.recv())


def ask(pipe: Connection, address: str) -> None:
    """The process: save a prompt, ask for it again and again until told to stop."""
    blob = daemons.hashes("always", RESIDENT)
    waits_s: list[float] = []
    missed = 0
    with daemons.engine(address, blocks=RESIDENT, page_bytes=SMALL_PAGE_BYTES) as engine:
        job = SaveJob(0, "always", 0, 32, blob, pack(range(RESIDENT)))
        engine.worker.save(job, 0, 0, 0).result(WAIT_S)
        pipe.send("ready")
        while True:
            begin_s = time.perf_counter()
            answer = engine.scheduler.query("always", 32, blob).result(WAIT_S)
            waits_s.append(time.perf_counter() - begin_s)
            missed += answer.hit_count < RESIDENT
            if pipe.poll(PAUSE_S):
                if pipe.recv() == "stop":
                    pipe.send(missed)
                    return
                pipe.send(waits_s)
                waits_s = []


@contextlib.contextmanager
def asking(address: str) -> Iterator[Asker]:
    """Run one."""
    ours, theirs = multiprocessing.Pipe()
    with daemons.spawned(ask, theirs, address):
        theirs.close()  # so that its end is seen here
        ours.recv()
        yield Asker(ours)


def measure(folder: Path, prompts: int, ring: str) -> Iterator[Line]:
    """All of it."""
    pool_bytes = POOL_PROMPTS * PROMPT * PAGE_BYTES + (64 << 20)
    disk_bytes = (prompts + 4) * PROMPT * PAGE_BYTES
    arguments = ["--pool-size", str(pool_bytes), "--slab-size", "16mb", "--http-addr", "off"]
    arguments += ["--ssd-cache-path", str(folder / "trikv.ssd"), "--ssd-ring", ring]
    arguments += ["--ssd-cache-capacity", str(disk_bytes), "--drain-seconds", "60"]
    gib = prompts * PROMPT * PAGE_BYTES / 2**30
    case = f"{prompts} prompts of {PROMPT} x 2 MiB"
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(daemons.daemon(*arguments))
        engine = stack.enter_context(daemons.engine(address, blocks=PROMPT, page_bytes=PAGE_BYTES))
        asker = stack.enter_context(asking(address))
        time.sleep(2)
        yield from asker.lines(f"{case}, at rest")
        begin_s = time.perf_counter()
        for prompt in range(prompts):
            save(engine, prompt)
        saved_s = time.perf_counter() - begin_s
        yield Line(case, "saved, the pool being smaller", gib / saved_s, "GiB/s")
        yield from asker.lines(f"{case}, written")
        wait_s = load_s = 0.0
        right = 0
        for prompt in range(prompts):
            waited, loaded, count = load(engine, prompt)
            wait_s, load_s, right = wait_s + waited, load_s + loaded, right + count
        yield from asker.lines(f"{case}, read")
        yield Line(case, "blocks back with right bytes", right, "")
        back_gib = right * PAGE_BYTES / 2**30
        yield Line(case, "SSD to pool", back_gib / wait_s, "GiB/s")
        yield Line(case, "SSD to engine", back_gib / (wait_s + load_s), "GiB/s")
        yield Line(case, "resident prompt not whole", asker.stop(), "", 0)
        lost = daemons.status(address)["counters"]["trikv_evicted_unwritten_blocks_total"]
        yield Line(case, "blocks evicted before they were written", lost, "")


def main() -> int:
    """Run and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--ring", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        lines = list(measure(Path(folder), options.prompts, options.ring))
    (print_json if options.json else lambda _, rows: print_table(rows))("below", lines)
    return int(any(line.is_ok is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
