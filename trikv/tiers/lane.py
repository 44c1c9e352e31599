"""One direction of a GPU: how a chunk's bytes get across.

Decided here: which copies go straight by the copy engine and which are gathered first, how much of
them is under way, and where in the staging. This file does not know whose memory it is or who
waits.

    large pieces      one request to the copy engine each, neighbours merged
    scattered pieces  gathered by a kernel into staging, then one request a run of pages

Two processes' kernels share a busy GPU by time slices of about 2 ms: each chunk may wait that long
for its kernel, and each kernel costs the engine a switch. So chunks are small while the GPU is ours
and large when kernels are seen to wait.
"""

import ctypes
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import Ring, Runs, page_runs, piece_runs
from trikv.core.pages import PAGE_ALIGN
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.copier import Mapped

CHUNK_BYTES: Final = 16 << 20
CHUNK_BYTES_BUSY: Final = 64 << 20
BUS_BYTES_S: Final = 40e9
LATE_S: Final = 0.0005
"""A chunk that ends so much later than the bus needs has waited for the GPU's other users."""
BUSY_S: Final = 1.0
"""How long chunks stay large after one was late: with many of them under way none is seen late."""
DIRECT_WINDOW_BYTES: Final = 64 << 20
STAGING_BYTES_MIN: Final = 16 << 20
_KERNEL_TYPES: Final = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint32,
)


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
    """One cache group of a mapped rank.

    Attributes:
        address: int64[pieces], of block 0 here.
        pitch: from page to page, in staging and where pages are neighbours in the pool.
        table: of the kernel; its rows lie at `rows` on the GPU.
    """

    address: NDArray[np.int64]
    stride: NDArray[np.int64]
    length: NDArray[np.int64]
    page_bytes: int
    pitch: int
    is_direct: bool
    table: kernels.Table
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class GpuMemory:
    """A rank's memory as this process sees it; a `Mapped`."""

    handles: tuple[bytes, ...]
    events: tuple[gpu.Handle, ...]
    groups: tuple[Group, ...]

    def is_over(self, event: int) -> bool:
        """See `Mapped`."""
        return event == 0 or gpu.is_over(self.events[event - 1])

    def block_bytes(self, group: int) -> int:
        """See `Mapped`."""
        return self.groups[group].pitch


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    """A chunk under way."""

    end: gpu.Handle
    between: gpu.Handle | None  # the two steps of a staged chunk; None: direct
    bytes: int
    due_s: float  # when it has ended, if only the bus holds it up


