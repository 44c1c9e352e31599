"""One direction of a GPU: how a chunk's bytes get across.

Decided here: which copies go straight by the copy engine and which are gathered first, how much of
them is under way, and where in the staging. This file does not know whose memory it is or who
waits.

    gathered  by a kernel into staging, then one request to the copy engine a run of pages
    direct    one request for each piece, neighbours merged: large pieces of a busy GPU

Of a section, whose parts of pages are no neighbours in the pool, a run of pages is a rectangle.

Two processes' kernels share a busy GPU by time slices of about 2 ms: each chunk may wait that long
for its kernel, and each change between them costs the engine a tenth of a millisecond. So chunks
are small while the GPU is ours; when kernels are seen to wait, a chunk has half of the staging, and
one kernel; pieces that the copy engine is good at need none, and some others go without one while
the first kernel of a save or the last of a load is waited for (the bridge).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import (
    Runs,
    Sorted,
    bridge_blocks,
    chunk_blocks,
    page_runs,
    piece_runs,
    sort,
    tall_runs,
)
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.devices import Mapped, Target
from trikv.tiers.frames import CopyOrder
from trikv.tiers.staging import Staging

CHUNK_BYTES: Final = 32 << 20
CHUNK_BYTES_DIRECT: Final = 16 << 20
CHUNKS_MIN: Final = 4
"""So many chunks fit into the staging, at least."""
LATE_S: Final = 0.001
"""A kernel that ends so long after it could begin has waited for the GPU's other users."""
BUSY_S: Final = 1.0
"""How long chunks stay large after one was late: with many of them under way none is seen late."""
DIRECT_WINDOW_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 192 << 20
"""As much is under way on a GPU that is ours: a small copy that comes now waits for no more. The
staging has so much, and all that it may have once the GPU was busy."""
TALL_PAGES: Final = 8
"""A rectangle costs as much of the processor as some requests of a row."""


class Owner(Protocol):
    """What a lane needs of its device."""

    kernels: dict[int, gpu.Handle]
    pool_address: int
    slab_bytes: int
    staging_bytes: int

    def register_slabs(self, offsets: Offsets) -> None:
        """Have the slabs of these pages registered now."""
        ...

    def tell(self, event: str, **facts: float | str) -> None:
        """A line for the daemon's log."""
        ...


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

    def sort(self, order: CopyOrder) -> Sorted:
        """See `Mapped`."""
        pitch = self.groups[order.group].pitch
        return sort(order.blocks, order.offsets, page_bytes=pitch, slab_bytes=self.slab_bytes)


@dataclass(slots=True, eq=False)
class _Moving:
    """A chunk under way.

    Attributes:
        end: comes when no byte of it moves any more.
        bytes: in all.
        steps: other events of a staged chunk; none: it goes straight.
        kernel: when its kernel could begin and when it had ended, where that is known.
    """

    end: gpu.Handle
    bytes: int
    steps: tuple[gpu.Handle, ...] = ()
    kernel: tuple[gpu.Handle, gpu.Handle] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Landing:
    """A chunk that the bus brings, whose kernel has not been launched."""

    moving: _Moving
    there: gpu.Handle
    group: Group
    ids: NDArray[np.int32]
    staging: int


