"""The one thread of a process that may touch capnp: an asyncio loop inside `kj_loop`.

Decided here: when the thread starts (first use, once), when it ends (last user, or interpreter
exit, never hanging), and what a forked child may keep (nothing). This file does not know the schema
or sockets.

capnp crashes a process whose other threads free its objects, be it by the cyclic garbage collector:
so only callables go in and plain Python comes out, and nothing here or above may tie them into a
cycle.
"""
# ruff: noqa: TID251  # capnp's loop is asyncio's

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import capnp

from trikv.streams import Loop

START_S: Final = 10.0
STOP_S: Final = 2.0

LOG = logging.getLogger(__name__)


class RunnerStoppedError(RuntimeError):
    """The thread has ended or could not start; the callable was not run."""


class Runner:
    """An event loop in a daemon thread, shared by all connections of this process.

    Life: absent, until `post` or `enter`; running; absent again after the last `leave`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._users = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._bell = -1  # an eventfd, made once and kept: it cannot be rung after its end

    def enter(self) -> None:
        """Count a user; starts the thread if this is the first.

        Raises:
            RunnerStoppedError: the thread did not start within `START_S`.
        """
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._users += 1

    def leave(self) -> None:
        """Uncount a user; the last one ends the thread and waits for it, at most `STOP_S`."""
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._users or self._loop is None or self._stop is None:
                return
            thread, loop, stop = self._thread, self._loop, self._stop
            self._thread = self._loop = self._stop = None
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_S)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the thread, soon and in order; many posts cost one wake-up.

        Raises:
            RunnerStoppedError: no thread runs.
        """
        loop = self._loop
        if loop is None or loop.is_closed():
            raise RunnerStoppedError("the connector's thread does not run")
        self._inbox.append(work)
        if not self._is_woken:
            self._is_woken = True
            os.eventfd_write(self._bell, 1)

    def _drain(self) -> None:
        os.eventfd_read(self._bell)
        self._is_woken = False  # first: what is appended from here on wakes again
        while self._inbox:
            self._inbox.popleft()()

    def _start(self) -> None:
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
        started = concurrent.futures.Future()
        self._inbox.clear()
        self._is_woken = False
        if self._bell < 0:
            self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=_main,
            args=(started, self._bell, self._drain),
            name="trikv-connector",
            daemon=True,
        )
        self._thread.start()
        try:
            self._loop, self._stop = started.result(
                START_S
            )  # last: others see it only when it runs
        except concurrent.futures.TimeoutError:
            raise RunnerStoppedError("the connector's thread did not start") from None

    def forget(self) -> None:
        """In a forked child: drop everything without running a destructor of it."""
        for thing in (self._loop, self._stop):
            keep_for_ever(thing)
        if self._bell >= 0:
            os.close(self._bell)  # our copy: what we write would wake the parent
        self.__init__()  # type: ignore[misc]  # a lock held at the fork would never be released


def _main(started: concurrent.futures.Future[Any], bell: int, drain: Callable[[], None]) -> None:
    async def serve(loop: Loop) -> None:
        stop = asyncio.Event()
        loop.set_exception_handler(_note)
        async with capnp.kj_loop():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(bell)  # rung for the thread before this one
            loop.add_reader(bell, loop.run_on, drain)
            started.set_result((loop, stop))
            await stop.wait()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STOP_S / 2)

    try:
        with asyncio.Runner(loop_factory=Loop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, Loop)
            runner.run(serve(loop))
    except Exception as exc:  # noqa: BLE001  # a thread's end: nobody else can hear of it
        LOG.debug("the connector's thread ended: %s", exc)
        if not started.done():
            started.set_exception(RunnerStoppedError(str(exc)))


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    LOG.debug("connector loop: %s", context.get("message"))


def keep_for_ever(thing: object) -> None:
    """Leak one reference, so that no destructor runs in a process that must not run it."""
    if thing is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


RUNNER: Final = Runner()
"""kj allows one loop a thread, and the collector punishes several; hence one for the process."""

_CLOSERS: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register(user: object) -> None:
    """Have `user.close()` called at interpreter exit and `user.forget()` in a forked child."""
    _CLOSERS.add(user)


def _at_exit() -> None:
    for user in list(_CLOSERS):
        user.close()


def _after_fork() -> None:
    for user in list(_CLOSERS):
        user.forget()
    RUNNER.forget()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
