"""`trikv replay`: hit rates of traces at several capacities, policies and ways to share.

Decided here: which cases are run, and how they are shown. This file does not know how a request is
replayed, nor how a file is read.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from trikv.cli.made import KINDS, make_trace
from trikv.cli.rerun import Case, Outcome, Service, run
from trikv.cli.traces import MADE, Trace, TraceError, ceiling, interleave, read_trace
from trikv.core.policies import DEFAULT, MAKERS
from trikv.options import read_bytes

CAPACITIES: Final = "2%,5%,10%,20%,40%,100%"
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Job:
    """One trace and one case, as it goes to a process of its own."""

    trace: Trace
    case: Case
    ceiling: float
    distinct: int
    service: Service


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trikv replay`."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help=f"a file, or {MADE}KIND[:SEED] with KIND of {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--capacity",
        default=CAPACITIES,
        metavar="LIST",
        help="of all pools together: shares of the distinct blocks (10%%), blocks "
        f"(5000) or sizes (30gb) [{CAPACITIES.replace('%', '%%')}]",
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT,
        metavar="LIST",
        help=f"of {', '.join(MAKERS)}, or all [{DEFAULT}]",
    )
    parser.add_argument(
        "--engines", type=int, default=1, metavar="N", help="engines that take requests in turn [1]"
    )
    parser.add_argument(
        "--pools",
        default="shared",
        metavar="LIST",
        help="shared, private (each engine its part of the capacity), or both [shared]",
    )
    parser.add_argument(
        "--by-session",
        action="store_true",
        help="a session stays with its engine, where the trace names sessions",
    )
    parser.add_argument(
        "--ranks",
        default="1",
        metavar="LIST",
        help="every block stored once a rank, e.g. 1,8 for MLA both ways [1]",
    )
    parser.add_argument(
        "--interleave",
        type=int,
        default=0,
        metavar="N",
        help="run N sessions at a time that were recorded one after another",
    )
    _add_ssd(parser)
    _add_service(parser)
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes [one a core]",
    )
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    parser.add_argument("--plot", metavar="FILE", help="hit rate against capacity: .png or .svg")


def _add_ssd(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ssd",
        default="0",
        metavar="LIST",
        help="of the disks below all pools together, spelled as --capacity; 0: none [0]",
    )
    parser.add_argument(
        "--ssd-write-through",
        action="store_true",
        help="disks get every block, not only those that are used again or would be evicted",
    )


def _add_service(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill",
        type=float,
        default=10_000,
        metavar="TOKENS",
        help="tokens a second that an engine computes [10000]",
    )
    parser.add_argument(
        "--load",
        type=read_bytes,
        default="25gb",
        metavar="SIZE",
        help="bytes a second that it loads [25gb]",
    )
    parser.add_argument(
        "--ssd-read",
        type=read_bytes,
        default="2.5gb",
        metavar="SIZE",
        help="bytes a second that a disk reads [2.5gb]",
    )
    parser.add_argument(
        "--token-size",
        type=read_bytes,
        default="128kb",
        metavar="SIZE",
        help="of a token's keys and values [128kb]",
    )


def replay(given: argparse.Namespace) -> None:
    """Run all cases and show them.

    Raises:
        TraceError: a trace or an option cannot be used; one line.
    """
    draw = _drawer() if given.plot else None
    jobs = [job for name in given.traces for job in _jobs(name, given)]
    rows = []
    with _Progress(len(jobs), is_shown=sys.stderr.isatty()) as progress:
        for row in _results(jobs, given.jobs):
            progress.step()
            rows.append(row)
            if given.json:
                print(json.dumps(row), flush=True)
    if not given.json:
        print("\n".join(render(rows)))
    if draw is not None:
        draw(rows, given.plot)


def _drawer() -> Any:  # noqa: ANN401
    try:
        from trikv.cli.plot import draw  # noqa: PLC0415  # an optional library
    except ImportError:
        raise TraceError("--plot needs matplotlib: pip install 'trikv[replay]'") from None
    return draw


def _jobs(name: str, given: argparse.Namespace) -> Iterator[_Job]:
    trace = make_trace(name) if name.startswith(MADE) else read_trace(name)
    if trace.asked == 0:
        raise TraceError(f"{name}: nothing is asked for")
    if trace.is_cut:
        print(f"{name}: its last line was cut off and is left out", file=sys.stderr)
    if given.interleave:
        trace = interleave(trace, given.interleave)
    service = Service(given.prefill, given.load, given.token_size, given.ssd_read)
    top, distinct = ceiling(trace), trace.distinct
    sizes = distinct, given.token_size * trace.block_tokens
    pairs = itertools.product(
        _capacities("--capacity", given.capacity, 1, *sizes),
        _capacities("--ssd", given.ssd, 0, *sizes),
    )
    for blocks, ssd_blocks in pairs:
        for pools in _words(given.pools, {"shared": 1, "private": given.engines}, "--pools"):
            for ranks in _words(given.ranks, {str(one): one for one in range(1, 65)}, "--ranks"):
                for policy in _words(given.policy, {one: one for one in MAKERS}, "--policy"):
                    case = Case(
                        blocks,
                        policy,
                        given.engines,
                        pools,
                        ranks,
                        by_session=given.by_session,
                        ssd_blocks=ssd_blocks,
                        write_through=given.ssd_write_through,
                    )
                    yield _Job(trace, case, top, distinct, service)


def _capacities(option: str, text: str, least: int, distinct: int, block_bytes: int) -> list[int]:
    found = []
    for word in text.split(","):
        try:
            if word.endswith("%"):
                found.append(round(distinct * float(word[:-1]) / 100))
            elif word.isdigit():
                found.append(int(word))
            else:
                found.append(read_bytes(word) // block_bytes)
        except ValueError:
            raise TraceError(f"{option} {word}: expected 10%, 5000 or 30gb") from None
    return [max(least, blocks) for blocks in found]


def _words(text: str, known: dict[str, Any], option: str) -> list[Any]:
    words = list(known) if text == "all" else text.split(",")
    for word in words:
        if word not in known:
            raise TraceError(f"{option} {word}: expected some of {', '.join(known)}")
    return [known[word] for word in words]


def _results(jobs: list[_Job], processes: int) -> Iterator[Row]:
    """Rows in the order of the jobs."""
    if processes <= 1 or len(jobs) <= 1:
        yield from map(_run, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=context) as pool:
        yield from pool.map(_run, jobs)


def _run(job: _Job) -> Row:
    return _row(job, run(job.trace, job.case))


def _row(job: _Job, outcome: Outcome) -> Row:
    trace, case = job.trace, job.case
    asks = ~trace.is_save
    none = np.zeros_like(outcome.hits)
    times_s = job.service.times_s(trace, outcome.hits, outcome.ssd_hits)[asks]
    cold_s = job.service.times_s(trace, none, none)[asks]
    return {
        "trace": trace.name,
        "requests": int(asks.sum()),
        "blocks_asked": trace.asked,
        "blocks_distinct": job.distinct,
        "ceiling": round(job.ceiling, 6),
        "capacity_blocks": outcome.blocks,
        "capacity_share": round(case.blocks / job.distinct, 4),
        "ssd_blocks": outcome.ssd_blocks,
        "policy": case.policy,
        "engines": case.engines,
        "pools": case.pools,
        "ranks": case.ranks,
        "hit_rate": round(int(outcome.hits.sum()) / trace.asked, 6),
        "ssd_hit_rate": round(int(outcome.ssd_hits.sum()) / trace.asked, 6),
        "ssd_written": outcome.written,
        "ssd_read": outcome.read,
        "ttft_mean_s": round(float(times_s.mean()), 5),
        "ttft_p50_s": round(float(np.median(times_s)), 5),
        "ttft_p99_s": round(float(np.quantile(times_s, 0.99)), 5),
        "ttft_cold_mean_s": round(float(cold_s.mean()), 5),
        "evicted": outcome.evicted,
        "refused": outcome.refused,
        "events": outcome.events,
        "events_per_cpu_s": round(outcome.events / outcome.cpu_s) if outcome.cpu_s else 0,
    }


def render(rows: Iterable[Row]) -> list[str]:
    """The table, in 80 columns."""
    lines: list[str] = []
    trace = None
    for row in rows:
        if row["trace"] != trace:
            trace = row["trace"]
            lines += [
                *([""] if lines else []),
                f"{trace}: {row['requests']} requests, {row['blocks_asked']} blocks asked, "
                f"{row['blocks_distinct']} distinct",
                f"ceiling {row['ceiling']:.4f}; TTFT without a cache "
                f"{row['ttft_cold_mean_s'] * 1e3:.0f} ms mean (estimated, no queue)",
                f"{'capacity':>8} {'blocks':>9}  {'pools':<9}{'ranks':<6}{'policy':<15}"
                f"{'hit rate':>9}{'of ceiling':>11}{'TTFT ms':>9}",
            ]
        of_ceiling = row["hit_rate"] / row["ceiling"] if row["ceiling"] else 1.0
        pools = "shared" if row["pools"] == 1 else f"{row['pools']} apart"
        lines.append(
            f"{row['capacity_share']:>8.1%} {row['capacity_blocks']:>9}  {pools:<9}"
            f"{row['ranks']:<6}{row['policy']:<15}{row['hit_rate']:>9.4f}{of_ceiling:>11.1%}"
            f"{row['ttft_mean_s'] * 1e3:>9.0f}"
        )
        if row["ssd_blocks"]:
            lines.append(
                f"{'':>8} {row['ssd_blocks']:>9}  on disk: {row['ssd_hit_rate']:.4f} of the blocks "
                f"came from it; wrote {row['ssd_written']}, read {row['ssd_read']}"
            )
    return lines


class _Progress:
    """A bar on the terminal, gone at the end."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._total, self._done, self._is_shown = total, 0, is_shown

    def __enter__(self) -> Self:
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def step(self) -> None:
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._is_shown and self._total:
            bar = "#" * (40 * self._done // self._total)
            print(f"\r[{bar:<40}] {self._done}/{self._total}", end="", file=sys.stderr, flush=True)
