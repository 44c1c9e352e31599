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
from trikv.address import Address
from trikv.config import Settings
from trikv.core.cache import Cache
from trikv.core.engines import Engines
from trikv.core.errors import KvError
from trikv.core.insight import Insight
from trikv.core.pages import PAGE_ALIGN
from trikv.core.plans import Limits
from trikv.core.windows import Windows
from trikv.nursery.ceiling import CeilingTask, state_path
from trikv.nursery.choices import policy_of, pool_bytes_for, tenants_of
from trikv.nursery.copiers import Copiers, PoolPlace
from trikv.nursery.copying import Copying
from trikv.nursery.evicting import evict
from trikv.nursery.keeping import Opened, PoolError, check, keep, notice, opened
from trikv.nursery.memories import Memories
from trikv.nursery.metrics import Families
from trikv.nursery.peerdoor import PEER_CONNECTIONS, peering_door
from trikv.nursery.peering import first_of, peering_of
from trikv.nursery.peerplan import engines_addr, peers_of
from trikv.nursery.populating import populate
from trikv.nursery.quotas import watch
from trikv.nursery.recording import Recorder
from trikv.nursery.rpc import opener
from trikv.nursery.service import Service, digest, sweep
from trikv.nursery.sessions import Sessions
from trikv.nursery.status import Facts
from trikv.nursery.store import Store
from trikv.nursery.takeover import TakeoverError, take_over
from trikv.nursery.tiers import Tiers, below_of, disks_of, open_disks
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

BLOCKS_MAX = 1 << 24
QUEUE_JOBS_MAX = 1_024
COPIES_MAX = 320  # under way in a direction: more than one session may have, so none fills it
SWEEP_S = 0.25
EXIT_USAGE = 2
SWITCH_S = 0.0005
"""How long a thread that makes sums may keep the main one waiting, which serves."""


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


