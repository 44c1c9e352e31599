"""What the hit-rate windows cost, and how far their estimates are off.

    python -m bench.ceiling [--json] [--seeds 100]

Costs are processor time of the thread: on a shared machine wall time says little. The baseline of
the cost is the package's own `add`, one block at a time.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from hyperloglog import HyperLogLog

from bench.lines import Line, print_json, print_table
from trikv.core.windows import NAMESPACES_MAX, Windows
from trikv.core.words import Words

LENGTHS_S: Final = (900.0, 3600.0, 86400.0)
PREFIX: Final = 512
ROUNDS: Final = 40
QUERIES: Final = 200  # a round: what a busy second brings
ERROR_RATE: Final = 0.0058  # the package makes 2^15 registers of it
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)

ERROR_PERCENT_TARGET: Final = 0.85
MEMORY_MIB_TARGET: Final = 1.0
COST_US_TARGET: Final = 0.3
PAUSE_MS_TARGET: Final = 10.0


def words(rng: np.random.Generator, count: int) -> Words:
    """Hashes as an engine's: random bits."""
    return np.frombuffer(rng.bytes(32 * count), "<u8").reshape(count, 4)


def took_us(call: Callable[[], object]) -> float:
    """Processor time of one call in microseconds."""
    begin_s = time.thread_time()
    call()
    return (time.thread_time() - begin_s) * 1e6


def errors(seeds: int) -> Iterator[Line]:
    """Root mean square of the relative error, through the windows themselves.

    Each block is asked for twice: the windows never say that more are distinct than were asked for,
    which would hide half of the error.
    """
    for size in SIZES:
        off = []
        for seed in range(seeds):
            windows = Windows((900.0,), now_s=0.0, namespaces_max=0)
            blocks = words(np.random.default_rng(seed), size)
            for first in (*range(0, size, 65_536), *range(0, size, 65_536)):  # twice: N is 2 U
                windows.record("a", seed, blocks[first : first + 65_536], (0,), now_s=0.0)
            off.append(windows.read(now_s=0.0)[0].distinct_blocks / size - 1)
        error = 100 * float(np.sqrt(np.mean(np.square(off))))
        yield Line(f"{size:,} blocks, {seeds} seeds", "rms error", error, "%", ERROR_PERCENT_TARGET)


def memory() -> Iterator[Line]:
    """Registers and numbers."""
    day = Windows((86400.0,), now_s=0.0).memory_bytes / 2**20
    every = Windows(LENGTHS_S, now_s=0.0).memory_bytes / 2**20
    yield Line("24 h window", "memory", day, "MiB", MEMORY_MIB_TARGET)
    yield Line("all windows, most namespaces", "memory", every * (1 + NAMESPACES_MAX), "MiB")


def costs() -> Iterator[Line]:
    """Counting a query of new blocks in three windows, of everyone and of its namespace."""
    rng = np.random.default_rng(1)
    windows = Windows(LENGTHS_S, now_s=0.0)
    records, rounds, tends = [], [], []
    for _ in range(ROUNDS):
        total = 0.0
        for _ in range(QUERIES):
            message = words(rng, PREFIX)

            def record(message: Words = message) -> None:
                windows.record("a", 1, message, (PREFIX // 3,), now_s=0.0)

            records.append(took_us(record))
            total += records[-1]
        tends.append(took_us(lambda: windows.tend(now_s=0.0)))
        rounds.append((total + tends[-1]) / QUERIES / PREFIX)
    package, blocks = HyperLogLog(ERROR_RATE), [bytes(row) for row in words(rng, 2_000)]
    one_by_one = took_us(lambda: [package.add(block) for block in blocks]) / len(blocks)
    case = f"queries of {PREFIX} blocks"
    cost = statistics.median(rounds)
    yield Line(case, "cost a block", cost, "us", COST_US_TARGET, baseline=one_by_one)
    yield Line(case, "a query that is kept", statistics.median(records), "us")
    longest = max(*records, *tends) / 1e3
    yield Line(case, "longest pause", longest, "ms", PAUSE_MS_TARGET)


def pauses() -> Iterator[Line]:
    """What a scrape and a save cost with windows of everyone and of the most namespaces."""
    rng = np.random.default_rng(1)
    windows = Windows(LENGTHS_S, now_s=0.0)
    for step in range(12):  # every slot of the shortest window is in use
        for name in range(NAMESPACES_MAX):
            windows.record(str(name), name, words(rng, 40_000), (0,), now_s=75.0 * step)
    now_s = 75.0 * 12
    reads = [took_us(lambda: windows.read(now_s=now_s)) / 1e3 for _ in range(ROUNDS)]
    dumps = [took_us(lambda: windows.dump(now_s=now_s, wall_s=0.0)) / 1e3 for _ in range(ROUNDS)]
    case = f"{1 + NAMESPACES_MAX} x {len(LENGTHS_S)} windows"
    yield Line(case, "read, for a scrape", statistics.median(reads), "ms", PAUSE_MS_TARGET)
    yield Line(case, "copy, for the file", statistics.median(dumps), "ms", PAUSE_MS_TARGET)


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=100)
    given = parser.parse_args()
    lines = [*errors(given.seeds), *memory(), *costs(), *pauses()]
    if given.json:
        print_json("ceiling", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
