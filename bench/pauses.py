"""Longest steps of the daemon's tasks while a tenth of many blocks go at once.

    python -m bench.pauses [--json] [--blocks 5000000]

The daemon's own service, store and tasks, on Trio; only the copies are no copies, so that the pool
needs no memory. A pool full of one model's blocks loses a tenth of them in each of three ways: to
new prompts of the same model, to another model's prompts (whole slabs change hands), and to a reset
(all of them). Each step of each task is timed by the processor time of the thread: a step is what
everybody else waits for.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import thread_time

import numpy as np
import trio
from numpy.typing import NDArray

from bench.lines import Line, print_json, print_table
from trikv.core.below import Below
from trikv.core.blocks import SEALED
from trikv.core.cache import Cache
from trikv.core.calls import Declare, GroupPieces, Query, Register, Save
from trikv.core.disklayout import SLOT_BYTES_MIN
from trikv.core.engines import Engines
from trikv.core.layout import Piece, Range
from trikv.core.lower import Lower
from trikv.core.pages import PAGE_ALIGN
from trikv.core.plans import Limits
from trikv.core.spills import Budget, Spills
from trikv.core.windows import Windows
from trikv.core.words import InstanceName, RequestId, Words
from trikv.nursery.choices import slab_bytes_for
from trikv.nursery.copying import Copying
from trikv.nursery.evicting import evict
from trikv.nursery.service import Service
from trikv.nursery.sessions import Attachment, Session, Sessions
from trikv.nursery.store import Store
from trikv.tiers.copies import Copy, Process

PROMPT = 512
PAUSE_MS = 10.0
PART = 10


class Nobody:
    """A process that lives."""

    pid = 1

    def is_alive(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Nothing holds it."""


