"""A copier's own time of one copy, without a GPU: from its order to its report, less the bus's.

    python -m bench.copier [--json] [--blocks 113] [--page-kib 1152] [--rounds 200]

The real thread, lane and moves of `trikv.tiers` on a CUDA that only counts time
(`bench.fake_cuda`): what is left when the bus's time is taken away is Python before the first byte
and behind the last. Calls of CUDA take nothing here, and kernels neither. Loads are announced as
the daemon does it, so that they begin ahead; their order comes while the bus still moves them, or
when all is there and the thread sleeps.
"""

import argparse
import socket
import statistics
import threading
import time
from typing import Final

import numpy as np

from bench import fake_cuda
from bench.lines import Line, print_json, print_table
from trikv.core.layout import Piece
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers import frames

POOL_BYTES: Final = 8 << 30
SLAB_BYTES: Final = 256 << 20
PIECES: Final = 72
ANNOUNCED_S: Final = 0.0008
"""From an announcement to its order on an H200 host."""
LATE_S: Final = 0.004
WARM_UP: Final = 20
CASES: Final = {  # is it a load, is it begun ahead, seconds until its order
    "save": (False, False, ANNOUNCED_S),
    "load": (True, False, ANNOUNCED_S),
    "load ahead, under way": (True, True, ANNOUNCED_S),
    "load ahead, all there": (True, True, LATE_S),
}


class Bench:
    """A copier's thread of one direction, and the daemon's end of its socket."""

    def __init__(self, *, into_engine: bool, blocks: int, page_bytes: int) -> None:
        """Start it; `fake_cuda` stands in for CUDA by now."""
        from trikv.tiers import copier, device, kernels  # noqa: PLC0415  # they import `gpu`

        copier.AWAKE_S = 0.002  # type: ignore[misc]  # as on a host of many processors
        pages = np.arange(blocks, dtype=np.int64) * page_bytes
        ids = np.random.default_rng(1).permutation(blocks).astype(np.int32)
        self.direction = frames.Direction.LOAD if into_engine else frames.Direction.SAVE
        lease = int(into_engine)
        order = frames.CopyOrder(1, 0, self.direction, 0, ids, pages, lease=lease)
        self.body = frames.pack_copy(order)
        names = {width: str(width) for width in kernels.WIDTHS}
        facts = (1 << 44, POOL_BYTES, SLAB_BYTES, 1 << 30, 0.0, -1)
        gpu = device.GpuDevice(None, "made up", names, *facts)
        gpu.prepare_pool(lambda _: None)
        size = page_bytes // PIECES
        pieces = tuple(Piece(0, at * size * blocks, size, size) for at in range(PIECES))
        group = frames.GroupOrder(blocks, pieces)
        memory = gpu.attach(frames.AttachOrder((bytes(64),), (), (group,)))
        self.sock, theirs = socket.socketpair()
        mapping = threading.Lock()
        work = copier.Work(self.direction, gpu, theirs, {1: memory}, mapping)
        self.reports = frames.Frames()
        self.took_s: list[float] = []
        threading.Thread(target=work.run, daemon=True).start()

    def copy(self, number: int, *, is_ahead: bool, after_s: float) -> None:
        """Announce, order, and wait for the report."""
        kinds = frames.Kind
        announced = (kinds.AHEAD, 0, self.body) if is_ahead else (kinds.SOON, 0)
        self.sock.sendall(frames.pack(*announced))
        time.sleep(after_s)
        self.sock.sendall(frames.pack(kinds.COPY, number, self.body))
        while len(self.took_s) <= number:
            self.reports.feed(self.sock.recv(1 << 16), self._note)

    def _note(self, kind: frames.Kind, _number: int, body: bytes) -> None:
        if kind is frames.Kind.ENDED:
            arrived, took_s = frames.read_ended(body)
            assert arrived.all(), "a block was lost"
            self.took_s.append(took_s)


def wait(event: fake_cuda.Clock) -> None:
    """As CUDA waits: awake."""
    while event.end_s > time.perf_counter():
        pass


def measure(blocks: int, page_bytes: int, rounds: int) -> list[Line]:
    """All cases, one after another."""
    fake_cuda.KERNEL_S = 0.0  # type: ignore[misc]
    fake_cuda.install().wait = wait
    bus_s = blocks * page_bytes / fake_cuda.BUS_BYTES_S
    lines = []
    for case, (into_engine, is_ahead, after_s) in CASES.items():
        bench = Bench(into_engine=into_engine, blocks=blocks, page_bytes=page_bytes)
        for number in range(WARM_UP + rounds):
            bench.copy(number, is_ahead=is_ahead, after_s=after_s)
        own_us = sorted((took_s - bus_s) * 1e6 for took_s in bench.took_s[WARM_UP:])
        slow = own_us[len(own_us) * 9 // 10]
        lines.append(Line(case, "own time", statistics.median(own_us), "us"))
        lines.append(Line(case, "own time, 90th percentile", slow, "us"))
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--blocks", type=int, default=113, help="of a copy")
    parser.add_argument("--page-kib", type=int, default=1152, help="of a block; a multiple of 36")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    page_bytes = given.page_kib << 10
    if page_bytes % PAGE_ALIGN or page_bytes % PIECES or given.blocks < 1 or given.rounds < 1:
        parser.error("--page-kib must be a multiple of 36, and the others positive")
    if given.blocks * page_bytes > POOL_BYTES:
        parser.error(f"--blocks: at most {POOL_BYTES // page_bytes} of this size")
    lines = measure(given.blocks, page_bytes, given.rounds)
    (print_json("copier", lines) if given.json else print_table(lines))


if __name__ == "__main__":
    main()
