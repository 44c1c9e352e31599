"""The connection to the daemon: found, trusted, kept, lost, found again; calls that return futures.

Decided here: deadlines, back-off, when the daemon counts as sick, and what a caller is told about a call
whose answer will not come. This file does not know vLLM or what the calls mean.

States of a client, all on the runner's thread:

    searching   no connection; `attached` is None, calls fail at once with AbsentError
    attaching   hello answered, `declare` or `register` not yet; calls fail likewise
    attached    calls go out
    suspect     a call was late: new calls fail at once until a heartbeat is answered, else searching
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import capnp

from trikv import address
from trikv.connector import peers
from trikv.connector.runner import RUNNER, RunnerStoppedError, keep_for_ever, register
from trikv.wire import PROTOCOL, SCHEMA

CONNECT_S: Final = 2.0
HELLO_S: Final = 5.0
ATTACH_S: Final = 30.0
CALL_S: Final = 2.0
CLOSE_S: Final = 1.0
BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 5.0
RETRY_S_MIN: Final = 0.02
STRIKES_MAX: Final = 3
RETRIED: Final = frozenset({"not-ready", "conflict"})


class CallError(Exception):
    """A call without a result."""


class AbsentError(CallError):
    """Nothing was sent: no daemon is attached, or not the one that was meant."""


class RefusedError(CallError):
    """The daemon answered with an error: nothing was done."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class UnknownError(CallError):
    """Sent, but the answer is missing: whether it was done, or still is being done, is unknown."""


class LateError(UnknownError):
    """No answer within the deadline."""


class LostError(UnknownError):
    """The connection broke."""


class BrokenError(UnknownError):
    """The daemon raised, or its answer could not be read: a bug on one side."""


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """One daemon that has accepted this process; compared by identity."""

    number: int  # grows with each attachment of this client
    epoch: int  # of the daemon: another one after its restart
    address: str
    namespace: str
    watch: peers.Watch | None  # None over TCP


@dataclass(frozen=True, slots=True)
class Introduction:
    """The call that makes a session of ours useful: `declare` or `register`."""

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
    future: "concurrent.futures.Future[Any]"

    def settle(self, outcome: Any) -> None:  # noqa: ANN401
        if isinstance(outcome, CallError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class _Link:
    """One connection. Everything of capnp hangs on it and dies in `close`, on the runner's thread."""

    def __init__(self, sock: socket.socket, where: str, peer: peers.Peer | None) -> None:
        self.sock, self.where, self.peer = sock, where, peer
        self.watch = peers.watch(sock, peer) if peer is not None else None
        self.stream: Any = None
        self.party: Any = None
        self.session: Any = None
        self.epoch = 0
        self.heartbeat_s = 1.0
        self.lost = asyncio.Event()
        self.probe = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Any) -> None:  # noqa: ANN401  # a coroutine
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def close(self) -> None:
        """Answer every open call with LostError, then free stream and capabilities, in this order."""
        try:
            for task in list(self.tasks):
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks, timeout=CLOSE_S)
        finally:
            self._free()

    def _free(self) -> None:
        self.session = None
        if self.stream is not None:
            self.stream.close()
        if self.party is not None:
            self.party.close()
        self.party = self.stream = None
        self.sock.close()


