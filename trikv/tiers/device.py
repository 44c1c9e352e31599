"""One GPU as a copier drives it: memory of engines mapped, the pool registered; and its process.

Decided here: that each allocation is mapped once, that slabs are registered when first used or
before, and when staging is given back. This file does not know blocks, sessions or who waits, and
CUDA's calls only through `gpu`.
"""

import argparse
import contextlib
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import cut
from trikv.core.pages import PAGE_ALIGN
from trikv.core.words import Offsets
from trikv.tiers import gpu, kernels
from trikv.tiers.copier import serve
from trikv.tiers.devices import AttachError, Mapped
from trikv.tiers.drivers import version_problem
from trikv.tiers.frames import AttachOrder, Direction, GroupOrder, pack_facts
from trikv.tiers.lane import GpuLane
from trikv.tiers.moves import GpuMemory, Group
from trikv.tiers.numa import node_of
from trikv.tiers.rehearsals import Rehearsal

DIRECT_BYTES: Final = 512 << 10
"""Pieces of this size and more are worth a request to the copy engine each."""
STAGING_PART: Final = 64  # of the GPU's memory, both directions together
CAPABILITY_MIN: Final = 70
SWITCH_S: Final = 0.0005


@dataclass(slots=True)
class GpuDevice:
    """One GPU; a `Device`."""

    context: gpu.Handle
    name: str
    kernels: dict[int, gpu.Handle]
    pool_address: int
    pool_bytes: int
    slab_bytes: int
    staging_bytes: int
    started_s: float
    node: int
    note: Callable[[bytes], None] = lambda _: None
    _lanes: list[GpuLane] = field(default_factory=list)
    _opened: dict[bytes, list[int]] = field(default_factory=dict)  # handle: address, users
    _ranks: int = 0
    _has_words: bool = False  # that streams of an engine may wait for
    _is_ready: bool = False  # all of the pool is registered
    _registered: NDArray[np.bool_] = field(init=False)
    _registering: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._registered = np.zeros(-(-self.pool_bytes // self.slab_bytes), np.bool_)

    @property
    def facts(self) -> dict[str, str | int | float]:
        """See `Device`."""
        took_s = round(time.perf_counter() - self.started_s, 3)
        return {
            "name": self.name,
            "took_s": took_s,
            "staging_bytes": 2 * self.staging_bytes,
            "node": self.node,
        }

    def lane(self, direction: Direction) -> GpuLane:
        """See `Device`."""
        gpu.make_current(self.context)
        into_engine = direction is Direction.LOAD
        lane = GpuLane(self, into_engine=into_engine)
        with contextlib.suppress(gpu.CudaError):  # a full GPU: its first chunks are slower
            rehearsal = Rehearsal(self.kernels, self.slab_bytes, into_engine=into_engine)
            lane.practise = rehearsal.run
        self._lanes.append(lane)
        self._make_staging()
        return lane

    def prepare_pool(self, note: Callable[[bytes], None]) -> None:
        """See `Device`: registers slab after slab."""
        gpu.make_current(self.context)
        self.note = note
        begin_s = time.perf_counter()
        for slab in range(len(self._registered)):
            self._register(slab)
        self._is_ready = True
        took_s = round(time.perf_counter() - begin_s, 3)
        self.tell("pool.registered", bytes=self.pool_bytes, took_s=took_s)

    def tell(self, event: str, **facts: float | str) -> None:
        """See `Owner`."""
        self.note(pack_facts(event=event, **facts))

    def register_slabs(self, offsets: Offsets) -> None:
        """Have the slabs of these pages registered now."""
        if self._is_ready:
            return
        slabs = offsets // self.slab_bytes
        if not self._registered[slabs].all():
            for slab in np.unique(slabs).tolist():
                self._register(slab)

    def _register(self, slab: int) -> None:
        with self._registering:
            if not self._registered[slab]:
                begin = slab * self.slab_bytes
                size = min(self.slab_bytes, self.pool_bytes - begin)
                gpu.register(self.pool_address + begin, size)
                self._registered[slab] = True

    def attach(self, order: AttachOrder) -> GpuMemory:
        """See `Device`."""
        with contextlib.ExitStack() as undo:
            addresses = []
            for handle in order.handles:
                addresses.append(self._open(handle))
                undo.callback(self._close, handle)
            events = []
            for handle in order.events:
                events.append(_open_event(handle))
                undo.callback(gpu.close_event, events[-1])
            groups = tuple(_map_group(group, addresses, undo) for group in order.groups)
            undo.pop_all()
        self._ranks += 1
        signals = 0
        if order.signals is not None:
            memory, offset = order.signals
            signals = addresses[memory] + offset
            self._has_words = True
            self._make_staging()
        return GpuMemory(order.handles, tuple(events), groups, self.slab_bytes, signals)

    def detach(self, mapped: Mapped) -> None:
        """See `Device`; the last rank takes the staging along."""
        memory = cast("GpuMemory", mapped)
        for group in memory.groups:
            for part in (group, *group.sections):
                gpu.free(part.rows)
        for event in memory.events:
            gpu.close_event(event)
        for handle in memory.handles:
            self._close(handle)
        self._ranks -= 1
        if self._ranks == 0:
            self._has_words = False
            for lane in self._lanes:
                lane.forget()
                lane.staging.drop()

    def _make_staging(self) -> None:
        """While no stream waits for a load yet: see `Staging.make`."""
        for lane in self._lanes if self._has_words else ():
            lane.staging.make()

    def _open(self, handle: bytes) -> int:
        """Each allocation is mapped once, whoever registers it how often."""
        known = self._opened.get(handle)
        if known is None:
            try:
                known = self._opened[handle] = [gpu.open_memory(handle), 0]
            except gpu.CudaError as error:
                raise AttachError(
                    f"the engine's GPU memory cannot be mapped ({error}): engine and daemon must "
                    "share IPC and pid namespaces"
                ) from None
        known[1] += 1
        return known[0]

    def _close(self, handle: bytes) -> None:
        known = self._opened[handle]
        known[1] -= 1
        if known[1] == 0:
            del self._opened[handle]
            gpu.close_memory(known[0])


def _open_event(handle: bytes) -> gpu.Handle:
    try:
        return gpu.open_event(handle)
    except gpu.CudaError as error:
        raise AttachError(f"an event of the engine cannot be opened ({error})") from None


def _map_group(order: GroupOrder, addresses: Sequence[int], undo: contextlib.ExitStack) -> Group:
    """A group and its sections; `undo` takes their tables back."""
    pieces = order.pieces
    address = np.array([addresses[one.memory] + one.offset for one in pieces], np.int64)
    stride = np.array([one.stride for one in pieces], np.int64)
    length = np.array([one.bytes for one in pieces], np.int64)
    whole = int(length.sum())
    pitch = _padded(whole)

    def part(begin: int, end: int, sections: tuple[Group, ...] = ()) -> Group:
        which, skip, size = cut(length, begin, end)
        rows = kernels.table(address[which] + skip, stride[which], size)
        try:
            where = gpu.upload(rows.rows)
        except gpu.CudaError as error:
            raise AttachError(f"no table of {len(which)} pieces on the GPU ({error})") from None
        undo.callback(gpu.free, where)
        return Group(
            address[which] + skip,
            stride[which],
            size,
            end - begin,
            _padded(end - begin),
            pitch,
            begin,
            end - begin < whole,
            (end - begin) // len(which) >= DIRECT_BYTES,
            rows,
            where,
            sections,
        )

    sections = tuple(part(*one) for one in pairwise((0, *order.sections)))
    return part(0, whole, sections)


def _padded(size: int) -> int:
    return -(-size // PAGE_ALIGN) * PAGE_ALIGN


def open_device(uuid: bytes, pool: mmap.mmap, *, slab_bytes: int, staging_bytes: int) -> GpuDevice:
    """Open a GPU for the calling thread.

    Raises:
        gpu.CudaError: the message says what is wrong, and what to do where that is known.
    """
    begin_s = time.perf_counter()
    problem = version_problem(gpu.driver_version(), gpu.BINDINGS)
    if problem:
        raise gpu.CudaError(problem)
    found = gpu.find_device(uuid)
    if found is None:
        raise gpu.CudaError(
            f"GPU {uuid.hex()} is not visible to the daemon: give it the devices of its engines "
            "(CUDA_VISIBLE_DEVICES, container)"
        )
    name, capability = gpu.describe(found)
    if capability < CAPABILITY_MIN:
        raise gpu.CudaError(f"{name}: compute capability {capability / 10} is below 7.0")
    context = gpu.open_context(found)
    names = [f"move_{width}" for width in kernels.WIDTHS]
    compiled = gpu.compile_kernels(kernels.SOURCE, names, capability)
    return GpuDevice(
        context,
        name,
        dict(zip(kernels.WIDTHS, compiled, strict=True)),
        np.frombuffer(pool, np.uint8).ctypes.data,
        len(pool),
        slab_bytes,
        staging_bytes or staging_part(gpu.memory_bytes(found)),
        begin_s,
        node_of(gpu.pci_address(found)),
    )


def staging_part(memory_bytes: int) -> int:
    """Bytes of staging for a direction, of a GPU with so much memory, where nobody has said."""
    return memory_bytes // (2 * STAGING_PART) // PAGE_ALIGN * PAGE_ALIGN


def main() -> None:
    """Entry point of a copier; started by the daemon with descriptors it inherits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--uuid", type=bytes.fromhex, required=True)
    for name in ("pool-fd", "pool-bytes", "slab-bytes", "staging-bytes", "parent"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--sockets", type=int, nargs=3, required=True)
    given = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)  # two directions and the reports take turns
    pool = mmap.mmap(given.pool_fd, given.pool_bytes)
    serve(
        lambda: open_device(
            given.uuid,
            pool,
            slab_bytes=given.slab_bytes,
            staging_bytes=given.staging_bytes,
        ),
        given.sockets,
        given.parent,
    )


if __name__ == "__main__":
    main()
