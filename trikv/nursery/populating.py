"""The task that touches the pool's pages before anybody copies into them.

Decided here: that a machine without memory is asked again for ever, and told about meanwhile.
"""

from typing import Final, Protocol

import structlog
import trio

from trikv.core.pages import Pages
from trikv.tiers.pool import Pool

log = structlog.get_logger()

POPULATE_RETRY_S: Final = 2.0


class Faults(Protocol):
    """Where is told what is wrong."""

    pool_fault: str


async def populate(pool: Pool, pages: Pages, said: Faults) -> None:
    """Touch the pool in the background, slab by slab, so that no save waits for fresh pages.

    Without memory for a slab it is tried again for ever; meanwhile a block whose pages cannot be
    had is not saved.
    """
    begin_s = trio.current_time()
    for slab in range(pages.slab_count):
        ready_bytes = slab * pages.slab_bytes
        while reason := await _populate_slab(pool, ready_bytes, pages.slab_bytes):
            if not said.pool_fault:
                log.error("pool.short", bytes_ready=ready_bytes, bytes_wanted=pages.capacity_bytes)
            said.pool_fault = f"the machine has no memory for the whole pool ({reason})"
            await trio.sleep(POPULATE_RETRY_S)
        said.pool_fault = ""
    log.debug(
        "pool.touched", bytes=pages.capacity_bytes, took_s=round(trio.current_time() - begin_s, 3)
    )


async def _populate_slab(pool: Pool, offset: int, length: int) -> str:
    """Returns why that is not possible, empty when it is done."""
    try:
        await trio.to_thread.run_sync(pool.populate, offset, length)
    except OSError as error:
        return error.strerror or "unknown"
    except RuntimeError as error:  # no thread could be started
        return str(error)
    return ""
