"""The daemon found, kept, lost and found again; calls that return futures.

Decided here: deadlines, back-off, when the daemon counts as sick, and what a caller is told about a
call whose answer will not come. This file does not know sockets, vLLM or what the calls mean.

States, all changed on the runner's thread:

    searching   no connection; `attached` is None, calls fail at once with AbsentError
    attaching   hello is answered, `declare` or `register` not yet; calls fail likewise
    attached    calls go out
    suspect     a call was late: new calls fail at once until a heartbeat is answered; it is, or
                the connection is given up
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trikv import address
from trikv.connector import peers
from trikv.connector.link import (
    AbsentError,
    BrokenError,
    CallError,
    LateError,
    Link,
    LostError,
    RefusedError,
    UnknownError,
    checked,
    open_link,
    read_nothing,
)
from trikv.connector.runner import RUNNER, RunnerStoppedError, keep_for_ever, register

ATTACH_S: Final = 30.0
CALL_S: Final = 2.0
CLOSE_S: Final = 2.0
BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 1.0  # looking costs 50 us, and a daemon that starts again has blocks at once
REFUSED_S: Final = 5.0
RETRY_S_MIN: Final = 0.02
RETRY_S_MAX: Final = 1.0
STRIKES_MAX: Final = 3
RETRIED: Final = frozenset({"not-ready", "conflict"})
ENDED: Final = frozenset({"shutting-down", "engine-lost"})


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """One daemon that has accepted this process; compared by identity."""

    number: int  # grows with each attachment of this client
    epoch: int  # of the daemon: another one after its restart
    address: str
    namespace: str  # empty while parts of the engine are missing
    watch: peers.Watch | None  # None over TCP; of the daemon and of all who write for it


@dataclass(frozen=True, slots=True)
class Introduction:
    """The call that makes a session useful: `declare` or `register`."""

    method: str
    params: Callable[[], Mapping[str, Any]]
    offers_memory: bool = False  # only to a process on this machine that can be watched


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to look, and the name to give."""

    software: str
    given: str | None = None  # an address that overrides the environment
    environ: Mapping[str, str] | None = None


@dataclass(slots=True)
class _Call:
    method: str
    params: Mapping[str, Any]
    read: Callable[[Any], Any]
    deadline_s: float | None
    retry_s: float
    via: Attached | None
    future: concurrent.futures.Future[Any]

    def settle(self, outcome: Any) -> None:  # noqa: ANN401
        """Answer the caller, once: a later outcome is ignored."""
        if not self.future.done():
            is_error = isinstance(outcome, CallError)
            (self.future.set_exception if is_error else self.future.set_result)(outcome)


