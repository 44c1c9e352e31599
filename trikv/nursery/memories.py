"""Which of the daemon's ways to reach an engine's memory a copy takes.

Decided here: nothing but that; a layout says where its memory is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.core.calls import Register
from trikv.core.layout import Place
from trikv.core.words import Offsets
from trikv.nursery.copiers import Copiers
from trikv.nursery.sessions import Attachment
from trikv.tiers.copies import Copy, Process
from trikv.tiers.hostmem import HostMemory, read_word


@dataclass(frozen=True, slots=True)
class Memories:
    """Process memory by threads of the daemon, GPU memory by copiers; a `Memory`."""

    host: HostMemory
    copiers: Copiers

    def begin(
        self,
        copy: Copy,
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> bool:
        """See `Memory`: what is on a GPU is its copier's."""
        if copy.layout.place is None:
            return False
        self.copiers.begin(copy, copy.layout.place, is_stopped, ended)
        return True

    async def copy(self, copy: Copy, is_stopped: Callable[[], bool]) -> NDArray[np.bool_]:
        """See `Memory`."""
        return await self.host.copy(copy, is_stopped)

    def read_word(self, process: Process, address: int) -> int | None:
        """See `Memory`; takes microseconds, so no thread."""
        return read_word(process, address)

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment | None:
        """See `Memory`."""
        return None if call.gpu is None else await self.copiers.attach(call, on_lost)

    def detach(self, attachment: Attachment) -> None:
        """See `Memory`."""
        self.copiers.detach(attachment)

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        """See `Memory`."""
        self.copiers.expect(attachment, into_engine=into_engine)

    def bring(self, place: Place, lease: int, offsets: Offsets) -> None:
        """See `Memory`."""
        self.copiers.bring(place, lease, offsets)