def build(settings: Settings, opened: Opened, guard: FreezeGuard | None) -> Daemon:
    """Wire the parts; opens nothing."""
    pool = opened.pool
    rows = settings.max_blocks or min(pool.bytes // PAGE_ALIGN, BLOCKS_MAX)
    limits = Limits(lease_s=settings.lease_seconds, fill_s=settings.fill_seconds)
    cache = Cache(
        pool.bytes,
        opened.slab_bytes,
        entries_max=rows,
        seed=secrets.randbits(63),
        limits=limits,
        policy=policy_of(settings),
        tenants=tenants_of(settings, pool.bytes),
        pool_parts=pool.parts,
    )
    cache.leases.number_from(1 + secrets.randbits(62))
    windows = Windows(settings.metric_hll_windows, now_s=0.0)
    engines = Engines(settings.max_engines)
    keeper = keep(cache, engines.namespaces, opened.ledger) if opened.ledger else None
    below = below_of(settings, cache)
    epoch = time.time_ns()  # a name that differs after each start, not a clock
    peering = peering_of(peers_of(settings), cache, below, pool, epoch)
    store = Store(
        cache,
        engines,
        trio.current_time,
        windows,
        insight=Insight(cache.pages.capacity_bytes),
        recorder=Recorder(settings.record_trace) if settings.record_trace else None,
        keeper=keeper,
        below=below,
        shared=peering.shared if peering is not None else None,
        remote=peering.remote if peering is not None else None,
    )
    staging_bytes = (settings.gpu_staging or 0) // 2 // PAGE_ALIGN * PAGE_ALIGN  # a direction
    place = PoolPlace(pool.fd, pool.bytes, cache.pages.slab_bytes, staging_bytes)
    copiers = Copiers(place, cuda_refusal())
    host = HostMemory(pool.address, threads=settings.copy_threads, freeze_s=settings.freeze_seconds)
    memory = Memories(host, copiers)
    sessions = Sessions(
        store, 4 * settings.max_engines + 64, settings.heartbeat_seconds, memory.detach
    )
    jobs, queued = COPIES_MAX, QUEUE_JOBS_MAX
    saving = Copying("save", memory, sessions, jobs_max=jobs, queue_jobs_max=queued)
    loading = Copying("load", memory, sessions, jobs_max=jobs, queue_jobs_max=queued, guard=guard)
    tiers = Tiers(store, below, peering=peering) if below is not None else None
    service = Service(store, sessions, saving, loading, memory, tiers)
    facts = Facts(epoch, 0.0, pool.backing, copiers, tiers)
    facts.pool_notice = notice(settings, pool.backing)
    return Daemon(settings, pool, service, facts)


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
    """The disks, and with them all tasks of the daemon."""
    daemon.facts.started_s = trio.current_time()
    tiers = daemon.service.tiers
    if tiers is None:
        return await run_tasks(daemon, closing, open_calls)
    async with open_disks(disks_of(daemon.settings), tiers, daemon.pool):
        await run_tasks(daemon, closing, open_calls)
        await tiers.end()
    return None


async def run_tasks(
    daemon: Daemon, closing: trio.Event, open_calls: Callable[[trio.Nursery], None]
) -> None:
    """From the inside out: calls, copies, what watches."""
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
        if daemon.service.tiers is not None:
            await back.start(daemon.service.tiers.run)
        await back.start(evict, daemon.service.store)
        pages = daemon.service.store.cache.pages
        back.start_soon(populate, daemon.pool, pages, daemon.facts)
        back.start_soon(collect_garbage)
        start_watching(back, daemon)
        async with trio.open_nursery() as copies:
            await copies.start(daemon.service.saving.run)
            await copies.start(daemon.service.loading.run)
            async with trio.open_nursery() as calls:
                open_calls(calls)
                await closing.wait()
                deadline_s = trio.current_time() + daemon.settings.drain_seconds
                if daemon.service.tiers is not None:
                    daemon.service.tiers.close_calls(deadline_s)
                calls.cancel_scope.deadline = deadline_s
                calls.start_soon(daemon.service.saving.drain)
                calls.start_soon(daemon.service.loading.drain)
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


async def host(daemon: Daemon) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    settings, loop = daemon.settings, asyncio.get_running_loop()
    connections_wanted = 8 * settings.max_engines + 64
    connections_wanted += PEER_CONNECTIONS if settings.metaserver_addr else 0
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
        bind(engines_addr(settings), os.environ) as (address, listening),
        listen(settings.http_addr) as http,
        peering_door(daemon.service.tiers) as door,
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
            await door.open(guest)
            stopped = asyncio.create_task(stop.wait())
            say_ready(daemon, address)
            ends: list[asyncio.Future[Any]] = [accepting, stopped, guest.ended, guest.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            bugs = [one.exception() for one in (accepting, guest.failed) if one.done()]
            accepting.cancel()
            stopped.cancel()
            guest.failed.cancel()
            await door.close()
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


def say_ready(daemon: Daemon, address: Address) -> None:
    """Whoever has started this waits for the line."""
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
    if daemon.facts.pool_notice:
        log.warning("pool.slow", reason=daemon.facts.pool_notice)
    if not address.is_unix:
        log.warning(
            "engines.unreachable",
            reason=f"engines need a unix socket, {address} serves only the status: set TRIKV_SOCKET"
            " or --addr unix:/path",
        )


def end_the_other(settings: Settings) -> None:
    """With `--takeover`, the daemon whose place this one has ends first.

    Raises:
        TakeoverError: it does not.
    """
    if not settings.takeover:
        return
    begin_s = time.perf_counter()
    other = take_over(engines_addr(settings), os.environ, drain_s=settings.drain_seconds)
    if other is not None:
        took_s = round(time.perf_counter() - begin_s, 3)
        log.info("daemon.replaced", pid=other.pid, addr=str(other.address), took_s=took_s)


def main() -> None:
    """Entry point of `trikv-daemon`."""
    if not __debug__:
        sys.exit("trikv-daemon: the checks are part of it: run without -O and PYTHONOPTIMIZE")
    sys.setswitchinterval(SWITCH_S)
    try:
        settings = config.load(sys.argv[1:], os.environ)
        check(settings)
        policy_of(settings)
        tenants_of(settings, settings.pool_size or 0)
        disks_of(settings)
        peers_of(settings)
        set_up_logging(settings.log_level, settings.log_format)
        end_the_other(settings)
        size = pool_bytes_for(settings)
    except (SettingError, TakeoverError) as error:
        print(f"trikv-daemon: {error}", file=sys.stderr)  # noqa: T201  # the one clear line
        sys.exit(EXIT_USAGE)
    try:
        with opened(settings, size) as pool, contextlib.suppress(KeyboardInterrupt):
            freeze_s = settings.freeze_seconds
            with (
                FreezeGuard(freeze_s) if freeze_s else contextlib.nullcontext() as guard,
                asyncio.Runner(loop_factory=Loop) as runner,
            ):
                runner.run(host(build(settings, pool, guard)))
    except (AddressError, PoolError, KvError) as error:
        sys.exit(f"trikv-daemon: {error}")
    except SettingError as error:  # what only opening it could tell
        print(f"trikv-daemon: {error}", file=sys.stderr)  # noqa: T201  # the one clear line
        sys.exit(EXIT_USAGE)
    except BaseExceptionGroup as group:  # likewise, from within a task
        refused, others = group.split(SettingError)
        if refused is None or others is not None:
            raise
        print(f"trikv-daemon: {first_of(refused)}", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_USAGE)
    except MemoryError as error:
        sys.exit(f"trikv-daemon: no memory for the index; lower --max-blocks: {error}")


if __name__ == "__main__":
    main()