class Client:
    """Keeps one session with one daemon, for one role of one engine process."""

    def __init__(self, settings: Settings, log: logging.Logger) -> None:
        self._settings = settings
        self._log = log
        self._numbers = itertools.count(1)
        self._attached: Attached | None = None
        self._is_suspect = False
        self._strikes = 0
        self._link: _Link | None = None
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
    ) -> "concurrent.futures.Future[Any]":
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
        if not self.is_ready or (via is not None and via is not self._attached):
            future.set_exception(AbsentError("no daemon is attached"))
            return future
        call = _Call(method, params, read, deadline_s, retry_s, via, future)
        try:
            RUNNER.post(lambda: self._begin_call(call))
        except RunnerStoppedError as exc:
            future.set_exception(AbsentError(str(exc)))
        return future

    def close(self) -> None:
        """End the session and forget the daemon; waits at most 2 s, never raises."""
        if not self._is_open or self._owner != os.getpid():
            return
        self._is_open = False
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        with contextlib.suppress(RunnerStoppedError, concurrent.futures.TimeoutError):
            RUNNER.post(lambda: self._end(ended))
            ended.result(2.0)
        RUNNER.leave()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's; close our copy of it and touch nothing else."""
        link = self._link
        if link is not None:
            for thing in (link.stream, link.party, link.session, link.sock, link, self._main):
                keep_for_ever(thing)
            with contextlib.suppress(OSError):
                os.close(link.sock.fileno())
        self._link = self._main = self._attached = None
        self._is_open = False

    # -- the runner's thread ---------------------------------------------------------------------

    def _begin(self, introduction: Introduction) -> None:
        if self._is_open:
            self._main = asyncio.get_running_loop().create_task(self._serve(introduction))

    def _end(self, ended: "concurrent.futures.Future[None]") -> None:
        main, self._main = self._main, None
        if main is None or main.done():
            ended.set_result(None)
            return
        main.add_done_callback(lambda _: ended.set_result(None))
        main.cancel()

    async def _serve(self, introduction: Introduction) -> None:
        backoff_s = BACKOFF_S_MIN
        while True:
            link = await self._open()
            if link is not None:
                try:
                    if await self._hold(link, introduction):
                        backoff_s = BACKOFF_S_MIN
                finally:
                    self._attached, self._link = None, None
                    await asyncio.shield(link.close())
            await asyncio.sleep(backoff_s * random.uniform(0.75, 1.25))  # noqa: S311
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def _open(self) -> _Link | None:
        """Try every address once, until a daemon greets."""
        settings = self._settings
        environ = os.environ if settings.environ is None else settings.environ
        try:
            targets = address.search(environ, settings.given)
        except ValueError as exc:
            self._say(logging.ERROR, f"TriKV: {exc}")
            return None
        for target in targets:
            link = await self._connect(target)
            if link is None:
                continue
            problem = "cancelled"
            try:
                problem = await self._greet(link)
            finally:
                if problem:
                    self._link = None
                    await asyncio.shield(link.close())
            if not problem:
                return link
            self._say(logging.WARNING, f"TriKV: {target}: {problem}")
        places = ", ".join(str(target) for target in targets)
        self._say(
            logging.WARNING, f"TriKV: no daemon at {places}; computing without it, still looking"
        )
        return None

    async def _connect(self, target: address.Address) -> _Link | None:
        """Open a socket to a process that may be trusted."""
        sock = socket.socket(target.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        link: _Link | None = None
        peer: peers.Peer | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, target.target)
            if target.is_unix:
                peer = peers.peer_of(sock)
                if not peer.is_trusted:
                    self._say(
                        logging.WARNING,
                        f"TriKV: {target} belongs to uid {peer.uid}, neither ours nor root: not used",
                    )
                    return None
            else:
                # asyncio leaves sockets made by hand alone, and each call would wait 40 ms.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            stream_of = capnp.AsyncIoStream
            if target.is_unix:
                stream = await stream_of.create_unix_connection(sock=sock)
            else:
                stream = await stream_of.create_connection(sock=sock)
            link = _Link(sock, str(target), peer)
            link.stream, link.party = stream, capnp.TwoPartyClient(stream)
            self._link = link
        except (OSError, TimeoutError):
            return None
        finally:
            if link is None:
                sock.close()
        return link

    async def _greet(self, link: _Link) -> str:
        """Say hello; returns what is wrong, or nothing."""
        kv = link.party.bootstrap().cast_as(SCHEMA.Kv)
        hello = {"protocol": PROTOCOL, "software": self._settings.software[:256]}

        def read(response: Any) -> tuple[Any, int, float]:  # noqa: ANN401
            ok = checked(response.reply)
            return ok.session, int(ok.epoch), float(ok.heartbeatSeconds)

        outcome = await _ask(kv, "hello", {"hello": hello}, read, HELLO_S)
        if isinstance(outcome, CallError):
            return str(outcome)
        link.session, link.epoch, link.heartbeat_s = outcome
        return ""

    async def _hold(self, link: _Link, introduction: Introduction) -> bool:
        """Attach and stay until the connection is lost; returns whether it was of any use."""
        link.spawn(_await_disconnect(link))
        link.spawn(self._beat(link))
        self._is_suspect, self._strikes = False, 0
        namespace = await self._introduce(link, introduction)
        if namespace is None:
            return False
        self._attached = Attached(
            number=next(self._numbers),
            epoch=link.epoch,
            address=link.where,
            namespace=namespace,
            watch=link.watch,
        )
        self._said.clear()
        self._log.info(
            "TriKV: attached to %s, namespace %s",
            link.where,
            namespace or "known when all parts of the engine are there",
        )
        await link.lost.wait()
        if self._is_open:
            self._log.warning("TriKV: lost %s; computing without it until it is back", link.where)
        return True

    async def _introduce(self, link: _Link, introduction: Introduction) -> str | None:
        """Declare or register, again while the daemon is not ready for it."""
        if introduction.offers_memory and link.watch is None:
            self._say(
                logging.WARNING,
                f"TriKV: {link.where} cannot be offered this process's memory: it takes a unix socket"
                " to a daemon on the same machine",
            )
            await asyncio.sleep(BACKOFF_S_MAX)
            return None
        if introduction.offers_memory and link.peer is not None and link.peer.pid > 0:
            peers.allow_tracing(link.peer.pid)
        wait_s = RETRY_S_MIN
        while not link.lost.is_set():
            outcome = await _ask(
                link.session, introduction.method, introduction.params(), _read_namespace, ATTACH_S
            )
            if isinstance(outcome, str):
                return outcome
            self._say(logging.WARNING, f"TriKV: {link.where}: {introduction.method}: {outcome}")
            if not (isinstance(outcome, RefusedError) and outcome.code in RETRIED):
                await asyncio.sleep(BACKOFF_S_MAX if isinstance(outcome, RefusedError) else 0)
                return None
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 1.0)
        return None

    async def _beat(self, link: _Link) -> None:
        """Show that we live, and find out whether the daemon does."""
        period_s = max(0.05, link.heartbeat_s / 3)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await link.probe.wait()
            link.probe.clear()
            outcome = await _ask(
                link.session, "heartbeat", {}, lambda _: None, max(CALL_S, period_s)
            )
            if isinstance(outcome, UnknownError):
                link.lost.set()
                return
            self._is_suspect = False

    def _begin_call(self, call: _Call) -> None:
        link = self._link
        attached = self._attached
        if link is None or attached is None or call.via not in (None, attached):
            call.settle(AbsentError("the daemon is gone"))
            return
        link.spawn(self._run_call(link, call))

    async def _run_call(self, link: _Link, call: _Call) -> None:
        outcome: Any = None
        try:
            until_s = asyncio.get_running_loop().time() + call.retry_s
            wait_s = RETRY_S_MIN
            while True:
                outcome = LostError("the connection was closed")
                outcome = await _ask(
                    link.session, call.method, call.params, call.read, call.deadline_s
                )
                now_s = asyncio.get_running_loop().time()
                if not isinstance(outcome, RefusedError) or outcome.code not in RETRIED:
                    break
                if now_s + wait_s > until_s:
                    break
                await asyncio.sleep(wait_s)
                wait_s *= 2
            self._judge(link, outcome, is_bounded=call.deadline_s is not None)
        finally:
            call.settle(outcome)

    def _judge(self, link: _Link, outcome: object, *, is_bounded: bool) -> None:
        """Open the circuit on the first late answer; give up on a daemon that keeps on raising."""
        if isinstance(outcome, LateError):
            self._is_suspect = True
            link.probe.set()
        elif isinstance(outcome, BrokenError):
            self._strikes += 1
            self._say(logging.WARNING, f"TriKV: {link.where}: {outcome}")
            # Of a copy whose end is unknown only a new registration tells.
            if self._strikes >= STRIKES_MAX or not is_bounded:
                link.lost.set()
        elif isinstance(outcome, LostError):
            link.lost.set()
        else:
            self._strikes = 0

    def _say(self, level: int, line: str) -> None:
        """Log a line once, until things have changed for the better."""
        if line not in self._said and self._is_open:
            self._said.add(line)
            self._log.log(level, line)


