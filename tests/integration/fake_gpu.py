"""A copier whose GPU is shared memory: a `Device` that completes late, out of order or never.

An "allocation" is a memfd of the engine's process, named `pid:fd` in its 64-byte handle; an event
is a byte of one, named `pid:fd:offset`, that is not 0 once the engine's work is over. How copies go
is said by a control memfd that the test may change at any time.
"""

import argparse
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trikv.core.chunks import Sorted, chunk_blocks, put_first, sort
from trikv.tiers.copier import serve
from trikv.tiers.devices import AttachError, Key, Landed
from trikv.tiers.frames import AttachOrder, CopyOrder, Direction, pack_facts

CONTROL_BYTES = 4096
# bytes of the control; NODE: one more than it
PAUSE_MS, HANG, BREAK, EARLY, NODE, REHEARSALS, BROUGHT, LANDED = range(8)
CHUNK_BYTES = 16 << 10
CHUNKS_MAX = 3


def handle(*numbers: int) -> bytes:
    return ":".join(str(one) for one in (os.getpid(), *numbers)).encode().ljust(64, b"\0")


def numbers(raw: bytes) -> list[int]:
    return [int(one) for one in raw.rstrip(b"\0").split(b":")]


def open_map(pid: int, fd: int) -> mmap.mmap:
    try:
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        raise AttachError(f"no such memory: {error.strerror}") from None
    try:
        return mmap.mmap(opened, os.fstat(opened).st_size)
    finally:
        os.close(opened)


@dataclass
class FakeMapped:
    maps: list[mmap.mmap]
    events: list[tuple[mmap.mmap, int]]
    groups: list["FakeTarget"]
    signals: tuple[int, int] | None = None  # memory, offset

    def is_over(self, event: int) -> bool:
        if event == 0:
            return True
        at, offset = self.events[event - 1]
        return at[offset] != 0

    def sort(self, order: CopyOrder) -> Sorted:
        page = self.groups[order.group].block_bytes
        return sort(order.blocks, order.offsets, page_bytes=page, slab_bytes=1 << 20)

    def has_sections(self, group: int) -> bool:
        return bool(self.groups[group].ends)

    def targets(self, order: CopyOrder) -> list["FakeTarget"]:
        group = self.groups[order.group]
        ends = group.ends if order.is_ordered and group.ends else (group.end,)
        return [FakeTarget(self, group.pieces, begin, end) for begin, end in pairwise((0, *ends))]