class GpuLane:
    """One direction; a `Lane`. All calls come from one thread."""

    practise: Callable[[], None] | None = None  # goes the way of a chunk, without one

    def __init__(self, device: Owner, *, into_engine: bool, late_s: float = LATE_S) -> None:
        """Take streams; kernels that are so late say that the GPU is busy."""
        self._device = device
        self._late_s = late_s
        self._into_engine = into_engine
        self._bus, self._cores = gpu.new_stream(), gpu.new_stream()
        self._events: list[gpu.Handle] = []
        self._moving: deque[_Moving] = deque()
        self._landing: deque[_Landing] = deque()
        self._bytes = 0  # under way
        self._busy_until_s = 0.0
        self._arguments = kernels.Arguments()
        self.staging = Staging(device, WINDOW_BYTES)

    def rehearse(self) -> None:
        """See `Lane`. Not on a busy GPU, where its kernel would be waited for."""
        if self.practise is not None and not self._is_busy:
            self.practise()

    @property
    def is_free(self) -> bool:
        """Whether nothing is under way; what has ended is put away."""
        while self._moving and gpu.is_over(self._moving[0].end):
            self.wait()
        return not self._moving

    def next_part(self, target: Target, begin: int, count: int, before: int) -> slice:
        """See `Lane`."""
        group, room, is_busy = cast("Group", target), self.staging.ring.size, self._is_busy
        size = CHUNK_BYTES_DIRECT
        if is_busy and not group.is_direct and room >= group.pitch:
            end = begin + max(1, room // 2 // group.pitch)
            bridge = self._bridge(group, count)
            edge = count - bridge if self._into_engine else bridge
            return slice(begin, min(end, edge if begin < edge else count))
        if not is_busy and not 0 < room < group.pitch:
            size = min(CHUNK_BYTES, room // CHUNKS_MIN or CHUNK_BYTES)
        size = chunk_blocks(before, page_bytes=group.pitch, chunk_bytes=size)
        return slice(begin, min(begin + size, count))

    def _bridge(self, group: Group, count: int) -> int:
        """How many blocks, the first of a save or the last of a load, go without a kernel."""
        if not self._is_busy or group.is_section or (self._moving and not self._into_engine):
            return 0
        return bridge_blocks(count, page_bytes=group.page_bytes, pieces=len(group.length))

    @property
    def _is_busy(self) -> bool:
        return time.perf_counter() < self._busy_until_s

    def start(self, target: Target, blocks: Sorted, part: slice) -> bool:
        """See `Lane`."""
        group = cast("Group", target)
        ids, offsets = blocks.blocks[part], blocks.offsets[part]
        self._device.register_slabs(offsets)
        bridge, left = self._bridge(group, len(blocks.blocks)), len(blocks.blocks) - part.start
        is_bridge = (left if self._into_engine else part.stop) <= bridge
        is_direct = is_bridge or (group.is_direct and self._is_busy)
        if not is_direct and self.staging.fits(len(ids) * group.pitch):
            return self._start_staged(group, ids, offsets, blocks.heads[part])
        under_way = self._bytes + len(ids) * group.page_bytes
        if self._bytes and under_way > DIRECT_WINDOW_BYTES and not is_bridge:
            return False
        self._start_direct(group, ids, offsets)
        return True

    def wait(self) -> None:
        """See `Lane`."""
        moving = self._moving.popleft()
        if self._landing and self._landing[0].moving is moving:
            landing = self._landing.popleft()
            gpu.wait(landing.there)
            self._scatter(landing)
        gpu.wait(moving.end)
        if moving.kernel is not None and gpu.seconds_between(*moving.kernel) > self._late_s:
            self._busy_until_s = time.perf_counter() + BUSY_S
        self._events += (moving.end, *moving.steps)
        self._bytes -= moving.bytes
        if moving.steps:
            self.staging.ring.give_back()
        if not self._moving and self._is_busy:
            self.staging.grow()

    def signal(self, mapped: Mapped, number: int, value: int) -> None:
        """See `Lane`.

        Chunks of one copy may have ended on either stream: the word is written behind both.
        """
        while self._landing:
            self._scatter(self._landing.popleft())
        behind = self._event()
        gpu.record(behind, self._bus)
        gpu.wait_in(self._cores, behind)
        self._events.append(behind)  # recorded again later: the wait is for this record
        first = cast("GpuMemory", mapped).signals
        gpu.write_word(first + 4 * (number - 1), value, self._cores)

    def _start_staged(
        self,
        group: Group,
        ids: NDArray[np.int32],
        offsets: Offsets,
        heads: NDArray[np.bool_],
    ) -> bool:
        size, is_busy = len(ids) * group.pitch, self._is_busy
        if not is_busy and self._bytes and self._bytes + size > WINDOW_BYTES:
            return False
        at = self.staging.ring.take(size)
        if at is None:
            return False
        staging, end, between = self.staging.address + at, self._event(), self._event()
        if self._into_engine:
            self._move_pages(group, offsets, heads, staging)
            gpu.record(between, self._bus)
            moving = self._note(end, size, (between,), (between, end))
            landing = _Landing(moving, between, group, ids, staging)
            if is_busy:
                self._landing.append(landing)
            else:
                self._scatter(landing)
            return True
        steps: tuple[gpu.Handle, ...] = (between,)
        kernel = None
        if not self._moving:  # the bus has nothing to do: its stream's time is now
            begun = self._event()
            gpu.record(begun, self._bus)
            steps, kernel = (between, begun), (begun, between)
        self._launch(group, ids, staging)
        gpu.record(between, self._cores)
        gpu.wait_in(self._bus, between)
        self._move_pages(group, offsets, heads, staging)
        gpu.record(end, self._bus)
        self._note(end, size, steps, kernel)
        return True

    def _scatter(self, landing: _Landing) -> None:
        """Launch its kernel, behind its bytes."""
        gpu.wait_in(self._cores, landing.there)
        self._launch(landing.group, landing.ids, landing.staging)
        gpu.record(landing.moving.end, self._cores)

    def _start_direct(self, group: Group, ids: NDArray[np.int32], offsets: Offsets) -> None:
        addresses = group.address + ids.astype(np.int64)[:, None] * group.stride
        slab = self._device.slab_bytes
        self._move(piece_runs(addresses, offsets + group.at, group.length, slab_bytes=slab))
        end = self._event()
        gpu.record(end, self._bus)
        self._note(end, len(ids) * group.page_bytes)

    def _move_pages(
        self, group: Group, offsets: Offsets, heads: NDArray[np.bool_], staging: int
    ) -> None:
        """Between the pool and staging: all of these pages, or the part that a section is."""
        if not group.is_section:
            runs = page_runs(offsets, heads, page_bytes=group.pitch)
            runs[:, 0] += staging
            self._move(runs)
            return
        runs, rest = tall_runs(offsets, heads, least=TALL_PAGES)
        first = self._device.pool_address + group.at
        for page, offset, height in runs.tolist():
            near = (staging + page * group.pitch, group.pitch)
            far = (first + offset, group.page_pitch)
            way, size = self._into_engine, (group.page_bytes, height)
            gpu.copy_rectangle(near, far, *size, self._bus, into_device=way)
        if len(rest):
            near_rows, far_rows = staging + rest * group.pitch, offsets[rest] + group.at
            sizes = np.full(len(rest), group.page_bytes)
            self._move(np.column_stack((near_rows, far_rows, sizes)))

    def _move(self, runs: Runs) -> None:
        """Ask the copy engine; columns are addresses on the GPU, offsets in the pool, bytes."""
        far = runs[:, 1] + self._device.pool_address
        target, source = (runs[:, 0], far) if self._into_engine else (far, runs[:, 0])
        gpu.copy(target, source, runs[:, 2], self._bus)

    def _note(
        self,
        end: gpu.Handle,
        size: int,
        steps: tuple[gpu.Handle, ...] = (),
        kernel: tuple[gpu.Handle, gpu.Handle] | None = None,
    ) -> _Moving:
        """A chunk is under way, behind all others."""
        self._bytes += size
        self._moving.append(_Moving(end, size, steps, kernel))
        return self._moving[-1]

    def _launch(self, group: Group, ids: NDArray[np.int32], staging: int) -> None:
        table, arguments, most = group.table, self._arguments, kernels.ROWS_MAX
        kernel = self._device.kernels[table.width]
        for first in range(0, len(ids), most):
            part, place = ids[first : first + most], staging + first * group.pitch
            into_engine = self._into_engine
            arguments.set(table, group.rows, part, place, group.pitch, into_engine=into_engine)
            grid = (table.grid_x(len(part)), len(part))
            gpu.launch(kernel, grid, kernels.THREADS, self._cores, arguments.address)

    def _event(self) -> gpu.Handle:
        return self._events.pop() if self._events else gpu.new_event()
