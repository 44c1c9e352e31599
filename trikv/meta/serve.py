"""`trikv-meta`: from settings to a serving process, and back.

Decided here: the order of start and end. Nothing is kept: nodes announce again what they hold.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import capnp
import structlog
import trio

from trikv import __version__
from trikv.address import Address
from trikv.core.proofs import Secret
from trikv.meta.gate import UNPROVEN_MAX, Gate
from trikv.meta.messages import MESSAGE_WORDS_MAX, META
from trikv.meta.server import SOFTWARE, opener
from trikv.meta.service import MetaService
from trikv.meta.settings import Settings, address_of, load, load_secret, read_tcp
from trikv.meta.status import Facts, Families, state_of
from trikv.meta.store import open_memory
from trikv.options import SettingError
from trikv.process.accepting import Listener
from trikv.process.guest import Guest
from trikv.process.hosting import collect_garbage, end_if_stuck
from trikv.process.http import HttpServer, listen, url_of
from trikv.process.listening import AddressError, bind_tcp, connections_for
from trikv.process.logs import set_up_logging
from trikv.process.pages import Page
from trikv.streams import Loop

log = structlog.get_logger()

EXIT_USAGE = 2
HTTP = "127.0.0.1:9092"
GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Meta:
    """The parts of a running metaserver, wired."""

    settings: Settings
    address: Address
    secret: Secret | None
    service: MetaService
    facts: Facts

    @property
    def advertised(self) -> Address:
        """Where nodes reach it, as its proofs say."""
        given = self.settings.advertise_addr
        return self.address if given is None else read_tcp(given, "--advertise-addr")


def build(settings: Settings) -> Meta:
    """Wire the parts; listens nowhere.

    Raises:
        SettingError: a setting cannot be used.
        MemoryError: there is not so much memory.
    """
    address, secret = address_of(settings), load_secret(settings.cluster_secret_file)
    state = open_memory(
        settings.memory,
        seed=secrets.randbits(63),
        silence_s=settings.node_seconds,
        grace_s=min(GRACE_S, settings.node_seconds),
        nodes_max=settings.max_nodes,
    )
    epoch = time.time_ns()  # a name that differs after each start, not a clock
    service = MetaService(state, state, trio.current_time)
    return Meta(settings, address, secret, service, Facts(epoch, is_open=secret is None))


async def run_trio(
    meta: Meta,
    http: socket.socket | None,
    closing: trio.Event,
    open_calls: Callable[[trio.Nursery], None],
) -> None:
    """What watches; calls are answered without waiting."""
    service, facts = meta.service, meta.facts
    facts.started_s = trio.current_time()
    async with trio.open_nursery() as back:
        await back.start(service.watch)
        back.start_soon(service.sweep)
        back.start_soon(collect_garbage)
        if http is not None:
            page = Page(Families(service, facts).read)
            await back.start(HttpServer(page.render, lambda: state_of(service, facts), http).run)
        async with trio.open_nursery() as calls:
            open_calls(calls)
            await closing.wait()
        back.cancel_scope.cancel()


def _say_ready(meta: Meta, listening: socket.socket) -> None:
    owners = meta.service.state.owners
    host, port = listening.getsockname()[:2]
    log.info(
        "meta.ready",
        addr=str(Address(host=host, port=port)),
        http=meta.facts.http,
        block_count_max=owners.capacity,
        memory_mib=round(owners.memory_bytes / 2**20, 1),
        secure=meta.secret is not None,
        pid=os.getpid(),
        version=__version__,
    )


async def host(meta: Meta) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    loop = asyncio.get_running_loop()
    wanted = meta.settings.max_nodes + UNPROVEN_MAX
    connections_max = connections_for(wanted)
    if connections_max < wanted:
        log.warning("descriptors.few", connections_max=connections_max, count_wanted=wanted)
    loop.set_exception_handler(end_if_stuck)
    stop, closing, guest = asyncio.Event(), trio.Event(), Guest()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: os._exit(1) if stop.is_set() else stop.set())
    with (
        bind_tcp(meta.address, reaches_others=not meta.address.is_loopback) as listening,
        listen(meta.settings.http_addr, HTTP) as http,
    ):
        meta.facts.http = url_of(http)
        await guest.start(run_trio, meta, http, closing)
        gate = Gate(meta.secret, META, str(meta.advertised), SOFTWARE)
        checks_user = meta.address.is_loopback and meta.secret is None
        listener = Listener(
            opener(meta.service, guest, meta.facts, gate, checks_user=checks_user),
            guest,
            meta.service.counters,
            connections_max=connections_max,
            message_words_max=MESSAGE_WORDS_MAX,
        )
        async with capnp.kj_loop():
            meta.facts.ticks.start()
            accepting = asyncio.create_task(listener.run(listening))
            stopped = asyncio.create_task(stop.wait())
            _say_ready(meta, listening)
            ends: list[asyncio.Future[Any]] = [accepting, stopped, guest.ended, guest.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            bugs = [one.exception() for one in (accepting, guest.failed) if one.done()]
            accepting.cancel()
            stopped.cancel()
            guest.failed.cancel()
            meta.facts.is_draining = True
            await listener.close()
            guest.close_calls()
            closing.set()
            result = await guest.ended
        result.unwrap()
        for bug in bugs:
            if bug is not None:
                raise bug
    log.info("meta.ended")


def main() -> None:
    """Entry point of `trikv-meta`."""
    if not __debug__:
        sys.exit("trikv-meta: the checks are part of it: run without -O and PYTHONOPTIMIZE")
    try:
        settings = load(sys.argv[1:], os.environ)
        meta = build(settings)
        _ = meta.advertised
    except SettingError as error:
        print(f"trikv-meta: {error}", file=sys.stderr)  # noqa: T201  # the one clear line
        sys.exit(EXIT_USAGE)
    except MemoryError as error:
        sys.exit(f"trikv-meta: no memory for the index; lower --memory: {error}")
    set_up_logging(settings.log_level, settings.log_format)
    try:
        with (
            contextlib.suppress(KeyboardInterrupt),
            asyncio.Runner(loop_factory=Loop) as runner,
        ):
            runner.run(host(meta))
    except AddressError as error:
        sys.exit(f"trikv-meta: {error}")


if __name__ == "__main__":
    main()
