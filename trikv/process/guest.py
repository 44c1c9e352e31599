"""Trio as the guest of asyncio in one thread: pycapnp needs asyncio, everything else here is Trio.

Decided here: how a call that waits crosses from one to the other. Plain methods need no crossing:
nothing of Trio runs between two callbacks of asyncio, so servants call them directly, without a
lock. This file does not know what runs on either side.
"""

import asyncio
import importlib
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import outcome
import trio

from trikv.core.errors import ShuttingDownError
from trikv.streams import STEPS_S, Loop

T = TypeVar("T")
TURNS_MAX = 16
TURNS_S = STEPS_S  # both: how long sockets wait to be looked at
TRIO: Any = importlib.import_module("trio._core._run")
FLUSH_S = 0.02
SETTLE_S = 2.0
THREADED: Any = getattr(TRIO, "start_thread_soon", None)
"""What Trio's guest mode waits with: a thread that polls for it, which costs two hops a wait."""


class StuckError(Exception):
    """Trio will not run again: who waits for it waits for ever, and what it did is unknown."""


class Host:
    """What a Trio run is given by asyncio: turns, and a wake-up when its events have come.

    Trio's guest mode hands each wait to a helper thread and takes a turn of the host's loop for
    each of its own: 200 µs and more for a call that waits. Here asyncio watches Trio's epoll, and
    Trio's turns follow each other at once, `TURNS_MAX` of them or for `TURNS_S` before asyncio has
    its own again, as calls come in there; or until there is an answer to be sent, which is not to
    wait for what else Trio has to do.

    The thread is avoided by replacing the one function of Trio by which it asks for it; where that
    is not found as it was in Trio 0.27 to 0.35, the thread stays.

    A turn that raises was Trio's last one: `crashed` is called, once.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, crashed: Callable[[Exception], None]
    ) -> None:
        self._loop = loop
        self._crashed = crashed
        self._owner = threading.get_ident()
        self._turns: deque[Callable[[], object]] = deque()
        self._is_turning = False
        self._end_wait: Callable[[], None] | None = None
        self._watched = -1  # Trio's epoll, once it has been waited for
        if THREADED is not None:
            TRIO.start_thread_soon = self._wait

    def kick(self) -> None:
        """Trio has something to do, by code of asyncio or an event: do it now."""
        if self._end_wait is not None and not self._is_turning:
            self._end_wait()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Give Trio a turn; from the loop's thread."""
        self._turns.append(callback)
        if not self._is_turning:
            self._turn()

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        """Give Trio a turn; from any thread."""
        if threading.get_ident() == self._owner:
            self.call_soon(callback)
        else:
            self._loop.call_soon_threadsafe(self.call_soon, callback)

    def close(self) -> None:
        """The run has ended, and closed what was watched."""
        if self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1
        if THREADED is not None:
            TRIO.start_thread_soon = THREADED

    def _turn(self) -> None:
        self._is_turning = True
        try:
            until_s = time.perf_counter() + TURNS_S
            for _ in range(TURNS_MAX):
                if not self._turns:
                    return
                self._turns.popleft()()
                if isinstance(self._loop, Loop) and self._loop.has_soon:
                    break
                if time.perf_counter() > until_s:
                    break
        except Exception as error:  # noqa: BLE001  # whatever it is, there is no next turn
            self._turns.clear()
            self._crashed(error)
        finally:
            self._is_turning = False
        if self._turns:
            call = self._loop.call_last if isinstance(self._loop, Loop) else self._loop.call_soon
            call(self._turn)

    def _wait(
        self,
        poll: Callable[[], Any],
        deliver: Callable[[outcome.Outcome[Any]], object],
        *rest: Any,  # noqa: ANN401  # passed on
    ) -> None:
        """Call `poll`, which blocks, when it would not, and hand its result to `deliver`."""
        cells: Any = getattr(poll, "__closure__", None) or ()
        names: Any = getattr(getattr(poll, "__code__", None), "co_freevars", ())
        known = {n: c.cell_contents for n, c in zip(names, cells, strict=True)}
        manager: Any = getattr(getattr(known.get("self"), "runner", None), "io_manager", None)
        descriptor = getattr(getattr(manager, "_epoll", None), "fileno", lambda: -1)()
        if descriptor < 0 or "timeout" not in known or threading.get_ident() != self._owner:
            THREADED(poll, deliver, *rest)
            return

        def end() -> None:
            self._end_wait = None
            timer.cancel()
            deliver(outcome.capture(manager.get_events, 0))

        self._end_wait = end
        timer = self._loop.call_later(known["timeout"], self._run_on, end)
        if descriptor != self._watched:
            self._watched = descriptor
            self._loop.add_reader(descriptor, self._run_on, self.kick)

    def _run_on(self, work: Callable[[], None]) -> None:
        """Run what an event has caused; on our loop with all that it wants to be run soon."""
        if isinstance(self._loop, Loop):
            self._loop.run_on(work)
        else:
            work()


