"""Many ranks at full speed, without a GPU: what the daemon and its copiers need of a processor.

Run by `python -m bench.transfer --ranks 8`. An engine of so many ranks saves new prompts and loads
earlier ones without pause, on made-up GPUs of 55 GB/s in each direction (`bench.fake_cuda`): the
daemon, its calls and the copiers are real, no byte moves, and the pool's memory is never touched.
Meanwhile another engine asks about resident prompts; its base is the same with no copies. Blocks
are Llama-3-70B's: 80 layers, 16 tokens, bfloat16, one of 8 KV heads a rank; 512 of them a copy.
"""

import contextlib
import logging
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from bench import daemons, fake_cuda
from bench.lines import Line
from bench.rpc import LOADED_P99_US, percentile, save_all
from trikv.connector.calls import Calls, pack
from trikv.connector.client import Client, Introduction, Settings
from trikv.connector.jobs import LoadJob, SaveJob
from trikv.nursery import choices, copiers, serve

BLOCKS: Final = 512
PIECES, PIECE_BYTES = 160, 16 * 128 * 2
PAGE_BYTES: Final = PIECES * PIECE_BYTES
POOL: Final = "96gb"
ASKED_BLOCKS: Final = 512
PAUSE_S: Final = 0.002
KEPT_PROMPTS: Final = 4
TICKS_S: Final = os.sysconf("SC_CLK_TCK")


def command(uuid: str, pool: copiers.PoolPlace, sockets: Sequence[int]) -> list[str]:
    """A copier of a made-up GPU."""
    real = copiers.gpu_command(uuid, pool, sockets)
    return ["bench.fake_cuda" if one == "trikv.tiers.device" else one for one in real]


def main() -> None:
    """Be a daemon whose GPUs are made up, and whose pool is address space only."""
    build = serve.build

    def build_so(*parts: Any) -> serve.Daemon:  # noqa: ANN401
        made = build(*parts)
        made.facts.copiers.refusal = ""
        made.facts.copiers.command = command
        return made

    async def touch_nothing(*_: object) -> None:
        pass

    serve.build, serve.populate = build_so, touch_nothing
    choices.pools.available_bytes = lambda: 1 << 50
    serve.main()


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of several ranks, a client each."""

    scheduler: Calls
    ranks: list[Calls]

    def save(self, name: str) -> None:
        """A prompt, on all ranks."""
        blob, blocks = daemons.hashes(name, BLOCKS), pack(range(BLOCKS))
        job = SaveJob(0, name, 0, daemons.HASH_BYTES, blob, blocks)
        for answer in [rank.save(job, 0, 0, 0) for rank in self.ranks]:
            answer.result(60)

    def load(self, name: str) -> int:
        """A prompt, into all ranks; how many blocks were there."""
        blob = daemons.hashes(name, BLOCKS)
        found = self.scheduler.query(name, daemons.HASH_BYTES, blob).result(60)
        if found.hit_count:
            blocks = pack(range(BLOCKS, BLOCKS + found.hit_count))
            job = LoadJob(name, found.lease, 0, blocks)
            for rank, answer in [(rank, self._start(rank, job)) for rank in self.ranks]:
                if answer.result(60):
                    raise RuntimeError(f"{rank}: blocks did not arrive")
        self.scheduler.release([name])
        return found.hit_count

    @staticmethod
    def _start(rank: Calls, job: LoadJob) -> Any:  # noqa: ANN401
        assert rank.attached is not None
        return rank.load(job, rank.attached, 60.0, 0)


def rank_of(name: str, rank: int) -> dict[str, Any]:
    """What a rank registers: K and V of each layer apart, on a GPU of its own."""
    blocks = 2 * BLOCKS
    memory = {
        "cudaIpc": {
            "handle": bytes([rank]) * 64,
            "allocationBytes": blocks * PAGE_BYTES,
            "deviceUuid": bytes([rank]) * 16,
        }
    }
    pieces = [
        {
            "memory": 0,
            "offset": at * blocks * PIECE_BYTES,
            "stride": PIECE_BYTES,
            "bytes": PIECE_BYTES,
        }
        for at in range(PIECES)
    ]
    group = {"blockCount": blocks, "pieces": pieces, "layout": "apart"}
    return {"instance": name, "rank": rank, "memories": [memory], "groups": [group]}


@contextlib.contextmanager
def engine(address: str, ranks: int) -> Iterator[Engine]:
    """Attach an engine whose ranks are on made-up GPUs."""
    name, log, settings = f"bench-{os.getpid()}", logging.getLogger("bench"), Settings("b", address)
    clients = [Client(settings, log) for _ in range(ranks)]
    scheduler = Client(settings, log)
    for number, client in enumerate(clients):
        offer = {"rank": rank_of(name, number)}
        client.start(Introduction("register", lambda offer=offer: offer, offers_memory=True))
    fields = [{"name": "model", "value": "70B"}]
    declared = {"instance": {"name": name, "rankCount": ranks, "fields": fields}}
    scheduler.start(Introduction("declare", lambda: declared))
    try:
        deadline_s = time.monotonic() + daemons.READY_S
        while not all(one.is_ready for one in (*clients, scheduler)):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the engine did not attach")
            time.sleep(0.02)
        yield Engine(Calls(scheduler), [Calls(one, at) for at, one in enumerate(clients)])
    finally:
        for one in (*clients, scheduler):
            one.close()


def work(address: str, ranks: int, pipe: Connection) -> None:
    """A process: saves in one thread, loads in another; says what was moved when it is asked."""
    moved, saved = {"save": 0, "load": 0}, ["prompt 0"]

    with engine(address, ranks) as made:
        made.save(saved[0])

        def keep_saving() -> None:
            for number in count(1):
                name = f"prompt {number}"
                made.save(name)
                moved["save"] += BLOCKS * ranks * PAGE_BYTES
                saved[:] = [*saved, name][-KEPT_PROMPTS:]

        def keep_loading() -> None:
            for turn in count():
                blocks = made.load(saved[turn % len(saved)])
                moved["load"] += blocks * ranks * PAGE_BYTES

        for one in (keep_saving, keep_loading):
            threading.Thread(target=or_end, args=(one,), daemon=True).start()
        while True:
            pipe.recv()
            pipe.send(dict(moved))


def or_end(run: Callable[[], None]) -> None:
    """An error is the end of the process: who asks it hears that."""
    try:
        run()
    except BaseException:  # noqa: BLE001  # whatever it is, nothing is measured any more
        traceback.print_exc()
        os._exit(1)


def cpu_s(pid: int) -> float:
    """Processor time of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def ask(asking: daemons.Engine, prompts: list[bytes], calls: int) -> list[float]:
    """Seconds of queries about resident prompts, with a pause after each."""
    times = []
    for call in range(calls):
        name = f"asked {call % len(prompts)}"
        begin_s = time.perf_counter()
        found = asking.scheduler.query(name, 32, prompts[call % len(prompts)]).result(30)
        times.append(time.perf_counter() - begin_s)
        assert found.hit_count == ASKED_BLOCKS, found
        time.sleep(PAUSE_S)
    return times


