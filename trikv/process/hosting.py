"""What a process does that hosts Trio and capnp in one thread, whatever it serves.

Decided here: when garbage is collected, and that a Trio that cannot go on ends the process.
"""

import asyncio
import gc
import os
from typing import Any, Final

import structlog
import trio

from trikv.process.guest import StuckError

log = structlog.get_logger()

COLLECT_S: Final = 5.0
EXIT_STUCK: Final = 70


async def collect_garbage() -> None:
    """Collect cycles here, on the thread that owns capnp's objects, and nowhere else.

    pycapnp 2.2 ends the process when the collector frees its objects on another thread, and the
    collector runs on whichever thread allocates. What is loaded at the start need not be walked.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    while True:
        await trio.sleep(COLLECT_S)
        gc.collect()


def end_if_stuck(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An error that reached asyncio's loop; one of Trio's own means that it never runs again.

    Then nothing here is true any more but that the process must end: copies may be under way of
    which nobody knows, so no call may be answered. Engines see it and compute.
    """
    error = context.get("exception")
    log.error("loop.failed", what=str(context.get("message")), reason=str(error), exc_info=error)
    if isinstance(error, StuckError):
        os._exit(EXIT_STUCK)