class NoMemory:
    """Copies that have ended before they began."""

    def begin(
        self,
        copy: Copy,
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> bool:
        """All blocks arrive."""
        ended(np.ones(len(copy.blocks), np.bool_))
        return True

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        """Not used: nothing has to be waited for."""
        raise NotImplementedError

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment | None:
        """Process memory."""
        return None

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        """See `Memory`."""
        del attachment, into_engine

    def detach(self, attachment: Attachment) -> None:
        """There is none."""

    def read_word(self, process: Process, address: int) -> int | None:
        """No fences."""
        return None


@dataclass(eq=False)
class Steps(trio.abc.Instrument):
    """Processor time of each task step."""

    took_s: list[float] = field(default_factory=list)
    _begin_s: float = 0.0
    _has_begun: bool = False

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step begins."""
        self._begin_s = thread_time()
        self._has_begun = True

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """A step has ended."""
        if self._has_begun:  # not the one in which timing itself began
            self.took_s.append(thread_time() - self._begin_s)

    def lines(self, case: str) -> Iterator[Line]:
        """What came out since the last time."""
        ms = np.array(self.took_s) * 1e3
        self.took_s = []
        yield Line(case, "longest step", float(ms.max()), "ms", PAUSE_MS)
        yield Line(case, "step, p99", float(np.quantile(ms, 0.99)), "ms")


class Engine:
    """One model's engine."""

    def __init__(self, service: Service, name: str, page_bytes: int) -> None:
        self.service, self.name = service, InstanceName(name)
        self.page_bytes = page_bytes
        self.session: Session = service.hello(Nobody(), name)
        self.random = np.random.default_rng(page_bytes)
        self.turn = 0

    async def attach(self) -> None:
        """Declare and register."""
        piece = Piece(0, 0, self.page_bytes, self.page_bytes)
        groups = (GroupPieces(PROMPT, (piece,), self.name),)
        memory = (Range(1 << 32, PROMPT * self.page_bytes),)
        await self.service.register(self.session, Register(self.name, 0, memory, groups, 0, 0))
        fields = (("model", self.name),)
        await self.service.declare(self.session, Declare(self.name, 1, fields))

    def words(self) -> Words:
        """A prompt that nobody has had."""
        return self.random.integers(1, 1 << 63, (PROMPT, 4), np.int64).astype(np.uint64)

    async def save(self) -> Words:
        """Save a new prompt."""
        self.turn += 1
        words, request = self.words(), RequestId(str(self.turn))
        blocks = np.arange(PROMPT, dtype=np.int32)
        call = Save(0, 0, request, 0, words, blocks, 0, 0)
        self.service.save(self.session, call, lambda _: None)
        await trio.lowlevel.checkpoint()
        self.service.release(self.session, [request])
        return words

    async def ask(self, words: Words) -> int:
        """Ask for a prompt, and end."""
        found = self.service.query(self.session, Query(RequestId("ask"), 0, words))
        self.service.release(self.session, [RequestId("ask")])
        await trio.lowlevel.checkpoint()
        return found.hit_count


@dataclass(slots=True)
class Rig:
    """The service over a pool, and what it stands on."""

    store: Store
    copying: list[Copying]
    service: Service


def rig(blocks: int, below: Callable[[Cache], Below | None] = lambda _: None) -> Rig:
    """A daemon with so many blocks of 4 KiB."""
    pool_bytes = blocks * PAGE_ALIGN
    slab_bytes = slab_bytes_for(pool_bytes, None)
    cache = Cache(pool_bytes, slab_bytes, entries_max=blocks, seed=1, limits=Limits())
    windows = Windows((900.0,), now_s=trio.current_time())
    store = Store(cache, Engines(4), trio.current_time, windows, below=below(cache))
    memory = NoMemory()
    sessions = Sessions(store, 8, 3600.0, memory.detach)
    copying = [Copying(name, memory, sessions, jobs_max=4, queue_jobs_max=64) for name in "sl"]
    return Rig(store, copying, Service(store, sessions, *copying, memory))


def freeze() -> None:
    """No collection of garbage in the midst of a measurement."""
    gc.collect()
    gc.freeze()
    gc.disable()


async def measure_pool(blocks: int, lines: list[Line]) -> None:
    """Fill the pool, then make blocks go."""
    made = rig(blocks)
    cache, service = made.store.cache, made.service
    case, steps = f"{blocks} blocks of 4 KiB", Steps()
    part = blocks // PART // PROMPT
    async with trio.open_nursery() as nursery:
        for one in made.copying:
            await nursery.start(one.run)
        await nursery.start(evict, made.store)
        first, second = Engine(service, "a", PAGE_ALIGN), Engine(service, "b", 2 * PAGE_ALIGN)
        await first.attach()
        await second.attach()
        while cache.counters.evicted_blocks_total == 0:
            await first.save()
        freeze()
        trio.lowlevel.add_instrument(steps)
        for name, engine in (("the same model", first), ("another model", second)):
            before = cache.counters.evicted_blocks_total
            while cache.counters.evicted_blocks_total - before < part * PROMPT:
                assert await engine.ask(await engine.save()) == PROMPT
            lines += steps.lines(f"{case}, a tenth goes to {name}")
        await service.reset(first.session)
        while cache.drop_retired() or cache.blocks.sealed_by_space.get(1):
            assert await first.ask(await first.save()) == PROMPT
            await trio.sleep(0.001)
        lines += steps.lines(f"{case}, reset")
        nursery.cancel_scope.cancel()


async def measure_disk(blocks: int, lines: list[Line]) -> None:
    """Fill a disk, then reset."""
    region_bytes = 64 << 20
    slots = region_bytes // SLOT_BYTES_MIN
    lower = Lower(-(-blocks // slots), region_bytes, first_sequence=1)
    lower.end_adopting()
    made = rig(
        64 * PROMPT, lambda cache: Below(cache, [lower], Spills(Budget(None)), has_disks=False)
    )
    below, steps = made.store.below, Steps()
    assert below is not None
    async with trio.open_nursery() as nursery:
        for one in made.copying:
            await nursery.start(one.run)
        await nursery.start(evict, made.store)
        engine = Engine(made.service, "a", PAGE_ALIGN)
        await engine.attach()
        (space,) = made.store.cache.spaces
        number, none = lower.open_origin(below.origin(space), (PAGE_ALIGN,)), np.empty(0, np.int32)
        assert number is not None
        depths = np.arange(PROMPT, dtype=np.int32)
        while lower.counters.evicted_blocks_total == 0:
            plan = lower.prepare_write(number, engine.words(), depths, kin=none)
            written = np.ones(len(plan.entries), np.bool_)
            lower.complete_write(plan, written, np.zeros(len(written), np.uint64), kin=none)
        held = lower.blocks.counts[SEALED]
        freeze()
        trio.lowlevel.add_instrument(steps)
        await made.service.reset(engine.session)
        while lower.blocks.counts[SEALED]:
            assert await engine.ask(await engine.save()) == PROMPT
            await trio.sleep(0.001)
        lines += steps.lines(f"{held} blocks on a disk, reset")
        nursery.cancel_scope.cancel()


async def measure(blocks: int, lines: list[Line]) -> None:
    """All of it."""
    await measure_pool(blocks, lines)
    gc.enable()
    await measure_disk(blocks, lines)


def main() -> int:
    """Run and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--blocks", type=int, default=5_000_000)
    options = parser.parse_args()
    lines: list[Line] = []
    trio.run(measure, options.blocks, lines)
    (print_json if options.json else lambda _, rows: print_table(rows))("pauses", lines)
    return int(any(line.is_ok is False for line in lines))


if __name__ == "__main__":
    sys.exit(main())
