"""Which of the daemon's ways to reach an engine's memory a copy takes.

Decided here: nothing but that; a layout says where its memory is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.nursery.copiers import Copiers
from trikv.nursery.sessions import Attachment
from trikv.tiers.copies import Copy, Process
from trikv.tiers.hostmem import HostMemory


@dataclass(frozen=True, slots=True)
class Memories:
    """Process memory by threads of the daemon, GPU memory by copiers; a `Memory`."""

    host: HostMemory
    copiers: Copiers

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        """See `Memory`."""
        way = self.host if copy.layout.place is None else self.copiers
        return await way.copy(copy, is_stopped)

    async def read_word(self, process: Process, address: int) -> int | None:
        """See `Memory`."""
        return await self.host.read_word(process, address)

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment | None:
        """See `Memory`."""
        return None if call.gpu is None else await self.copiers.attach(call, on_lost)

    def detach(self, attachment: Attachment) -> None:
        """See `Memory`."""
        self.copiers.detach(attachment)
