"""What a copier does while a copy is about to come, so that its first chunk is not its slowest.

Decided here: the whole way of a chunk, with real calls of CUDA, on streams and memory of its own:
nothing here touches an engine's memory or the pool, and no real chunk waits for it. A thread that
has slept needs twice as long for its first chunk as for its second.
"""

import math
from typing import Final

import numpy as np

from trikv.core.chunks import sort
from trikv.core.pages import PAGE_ALIGN
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.lane import GpuLane
from trikv.tiers.moves import Group

PAGES: Final = 16
EMPTY: Final = kernels.Table(16, np.zeros(3, np.uint64), pieces=1, each=1, units=0)
"""Of pages that have no bytes: the kernel ends at once."""


class Rehearsal:
    """Of one direction; an `Owner` of a lane of its own. Made and used by that lane's thread."""

    def __init__(
        self, kernels_by_width: dict[int, gpu.Handle], slab_bytes: int, *, into_engine: bool
    ) -> None:
        """Take its memory.

        Raises:
            gpu.CudaError: there is none.
        """
        self.kernels = kernels_by_width
        self.slab_bytes = slab_bytes
        self.staging_bytes = PAGES * PAGE_ALIGN
        self.pool_address = gpu.allocate_host(2 * PAGES * PAGE_ALIGN)
        self._lane = GpuLane(self, into_engine=into_engine, late_s=math.inf)
        if not self._lane.staging.make():
            raise gpu.CudaError("no memory for a rehearsal")
        nothing, whole = np.zeros(1, np.int64), np.full(1, PAGE_ALIGN, np.int64)
        page = (PAGE_ALIGN, PAGE_ALIGN, PAGE_ALIGN, 0)
        rows = gpu.upload(EMPTY.rows)
        self._group = Group(
            nothing,
            nothing,
            whole,
            *page,
            is_section=False,
            is_direct=False,
            table=EMPTY,
            rows=rows,
        )

    def run(self) -> None:
        """Begin a chunk; does not wait for its end."""
        if not self._lane.is_free:
            return  # the GPU is busy: the last one has not even ended
        ids = np.arange(PAGES, dtype=np.int32)
        offsets = ids[::-1].astype(np.int64) * (2 * PAGE_ALIGN)
        blocks = sort(ids, offsets, page_bytes=PAGE_ALIGN, slab_bytes=self.slab_bytes)
        self._lane.start(self._group, blocks, slice(0, PAGES))

    def register_slabs(self, offsets: Offsets) -> None:
        """See `Owner`."""

    def tell(self, event: str, **facts: float | str) -> None:
        """See `Owner`."""