class GpuLane:
    """One direction; a `Lane`. All calls come from one thread."""

    def __init__(self, device: Owner, *, into_engine: bool) -> None:
        self._device = device
        self._into_engine = into_engine
        self._bus, self._cores = gpu.new_stream(), gpu.new_stream()
        self._events: list[gpu.Handle] = []
        self._moving: deque[_Moving] = deque()
        self._bytes = 0  # under way
        self._busy_until_s = 0.0
        self.chunk_bytes = CHUNK_BYTES
        self._ring = Ring(0)
        self._staging = 0
        self._ids: NDArray[np.int32] | None = None
        self._ids_address = 0
        self._is_short = False

    def start(
        self, mapped: Mapped, group: int, blocks: NDArray[np.int32], offsets: Offsets
    ) -> bool:
        """See `Lane`."""
        facts = cast("GpuMemory", mapped).groups[group]
        self._device.register_slabs(offsets)
        need = len(blocks) * facts.pitch
        if not facts.is_direct and self._has_staging(need):
            return self._start_staged(facts, blocks, offsets)
        return self._start_direct(facts, blocks, offsets)

    def wait(self) -> None:
        """See `Lane`."""
        moving = self._moving.popleft()
        gpu.wait(moving.end)
        self._events.append(moving.end)
        self._bytes -= moving.bytes
        if moving.between is not None:
            self._events.append(moving.between)
            self._ring.give_back()
            now_s = time.perf_counter()
            if now_s - moving.due_s > LATE_S:
                self._busy_until_s = now_s + BUSY_S
            self.chunk_bytes = CHUNK_BYTES_BUSY if now_s < self._busy_until_s else CHUNK_BYTES

    def drop_staging(self) -> None:
        """Give the GPU its memory back; nothing staged is under way."""
        if self._staging:
            gpu.free(self._staging)
            self._staging, self._ring = 0, Ring(0)
        self._is_short = False

    def _has_staging(self, need: int) -> bool:
        """Whether a chunk fits; makes the staging when it is wanted first."""
        if not self._staging and not self._is_short:
            self._make_staging()
        return need <= self._ring.size

    def _make_staging(self) -> None:
        size = self._device.staging_bytes
        while size >= STAGING_BYTES_MIN and not self._staging:
            self._staging = gpu.allocate(size) or 0
            if self._staging:
                self._ring = Ring(size)
            else:
                size //= 2
        self._is_short = size < self._device.staging_bytes
        if self._is_short:
            got = self._ring.size
            self._device.tell(
                "staging.short", bytes_wanted=self._device.staging_bytes, bytes_got=got
            )
        if self._staging and self._ids is None:
            self._ids, self._ids_address = gpu.shared_numbers(
                self._device.staging_bytes // PAGE_ALIGN
            )

    def _start_staged(self, group: Group, blocks: NDArray[np.int32], offsets: Offsets) -> bool:
        at = self._ring.take(len(blocks) * group.pitch)
        if at is None:
            return False
        slot = at // PAGE_ALIGN  # a page has at least so many bytes, so its number has a place too
        assert self._ids is not None
        self._ids[slot : slot + len(blocks)] = blocks
        staging, ids = self._staging + at, self._ids_address + 4 * slot
        runs = page_runs(offsets, page_bytes=group.pitch, slab_bytes=self._device.slab_bytes)
        runs[:, 0] = staging + runs[:, 0] * group.pitch
        end, between = self._event(), self._event()
        first, second = (self._bus, self._cores) if self._into_engine else (self._cores, self._bus)
        if self._into_engine:
            self._move(runs)
        else:
            self._launch(group, len(blocks), ids, staging)
        gpu.record(between, first)
        gpu.wait_in(second, between)
        if self._into_engine:
            self._launch(group, len(blocks), ids, staging)
        else:
            self._move(runs)
        gpu.record(end, second)
        self._note(end, between, len(blocks) * group.pitch)
        return True

    def _start_direct(self, group: Group, blocks: NDArray[np.int32], offsets: Offsets) -> bool:
        size = len(blocks) * group.page_bytes
        if self._bytes and self._bytes + size > DIRECT_WINDOW_BYTES:
            return False
        addresses = group.address + blocks.astype(np.int64)[:, None] * group.stride
        slab = self._device.slab_bytes
        self._move(piece_runs(addresses, offsets, group.length, slab_bytes=slab))
        end = self._event()
        gpu.record(end, self._bus)
        self._note(end, None, size)
        return True

    def _move(self, runs: Runs) -> None:
        """Ask the copy engine; columns are addresses on the GPU, offsets in the pool, bytes."""
        far = runs[:, 1] + self._device.pool_address
        target, source = (runs[:, 0], far) if self._into_engine else (far, runs[:, 0])
        gpu.copy(target, source, runs[:, 2], self._bus)

    def _note(self, end: gpu.Handle, between: gpu.Handle | None, size: int) -> None:
        """A chunk is under way, behind all others."""
        self._bytes += size
        due_s = time.perf_counter() + self._bytes / BUS_BYTES_S
        self._moving.append(_Moving(end, between, size, due_s))

    def _launch(self, group: Group, rows: int, ids: int, staging: int) -> None:
        table = group.table
        values = (
            group.rows,
            table.pieces,
            table.each,
            table.units,
            ids,
            staging,
            group.pitch,
            int(self._into_engine),
        )
        kernel = self._device.kernels[table.width]
        grid = (table.grid_x, rows)
        gpu.launch(kernel, grid, kernels.THREADS, self._cores, (values, _KERNEL_TYPES))

    def _event(self) -> gpu.Handle:
        return self._events.pop() if self._events else gpu.new_event()