class Client:
    """Keeps one session with one daemon, for one role of one engine process."""

    def __init__(self, settings: Settings, log: logging.Logger) -> None:
        self._settings = settings
        self._log = log
        self._numbers = itertools.count(1)
        self._attached: Attached | None = None
        self._is_suspect = False
        self._strikes = 0
        self._link: Link | None = None
        self._main: asyncio.Task[None] | None = None
        self._is_open = False
        self._said: set[str] = set()
        self._owner = os.getpid()

    # -- any thread ------------------------------------------------------------------------------

    @property
    def attached(self) -> Attached | None:
        """The daemon that has accepted us; None while there is none."""
        return self._attached

    @property
    def is_ready(self) -> bool:
        """True when a call would be sent."""
        return self._attached is not None and not self._is_suspect

    def start(self, introduction: Introduction) -> None:
        """Begin to look for a daemon, in the background, until `close`."""
        if self._is_open:
            return
        RUNNER.enter()
        self._is_open = True
        self._owner = os.getpid()
        register(self)
        RUNNER.post(lambda: self._begin(introduction))

    def call(
        self,
        method: str,
        params: Mapping[str, Any],
        read: Callable[[Any], Any],
        *,
        deadline_s: float | None = CALL_S,
        retry_s: float = 0.0,
        via: Attached | None = None,
    ) -> concurrent.futures.Future[Any]:
        """Send one call, in the order of calls.

        Args:
            method: of the session.
            params: plain Python.
            read: turns the response into plain Python, on the runner's thread.
            deadline_s: for each attempt; None: wait as long as the connection lives.
            retry_s: how long "not-ready" and "conflict" are asked again.
            via: send only over this attachment.

        Returns:
            A future of what `read` returned, or of a CallError. It cannot be cancelled.
        """
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        if not self.is_ready or via not in (None, self._attached):
            future.set_exception(AbsentError("no daemon is attached"))
            return future
        call = _Call(method, params, read, deadline_s, retry_s, via, future)
        try:
            RUNNER.post(lambda: self._begin_call(call))
        except RunnerStoppedError as exc:
            future.set_exception(AbsentError(str(exc)))
        return future

    def close(self) -> None:
        """End the session and forget the daemon; waits at most a few seconds, never raises."""
        if not self._is_open or self._owner != os.getpid():
            return
        self._is_open = False
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        with contextlib.suppress(RunnerStoppedError, concurrent.futures.TimeoutError):
            RUNNER.post(lambda: self._end(ended))
            ended.result(CLOSE_S)
        RUNNER.leave()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's; close our copy, touch nothing else."""
        keep_for_ever(self._main)
        if self._link is not None:
            descriptor, things = self._link.leak()
            for thing in things:
                keep_for_ever(thing)
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._link = self._main = self._attached = None
        self._is_open = False

    # -- the runner's thread ---------------------------------------------------------------------

    def _begin(self, introduction: Introduction) -> None:
        if self._is_open:
            self._main = asyncio.get_running_loop().create_task(self._serve(introduction))

    def _end(self, ended: concurrent.futures.Future[None]) -> None:
        main, self._main = self._main, None
        if main is None or main.done():
            ended.set_result(None)
            return
        main.add_done_callback(lambda _: ended.set_result(None))
        main.cancel()

    async def _serve(self, introduction: Introduction) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                link = await self._open()
                if link is not None and await self._hold(link, introduction):
                    backoff_s = BACKOFF_S_MIN
            except Exception as exc:  # noqa: BLE001  # the search must go on, whatever failed
                self._say(logging.ERROR, f"TriKV: {type(exc).__name__}: {exc}; still looking")
            finally:
                self._attached = None
                await self._drop()
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _drop(self) -> None:
        """Close the connection, if there is one, even while being cancelled."""
        link, self._link = self._link, None
        if link is not None:
            await asyncio.shield(link.close())

    async def _open(self) -> Link | None:
        """Try every address once, until a daemon greets."""
        environ = os.environ if self._settings.environ is None else self._settings.environ
        try:
            targets = address.search(environ, self._settings.given)
        except ValueError as exc:
            self._say(logging.ERROR, f"TriKV: {exc}")
            return None
        for target in targets:
            opened = await open_link(target)
            problem = opened if isinstance(opened, str) else ""
            if isinstance(opened, Link):
                self._link = opened
                problem = await opened.start(self._settings.software)
                if not problem:
                    return opened
                await self._drop()
            if problem:
                self._say(logging.WARNING, f"TriKV: {target}: {problem}")
        places = ", ".join(str(target) for target in targets)
        self._say(
            logging.WARNING, f"TriKV: no daemon at {places}; computing without it, still looking"
        )
        return None

    async def _hold(self, link: Link, introduction: Introduction) -> bool:
        """Attach and stay until the connection is lost; returns whether it was of any use."""
        self._is_suspect, self._strikes = False, 0
        link.spawn(self._beat(link))
        named = await self._introduce(link, introduction)
        if named is None:
            return False
        namespace, writers = named
        watch = link.watch.joined(writers) if link.watch is not None else None
        if introduction.offers_memory and watch is None:
            self._say(logging.WARNING, f"TriKV: {link.where}: its copier cannot be watched")
            return False
        self._attached = Attached(
            number=next(self._numbers),
            epoch=link.epoch,
            address=str(link.where),
            namespace=namespace,
            watch=watch,
        )
        self._said.clear()
        which = f", namespace {namespace}" if namespace else ""
        self._log.info("TriKV: attached to %s%s", link.where, which)
        await link.lost.wait()
        if self._is_open:
            self._log.warning("TriKV: lost %s; computing without it until it is back", link.where)
        return True

    async def _introduce(
        self, link: Link, introduction: Introduction
    ) -> tuple[str, tuple[int, ...]] | None:
        """Declare or register, again while the daemon is not ready.

        Returns:
            The namespace, and who else writes this process's memory; None: it will not be.
        """
        if introduction.offers_memory:
            if link.watch is None:
                self._say(
                    logging.WARNING,
                    f"TriKV: {link.where} cannot be offered this process's memory: that takes a"
                    " unix socket of a daemon on the same machine; nothing is cached",
                )
                await asyncio.sleep(REFUSED_S)
                return None
            if link.peer is not None and link.peer.pid > 0:
                peers.allow_tracing(link.peer.pid)
        read = _read_registered if introduction.offers_memory else _read_declared
        wait_s = RETRY_S_MIN
        while not link.lost.is_set():
            outcome = await link.ask(introduction.method, introduction.params(), read, ATTACH_S)
            if isinstance(outcome, tuple):
                return outcome
            self._say(logging.WARNING, f"TriKV: {link.where}: {introduction.method}: {outcome}")
            if not isinstance(outcome, RefusedError):
                return None
            if outcome.code not in RETRIED:
                await asyncio.sleep(REFUSED_S)
                return None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)
        return None

    async def _beat(self, link: Link) -> None:
        """Show that we live, and find out whether the daemon does."""
        period_s = link.heartbeat_s / 3
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await link.probe.wait()
            link.probe.clear()
            outcome = await link.ask("heartbeat", {}, read_nothing, max(CALL_S, period_s))
            if isinstance(outcome, UnknownError | AbsentError):
                link.lost.set()
                return
            self._is_suspect = False

    def _begin_call(self, call: _Call) -> None:
        link, attached = self._link, self._attached
        if link is None or attached is None or call.via not in (None, attached):
            call.settle(AbsentError("the daemon is gone"))
            return
        done = functools.partial(self._end_call, link, call)
        link.send(call.method, call.params, call.read, call.deadline_s, done)

    def _end_call(self, link: Link, call: _Call, outcome: Any) -> None:  # noqa: ANN401
        if call.retry_s and _may_change(outcome):
            task = link.spawn(self._ask_again(link, call, outcome))
            task.add_done_callback(lambda _: call.settle(LostError("the connection was closed")))
            return
        try:
            self._judge(link, outcome, is_bounded=call.deadline_s is not None)
        finally:
            call.settle(outcome)

    async def _ask_again(self, link: Link, call: _Call, outcome: Any) -> None:  # noqa: ANN401
        """Ask until there is a final answer. Cancelled with the link: the answer is lost."""
        clock = asyncio.get_running_loop().time
        until_s, wait_s = clock() + call.retry_s, RETRY_S_MIN
        while _may_change(outcome) and clock() + wait_s <= until_s:
            await asyncio.sleep(wait_s)
            wait_s *= 2
            outcome = await link.ask(call.method, call.params, call.read, call.deadline_s)
        self._judge(link, outcome, is_bounded=call.deadline_s is not None)
        call.settle(outcome)

    def _judge(self, link: Link, outcome: object, *, is_bounded: bool) -> None:
        """Open the circuit on the first late answer; give up on a daemon that keeps on raising."""
        if isinstance(outcome, AbsentError | BrokenError):
            self._say(logging.WARNING, f"TriKV: {link.where}: {outcome}")
        if isinstance(outcome, LateError):
            self._is_suspect = True
            link.probe.set()
        elif isinstance(outcome, BrokenError):
            self._strikes += 1
            # Of a copy whose end is unknown only a new registration tells.
            if self._strikes >= STRIKES_MAX or not is_bounded:
                link.lost.set()
        elif isinstance(outcome, LostError):
            link.lost.set()
        elif isinstance(outcome, RefusedError) and outcome.code in ENDED:
            link.probe.set()  # the session has ended, or will soon: the heartbeat tells
        else:
            self._strikes = 0

    def _say(self, level: int, line: str) -> None:
        """Log a line once, until things have changed for the better."""
        if line not in self._said and self._is_open:
            self._said.add(line)
            self._log.log(level, line)


def _read_declared(response: Any) -> tuple[str, tuple[int, ...]]:  # noqa: ANN401
    return str(checked(response.reply).namespace), ()


def _read_registered(response: Any) -> tuple[str, tuple[int, ...]]:  # noqa: ANN401
    ok = checked(response.reply)
    return str(ok.namespace), tuple(int(pid) for pid in ok.writers)


def _may_change(outcome: object) -> bool:
    return isinstance(outcome, RefusedError) and outcome.code in RETRIED