class Guest:
    """A Trio run inside the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: trio.Nursery | None = None
        self._running: set[asyncio.Future[None]] = set()  # ends of the calls under way
        self._started: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[outcome.Outcome[None]] = self._loop.create_future()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    async def start(self, main: Callable[..., Awaitable[None]], *args: Any) -> None:  # noqa: ANN401  # passed on
        """Run `main(*args, open_calls)` as Trio's main task until it calls `open_calls(nursery)`.

        Raises:
            Exception: what `main` raised before it was ready.
        """
        self._host = Host(self._loop, self._crash)
        trio.lowlevel.start_guest_run(
            main,
            *args,
            self._open_calls,
            run_sync_soon_threadsafe=self._host.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=self._host.call_soon,
            done_callback=self._end,
            host_uses_signal_set_wakeup_fd=True,
        )
        ready: list[asyncio.Future[Any]] = [self._started, self.ended]
        await asyncio.wait(ready, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result().unwrap()
            raise ShuttingDownError("the daemon ended before it was ready")

    def _open_calls(self, nursery: trio.Nursery) -> None:
        self._calls = nursery
        self._started.set_result(None)

    def kick(self) -> None:
        """Code of asyncio has given Trio something to do: do it now."""
        self._host.kick()

    def fail(self, error: Exception) -> None:
        """A bug of ours showed itself in a call: `failed` tells the host to end."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def close_calls(self) -> None:
        """Take no more calls; those in flight go on."""
        self._calls = None

    def _end(self, result: outcome.Outcome[None]) -> None:
        if isinstance(result, outcome.Error) and isinstance(result.error, trio.TrioInternalError):
            self._crash(result.error)
            return
        self._close(result)

    def _crash(self, error: Exception) -> None:
        """Tell asyncio's loop, whose handler should end the process; wake who waits for Trio."""
        stuck = StuckError(f"{type(error).__name__}: {error}")
        stuck.__cause__ = error
        self._loop.call_exception_handler({"message": "Trio cannot go on", "exception": stuck})
        self._close(outcome.Error(stuck))

    def _close(self, result: outcome.Outcome[None]) -> None:
        self._calls = None
        self._host.close()
        for end in self._running:
            if not end.done():
                end.set_result(None)
        if not self.ended.done():
            self.ended.set_result(result)

    async def settle(self) -> None:
        """Let those who waited for calls of an ended run go on, and what they answer be sent.

        capnp cannot be asked whether an answer has left, so it gets a moment. At the bound,
        `SETTLE_S`: whoever has not gone on is left.
        """
        until_s = self._loop.time() + SETTLE_S
        while self._running and self._loop.time() < until_s:  # noqa: ASYNC110  # a few turns
            await asyncio.sleep(0)
        await asyncio.sleep(FLUSH_S)

    async def run(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:  # noqa: ANN401  # passed on
        """Run one Trio coroutine from asyncio.

        Cancellation: a cancelled caller cancels the coroutine and stays until it has unwound.

        Raises:
            ShuttingDownError: no more calls are taken, or the coroutine was cancelled by shutdown.
        """
        if self._calls is None:
            raise ShuttingDownError("the daemon is ending")
        done: asyncio.Future[None] = self._loop.create_future()
        scope = trio.CancelScope()
        outcomes: list[outcome.Outcome[T]] = []

        async def job() -> None:
            try:
                with scope:
                    outcomes.append(outcome.Value(await function(*args)))
            except Exception as error:  # noqa: BLE001  # carried to the caller, whatever it is
                outcomes.append(outcome.Error(error))
            finally:
                if not done.done():
                    done.set_result(None)

        try:
            self._calls.start_soon(job)
        except RuntimeError:  # Trio is ending by itself: a bug of ours, told when it has ended
            raise ShuttingDownError("the daemon is ending") from None
        self._running.add(done)
        self._host.kick()
        was_cancelled = False
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                was_cancelled = True
                scope.cancel()
        self._running.discard(done)
        if was_cancelled:
            outcomes.clear()
            raise asyncio.CancelledError
        if not outcomes:
            raise ShuttingDownError("the call was cancelled")
        # Taken out before it is raised: an error that its own traceback reaches is freed by the
        # cyclic collector only, and with it the capnp objects of the calling frames.
        return outcomes.pop().unwrap()
