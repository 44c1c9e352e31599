"""A Trio task that waits for a coroutine of asyncio: the way out, for calls that we make ourselves.

Decided here: what cancellation means on the way. This file does not know what is called.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import outcome
import trio

T = TypeVar("T")


async def on_asyncio(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of asyncio from Trio, its guest, and return what it returns.

    Cancellation: a cancelled caller cancels the coroutine and stays until it has unwound. What had
    just been returned is returned here too: it may have to be closed.
    """
    jobs = [asyncio.get_running_loop().create_task(work)]
    waiter = trio.lowlevel.current_task()
    cancelled: list[Any] = []

    def ended(_job: asyncio.Task[T]) -> None:
        trio.lowlevel.reschedule(waiter, outcome.Value(None))

    def abort(raise_cancel: Any) -> trio.lowlevel.Abort:  # noqa: ANN401  # Trio's own
        cancelled.append(raise_cancel)
        jobs[0].cancel()
        return trio.lowlevel.Abort.FAILED

    jobs[0].add_done_callback(ended)
    await trio.lowlevel.wait_task_rescheduled(abort)
    if cancelled and jobs[0].cancelled():
        cancelled[0]()
    # Taken out before it raises: an error that its own traceback reaches is freed by the cyclic
    # collector only.
    return jobs.pop().result()
