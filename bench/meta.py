"""What one metaserver carries: operations a second, bytes an entry, and what a dead node costs.

    python -m bench.meta [--json] [--entries 10000000] [--nodes 64] [--calls 1000]

Two parts. `core`: the index alone, in a process of its own: all entries, node 0 with a million of
them (or a quarter), the rest shared by the others; prefixes of 4,096 hashes, each asked for once
after the index has been filled, so that nothing is warm. `copies`: each block of a prefix has four
owners. `disks`: likewise, and only the last of them has it in memory. `pieces`: every 64 blocks are
of another node. `service`: a real `trikv-meta` with the same
content over TCP on loopback, asked through the client of a daemon. Both sides share this machine's
processors. Needs about 100 bytes an entry in each part, one part at a time.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import capnp
import numpy as np

from bench.core_ops import huge_page_s, resident_bytes
from bench.daemons import serving
from bench.lines import Line, print_json, print_table
from trikv import address as addresses
from trikv.core.adverts import PORTION_KEYS_MAX, Part
from trikv.core.nodes import Node, Nodes
from trikv.core.owners import ROW_BYTES, Owners, capacity_for
from trikv.core.words import Words
from trikv.meta.link import Link, dial
from trikv.meta.messages import NODE
from trikv.streams import Loop

T = TypeVar("T")
ORIGIN: Final = b"bench bench bench..!"
LOCATE: Final = 4_096
PIECE: Final = 64
COPIES: Final = 4
BIG: Final = 1_000_000
PAUSE_MS_TARGET: Final = 10.0
BYTES_TARGET: Final = 100.0
LOCATE_MS_TARGET: Final = 10.0
READY_S: Final = 120.0
LINKS: Final = 8


def words_of(prefix: int, count: int = LOCATE) -> Words:
    """The same random hashes for the same number: splitmix64 of (prefix, block, word)."""
    x = np.arange(count * 4, dtype=np.uint64) + np.uint64(prefix) * np.uint64(PORTION_KEYS_MAX * 4)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(count, 4)


def memory_for(entries: int) -> int:
    """The setting that holds so many."""
    memory = entries * ROW_BYTES
    while capacity_for(memory) < entries:
        memory += 8 << 20
    return memory


class Content:
    """Who holds which prefix, as numbers: node 0 a million blocks, the others the rest."""

    def __init__(self, entries: int, nodes: int) -> None:
        prefixes = entries // LOCATE
        self.big = min(BIG, entries // 4) // LOCATE
        self.prefixes = prefixes
        self.nodes = nodes

    @property
    def entries(self) -> int:
        """Blocks in all."""
        return self.prefixes * LOCATE

    def owner(self, prefix: int) -> int:
        """Its number, from 0."""
        if prefix < self.big:
            return 0
        return 1 + prefix % (self.nodes - 1)

    def ask(self, calls: int) -> list[int]:
        """Prefixes to ask for, each once; none of node 0, who asks."""
        order = np.random.default_rng(5).permutation(np.arange(self.big, self.prefixes))
        return [int(one) for one in order[:calls]]


class Clock:
    """Times of calls of one kind: by the wall, and of this thread's processor.

    On a shared machine only the second says what the code did.
    """

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def call(self, function: Callable[[], T]) -> T:
        """Call and time it."""
        cpu, wall = time.thread_time(), time.perf_counter()
        result = function()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.thread_time() - cpu)
        return result

    def longest(self, case: str, metric: str, target: float | None = None) -> list[Line]:
        """The longest call."""
        return [
            Line(case, f"{metric}{kind}", max(times_s) * 1e3, "ms", target)
            for kind, times_s in (("", self.wall_s), (", cpu", self.cpu_s))
        ]

    def spread(self, case: str, metric: str, target: float) -> list[Line]:
        """Median and 99th percentile."""
        return [
            *spread(case, metric, self.wall_s, target),
            spread(case, f"{metric}, cpu", self.cpu_s, target)[1],
        ]

    def us_a_block(self) -> float:
        """Mean, of the wall."""
        return float(np.mean(self.wall_s)) * 1e6 / LOCATE


def spread(case: str, metric: str, times_s: list[float], target: float | None = None) -> list[Line]:
    """Median and 99th percentile."""
    ms = np.array(times_s) * 1e3
    return [
        Line(case, f"{metric}, p50", float(np.median(ms)), "ms"),
        Line(case, f"{metric}, p99", float(np.percentile(ms, 99)), "ms", target),
    ]


# -- the index alone


def fill(state: Nodes, nodes: list[Node], content: Content, layout: str) -> Clock:
    """Advertise everything."""
    clock = Clock()
    for prefix in range(content.prefixes):
        words, owner = words_of(prefix), content.owner(prefix)
        if layout == "pieces":
            for at in range(0, LOCATE, PIECE):
                node = nodes[(owner + at // PIECE) % len(nodes)]
                state.advertise(node, ORIGIN, words[at : at + PIECE])
            continue
        copies = COPIES if layout in {"copies", "disks"} else 1
        for copy in range(copies):
            node = nodes[owner if copy == 0 else 1 + (owner + copy) % (len(nodes) - 1)]
            is_below = layout == "disks" and copy < copies - 1
            told = functools.partial(state.advertise, node, ORIGIN, words, is_below=is_below)
            clock.call(told)
    return clock


def measure_core(layout: str, entries: int, node_count: int, calls: int) -> list[Line]:
    """One layout of owners, in this process."""
    gc.collect()
    gc.freeze()
    gc.disable()
    content = Content(entries, node_count)
    case = f"core, {layout}, {content.entries}"
    before = resident_bytes()
    state = Nodes(Owners(capacity_for(memory_for(entries)), seed=1), 5.0, 1.0)
    nodes = [state.join(f"10.0.0.{at}:1", 1, [], now_s=0.0) for at in range(node_count)]
    filling = fill(state, nodes, content, layout)
    used = resident_bytes() - before
    lines = [Line(case, "resident size", used / content.entries, "B/entry", BYTES_TARGET)]
    if filling.wall_s:
        lines.append(Line(case, "advertise, mean", filling.us_a_block(), "us/block"))
        first_write_ms = huge_page_s() * 1e3  # memory that is written for the first time
        longest_ms = max(filling.cpu_s) * 1e3
        metric = "advertise 4096, longest, cpu"
        lines.append(Line(case, metric, longest_ms, "ms", baseline=first_write_ms))
    asker = state.join("10.0.1.1:1", 1, [], now_s=0.0)
    asking = Clock()
    for at, prefix in enumerate(content.ask(calls)):
        locate = functools.partial(state.locate, asker, ORIGIN, words_of(prefix), now_s=at * 0.01)
        assert asking.call(locate).block_count == LOCATE
    lines += asking.spread(case, "locate 4096", LOCATE_MS_TARGET)
    if layout == "one owner":
        lines += forget(case, state, nodes[0], content)
    return lines


def forget(case: str, state: Nodes, node: Node, content: Content) -> list[Line]:
    """A node dies; then its memory is taken back; then another withdraws in the ordinary way."""
    held = state.held(node)
    forgetting, sweeping, withdrawing = Clock(), Clock(), Clock()
    forgetting.call(lambda: state.forget(node))
    while not state.owners.is_clean:
        sweeping.call(state.owners.sweep)
    assert len(state.owners) == content.entries - held
    other = state.by_number[2]
    for prefix in [p for p in range(content.prefixes) if content.owner(p) == 1][:100]:
        part = functools.partial(state.withdraw, other, ORIGIN, words_of(prefix))
        withdrawing.call(part)
    return [
        *forgetting.longest(case, f"forget a node of {held}", PAUSE_MS_TARGET),
        Line(case, "take its memory back, in all", sum(sweeping.wall_s) * 1e3, "ms"),
        *sweeping.longest(case, "longest pause of that", PAUSE_MS_TARGET),
        Line(case, "withdraw, mean", withdrawing.us_a_block(), "us/block"),
    ]


# -- a real process


@contextlib.contextmanager
def metaserver(memory: int) -> Iterator[tuple[str, int]]:
    """Run one; yields its address and pid."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "meta.log"
        command = [sys.executable, "-m", "trikv.meta.serve", "--addr", "127.0.0.1:0"]
        command += ["--http-addr", "off", "--memory", str(memory), "--log-format", "json"]
        with serving(command, log, "meta.ready", READY_S) as child:
            ready = next(line for line in log.read_text().splitlines() if "meta.ready" in line)
            yield json.loads(ready)["addr"], child.pid


