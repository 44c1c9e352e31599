"""The pool from settings: how large, cut how, and whether it outlives this daemon.

Decided here: which pool is opened for which settings, and how blocks that an earlier daemon has
left come back before anybody is served. This file does not know how records are written.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from trikv.config import Settings
from trikv.core.banks import ANY_BANK, WHOLE, Parts
from trikv.core.cache import Cache
from trikv.core.keeper import Keeper
from trikv.core.ledger import Found, Ledger
from trikv.core.namespace import Namespaces, parts_of
from trikv.core.pages import PAGE_ALIGN
from trikv.core.words import ShapeId, SpaceId
from trikv.nursery.choices import slab_bytes_for
from trikv.options import SettingError
from trikv.tiers import kept, numa, pool

log = structlog.get_logger()

COST: Final = "with 4 KiB pages SSD reads run at a third of their speed"
CURE: Final = "set shmem_enabled=advise, or vm.nr_hugepages and --use-hugepages"
KEPT_CURE: Final = "use a folder on a tmpfs mounted with huge=always, or on hugetlbfs"


class PoolError(Exception):
    """The pool cannot be had; the message is one line."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool, and its records when it outlives this daemon."""

    pool: pool.Pool
    slab_bytes: int
    ledger: Ledger | None = None


def check(settings: Settings) -> None:
    """Refuse what cannot be, whatever the machine has.

    Raises:
        SettingError: two settings contradict each other.
    """
    if settings.slab_size and settings.pool_size and settings.slab_size > settings.pool_size:
        raise SettingError("--slab-size: larger than the pool")
    if settings.persist and settings.use_hugepages:
        raise SettingError("--use-hugepages: with --persist, name a folder on hugetlbfs instead")
    if settings.persist and not Path(settings.persist).is_absolute():
        raise SettingError(f"--persist: {settings.persist!r} is no absolute path")


@contextlib.contextmanager
def opened(settings: Settings, size_bytes: int) -> Iterator[Opened]:
    """Open the pool; its memory is unmapped at the end.

    Raises:
        PoolError: it cannot be had.
    """
    unit = numa.HUGE_PAGE_BYTES if settings.use_hugepages else PAGE_ALIGN
    size_bytes = size_bytes // unit * unit
    slab_bytes = slab_bytes_for(size_bytes, settings.slab_size)
    begin_s = time.perf_counter()
    spread = partial(spread_over, numa.pool_nodes() if settings.numa == "auto" else ())
    if settings.persist:
        try:
            found = kept.open_kept(Path(settings.persist), size_bytes, slab_bytes, spread=spread)
        except kept.KeptError as error:
            raise PoolError(f"--persist: {error}") from error
        if found.note:
            log.warning("pool.emptied", folder=settings.persist, reason=found.note)
        took_s = round(time.perf_counter() - begin_s, 3)
        log.info("pool.mapped", folder=settings.persist, bytes=found.pool.bytes, took_s=took_s)
        made = Opened(found.pool, slab_bytes, found.ledger)
    else:
        try:
            plain = pool.open_pool(size_bytes, use_hugepages=settings.use_hugepages, spread=spread)
        except OSError as error:
            raise PoolError(f"--pool-size {size_bytes}: {error}") from error
        made = Opened(plain, slab_bytes)
    banks = [str(bank) for _, bank in made.pool.parts if bank != ANY_BANK]
    if banks:
        made.pool.backing += f", NUMA nodes {', '.join(banks)}"
    try:
        yield made
    finally:
        made.pool.close()


def notice(settings: Settings, backing: str) -> str:
    """What a person could do for the pool's speed, as one line, or nothing."""
    if not backing.startswith(pool.SMALL_PAGES):
        return ""
    return f"{COST}: {KEPT_CURE if settings.persist else CURE}"


def spread_over(nodes: tuple[int, ...], address: int, size_bytes: int) -> Parts:
    """A pool goes on without, where the kernel refuses: containers may."""
    try:
        return numa.spread(address, size_bytes, nodes)
    except OSError as error:
        log.warning("numa.off", nodes=nodes, reason=str(error))
        return WHOLE


def keep(cache: Cache, namespaces: Namespaces, ledger: Ledger) -> Keeper:
    """Bring back what an earlier daemon has left, and keep records from now on.

    All of it before anybody is served: a place that is found must not be given to another block.
    """
    begin_s = time.perf_counter()
    keeper = Keeper(ledger, cache.pages, cache.blocks, cache.index, cache.room)

    def open_space(found: Found) -> tuple[SpaceId, ShapeId]:
        space = namespaces.reserve(*parts_of(found.origin))
        cache.open_space(space, found.page_bytes, found.tenant)
        shape = cache.spaces[space].shape
        keeper.open_space(space, shape, found.origin, found.tenant)
        return space, shape

    block_count = sum(keeper.adopt(open_space))
    cache.counters.recovered_blocks_total += block_count
    took_s = round(time.perf_counter() - begin_s, 3)
    log.info("pool.found", block_count=block_count, took_s=took_s)
    return keeper
