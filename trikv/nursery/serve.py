"""`trikv-daemon`: from settings to a serving process, and back in order.

Decided here: what is opened before what, so that shutdown is nesting read backwards: no new
connections, calls drained until a deadline, copies ended, connections closed, memory unmapped last.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import capnp
import structlog
import trio

from trikv import __version__, config
from trikv.config import Settings
from trikv.core.cache import Cache
from trikv.core.engines import Engines
from trikv.core.errors import KvError
from trikv.core.insight import Insight
from trikv.core.pages import PAGE_ALIGN
from trikv.core.plans import Limits
from trikv.core.policies import ADMISSION, DEFAULT, MAKERS, Maker
from trikv.core.tenants import Tenants
from trikv.core.windows import Windows
from trikv.nursery.ceiling import CeilingTask, state_path
from trikv.nursery.copiers import Copiers, PoolPlace
from trikv.nursery.copying import Copying
from trikv.nursery.memories import Memories
from trikv.nursery.metrics import Families
from trikv.nursery.quotas import read_rules, watch
from trikv.nursery.recording import Recorder
from trikv.nursery.rpc import opener
from trikv.nursery.service import Service, digest, sweep
from trikv.nursery.sessions import Sessions
from trikv.nursery.status import Facts
from trikv.nursery.store import Store
from trikv.options import SettingError
from trikv.process.accepting import Listener
from trikv.process.guest import Guest
from trikv.process.hosting import collect_garbage, end_if_stuck
from trikv.process.http import HttpServer, listen, url_of
from trikv.process.listening import AddressError, bind, connections_for
from trikv.process.logs import set_up_logging
from trikv.process.pages import Page
from trikv.streams import Loop
from trikv.tiers import pool as pools
from trikv.tiers.freeze import FreezeGuard
from trikv.tiers.hostmem import HeldProcess, HostMemory

log = structlog.get_logger()

SLAB_BYTES_MIN = 2 << 20
SLAB_BYTES_MAX = 1 << 30
SLABS_WANTED = 64
BLOCKS_MAX = 1 << 24
QUEUE_JOBS_MAX = 1_024
COPIES_MAX = 320  # under way in a direction: more than one session may have, so none fills it
SWEEP_S = 0.25
POPULATE_RETRY_S = 2.0
EXIT_USAGE = 2


@dataclass(slots=True)
class Places:
    """What is known once the daemon listens: where its windows are kept, and its HTTP socket."""

    windows: Path | None = None
    http: socket.socket | None = None


@dataclass(frozen=True, slots=True)
class Daemon:
    """The parts of a running daemon, wired."""

    settings: Settings
    pool: pools.Pool
    service: Service
    facts: Facts
    places: Places = field(default_factory=Places)


def slab_bytes_for(pool_bytes: int, wanted: int | None) -> int:
    """Size of a slab, whole pages: the setting, else a 64th of the pool within bounds."""
    size = wanted or min(max(pool_bytes // SLABS_WANTED, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
    return min(size, pool_bytes) // PAGE_ALIGN * PAGE_ALIGN


def pool_bytes_for(settings: Settings) -> int:
    """Size of the pool: the setting, else half of what is available.

    Raises:
        SettingError: the machine has not so much, or a slab does not fit.
    """
    size = settings.pool_size or pools.default_bytes()
    available = pools.available_bytes()
    if settings.pool_size and not settings.use_hugepages and size > available:
        raise SettingError(f"--pool-size: {size} bytes, but only {available} are available")
    if settings.slab_size and settings.slab_size > size:
        raise SettingError("--slab-size: larger than the pool")
    return size


def policy_of(settings: Settings) -> Maker:
    """The order of eviction.

    Raises:
        SettingError: the frequency filter stands before leaf-first LRU only.
    """
    if not settings.enable_lfu_admission:
        return MAKERS[settings.eviction_policy]
    if settings.eviction_policy != DEFAULT:
        raise SettingError(f"--enable-lfu-admission: needs --eviction-policy {DEFAULT}")
    return MAKERS[ADMISSION]


def tenants_of(settings: Settings, pool_bytes: int) -> Tenants | None:
    """Quotas, when there is a file of them.

    Raises:
        SettingError: the file cannot be used.
    """
    if settings.quota_file is None:
        return None
    return Tenants(pool_bytes, read_rules(settings.quota_file))


def build(settings: Settings, pool: pools.Pool, guard: FreezeGuard | None) -> Daemon:
    """Wire the parts; opens nothing."""
    rows = settings.max_blocks or min(pool.bytes // PAGE_ALIGN, BLOCKS_MAX)
    limits = Limits(lease_s=settings.lease_seconds, fill_s=settings.fill_seconds)
    slab_bytes = slab_bytes_for(pool.bytes, settings.slab_size)
    cache = Cache(
        pool.bytes,
        slab_bytes,
        entries_max=rows,
        seed=secrets.randbits(63),
        limits=limits,
        policy=policy_of(settings),
        tenants=tenants_of(settings, pool.bytes),
    )
    windows = Windows(settings.metric_hll_windows, now_s=0.0)
    store = Store(
        cache,
        Engines(settings.max_engines),
        trio.current_time,
        windows,
        insight=Insight(cache.pages.capacity_bytes),
        recorder=Recorder(settings.record_trace) if settings.record_trace else None,
    )
    staging_bytes = settings.gpu_staging // 2 // PAGE_ALIGN * PAGE_ALIGN  # a direction
    place = PoolPlace(pool.fd, pool.bytes, cache.pages.slab_bytes, staging_bytes)
    copiers = Copiers(place, cuda_refusal())
    host = HostMemory(pool.address, threads=settings.copy_threads, freeze_s=settings.freeze_seconds)
    memory = Memories(host, copiers)
    sessions = Sessions(
        store, 4 * settings.max_engines + 64, settings.heartbeat_seconds, memory.detach
    )
    workers, jobs = COPIES_MAX, QUEUE_JOBS_MAX
    saving = Copying("save", memory, sessions, workers=workers, queue_jobs_max=jobs)
    loading = Copying("load", memory, sessions, workers=workers, queue_jobs_max=jobs, guard=guard)
    service = Service(store, sessions, saving, loading, memory)
    epoch = time.time_ns()  # a name that differs after each start, not a clock
    return Daemon(settings, pool, service, Facts(epoch, 0.0, pool.backing, copiers))


def cuda_refusal() -> str:
    """Why GPU memory cannot be registered here; empty: nothing speaks against it yet."""
    if importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"):
        return ""
    return (
        "this daemon has no CUDA: install trikv[daemon,cu13], or trikv[daemon,cu12] where the "
        "driver is older"
    )


async def run_trio(
    daemon: Daemon, closing: trio.Event, open_calls: Callable[[trio.Nursery], None]
) -> None:
    """All tasks of the daemon; from the inside out: calls, copies, what watches."""
    daemon.facts.started_s = trio.current_time()
    async with trio.open_nursery() as back:
        await back.start(daemon.facts.copiers.run)
        await back.start(daemon.service.sessions.run)
        await back.start(CeilingTask(daemon.service.store, daemon.places.windows).run)
        if daemon.places.http is not None:
            page = Page(Families(daemon.service, daemon.facts).read)
            server = HttpServer(page.render, lambda: daemon.facts.shown_state, daemon.places.http)
            await back.start(server.run)
        await back.start(
            lambda task_status: sweep(
                daemon.service.store, every_s=SWEEP_S, task_status=task_status
            )
        )
        back.start_soon(populate, daemon)
        back.start_soon(collect_garbage)
        start_watching(back, daemon)
        async with trio.open_nursery() as copies:
            await copies.start(daemon.service.saving.run)
            await copies.start(daemon.service.loading.run)
            async with trio.open_nursery() as calls:
                open_calls(calls)
                await closing.wait()
                deadline_s = trio.current_time() + daemon.settings.drain_seconds
                calls.cancel_scope.deadline = deadline_s
                copies.start_soon(stop_copies, daemon.service, deadline_s)
            copies.cancel_scope.cancel()
        back.cancel_scope.cancel()


def start_watching(nursery: trio.Nursery, daemon: Daemon) -> None:
    """What looks on and serves no call."""
    store, settings = daemon.service.store, daemon.settings
    nursery.start_soon(digest, store)
    if store.cache.tenants is not None and settings.quota_file is not None:
        nursery.start_soon(watch, settings.quota_file, store.cache.tenants)
    if store.recorder is not None:
        nursery.start_soon(store.recorder.run, settings.trace_block_tokens)


async def stop_copies(service: Service, deadline_s: float) -> None:
    """Calls that wait for a copy are answered when it ends: at the deadline, copies are stopped."""
    await trio.sleep_until(deadline_s)
    service.saving.stop()
    service.loading.stop()


async def populate(daemon: Daemon) -> None:
    """Touch the pool in the background, slab by slab, so that no save waits for fresh pages.

    Without memory for a slab it is tried again for ever; meanwhile a block whose pages cannot be
    had is not saved.
    """
    pages, facts = daemon.service.store.cache.pages, daemon.facts
    begin_s = trio.current_time()
    for slab in range(pages.slab_count):
        ready_bytes = slab * pages.slab_bytes
        while reason := await _populate_slab(daemon.pool, ready_bytes, pages.slab_bytes):
            if not facts.pool_fault:
                log.error("pool.short", bytes_ready=ready_bytes, bytes_wanted=pages.capacity_bytes)
            facts.pool_fault = f"the machine has no memory for the whole pool ({reason})"
            await trio.sleep(POPULATE_RETRY_S)
        facts.pool_fault = ""
    log.debug(
        "pool.touched", bytes=pages.capacity_bytes, took_s=round(trio.current_time() - begin_s, 3)
    )


async def _populate_slab(pool: pools.Pool, offset: int, length: int) -> str:
    """Returns why that is not possible, empty when it is done."""
    try:
        await trio.to_thread.run_sync(pool.populate, offset, length)
    except OSError as error:
        return error.strerror or "unknown"
    except RuntimeError as error:  # no thread could be started
        return str(error)
    return ""


async def host(daemon: Daemon) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    settings, loop = daemon.settings, asyncio.get_running_loop()
    connections_wanted = 8 * settings.max_engines + 64
    connections_max = connections_for(connections_wanted)
    if connections_max < connections_wanted:
        log.warning(
            "descriptors.few", connections_max=connections_max, count_wanted=connections_wanted
        )
    loop.set_exception_handler(end_if_stuck)
    stop, closing, guest = asyncio.Event(), trio.Event(), Guest()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: os._exit(1) if stop.is_set() else stop.set())
    with (
        bind(settings.addr, os.environ) as (address, listening),
        listen(settings.http_addr) as http,
    ):
        daemon.facts.http = url_of(http)
        daemon.places.http, daemon.places.windows = http, state_path(settings.state_dir, address)
        await guest.start(run_trio, daemon, closing)
        listener = Listener(
            opener(daemon.service, guest, daemon.facts, HeldProcess),
            guest,
            daemon.service.store.cache.counters,
            connections_max=connections_max,
        )
        async with capnp.kj_loop():
            daemon.facts.ticks.start()
            accepting = asyncio.create_task(listener.run(listening))
            stopped = asyncio.create_task(stop.wait())
            pages = daemon.service.store.cache.pages
            log.info(
                "daemon.ready",
                addr=str(address),
                http=daemon.facts.http,
                pool_gib=round(pages.capacity_bytes / 2**30, 2),
                slabs=pages.slab_count,
                backing=daemon.pool.backing,
                pid=os.getpid(),
                version=__version__,
            )
            ends: list[asyncio.Future[Any]] = [accepting, stopped, guest.ended, guest.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            bugs = [one.exception() for one in (accepting, guest.failed) if one.done()]
            accepting.cancel()
            stopped.cancel()
            guest.failed.cancel()
            daemon.facts.state = "draining"
            daemon.service.sessions.is_shutting_down = True
            guest.close_calls()
            closing.set()
            result = await guest.ended
            await guest.settle()
            await listener.close()
        result.unwrap()
        for bug in bugs:
            if bug is not None:
                raise bug
    log.info("daemon.ended")


def main() -> None:
    """Entry point of `trikv-daemon`."""
    if not __debug__:
        sys.exit("trikv-daemon: the checks are part of it: run without -O and PYTHONOPTIMIZE")
    try:
        settings = config.load(sys.argv[1:], os.environ)
        size = pool_bytes_for(settings)
        policy_of(settings)
        tenants_of(settings, size)
    except SettingError as error:
        print(f"trikv-daemon: {error}", file=sys.stderr)  # noqa: T201  # the one clear line
        sys.exit(EXIT_USAGE)
    set_up_logging(settings.log_level, settings.log_format)
    unit = pools.HUGE_PAGE_BYTES if settings.use_hugepages else PAGE_ALIGN
    try:
        pool = pools.open_pool(size // unit * unit, use_hugepages=settings.use_hugepages)
    except OSError as error:
        sys.exit(f"trikv-daemon: --pool-size {size}: {error}")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            freeze_s = settings.freeze_seconds
            with (
                FreezeGuard(freeze_s) if freeze_s else contextlib.nullcontext() as guard,
                asyncio.Runner(loop_factory=Loop) as runner,
            ):
                runner.run(host(build(settings, pool, guard)))
    except (AddressError, KvError) as error:
        sys.exit(f"trikv-daemon: {error}")
    except MemoryError as error:
        sys.exit(f"trikv-daemon: no memory for the index; lower --max-blocks: {error}")
    finally:
        pool.close()


if __name__ == "__main__":
    main()