async def _await_disconnect(link: _Link) -> None:
    with contextlib.suppress(capnp.KjException):
        await link.party.on_disconnect()
    link.lost.set()


async def _ask(
    capability: Any,  # noqa: ANN401
    method: str,
    params: Mapping[str, Any],
    read: Callable[[Any], Any],
    deadline_s: float | None,
) -> Any:  # noqa: ANN401
    """Call and read; failures are returned, not raised.

    A raised one would carry a traceback, with it the frames that hold capnp objects, to other threads.
    """
    failure: CallError | None = None
    try:
        async with asyncio.timeout(deadline_s):
            return read(await capability._send(method, **params))  # noqa: SLF001
    except TimeoutError:
        failure = LateError(f"{method} was not answered within {deadline_s} s")
    except RefusedError as exc:
        failure = RefusedError(exc.code, str(exc).partition(": ")[2])
    except capnp.KjException as exc:
        text = str(exc.description).strip().splitlines() or [""]
        kind = LostError if exc.type == "DISCONNECTED" else BrokenError
        failure = kind(f"{method}: {text[-1]}")
    except Exception as exc:  # noqa: BLE001  # whatever the answer holds must not end this thread
        failure = BrokenError(f"{method}: {type(exc).__name__}: {exc}")
    return failure


def checked(reply: Any) -> Any:  # noqa: ANN401
    """The `ok` group of a reply.

    Raises:
        RefusedError: it is an error.
    """
    if reply.which() == "error":
        raise RefusedError(str(reply.error.code), str(reply.error.message))
    return reply.ok


def _read_namespace(response: Any) -> str:  # noqa: ANN401
    return str(checked(response.reply).namespace)
