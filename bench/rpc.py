"""How long an engine's query takes, idle and while the daemon copies, beside grpcio and PegaFlow.

    python -m bench.rpc [--json] [--calls 3000]

A query of a prompt whose blocks are all resident, over the unix socket, through the connector's
own client: from the call until the answer is there, as a blocked caller sees it, and the time
that the call holds the scheduler's thread, which does not wait for the answer. Each round asks
about another prompt. gRPC: the same bytes to a grpcio server that answers with a constant, in
turns with ours. PegaFlow, where its wheel and a GPU are there: its own client and server, likewise
in turns. `copying`: the same while another engine saves and loads without pause.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench import daemons, pegaflow
from bench.lines import Line, print_json, print_table
from trikv.connector.calls import pack
from trikv.connector.jobs import LoadJob, SaveJob

COUNTS = {64: 200.0, 512: 300.0, 1024: 450.0}  # hashes: target of the median, µs
BLOCKED_US = 50.0
LOADED_P99_US = 2_000.0
PROMPTS = 20
PAGE_BYTES = 4_096
ROUNDS = 20
IDLE = "idle"

GRPC_SERVER = """
import asyncio, sys
import grpc.aio
from grpc import unary_unary_rpc_method_handler, method_handlers_generic_handler
async def main():
    server = grpc.aio.server()
    async def query(request, context): return b"x" * 16
    methods = {"query": unary_unary_rpc_method_handler(query)}
    handler = method_handlers_generic_handler("kv", methods)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(sys.argv[1])
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()
asyncio.run(main())
"""


@contextlib.contextmanager
def grpc_call() -> Iterator[Callable[[bytes], object] | None]:
    """A blocking call of a grpcio server over a unix socket; None where grpcio is not installed."""
    try:
        import grpc  # noqa: PLC0415  # optional
    except ImportError:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/grpc.sock"
        server = subprocess.Popen(
            [sys.executable, "-c", GRPC_SERVER, address],
            stdout=subprocess.PIPE,
            preexec_fn=daemons.die_with_parent,  # noqa: PLW1509
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with grpc.insecure_channel(address) as channel:
                yield channel.unary_unary("/kv/query")
        finally:
            server.kill()
            server.wait()


def save_all(engine: daemons.Engine, name: str, count: int) -> bytes:
    """Make a prompt's blocks resident; returns its hashes."""
    blob = daemons.hashes(name, count)
    for first in range(0, count, len(engine.memory)):
        part = blob[32 * first : 32 * (first + len(engine.memory))]
        blocks = pack(range(len(part) // 32))
        engine.worker.save(SaveJob(0, name, first, 32, part, blocks), 0, 0, 0).result(30)
    return blob


def keep_copying(address: str, page_bytes: int) -> None:
    """An engine that saves and loads without pause, in a process of its own."""
    with daemons.engine(address, blocks=64, page_bytes=page_bytes, pieces=32) as engine:
        attached = engine.worker.attached
        assert attached is not None
        for turn in range(1 << 30):
            name = f"copy {turn}"
            blob, blocks = daemons.hashes(name, 64), pack(range(64))
            engine.worker.save(SaveJob(0, name, 0, 32, blob, blocks), 0, 0, 0).result(60)
            found = engine.scheduler.query(name, 32, blob).result(60)
            if found.hit_count:
                job = LoadJob(name, found.lease, 0, pack(range(found.hit_count)))
                engine.worker.load(job, attached, 60.0, 0).result(60)
            engine.scheduler.release([name])


@dataclass(slots=True)
class Times:
    """Seconds of calls with so many hashes."""

    waited: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    grpc: list[float] = field(default_factory=list)
    pegaflow: list[float] = field(default_factory=list)


def percentile(times_s: list[float], share: float) -> float | None:
    """In microseconds."""
    return float(np.quantile(times_s, share)) * 1e6 if times_s else None


def measure(
    engine: daemons.Engine,
    calls: int,
    case: str,
    grpc: Callable[[bytes], object] | None,
    peer: pegaflow.Ask | None,
) -> Iterator[Line]:
    """All sizes and all clients in turns, so that they see the same machine."""
    prompts = {
        count: [save_all(engine, f"{count} {n}", count) for n in range(PROMPTS)] for count in COUNTS
    }
    times = {count: Times() for count in COUNTS}
    empty: list[float] = []
    for _ in range(ROUNDS):
        for count, of in times.items():
            for call in range(calls // ROUNDS):
                name, blob = f"{count} {call % PROMPTS}", prompts[count][call % PROMPTS]
                begin_s = time.perf_counter()
                future = engine.scheduler.query(name, 32, blob)
                sent_s = time.perf_counter()
                found = future.result(30)
                of.waited.append(time.perf_counter() - begin_s)
                of.blocked.append(sent_s - begin_s)
                assert found.hit_count == count, (count, found)
            for _ in range(calls // ROUNDS // len(COUNTS)):
                begin_s = time.perf_counter()
                engine.scheduler.client.call("heartbeat", {}, lambda _: None).result(30)
                empty.append(time.perf_counter() - begin_s)
            for call in range(calls // ROUNDS if grpc is not None else 0):
                assert grpc is not None
                begin_s = time.perf_counter()
                grpc(prompts[count][call % PROMPTS])
                of.grpc.append(time.perf_counter() - begin_s)
            if peer is not None:
                of.pegaflow += [peer(count, call % PROMPTS) for call in range(calls // ROUNDS)]
    yield Line(f"{case}, empty call", "heartbeat p50", percentile(empty, 0.5) or 0.0, "us")
    for count, of in times.items():
        yield from lines_of(of, f"{case}, {count} hashes", COUNTS[count] if case == IDLE else None)


def lines_of(of: Times, case: str, target_us: float | None) -> Iterator[Line]:
    """Ours beside each of the others."""
    p99_us = LOADED_P99_US if target_us is None else None
    for name, share, target in (("p50", 0.5, target_us), ("p99", 0.99, p99_us)):
        ours = percentile(of.waited, share) or 0.0
        yield Line(case, f"query {name}", ours, "us", target, percentile(of.grpc, share))
        theirs = percentile(of.pegaflow, share)
        if theirs is not None:
            yield Line(case, f"query {name}, beside PegaFlow", ours, "us", target, theirs)
    blocked_us = percentile(of.blocked, 0.5) or 0.0
    yield Line(case, "scheduler blocked p50", blocked_us, "us", BLOCKED_US)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--calls", type=int, default=3000, help="of each size")
    options = parser.parse_args()
    lines: list[Line] = []
    with (
        daemons.daemon("--pool-size", "1gb") as address,
        daemons.engine(address, blocks=512, page_bytes=PAGE_BYTES) as engine,
        grpc_call() as grpc,
        pegaflow.look_up(list(COUNTS), PROMPTS) as peer,
    ):
        lines += measure(engine, options.calls, IDLE, grpc, peer)
        with daemons.spawned(keep_copying, address, 1 << 20):
            time.sleep(3)
            lines += measure(engine, options.calls, "copying", grpc, None)
    if options.json:
        print_json("rpc", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
