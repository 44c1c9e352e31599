"""The task that forgets blocks which a reset has made unreachable, a few at a time.

Decided here: how often it looks, and that everything else goes between two steps. Room for new
blocks is made by the call that needs it (`core/room.py`), in batches; this file does not know how.
"""

from typing import Final

import trio

from trikv.nursery.store import Store

LOOK_S: Final = 0.25
PAUSE_S: Final = 0.001


async def evict(
    store: Store, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run until cancelled; what is left then ends with the daemon."""
    task_status.started()
    while True:
        has_more = store.drop_retired()
        await trio.sleep(PAUSE_S if has_more else LOOK_S)
