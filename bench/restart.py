"""How long engines miss their cache when the daemon ends and another one starts on a kept pool.

    python -m bench.restart [--json] [--pool-gib 4] [--folder /dev/shm/trikv-bench] [--lives 3]

One engine stays: the client that the connector uses, which attaches again by itself. It has filled
the pool; then the daemon is killed (SIGKILL) or replaced (`--takeover`), another one is started at
once, and the engine asks until it finds its first prompt again. All blocks of some prompts are
loaded and compared afterwards. Needs twice the pool's size of free memory for a moment only when
the folder already holds another pool.
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as LateError
from pathlib import Path

import numpy as np

from bench import daemons
from bench.lines import Line, print_json, print_table
from trikv.connector.calls import pack
from trikv.connector.client import CallError
from trikv.connector.jobs import LoadJob, SaveJob

PAGE_BYTES = 2 << 20
PROMPT = 32
FIRST_HIT_S = 5.0
PATIENCE_S = 60.0
FILLED = 0.9


class Host:
    """A daemon on a kept pool, started again and again."""

    def __init__(self, folder: Path, pool_bytes: int, address: str) -> None:
        self.address = address
        arguments = ["--persist", str(folder), "--http-addr", "off", "--pool-size", str(pool_bytes)]
        self._command = daemons.command(address, *arguments)
        self._children: list[daemons.Child] = []

    def start(self, *more: str) -> None:
        """Begin to start a daemon; does not wait for it."""
        self._children.append(daemons.start([*self._command, *more]))

    @property
    def pid_before(self) -> int:
        """The daemon before the one that is starting."""
        return self._children[-2].pid

    def kill(self) -> None:
        """SIGKILL."""
        self._children[-1].send_signal(signal.SIGKILL)
        self._children[-1].wait()

    def close(self) -> None:
        """End all of them."""
        for child in self._children:
            child.terminate()
        for child in self._children:
            child.wait(60)


def blob_of(prompt: int) -> bytes:
    """The hashes of a prompt."""
    return daemons.hashes(f"prompt {prompt}", PROMPT)


def pages_of(prompt: int) -> np.ndarray:
    """The bytes of its blocks: the hash, again and again."""
    words = np.frombuffer(blob_of(prompt), "<u8").reshape(PROMPT, 4)[:, :1]
    return np.repeat(words, PAGE_BYTES // 8, axis=1).view(np.uint8)


def save(engine: daemons.Engine, prompt: int) -> None:
    """Save a prompt whole."""
    engine.memory[:PROMPT] = pages_of(prompt)
    job = SaveJob(0, f"save {prompt}", 0, 32, blob_of(prompt), pack(range(PROMPT)))
    engine.worker.save(job, 0, 0, 0).result(PATIENCE_S)


def ask(engine: daemons.Engine, prompt: int, name: str) -> tuple[int, int]:
    """Blocks found and lease; nothing while no daemon answers."""
    with contextlib.suppress(CallError, LateError):
        answer = engine.scheduler.query(name, 32, blob_of(prompt)).result(1)
        return answer.hit_count, answer.lease
    return 0, 0


def wrong_blocks(engine: daemons.Engine, prompt: int) -> int:
    """Load a prompt and compare; missing blocks count."""
    count, lease = ask(engine, prompt, f"load {prompt}")
    engine.memory[:PROMPT] = 0
    attached = engine.worker.attached
    assert attached is not None
    job = LoadJob(f"load {prompt}", lease, 0, pack(range(count)))
    failed = engine.worker.load(job, attached, PATIENCE_S, 0).result(PATIENCE_S)
    engine.scheduler.release([f"load {prompt}"])
    right = (engine.memory[:count] == pages_of(prompt)[:count]).all(axis=1)
    return PROMPT - int(right.sum()) + len(failed)


def first_hit_s(engine: daemons.Engine, begin_s: float, turn: int) -> float:
    """Ask until the first prompt is found whole."""
    while time.perf_counter() < begin_s + PATIENCE_S:
        name = f"turn {turn} {time.perf_counter_ns()}"
        count, _ = ask(engine, 0, name)
        if count == PROMPT:
            engine.scheduler.release([name])
            return time.perf_counter() - begin_s
        time.sleep(0.005)
    raise RuntimeError("no hit came back")


def measure(folder: Path, pool_bytes: int, lives: int) -> Iterator[Line]:
    """Fill, then end it `lives` times each way."""
    prompts = int(FILLED * pool_bytes) // (PROMPT * PAGE_BYTES)
    host = Host(folder, pool_bytes, f"unix:{folder}/run/trikv.sock")
    case = f"pool of {pool_bytes / 2**30:g} GiB, {prompts * PROMPT} blocks of 2 MiB"
    try:
        begin_s = time.perf_counter()
        host.start()
        with daemons.engine(host.address, blocks=PROMPT, page_bytes=PAGE_BYTES) as engine:
            fresh_s = time.perf_counter() - begin_s
            for prompt in range(prompts):
                save(engine, prompt)
            took: dict[str, list[float]] = {"SIGKILL": [], "--takeover": []}
            wrong = 0
            for life in range(lives):
                for way, times_s in took.items():
                    begin_s = time.perf_counter()
                    if way == "SIGKILL":
                        host.kill()
                        host.start()
                    else:
                        host.start("--takeover")
                        while pid_serving(host.address) in {0, host.pid_before}:
                            time.sleep(0.005)
                    times_s.append(first_hit_s(engine, begin_s, life))
                    for prompt in range(0, prompts, max(1, prompts // 16)):
                        wrong += wrong_blocks(engine, prompt)
            yield Line(case, "first daemon, memory taken and an engine attached", fresh_s, "s")
            for way, times_s in took.items():
                metric = f"{way} to first hit, median of {lives}"
                yield Line(case, metric, statistics.median(times_s), "s", FIRST_HIT_S)
            yield Line(case, "blocks missing or wrong, of those looked at", wrong, "", 0)
    finally:
        host.close()


def pid_serving(address: str) -> int:
    """Who serves now; 0: nobody."""
    with contextlib.suppress(OSError):
        return daemons.pid_of(address)
    return 0


def main() -> int:
    """Run and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--pool-gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(f"/dev/shm/trikv-bench-{os.getpid()}"))
    parser.add_argument("--lives", type=int, default=3)
    options = parser.parse_args()
    try:
        lines = list(measure(options.folder, int(options.pool_gib * 2**30), options.lives))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    (print_json if options.json else lambda _, rows: print_table(rows))("restart", lines)
    return int(any(line.is_ok is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
