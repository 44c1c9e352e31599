"""Trio as the guest of asyncio in one thread: pycapnp needs asyncio, everything else here is Trio.

Decided here: how a call that waits crosses from one to the other. Plain methods need no crossing:
nothing of Trio runs between two callbacks of asyncio, so servants call them directly, without a
lock. This file does not know what runs on either side.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import outcome
import trio

from trikv.core.errors import ShuttingDownError

T = TypeVar("T")


class Guest:
    """A Trio run inside the running asyncio loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: trio.Nursery | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[outcome.Outcome[None]] = self._loop.create_future()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    async def start(self, main: Callable[..., Awaitable[None]], *args: Any) -> None:  # noqa: ANN401  # passed on
        """Run `main(*args, open_calls)` as Trio's main task until it calls `open_calls(nursery)`.

        Raises:
            Exception: what `main` raised before it was ready.
        """
        trio.lowlevel.start_guest_run(
            main,
            *args,
            self._open_calls,
            run_sync_soon_threadsafe=self._loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=self._loop.call_soon,
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

    def fail(self, error: Exception) -> None:
        """A bug of ours showed itself in a call: `failed` tells the host to end."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def close_calls(self) -> None:
        """Take no more calls; those in flight go on."""
        self._calls = None

    def _end(self, result: outcome.Outcome[None]) -> None:
        self._calls = None
        if not self.ended.done():
            self.ended.set_result(result)

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
                done.set_result(None)

        self._calls.start_soon(job)
        was_cancelled = False
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError:
                was_cancelled = True
                scope.cancel()
        if was_cancelled:
            outcomes.clear()
            raise asyncio.CancelledError
        if not outcomes:
            raise ShuttingDownError("the call was cancelled")
        # Taken out before it is raised: an error that its own traceback reaches is freed by the
        # cyclic collector only, and with it the capnp objects of the calling frames.
        return outcomes.pop().unwrap()