@contextlib.contextmanager
def made_up_daemon() -> Iterator[str]:
    """A daemon that `main` makes."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/trikv.sock"
        flags = ("--pool-size", POOL, "--max-blocks", "65536")
        words = daemons.command(address, *flags)
        words[words.index("trikv.nursery.serve")] = "bench.ranks"
        with daemons.serving(words, Path(folder) / "log", "daemon.ready"):
            yield address


def measure(ranks: int, calls: int) -> Iterator[Line]:
    """All figures of one run."""
    with (
        made_up_daemon() as address,
        daemons.engine(address, blocks=ASKED_BLOCKS, page_bytes=4096) as asking,
    ):
        prompts = [save_all(asking, f"asked {n}", ASKED_BLOCKS) for n in range(8)]
        alone = ask(asking, prompts, calls)
        ours, theirs = multiprocessing.Pipe()
        with daemons.spawned(work, address, ranks, theirs):
            ours.send("ready?")
            ours.recv()
            time.sleep(1.0)
            pids = [one["pid"] for one in daemons.status(address)["copiers"]]
            assert len(pids) == ranks, "a copier a rank"
            pids.insert(0, daemons.pid_of(address))

            def look() -> tuple[float, dict[str, int], list[float]]:
                ours.send("now")
                return time.perf_counter(), ours.recv(), [cpu_s(pid) for pid in pids]

            begin_s, moved, used = look()
            times = ask(asking, prompts, calls)
            end_s, moved_then, used_then = look()
    took_s = end_s - begin_s
    speeds = {name: (moved_then[name] - moved[name]) / took_s / 1e9 for name in moved}
    shares = [(then - now) / took_s for now, then in zip(used, used_then, strict=True)]
    yield from lines_of(ranks, speeds, shares, (alone, times))


def lines_of(
    ranks: int,
    speeds: dict[str, float],
    shares: list[float],
    times: tuple[list[float], list[float]],
) -> Iterator[Line]:
    """Speeds beside those of the made-up buses; shares of the daemon, then of each copier."""
    case, bus = f"{ranks} ranks, fake GPUs", ranks * fake_cuda.BUS_BYTES_S / 1e9
    for name, speed in speeds.items():
        yield Line(case, name, speed, "GB/s", None, bus, more_is_better=True)
    yield Line(case, "daemon", shares[0], "CPU s/s")
    for number, share in enumerate(shares[1:]):
        yield Line(case, f"copier {number}", share, "CPU s/s")
    yield Line(case, "daemon, by bytes", shares[0] / sum(speeds.values()) * 1e3, "CPU s/TB")
    both = sum(shares[1:]) / sum(speeds.values()) * 1e3
    yield Line(case, "copiers, by bytes", both, "CPU s/TB")
    alone, busy = times
    for name, part, target in (("p50", 0.5, None), ("p99", 0.99, LOADED_P99_US)):
        found, base = percentile(busy, part) or 0.0, percentile(alone, part)
        yield Line(case, f"query {name}", found, "us", target, base)


if __name__ == "__main__":
    main()
