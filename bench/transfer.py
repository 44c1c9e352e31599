"""How fast blocks get from a GPU into the pool and back, beside one large copy.

    python -m bench.transfer [--json] [--layouts all|NAME,...] [--mib 128,512,2048] [--rounds 21]
        [--load] [--plot FILE.png [--lines FILE.jsonl]] [--pegaflow FOLDER]
    python -m bench.transfer --ranks 8 [--calls 2000] [--json]     (needs no GPU: see `bench.ranks`)

A daemon with a copier, and an engine process with real KV tensors, through the connector's own
worker. `save` and `load` are the copier's: from the arrival of the order to the last byte, the
median of all rounds; `with its call` is what the engine sees, from the call to the answer. Blocks
are drawn at random, anew in each round, and the pool is full and churned after the first rounds.
The base is one copy of as many bytes between a plain buffer and registered memory, taken in turns
with ours; and so is PegaFlow, with the same tensors in the layouts that it knows, where its wheel
is installed or unpacked in a folder: of that only the time with its call is seen. An engine saves
while its forward still runs: `save behind a forward` is from that one's end to the answer, as both
connectors do it: ours has sent its call by then, PegaFlow's waits for the GPU first. Bytes are
compared on the GPU in every case. `--load`: the same while another process multiplies matrices
without a pause, with its speed beside what it has just before and after.
"""

import argparse
import contextlib
import json
import mmap
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from bench import daemons, pegaflow, ranks
from bench.busy import computing
from bench.gpu_engine import LAYOUTS, Forward, GpuEngine, Tensors, gpu_engine
from bench.lines import Line, print_json, print_table

POOL = "12gb"
TARGETS = {512: 0.97, 128: 0.92}  # MiB and more: ratio to one large copy
PEER_TARGETS = {"block outermost": 1.05, "K and V apart": 3.0}
"""By layouts that PegaFlow knows: ratio to its default way."""
LOADED_MIB, LOADED_S, LOADED_TURNS = 1024, 0.5, 7
BEGUN_S = 0.1


