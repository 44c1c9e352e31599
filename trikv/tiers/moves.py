"""What a chunk asks of a GPU: its requests to the copy engine, and its kernel.

Decided here: the shape of each request. This file does not know when a chunk goes, or what comes
after what.

Of a section, whose parts of pages are no neighbours in the pool, a run of pages is a rectangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import Runs, Sorted, page_runs, piece_runs, sort, tall_runs
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.frames import CopyOrder

TALL_PAGES: Final = 8
"""A rectangle costs as much of the processor as some requests of a row."""


class Pool(Protocol):
    """What must be known of the other side."""

    kernels: dict[int, gpu.Handle]
    pool_address: int
    slab_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One cache group of a mapped rank, or a section of it; a `Target`.

    Attributes:
        address: int64[pieces], of block 0 here.
        pitch: from page to page in staging.
        page_pitch: where pages are neighbours in the pool.
        at: where in the page it begins.
        is_section: not all of the page.
        table: of the kernel; its rows lie at `rows` on the GPU.
        sections: of a whole group; none: it is not cut.
    """

    address: NDArray[np.int64]
    stride: NDArray[np.int64]
    length: NDArray[np.int64]
    page_bytes: int
    pitch: int
    page_pitch: int
    at: int
    is_section: bool
    is_direct: bool
    table: kernels.Table
    rows: int
    sections: tuple["Group", ...] = ()

    @property
    def block_bytes(self) -> int:
        """See `Target`."""
        return self.pitch


@dataclass(frozen=True, slots=True, eq=False)
class GpuMemory:
    """A rank's memory as this process sees it; a `Mapped`."""

    handles: tuple[bytes, ...]
    events: tuple[gpu.Handle, ...]
    groups: tuple[Group, ...]
    slab_bytes: int
    signals: int = 0  # address of the first word; 0: none

    def is_over(self, event: int) -> bool:
        """See `Mapped`."""
        return event == 0 or gpu.is_over(self.events[event - 1])

    def targets(self, order: CopyOrder) -> Sequence[Group]:
        """See `Mapped`."""
        group = self.groups[order.group]
        return (order.is_ordered and group.sections) or (group,)

    def has_sections(self, group: int) -> bool:
        """See `Mapped`."""
        return bool(self.groups[group].sections)

    def sort(self, order: CopyOrder) -> Sorted:
        """See `Mapped`."""
        pitch = self.groups[order.group].pitch
        return sort(order.blocks, order.offsets, page_bytes=pitch, slab_bytes=self.slab_bytes)


class Moves:
    """Of one direction, in two streams: requests in `bus`, kernels in `cores`."""

    def __init__(self, pool: Pool, *, into_engine: bool) -> None:
        self.bus, self.cores = gpu.new_stream(), gpu.new_stream()
        self._pool = pool
        self._into_engine = into_engine
        self._arguments = kernels.Arguments()

    def pieces(self, group: Group, ids: NDArray[np.int32], offsets: Offsets) -> None:
        """Between the pool and the engine's memory, neighbours merged."""
        addresses = group.address + ids.astype(np.int64)[:, None] * group.stride
        slab = self._pool.slab_bytes
        self._move(piece_runs(addresses, offsets + group.at, group.length, slab_bytes=slab))

    def pages(self, group: Group, offsets: Offsets, heads: NDArray[np.bool_], staging: int) -> None:
        """Between the pool and staging: all of these pages, or the part that a section is."""
        if not (group.is_section or heads[1:].any()):
            page = self._pool.pool_address + int(offsets[0])
            ends = (staging, page) if self._into_engine else (page, staging)
            gpu.copy_run(*ends, len(offsets) * group.pitch, self.bus)
            return
        if not group.is_section:
            runs = page_runs(offsets, heads, page_bytes=group.pitch)
            runs[:, 0] += staging
            self._move(runs)
            return
        runs, rest = tall_runs(offsets, heads, least=TALL_PAGES)
        first = self._pool.pool_address + group.at
        for page, offset, height in runs.tolist():
            near = (staging + page * group.pitch, group.pitch)
            far = (first + offset, group.page_pitch)
            way, size = self._into_engine, (group.page_bytes, height)
            gpu.copy_rectangle(near, far, *size, self.bus, into_device=way)
        if len(rest):
            near_rows, far_rows = staging + rest * group.pitch, offsets[rest] + group.at
            sizes = np.full(len(rest), group.page_bytes)
            self._move(np.column_stack((near_rows, far_rows, sizes)))

    def _move(self, runs: Runs) -> None:
        """Ask the copy engine; columns are addresses on the GPU, offsets in the pool, bytes."""
        far = runs[:, 1] + self._pool.pool_address
        target, source = (runs[:, 0], far) if self._into_engine else (far, runs[:, 0])
        gpu.copy(target, source, runs[:, 2], self.bus)

    def kernel(self, group: Group, ids: NDArray[np.int32], staging: int) -> None:
        """Between staging and the engine's memory; a page of no block goes nowhere."""
        table, arguments, most = group.table, self._arguments, kernels.ROWS_MAX
        move = self._pool.kernels[table.width]
        for first in range(0, len(ids), most):
            part, place = ids[first : first + most], staging + first * group.pitch
            into_engine = self._into_engine
            arguments.set(table, group.rows, part, place, group.pitch, into_engine=into_engine)
            grid = (table.grid_x(len(part)), len(part))
            gpu.launch(move, grid, kernels.THREADS, self.cores, arguments.address)
