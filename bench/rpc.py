"""How long an engine's query takes, idle and while the daemon copies, beside grpcio.

    python -m bench.rpc [--json] [--calls 3000]

A query of a prompt whose blocks are all resident, over the unix socket, through the connector's
own client: from the call until the answer is there, as a blocked caller sees it, and the time
that the call holds the scheduler's thread, which does not wait for the answer. Each round asks
about another prompt. gRPC: the same bytes to a grpcio server that answers with a constant, in
turns with ours.
"""

import argparse
import contextlib
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench import daemons
from bench.lines import Line, print_json, print_table
from trikv.connector.calls import pack
from trikv.connector.jobs import SaveJob

COUNTS = {64: 200.0, 512: 300.0, 1024: 450.0}  # hashes: target of the median, µs
BLOCKED_US = 50.0
LOADED_P99_US = 2_000.0
PROMPTS = 20
PAGE_BYTES = 4_096
ROUNDS = 20

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
    """An engine that saves without pause, in a process of its own."""
    with daemons.engine(address, blocks=64, page_bytes=page_bytes, pieces=32) as engine:
        for turn in range(1 << 30):
            blob = daemons.hashes(f"copy {turn}", 64)
            job = SaveJob(0, f"copy {turn}", 0, 32, blob, pack(range(64)))
            engine.worker.save(job, 0, 0, 0).result(60)
            engine.scheduler.release([f"copy {turn}"])


def percentile(times_s: list[float], share: float) -> float:
    """In microseconds."""
    return float(np.quantile(times_s, share)) * 1e6


def measure(
    engine: daemons.Engine, calls: int, grpc: Callable[[bytes], object] | None, case: str
) -> Iterator[Line]:
    """All sizes in turns, so that they see the same machine."""
    prompts = {
        count: [save_all(engine, f"{count} {n}", count) for n in range(PROMPTS)] for count in COUNTS
    }
    waited: dict[int, list[float]] = {count: [] for count in COUNTS}
    blocked: dict[int, list[float]] = {count: [] for count in COUNTS}
    beside: dict[int, list[float]] = {count: [] for count in COUNTS}
    empty: list[float] = []
    for turn in range(ROUNDS):
        for count in COUNTS:
            for call in range(calls // ROUNDS):
                blob = prompts[count][call % PROMPTS]
                begin_s = time.perf_counter()
                future = engine.scheduler.query(f"{count} {call % PROMPTS}", 32, blob)
                sent_s = time.perf_counter()
                found = future.result(30)
                waited[count].append(time.perf_counter() - begin_s)
                blocked[count].append(sent_s - begin_s)
                assert found.hit_count == count, (turn, count, found)
            for _ in range(calls // ROUNDS // len(COUNTS)):
                begin_s = time.perf_counter()
                engine.scheduler.client.call("heartbeat", {}, lambda _: None).result(30)
                empty.append(time.perf_counter() - begin_s)
            if grpc is not None:
                for call in range(calls // ROUNDS):
                    begin_s = time.perf_counter()
                    grpc(prompts[count][call % PROMPTS])
                    beside[count].append(time.perf_counter() - begin_s)
    yield Line(f"{case}, empty call", "heartbeat p50", percentile(empty, 0.5), "us")
    for count, target in COUNTS.items():
        name = f"{case}, {count} hashes"
        other = beside[count]
        is_idle = case == "idle"
        yield Line(
            name,
            "query p50",
            percentile(waited[count], 0.5),
            "us",
            target if is_idle else None,
            percentile(other, 0.5) if other else None,
        )
        yield Line(
            name,
            "query p99",
            percentile(waited[count], 0.99),
            "us",
            None if is_idle else LOADED_P99_US,
            percentile(other, 0.99) if other else None,
        )
        yield Line(name, "scheduler blocked p50", percentile(blocked[count], 0.5), "us", BLOCKED_US)


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
    ):
        lines += measure(engine, options.calls, grpc, "idle")
        context = multiprocessing.get_context("spawn")
        copying = context.Process(target=keep_copying, args=(address, 1 << 20), daemon=True)
        copying.start()
        time.sleep(3)
        lines += measure(engine, options.calls, grpc, "copying")
        copying.kill()
        copying.join()
    if options.json:
        print_json("rpc", lines)
    else:
        print_table(lines)


if __name__ == "__main__":
    main()