@dataclass
class Ceiling:
    """One large copy of registered memory."""

    host: torch.Tensor
    near: torch.Tensor

    @classmethod
    def of(cls, size: int) -> "Ceiling":
        """Buffers for up to `size` bytes."""
        memory = mmap.mmap(-1, size)
        memory.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        host.zero_()
        code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
        if code:
            raise RuntimeError(f"cudaHostRegister: {code}")
        return cls(host, torch.zeros(size, dtype=torch.uint8, device="cuda"))

    def seconds(self, size: int, *, into_engine: bool) -> float:
        """Time of one copy."""
        host, near = self.host[:size], self.near[:size]
        begin_s = time.perf_counter()
        if into_engine:
            near.copy_(host, non_blocking=True)
        else:
            host.copy_(near, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s


@dataclass
class Times:
    """Seconds of one case."""

    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    query: list[float] = field(default_factory=list)
    copied: list[dict[str, float]] = field(default_factory=list)  # the copier's, of each round
    save_base: list[float] = field(default_factory=list)
    load_base: list[float] = field(default_factory=list)
    behind: list[float] = field(default_factory=list)  # saves, from the end of a forward on
    save_peer: list[float] = field(default_factory=list)  # PegaFlow's, with its call
    behind_peer: list[float] = field(default_factory=list)
    load_peer: list[float] = field(default_factory=list)


def rounds(
    engine: GpuEngine,
    ceiling: Ceiling,
    peer: pegaflow.Rank | None,
    count: int,
    goes_on: Callable[[int], bool],
    case: str,
) -> Times:
    """Save and load `count` random blocks, in turns with the base and the peer."""
    times = Times()
    size, forward = count * engine.page_bytes, Forward()
    number = 0
    while goes_on(number):
        ids = random.Random(f"{case}/{number}").sample(range(engine.blocks), 2 * count)
        source, target = ids[:count], ids[count:]
        name = f"{case}/{number}/{time.monotonic_ns()}"
        before = copied_s(engine.address)
        times.save_base.append(ceiling.seconds(size, into_engine=False))
        times.save.append(engine.save(name, source))
        times.load_base.append(ceiling.seconds(size, into_engine=True))
        query_s, load_s = engine.load(name, target)
        times.query.append(query_s)
        times.load.append(load_s)
        after = copied_s(engine.address)
        times.copied.append({way: after[way] - before[way] for way in after})
        times.behind.append(engine.save(f"{name}/behind", source, forward))
        if number == 0 and not engine.equal(source, target):
            raise RuntimeError(f"{case}: bytes differ")
        if peer is not None:
            times.save_peer.append(peer.save(name, source))
            times.behind_peer.append(peer.save(f"{name}/behind", source, forward))
            if number == 0:
                engine.clear(target)
            times.load_peer.append(peer.load(name, target))
            if number == 0 and not engine.equal(source, target):
                raise RuntimeError(f"{case}: bytes differ after PegaFlow's load")
        number += 1
    return times


def copied_s(address: str) -> dict[str, float]:
    """Seconds that copiers have spent, as the daemon counts them."""
    rows = daemons.status(address)["copiers"]
    return {name: sum(one[f"{name}Seconds"] for one in rows) for name in ("save", "load")}


def lines_of(times: Times, case: str, size: int, target: float | None) -> Iterator[Line]:
    """Both directions and the query of one case."""
    for name, taken, base, peers in (
        ("save", times.save, times.save_base, times.save_peer),
        ("load", times.load, times.load_base, times.load_peer),
    ):
        speed, ceiling = (size / statistics.median(one) / 1e9 for one in (taken, base))
        copied = statistics.median(one[name] for one in times.copied)
        if peers:
            theirs = size / statistics.median(peers) / 1e9
            metric, best = f"{name}, beside PegaFlow's with its call", size / copied / 1e9
            yield Line(case, metric, best, "GB/s", None, theirs, more_is_better=True)
            metric, least = f"{name} with its call, beside PegaFlow's", peer_target(case, name)
            yield Line(case, metric, speed, "GB/s", least, theirs, more_is_better=True)
        yield Line(case, name, size / copied / 1e9, "GB/s", target, ceiling, more_is_better=True)
        yield Line(case, f"{name} with its call", speed, "GB/s", None, ceiling, more_is_better=True)
        call_us = (statistics.median(taken) - copied) * 1e6
        yield Line(case, f"{name}: the call", call_us, "us")
        yield Line(case, f"{name}: the slowest", max(taken) * 1e6, "us")
    behind = size / statistics.median(times.behind) / 1e9
    yield Line(case, "save behind a forward", behind, "GB/s")
    if times.behind_peer:
        theirs = size / statistics.median(times.behind_peer) / 1e9
        metric, least = "save behind a forward, beside PegaFlow's", peer_target(case, "behind")
        yield Line(case, metric, behind, "GB/s", least, theirs, more_is_better=True)
    yield Line(case, "query", statistics.median(times.query) * 1e6, "us")


def idle_target(mebibytes: int) -> float | None:
    """What the ratio to one large copy should reach."""
    return next((target for least, target in TARGETS.items() if mebibytes >= least), None)


def peer_target(case: str, what: str) -> float | None:
    """What the ratio to PegaFlow should reach: of loads, and of saves as engines have them."""
    return None if what == "save" else PEER_TARGETS[case.rpartition(",")[0]]


def peer_layers(layout: str, tensors: Tensors, blocks: int) -> Tensors:
    """Tensors as PegaFlow wants them: all layers of a block as one where they lie together."""
    if layout != "block outermost":
        return tensors
    first = tensors["l0"]
    rows = first.as_strided((blocks, first.stride(0)), (first.stride(0), 1))
    return {pegaflow.LAYER: rows}


def measure(args: argparse.Namespace) -> Iterator[Line]:
    """All cases."""
    sizes = [int(one) for one in args.mib.split(",")]
    names = list(LAYOUTS) if args.layouts == "all" else args.layouts.split(",")
    most = max(*sizes, LOADED_MIB if args.load else 0)
    ceiling = Ceiling.of(most * 1_100_000)
    with (
        daemons.daemon("--pool-size", args.pool) as address,
        pegaflow.beside(args.pool) as their_address,
    ):
        for layout in names:
            page = sum(one.numel() * one.element_size() for one in LAYOUTS[layout](1).values())
            blocks = 2 * most * (1 << 20) // page + 64
            tensors = LAYOUTS[layout](blocks)
            with gpu_engine(address, tensors, blocks, model=layout) as engine:
                wait_for_pool(address)
                peer = None
                if their_address and layout in PEER_TARGETS:
                    theirs = peer_layers(layout, tensors, blocks)
                    peer = pegaflow.Rank(their_address, theirs, blocks)
                for mebibytes in sizes:
                    count = max(1, mebibytes * (1 << 20) // page)
                    case, size = f"{layout}, {mebibytes} MiB", count * page
                    times = rounds(engine, ceiling, peer, count, lambda n: n < args.rounds, case)
                    yield from lines_of(times, case, size, idle_target(mebibytes))
                if args.load:
                    yield from loaded(engine, ceiling, layout, page)
            del tensors, engine, peer
            torch.cuda.empty_cache()


def loaded(engine: GpuEngine, ceiling: Ceiling, layout: str, page: int) -> Iterator[Line]:
    """One size while another process computes; each direction by itself, in turns with none."""
    count = LOADED_MIB * (1 << 20) // page
    size, case = count * page, f"{layout}, {LOADED_MIB} MiB, busy"
    is_contiguous = layout == "block outermost"
    target, kept = (0.95, 0.97) if is_contiguous else (0.90, 0.95)
    ids = random.Random(case).sample(range(engine.blocks), 2 * count)

    def save() -> None:
        engine.save(f"{case}/{time.monotonic_ns()}", ids[:count], is_alone=False)

    def load() -> None:
        engine.load(f"{case}/first", ids[count:], is_alone=False)

    base = {
        name: statistics.median(ceiling.seconds(size, into_engine=name == "load") for _ in range(5))
        for name in ("save", "load")
    }
    with computing() as other:
        for name, copy in (("save", save), ("load", load)):
            engine.save(f"{case}/first", ids[:count])
            copied, taken_s, alone, beside = 0, 0.0, [other.rate(LOADED_S)], []
            for _ in range(LOADED_TURNS):
                before_s = copied_s(engine.address)[name]
                with repeating(copy) as counts:
                    beside.append(other.rate(LOADED_S))
                copied += counts[0]
                taken_s += copied_s(engine.address)[name] - before_s
                alone.append(other.rate(LOADED_S))
            speed, best = size * copied / taken_s / 1e9, size / base[name] / 1e9
            yield Line(case, name, speed, "GB/s", target, best, more_is_better=True)
            rate, free = statistics.median(beside), statistics.median(alone)
            metric = f"engine during {name}"
            yield Line(case, metric, rate, "TFLOP/s", kept, free, more_is_better=True)


@contextlib.contextmanager
def repeating(work: Callable[[], None]) -> Iterator[list[int]]:
    """Do something again and again beside the block; counts it."""
    counts, over = [0], threading.Event()

    def run() -> None:
        while not over.is_set():
            work()
            counts[0] += 1

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        time.sleep(BEGUN_S)
        try:
            yield counts
        finally:
            over.set()
            running.result()


def wait_for_pool(address: str) -> None:
    """Until the pool is registered: before, the first copies pay for it."""
    deadline_s = time.monotonic() + 120
    while not any(one["registeredBytes"] for one in daemons.status(address)["copiers"]):
        if time.monotonic() > deadline_s:
            raise RuntimeError("the pool was not registered")
        time.sleep(0.2)


SEEN = {
    "save": "save behind a forward, beside PegaFlow's",
    "load": "load with its call, beside PegaFlow's",
}
"""By panel: what an engine sees, and its baseline is what it sees of PegaFlow."""


def plot(lines: list[Line], path: str) -> None:
    """Speed against bytes, a line a layout and direction."""
    import matplotlib  # noqa: PLC0415  # only for this

    matplotlib.use("agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    for panel, (metric, seen_as) in zip(panels, SEEN.items(), strict=True):
        rows, seen = by_layout(lines, metric), by_layout(lines, seen_as)
        for layout, points in rows.items():
            sizes, values, _ = zip(*points, strict=True)
            (line,) = panel.plot(sizes, values, marker="o", markersize=3, label=layout)
            for size, ours, theirs in seen.get(layout, ()):
                panel.plot(size, ours, color=line.get_color(), marker="D", markersize=6)
                panel.plot(size, theirs, color=line.get_color(), marker="X", markersize=7)
        best: dict[int, list[float]] = {}
        for size, _, base in (point for points in rows.values() for point in points):
            best.setdefault(size, []).append(base or 0)
        top = [statistics.median(best[size]) for size in best]
        panel.plot(list(best), top, color="black", linestyle="--", label="one large copy")
        grey = {"color": "grey", "linestyle": "none"}
        panel.plot([], [], marker="D", label="TriKV, as engines see it", **grey)
        panel.plot([], [], marker="X", label="PegaFlow, as engines see it", **grey)
        panel.set(title=metric, xscale="log", xlabel="MiB", ylim=(0, None))
        panel.set_xticks(list(best), [str(size) for size in best])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s")
    figure.legend(*panels[1].get_legend_handles_labels(), fontsize=8, loc="lower center", ncol=5)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(path, dpi=130)


def by_layout(lines: list[Line], metric: str) -> dict[str, list[tuple[int, float, float | None]]]:
    """MiB, GB/s and base of each case of a metric on an idle GPU."""
    points: dict[str, list[tuple[int, float, float | None]]] = {}
    for one in lines:
        if one.metric == metric and "busy" not in one.case:
            layout, _, size = one.case.rpartition(",")
            points.setdefault(layout, []).append((int(size.split()[0]), one.value, one.baseline))
    return points


def read_lines(path: str) -> list[Line]:
    """What a run with --json printed."""
    rows = [json.loads(text) for text in Path(path).read_text().splitlines()]
    return [
        Line(one["case"], one["metric"], one["value"], one["unit"], baseline=one["baseline"])
        for one in rows
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layouts", default="all", help=", ".join(LAYOUTS))
    parser.add_argument("--mib", default="32,128,512,2048")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--pool", default=POOL)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--plot", help="draw a picture")
    parser.add_argument("--lines", help="measure nothing: take what an earlier run printed")
    parser.add_argument("--pegaflow", help="folder of its unpacked wheel")
    parser.add_argument("--ranks", type=int, help="so many ranks on made-up GPUs: Python's share")
    parser.add_argument("--calls", type=int, default=2000, help="queries meanwhile, with --ranks")
    args = parser.parse_args()
    if args.lines:
        plot(read_lines(args.lines), args.plot)
        return
    if args.ranks:
        show = partial(print_json, "transfer") if args.json else print_table
        show(ranks.measure(args.ranks, args.calls))
        return
    if args.pegaflow:
        sys.path.insert(0, args.pegaflow)
    if not torch.cuda.is_available():
        sys.exit("bench.transfer: needs an NVIDIA GPU")
    lines = []
    for line in measure(args):
        lines.append(line)
        if args.json:
            print_json("transfer", [line])
        else:
            print_table([line])
    if args.plot:
        plot(lines, args.plot)


if __name__ == "__main__":
    main()
