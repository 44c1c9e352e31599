"""The tasks that touch the pool's pages before anybody copies into them.

Decided here: in which order, what is told of it, and that a machine without memory is asked again
for ever. The daemon serves meanwhile: slabs are touched in the order in which they are first given
away, and a block in one that is not touched yet is saved more slowly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog
import trio

from trikv.core.pages import Pages
from trikv.tiers.pool import Pool, Toucher

log = structlog.get_logger()

POPULATE_RETRY_S: Final = 2.0
STEP_BYTES: Final = 256 << 20
"""What a thread touches at a time: a stop of the daemon waits for that, 0.2 s."""
LINE_S: Final = 2.0
LINE_SHARE: Final = 0.1
GIB: Final = 1 << 30


class Faults(Protocol):
    """Where is told what is wrong."""

    pool_fault: str


@dataclass(slots=True)
class _Progress:
    """How far it is.

    Attributes:
        short: tasks that wait for memory now.
    """

    wanted_bytes: int
    begin_s: float
    done_bytes: int = 0
    short: int = 0
    told_bytes: int = 0
    told_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.told_s = self.begin_s

    def facts(self, now_s: float) -> dict[str, float]:
        """For the log."""
        took_s = max(now_s - self.begin_s, 1e-9)
        return {
            "gib": round(self.done_bytes / GIB, 2),
            "gib_wanted": round(self.wanted_bytes / GIB, 2),
            "gib_per_s": round(self.done_bytes / GIB / took_s, 2),
            "took_s": round(took_s, 3),
        }

    def add(self, size_bytes: int, now_s: float) -> None:
        """So much more is there; told every two seconds, but not for less than a tenth."""
        self.done_bytes += size_bytes
        is_much = self.done_bytes - self.told_bytes >= LINE_SHARE * self.wanted_bytes
        if is_much and now_s - self.told_s >= LINE_S and self.done_bytes < self.wanted_bytes:
            self.told_bytes, self.told_s = self.done_bytes, now_s
            log.info("pool.touching", **self.facts(now_s))


async def populate(pool: Pool, pages: Pages, said: Faults) -> None:
    """Touch the pool in the background, so that no save waits for fresh pages.

    Without memory for a part it is tried again for ever; meanwhile a block whose pages cannot be
    had is not saved.
    """
    toucher = Toucher(pool)
    progress = _Progress(pages.capacity_bytes, trio.current_time())
    steps = _steps(pages)

    async def work() -> None:
        for offset, length in steps:
            is_short = False
            while reason := await toucher.touch(offset, length):
                progress.short += not is_short
                is_short = True
                if not said.pool_fault:
                    done, wanted = progress.done_bytes, progress.wanted_bytes
                    log.error("pool.short", bytes_ready=done, bytes_wanted=wanted)
                said.pool_fault = f"the machine has no memory for the whole pool ({reason})"
                await trio.sleep(POPULATE_RETRY_S)
            progress.short -= is_short
            if not progress.short:
                said.pool_fault = ""
            progress.add(length, trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(toucher.threads):
            nursery.start_soon(work)
    log.info("pool.touched", threads=toucher.threads, **progress.facts(trio.current_time()))


def _steps(pages: Pages) -> Iterator[tuple[int, int]]:
    """Offset and length of each part, in the order in which slabs are given away."""
    for slab in pages.banks.order().tolist():
        begin, end = slab * pages.slab_bytes, (slab + 1) * pages.slab_bytes
        for offset in range(begin, end, STEP_BYTES):
            yield offset, min(STEP_BYTES, end - offset)