async def joined(address: str, number: int) -> Link:
    """A node's connection."""
    link = await dial(addresses.parse(address), NODE, f"10.0.0.{number}:1", None)
    await link.join(1, [])
    return link


async def keep_alive(links: list[Link]) -> None:
    """Heartbeats of all nodes, as their daemons would send them."""
    while True:
        await asyncio.sleep(1.0)
        for link in links:
            await link.heartbeat(0)


class Server:
    """The metaserver's process, and how long it computes for a call."""

    def __init__(self, case: str, pid: int) -> None:
        self.case = case
        self.pid = pid

    def cpu_s(self) -> float:
        """Processor time so far."""
        fields = (
            Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        )
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def rate(
        self, metric: str, calls: int, call: Callable[[int], Awaitable[object]]
    ) -> list[Line]:
        """Calls a second of `LINKS` callers, each with one call under way."""
        numbers = iter(range(calls))

        async def caller() -> None:
            for number in numbers:
                await call(number)

        began_s, cpu_s = time.perf_counter(), self.cpu_s()
        await asyncio.gather(*(caller() for _ in range(LINKS)))
        each_us = (self.cpu_s() - cpu_s) / calls * 1e6
        return [
            Line(self.case, metric, calls / (time.perf_counter() - began_s), "1/s"),
            Line(self.case, f"{metric}: server's cpu", each_us, "us/call"),
        ]


