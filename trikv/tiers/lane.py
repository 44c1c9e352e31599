"""One direction of a GPU: how a chunk's bytes get across.

Decided here: which copies go straight by the copy engine and which are gathered first, how much of
them is under way, and where in the staging. This file does not know whose memory it is or who
waits.

    gathered  by a kernel into staging, then one request to the copy engine a run of pages
    direct    one request for each piece, neighbours merged: large pieces of a busy GPU

Of a section, whose parts of pages are no neighbours in the pool, a run of pages is a rectangle.

Two processes' kernels share a busy GPU by time slices of about 2 ms: each chunk may wait that long
for its kernel, and each change between them costs the engine a tenth of a millisecond. So chunks
are small while the GPU is ours; when kernels are seen to wait, chunks are larger, kernels are
launched in bunches of half of the staging, and pieces that the copy engine is good at need none.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import Ring, Runs, Sorted, page_runs, piece_runs, sort, tall_runs
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.devices import Mapped, Target
from trikv.tiers.frames import CopyOrder

CHUNK_BYTES: Final = 32 << 20
CHUNK_BYTES_BUSY: Final = 64 << 20
CHUNK_BYTES_DIRECT: Final = 16 << 20
CHUNKS_MIN: Final = 4
"""So many chunks fit into the staging, at least."""
BUS_BYTES_S: Final = 40e9
LATE_S: Final = 0.001
"""A chunk that ends so much later than the bus needs has waited for the GPU's other users."""
BUSY_S: Final = 1.0
"""How long chunks stay large after one was late: with many of them under way none is seen late."""
DIRECT_WINDOW_BYTES: Final = 64 << 20
WINDOW_BYTES: Final = 192 << 20
"""As much is under way on a GPU that is ours: a small copy that comes now waits for no more. The
staging has so much, and all that it may have once the GPU was busy."""
STAGING_BYTES_MIN: Final = 16 << 20
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
    """A chunk under way."""

    end: gpu.Handle
    between: gpu.Handle | None  # the two steps of a staged chunk; None: direct
    bytes: int
    due_s: float  # when it has ended, if only the bus holds it up


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

    def __init__(self, device: Owner, *, into_engine: bool) -> None:
        self._device = device
        self._into_engine = into_engine
        self._bus, self._cores = gpu.new_stream(), gpu.new_stream()
        self._events: list[gpu.Handle] = []
        self._moving: deque[_Moving] = deque()
        self._landing: deque[_Landing] = deque()
        self._is_emptying = False  # the staging was full
        self._bytes = 0  # under way
        self._busy_until_s = 0.0
        self._ring = Ring(0)
        self._staging = 0
        self._arguments = kernels.Arguments()
        self._is_short = False
        self._making = threading.Lock()

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

    def chunk_bytes(self, target: Target) -> int:
        """See `Lane`."""
        group, room = cast("Group", target), self._ring.size
        if (self._is_busy and group.is_direct) or 0 < room < group.pitch:
            return CHUNK_BYTES_DIRECT
        most = CHUNK_BYTES_BUSY if self._is_busy else CHUNK_BYTES
        return min(most, room // CHUNKS_MIN or most)

    @property
    def _is_busy(self) -> bool:
        return time.perf_counter() < self._busy_until_s

    def start(self, target: Target, blocks: Sorted, part: slice) -> bool:
        """See `Lane`."""
        group = cast("Group", target)
        ids, offsets = blocks.blocks[part], blocks.offsets[part]
        self._device.register_slabs(offsets)
        is_direct = group.is_direct and self._is_busy
        if not is_direct and self._has_staging(len(ids) * group.pitch):
            return self._start_staged(group, ids, offsets, blocks.heads[part])
        return self._start_direct(group, ids, offsets)

    def wait(self) -> None:
        """See `Lane`."""
        moving = self._moving.popleft()
        if self._landing and self._landing[0].moving is moving:
            self._scatter_bunch()
        was_over = gpu.is_over(moving.end)  # then nobody knows when: this thread may be late
        gpu.wait(moving.end)
        self._events.append(moving.end)
        self._bytes -= moving.bytes
        if moving.between is not None:
            self._events.append(moving.between)
            self._ring.give_back()
            now_s = time.perf_counter()
            if not was_over and now_s - moving.due_s > LATE_S:
                self._busy_until_s = now_s + BUSY_S
        if not self._moving and self._is_busy:
            self._grow_staging()

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

    def make_staging(self) -> bool:
        """Make it before it is wanted, any thread; whether there is some.

        Within a load that a forward waits for, memory would be asked for while the engine's stream
        stands still, and nobody promises that a driver gives it then.
        """
        with self._making:
            if not self._staging and not self._is_short:
                self._allocate(min(self._device.staging_bytes, WINDOW_BYTES))
            return self._staging != 0

    def drop_staging(self) -> None:
        """Give the GPU its memory back; nothing staged is under way."""
        if self._staging:
            gpu.free(self._staging)
            self._staging, self._ring = 0, Ring(0)
        self._is_short = False

    def _has_staging(self, need: int) -> bool:
        """Whether a chunk fits; makes the staging where that was not done before."""
        if not self._staging:
            self.make_staging()
        return need <= self._ring.size

    def _grow_staging(self) -> None:
        """The larger it is, the less a busy engine is slowed; after a copy, never within one."""
        if self._is_short or not 0 < self._ring.size < self._device.staging_bytes:
            return
        before = self._staging
        self._allocate(self._device.staging_bytes)
        if self._staging != before:
            gpu.free(before)

    def _allocate(self, wanted: int) -> None:
        """So much, or half of it, and so on; what there is stays where there is no more."""
        size = wanted
        while size >= max(min(STAGING_BYTES_MIN, wanted), self._ring.size + 1):
            address = gpu.allocate(size)
            if address is not None:
                self._ring, self._staging = Ring(size), address
                break
            size //= 2
        got = self._ring.size
        self._is_short = got < wanted
        if self._is_short:
            self._device.tell("staging.short", bytes_wanted=wanted, bytes_got=got)

    def _start_staged(
        self,
        group: Group,
        ids: NDArray[np.int32],
        offsets: Offsets,
        heads: NDArray[np.bool_],
    ) -> bool:
        size, is_busy = len(ids) * group.pitch, self._is_busy
        if is_busy and self._is_emptying and 2 * self._bytes > self._ring.size:
            return False
        if not is_busy and self._bytes and self._bytes + size > WINDOW_BYTES:
            return False
        at = self._ring.take(size)
        self._is_emptying = at is None
        if at is None:
            return False
        staging = self._staging + at
        end, between = self._event(), self._event()
        first, second = (self._bus, self._cores) if self._into_engine else (self._cores, self._bus)
        if self._into_engine:
            self._move_pages(group, offsets, heads, staging)
        else:
            self._launch(group, ids, staging)
        gpu.record(between, first)
        moving = self._note(end, between, size)
        if self._into_engine:
            landing = _Landing(moving, between, group, ids, staging)
            if is_busy:
                self._landing.append(landing)
            else:
                self._scatter(landing)
        else:
            gpu.wait_in(second, between)
            self._move_pages(group, offsets, heads, staging)
            gpu.record(end, second)
        return True

    def _scatter(self, landing: _Landing) -> None:
        """Launch its kernel, behind its bytes."""
        gpu.wait_in(self._cores, landing.there)
        self._launch(landing.group, landing.ids, landing.staging)
        gpu.record(landing.moving.end, self._cores)

    def _scatter_bunch(self) -> None:
        """Launch the kernels of half of the staging, or of all that is under way, when it is there.

        Meanwhile the bus fills the other half.
        """
        bunch, size = [], 0
        while self._landing and 2 * size < self._ring.size:
            bunch.append(self._landing.popleft())
            size += bunch[-1].moving.bytes
        gpu.wait(bunch[-1].there)
        now_s = time.perf_counter()
        for landing in bunch:
            self._scatter(landing)
            landing.moving.due_s = now_s  # what it has waited for until now was our own choice

    def _start_direct(self, group: Group, ids: NDArray[np.int32], offsets: Offsets) -> bool:
        size = len(ids) * group.page_bytes
        if self._bytes and self._bytes + size > DIRECT_WINDOW_BYTES:
            return False
        addresses = group.address + ids.astype(np.int64)[:, None] * group.stride
        slab = self._device.slab_bytes
        self._move(piece_runs(addresses, offsets + group.at, group.length, slab_bytes=slab))
        end = self._event()
        gpu.record(end, self._bus)
        self._note(end, None, size)
        return True

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

    def _note(self, end: gpu.Handle, between: gpu.Handle | None, size: int) -> _Moving:
        """A chunk is under way, behind all others."""
        self._bytes += size
        due_s = time.perf_counter() + self._bytes / BUS_BYTES_S
        self._moving.append(_Moving(end, between, size, due_s))
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
