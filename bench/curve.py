"""The miss-ratio curve beside replay: error, memory and time, on traces.

    python -m bench.curve [--json] TRACE...

Each trace is replayed at six capacities, which is the baseline, and fed to the curve once.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Final

from bench.lines import Line, print_json, print_table
from trikv.cli.made import make_trace
from trikv.cli.rerun import Case, run
from trikv.cli.traces import MADE, Trace, read_trace
from trikv.core.curve import Curve
from trikv.core.policies import DEFAULT
from trikv.core.words import SpaceId

SHARES: Final = (0.02, 0.05, 0.1, 0.2, 0.4, 1.0)
BLOCK_BYTES: Final = 1 << 20
ERROR_TARGET: Final = 0.02


def measure(trace: Trace) -> Iterator[Line]:
    """Feed the curve as fast as it goes, then replay."""
    curve = Curve(2 * trace.distinct * BLOCK_BYTES)
    words, starts = trace.words(), trace.starts.tolist()
    begin_s = time.process_time()
    for row in range(len(trace)):
        mine = words[starts[row] : starts[row + 1]]
        curve.use(SpaceId(1), mine, BLOCK_BYTES, is_ask=not trace.is_save[row])
    took_s = time.process_time() - begin_s
    errors = []
    for share in SHARES:
        blocks = max(1, round(share * trace.distinct))
        told = curve.hit_rates([blocks * BLOCK_BYTES])[0]
        found = float(run(trace, Case(blocks, DEFAULT)).hits.sum() / trace.asked)
        errors.append(abs(told - found))
        yield Line(trace.name, f"hit rate at {share:.0%}", told, "", baseline=found)
    yield Line(trace.name, "largest error", max(errors), "", ERROR_TARGET)
    yield Line(trace.name, "share of blocks followed", curve.rate, "")
    yield Line(trace.name, "memory", curve.bytes_max / 2**20, "MiB", 4)
    yield Line(trace.name, "time, cpu", took_s / trace.asked * 1e6, "us/block")
    yield Line(trace.name, "time, cpu, a request", took_s / len(trace) * 1e6, "us")


def main() -> None:
    """Measure each trace and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    options = parser.parse_args()
    for name in options.traces:
        lines = list(measure(make_trace(name) if name.startswith(MADE) else read_trace(name)))
        if options.json:
            print_json("curve", lines)
        else:
            print_table(lines)


if __name__ == "__main__":
    main()