@dataclass
class FakeTarget:
    """Bytes `begin` to `end` of a page."""

    mapped: FakeMapped
    pieces: list[tuple[int, int, int, int]]  # memory, offset, stride, bytes
    begin: int
    end: int
    ends: tuple[int, ...] = ()  # of a group's sections

    @property
    def block_bytes(self) -> int:
        return -(-(self.end - self.begin) // 4096) * 4096

    def parts(self, block: int) -> list[tuple[mmap.mmap, int, int, int]]:
        """Of a block: memory, address there, place in the page, bytes."""
        found, at = [], 0
        for memory, offset, stride, size in self.pieces:
            first, last = max(at, self.begin), min(at + size, self.end)
            if first < last:
                where = offset + block * stride + first - at
                found.append((self.mapped.maps[memory], where, first, last - first))
            at += size
        return found


@dataclass
class FakeLane:
    pool: mmap.mmap
    control: mmap.mmap
    into_engine: bool
    chunks: deque[Callable[[], None]] = field(default_factory=deque)
    ahead: tuple[Key, Any, dict[int, bytes]] | None = None  # pages as they were then, by offset

    def bring(self, key: Key, target: Any, blocks: Sorted) -> None:
        if self.ahead is None or self.ahead[0] != key:
            some = blocks.offsets[: CHUNK_BYTES // target.block_bytes].tolist()
            pages = {at: bytes(self.pool[at : at + target.end]) for at in some}
            self.ahead = (key, target, pages)
            self.control[BROUGHT] = min(255, self.control[BROUGHT] + 1)

    def land(self, key: Key, blocks: Sorted) -> Landed:
        ahead, self.ahead = self.ahead, None
        if ahead is None or ahead[0] != key:
            return Landed(blocks)
        _, target, pages = ahead
        blocks, count = put_first(blocks, np.array(sorted(pages), np.int64))
        if count == 0:
            return Landed(blocks)
        wanted = list(zip(blocks.blocks.tolist(), blocks.offsets.tolist(), strict=True))[:count]

        def move() -> None:
            for block, page in wanted:
                for far, at, place, size in target.parts(block):
                    far[at : at + size] = pages[page][place : place + size]

        self.chunks.append(move)
        self.control[LANDED] = min(255, self.control[LANDED] + 1)
        return Landed(blocks, [slice(0, count)])

    def forget(self) -> None:
        self.ahead = None

    def rehearse(self) -> None:
        self.control[REHEARSALS] = min(255, self.control[REHEARSALS] + 1)

    def rest(self) -> None:
        """It has no memory of its own."""

    def next_part(self, target: Any, begin: int, count: int, before: int) -> slice:
        left, each = count - begin, target.block_bytes
        size = chunk_blocks(before, left, page_bytes=each, chunk_bytes=CHUNK_BYTES)
        return slice(begin, begin + size)

    def start(self, target: Any, blocks: Sorted, part: slice) -> bool:
        if len(self.chunks) == CHUNKS_MAX:
            return False
        if self.control[BREAK]:
            raise RuntimeError("the fake GPU has fallen off the bus")

        def move() -> None:
            ids, pages = blocks.blocks[part].tolist(), blocks.offsets[part].tolist()
            for block, offset in zip(ids, pages, strict=True):
                self.move(target, block, offset)

        if self.control[EARLY]:  # moved before those that were started earlier
            move()
            self.chunks.append(lambda: None)
        else:
            self.chunks.append(move)
        return True

    def move(self, target: FakeTarget, block: int, page: int) -> None:
        for far, at, place, size in target.parts(block):
            near = slice(page + place, page + place + size)
            if self.into_engine:
                far[at : at + size] = self.pool[near]
            else:
                self.pool[near] = far[at : at + size]

    def signal(self, mapped: Any, number: int, value: int) -> None:
        memory, offset = mapped.signals
        at = offset + 4 * (number - 1)

        def write() -> None:
            mapped.maps[memory][at : at + 4] = value.to_bytes(4, "little")

        last = self.chunks.pop() if self.chunks else lambda: None

        def both() -> None:
            last()
            write()

        self.chunks.append(both)

    def wait(self) -> None:
        time.sleep(self.control[PAUSE_MS] / 1000)
        while self.control[HANG]:
            time.sleep(0.01)
        self.chunks.popleft()()


class FakeGpu:
    def __init__(self, pool: mmap.mmap, control: mmap.mmap) -> None:
        self.pool, self.control = pool, control

    @property
    def facts(self) -> dict[str, str | int | float]:
        node = self.control[NODE] - 1
        return {"name": "Fake GPU", "threads": threading.active_count(), "node": node}

    def attach(self, order: AttachOrder) -> FakeMapped:
        maps = [open_map(*numbers(one)) for one in order.handles]
        events = [(open_map(*numbers(one)[:2]), numbers(one)[2]) for one in order.events]
        mapped = FakeMapped(maps, events, [], order.signals)
        for one in order.groups:
            pieces = [(p.memory, p.offset, p.stride, p.bytes) for p in one.pieces]
            for memory, offset, _, size in pieces:
                assert 0 < size <= len(maps[memory]) - offset, "the daemon has checked that"
            end = sum(p.bytes for p in one.pieces)
            mapped.groups.append(FakeTarget(mapped, pieces, 0, end, one.sections))
        return mapped

    def detach(self, mapped: Any) -> None:
        for one in [*mapped.maps, *(at for at, _ in mapped.events)]:
            one.close()

    def lane(self, direction: Direction) -> FakeLane:
        return FakeLane(self.pool, self.control, direction is Direction.LOAD)

    def prepare_pool(self, note: Callable[[bytes], None]) -> None:
        note(pack_facts(event="pool.registered", bytes=len(self.pool), took_s=0.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("pool-fd", "pool-bytes", "parent", "control-pid", "control-fd"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--sockets", type=int, nargs=3)
    given = parser.parse_args()
    pool = mmap.mmap(given.pool_fd, given.pool_bytes)
    serve(
        lambda: FakeGpu(pool, open_map(given.control_pid, given.control_fd)),
        given.sockets,
        given.parent,
    )


if __name__ == "__main__":
    main()