async def ask(link: Link, prefixes: list[int]) -> list[float]:
    """Seconds of each locate, one after another."""
    times_s = []
    for prefix in prefixes:
        words = words_of(prefix)
        began_s = time.perf_counter()
        plan = await link.locate(ORIGIN, words)
        times_s.append(time.perf_counter() - began_s)
        assert sum(one.count for one in plan) == LOCATE
    return times_s


async def measure_service(address: str, server: Server, content: Content, calls: int) -> list[Line]:
    """Everything over the wire."""
    async with capnp.kj_loop():
        links = [await joined(address, at) for at in range(content.nodes)]
        beating = asyncio.create_task(keep_alive(links))
        try:
            return await _measure_calls(server, links, content, calls)
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            for link in links:
                link.close()


async def _measure_calls(
    server: Server, links: list[Link], content: Content, calls: int
) -> list[Line]:
    def announce(prefix: int) -> Awaitable[object]:
        part = Part(ORIGIN, words_of(prefix), is_held=True)
        return links[content.owner(prefix)].announce([part])

    case = server.case
    lines = await server.rate("announce 4096", content.prefixes, announce)
    lines.append(Line(case, "announced blocks", lines[0].value * LOCATE, "1/s"))
    asker = links[1]
    prefixes = [one for one in content.ask(2 * calls) if content.owner(one) != 1]
    waits_s = await ask(asker, prefixes[:calls])
    lines += spread(case, "locate 4096, one caller", waits_s, LOCATE_MS_TARGET)
    quick = min(calls, len(prefixes))

    def locate(at: int, count: int) -> Awaitable[object]:
        return asker.locate(ORIGIN, words_of(prefixes[at % quick], count))

    lines += await server.rate("locate 4096, 8 callers", quick, lambda at: locate(at, LOCATE))
    lines += await server.rate("locate 64, 8 callers", 5 * calls, lambda at: locate(at, PIECE))
    beat = await server.rate(
        "heartbeat, 8 callers", 5 * calls, lambda at: links[at % 8].heartbeat(0)
    )
    began_s = time.perf_counter()
    await links[0].leave()
    lines += [*beat, Line(case, "a node leaves", (time.perf_counter() - began_s) * 1e3, "ms")]
    swept_s = await ask(asker, prefixes[:200])
    return lines + spread(case, "locate 4096 while its memory is taken", swept_s, LOCATE_MS_TARGET)


def run_service(entries: int, nodes: int, calls: int) -> list[Line]:
    """The second part."""
    content = Content(entries, nodes)
    with metaserver(memory_for(entries)) as (address, pid):
        with asyncio.Runner(loop_factory=Loop) as runner:
            server = Server(f"service, {content.entries}", pid)
            lines = runner.run(measure_service(address, server, content, calls))
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        lines.append(Line(lines[0].case, "resident size of the process", pages / 256, "MiB"))
        return lines


def main() -> None:
    """Measure and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--calls", type=int, default=1_000)
    given = parser.parse_args()
    show = functools.partial(print_json, "meta") if given.json else print_table
    context = multiprocessing.get_context("spawn")
    for layout in ("one owner", "copies", "disks", "pieces"):
        with context.Pool(1) as pool:
            arguments = (layout, given.entries, given.nodes, given.calls)
            show(pool.apply(measure_core, arguments))
    show(run_service(given.entries, given.nodes, given.calls))


if __name__ == "__main__":
    main()
