"""One direction of a GPU: how a chunk's bytes get across.

Decided here: which copies go straight by the copy engine and which are gathered first, how much of
them is under way, and where in the staging. This file does not know whose memory it is or who
waits.

    gathered  by a kernel into staging, then one request to the copy engine a run of pages
    direct    one request for each piece, neighbours merged: large pieces of a busy GPU

Two processes' kernels share a busy GPU by time slices of about 2 ms: each chunk may wait that long
for its kernel, and each change between them costs the engine a tenth of a millisecond. So chunks
are small while the GPU is ours. When kernels are seen to wait, a chunk has half of the staging, and
one kernel; of a save it has two parts, so that the bus has the first one early. Pieces that the
copy engine is good at need none. The last blocks of a load come while its kernels are waited for:
without one where their pieces are large (the bridge), else with one that has its turn with theirs.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import TAIL_BYTES, Sorted, blocks_of, chunk_blocks, put_first, tail_blocks
from trikv.core.words import Offsets
from trikv.tiers import gpu
from trikv.tiers.busy import LATE_S, Busy
from trikv.tiers.devices import Key, Landed, Mapped, Target
from trikv.tiers.events import Events
from trikv.tiers.moves import GpuMemory, Group, Moves, Pool
from trikv.tiers.staging import Giver, Staging
from trikv.tiers.underway import Ahead, Landing, Moving

CHUNK_BYTES: Final = 32 << 20
CHUNK_BYTES_DIRECT: Final = 16 << 20
CHUNKS_MIN: Final = 4
"""So many chunks fit into the staging, at least."""
DIRECT_WINDOW_BYTES: Final = 64 << 20
FIRST_PAGES: Final = 8
"""Of a busy GPU's load: what the bus has to do while it is asked for the rest of a large chunk."""
HEAD_BYTES: Final = 64 << 20
"""Of a busy GPU's save: what the bus has to do while the kernel gathers the rest."""
KEEP_AHEAD_S: Final = 0.01
"""So long what was brought for a load is not dropped for the next one's: they come in order."""
WINDOW_BYTES: Final = 192 << 20
"""As much is under way on a GPU that is ours: a small copy that comes now waits for no more. The
staging has so much, and all that it may have once the GPU was busy."""


class Owner(Pool, Giver, Protocol):
    """What a lane needs of its device."""

    def register_slabs(self, offsets: Offsets) -> None:
        """Have the slabs of these pages registered now."""
        ...


class GpuLane:
    """One direction; a `Lane`. All calls come from one thread, or while that does nothing here."""

    practise: Callable[[], None] | None = None  # goes the way of a chunk, without one

    def __init__(self, device: Owner, *, into_engine: bool, late_s: float = LATE_S) -> None:
        """Take streams; kernels that are so late say that the GPU is busy."""
        self._device = device
        self._into_engine = into_engine
        self._moves = Moves(device, into_engine=into_engine)
        self._bus, self._cores = self._moves.bus, self._moves.cores
        self._events = Events()
        self._moving: deque[Moving] = deque()
        self._landing: deque[Landing] = deque()
        self._ahead: Ahead | None = None
        self._bytes = 0  # under way
        self._is_full = False  # a chunk waits for room in the staging
        self.busy = Busy(late_s)
        self.staging = Staging(device, WINDOW_BYTES)

    def rehearse(self) -> None:
        """See `Lane`. Not on a busy GPU, where its kernel would be waited for."""
        if self.practise is not None and not self.busy.is_now:
            self.practise()

    @property
    def is_free(self) -> bool:
        """Whether nothing is under way; what has ended is put away."""
        while self._moving and gpu.is_over(self._moving[0].end):
            self.wait()
        return not self._moving

    def next_part(self, target: Target, begin: int, count: int, before: int) -> slice:
        """See `Lane`."""
        group, room, is_busy = cast("Group", target), self.staging.ring.size, self.busy.is_now
        size = CHUNK_BYTES_DIRECT
        if is_busy and not group.is_direct and room >= group.pitch:
            # A save that fits needs one change of processes; with others under way the bus goes on.
            fits = count * group.pitch <= room
            is_whole = fits and not self._into_engine and not self._moving
            end = begin + max(1, (room if is_whole else room // 2) // group.pitch)
            edge = count - self._tail(group, count)[0]
            return slice(begin, min(end, edge if begin < edge else count))
        if not is_busy and not 0 < room < group.pitch:
            size = min(CHUNK_BYTES, room // CHUNKS_MIN or CHUNK_BYTES)
        size = chunk_blocks(before, count - begin, page_bytes=group.pitch, chunk_bytes=size)
        return slice(begin, begin + size)

    def _tail(self, group: Group, count: int) -> tuple[int, bool]:
        """See `tail_blocks`. Not of a save: asking for pieces takes as long as its kernel waits."""
        if not self.busy.is_now or group.is_section or not self._into_engine:
            return 0, False
        return tail_blocks(count, page_bytes=group.page_bytes, pieces=len(group.length))

    def start(self, target: Target, blocks: Sorted, part: slice) -> bool:
        """See `Lane`."""
        group = cast("Group", target)
        ids, offsets = blocks.blocks[part], blocks.offsets[part]
        assert self._ahead is None, "it lies before this chunk in the staging"
        self._device.register_slabs(offsets)
        count = len(blocks.blocks)
        tail, is_bridge = self._tail(group, count)
        is_bridge = is_bridge and count - part.start <= tail
        is_direct = is_bridge or (group.is_direct and self.busy.is_now)
        if not is_direct and self.staging.fits(len(ids) * group.pitch):
            return self._start_staged(group, ids, offsets, blocks.heads[part])
        under_way = self._bytes + len(ids) * group.page_bytes
        if self._bytes and under_way > DIRECT_WINDOW_BYTES and not is_bridge:
            return False
        self._moves.pieces(group, ids, offsets)
        self._note(self._mark(self._bus), len(ids) * group.page_bytes)
        if not self.busy.is_now:
            self._scatter_all()
        return True

    def bring(self, key: Key, target: Target, blocks: Sorted) -> None:
        """See `Lane`. Not on a busy GPU, where a load waits for its kernel and not for the bus."""
        group, now_s, end = cast("Group", target), time.perf_counter(), 0
        if self._ahead is not None and (
            self._ahead.key == key or now_s - self._ahead.since_s < KEEP_AHEAD_S
        ):
            return
        self.forget()
        if self.busy.is_now or not self.staging.fits(group.pitch):
            return
        # No more than half of the staging: the bus goes on with the rest until that half is free.
        count = min(len(blocks.offsets), max(1, self.staging.ring.size // 2 // group.pitch))
        at = self.staging.ring.take(count * group.pitch)
        assert at is not None, "nothing moves now"
        begun, first = self._mark(self._bus, is_timed=True), self.staging.address + at
        chunks: list[tuple[int, gpu.Handle]] = []
        while end < count:
            part = self.next_part(target, end, count, end)
            self._device.register_slabs(blocks.offsets[part])
            where = first + end * group.pitch
            self._moves.pages(group, blocks.offsets[part], blocks.heads[part], where)
            end = part.stop
            chunks.append((end, self._mark(self._bus)))
        pages, ended = blocks.offsets[:count], self._mark(self._bus, is_timed=True)
        self._ahead = Ahead(key, group, pages, first, now_s, begun, ended, chunks)
        self._bytes += count * group.pitch

    def land(self, key: Key, blocks: Sorted) -> Landed:
        """See `Lane`. A page that the load does not want goes nowhere."""
        ahead, count = self._ahead, 0
        if ahead is None:
            return Landed(blocks)
        if ahead.key == key:
            blocks, count = put_first(blocks, ahead.pages)
        if count == 0:
            self.forget()
            return Landed(blocks)
        self._ahead, parts, begin, first = None, [], 0, 0
        is_whole, begun, ended = count == len(blocks.blocks), ahead.begun, ahead.ended
        ids, pitch = blocks_of(ahead.pages, blocks, count), ahead.group.pitch
        chunks, bus_s = ahead.chunks, math.inf
        if gpu.is_over(ended):  # one kernel for all
            chunks, bus_s = chunks[-1:], gpu.seconds_between(begun, ended)
        for end, there in chunks:
            last = np.searchsorted(blocks.offsets[:count], ahead.pages[end - 1], "right")
            part, size = slice(first, int(last)), (end - begin) * pitch
            is_last = end == len(ids)  # the staging and all events go with it
            steps = ahead.events if is_last else ()
            self._bytes -= size
            moving = self._note(self._events.take(is_timed=is_last), size, steps)
            moving.kernel_bytes = (part.stop - first) * pitch
            where = ahead.staging + begin * pitch
            landing = Landing(moving, there, ahead.group, ids[begin:end], where)
            if is_whole and is_last:  # behind all bytes, and not before now: it can begin then
                gpu.record(begun, self._bus)
                gpu.wait_in(self._cores, begun)
                moving.kernel = (begun, moving.end)
            if is_whole:
                self._scatter(landing)
            else:  # the bus first: what is asked of it next
                self._landing.append(landing)
            parts.append(part)
            begin, first = end, part.stop
        if not is_whole:
            self.busy.time_next()
        return Landed(blocks, parts, ahead.since_s, bus_s)

    def forget(self) -> None:
        """See `Lane`."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            gpu.wait(ahead.ended)
            self._events.put_away(*ahead.events)
            self.staging.ring.give_back()
            self._bytes -= len(ahead.pages) * ahead.group.pitch

    def wait(self) -> None:
        """See `Lane`."""
        moving = self._moving.popleft()
        if self._landing and self._landing[0].moving is moving:
            self._scatter_bunch()
        gpu.wait(moving.end)
        if moving.kernel is not None:
            self.busy.note(gpu.seconds_between(*moving.kernel), moving.kernel_bytes)
        self._events.put_away(moving.end, *moving.steps)
        self._bytes -= moving.bytes
        if moving.steps:
            self.staging.ring.give_back()
        if not self._moving:
            self._is_full = False
        elif self.busy.is_now:
            self.busy.go_on()

    def rest(self) -> None:
        """See `Lane`. Memory of a GPU may be 50 ms in coming."""
        if self.busy.is_now and not self._moving:
            self.staging.grow()

    def _scatter_bunch(self) -> None:
        """Launch the oldest kernel, or all: while more waits for room, the bus needs the rest.

        That of a tail waits in the stream for its bytes: they come while all wait for their turn.
        """
        bunch = [self._landing.popleft() for _ in range(1 if self._is_full else len(self._landing))]
        for one in bunch:
            one.moving.kernel = None  # it might have begun before it is launched: we time it
        last = bunch[-1]
        is_tail = len(last.ids) * last.group.page_bytes <= TAIL_BYTES and len(bunch) > 1
        there = bunch[:-1] if is_tail else bunch
        gpu.wait(there[-1].there)
        begin_s = time.perf_counter()
        for landing in bunch:
            self._scatter(landing)
        gpu.wait(there[-1].moving.end)
        if self.busy.is_now:  # else they were brought ahead, and their turn has no such meaning
            size = sum(one.moving.kernel_bytes for one in there)
            self.busy.note(time.perf_counter() - begin_s, size)

    def signal(self, mapped: Mapped, number: int, value: int) -> None:
        """See `Lane`.

        Chunks of a load may have ended on either stream: the word is written behind both. Those of
        a save end on the bus.
        """
        first = cast("GpuMemory", mapped).signals
        if not self._into_engine:
            gpu.write_word(first + 4 * (number - 1), value, self._bus)
            return
        self._scatter_all()
        behind = self._mark(self._bus)
        gpu.wait_in(self._cores, behind)
        self._events.put_away(behind)  # recorded again later: the wait is for this record
        gpu.write_word(first + 4 * (number - 1), value, self._cores)

    def _start_staged(
        self,
        group: Group,
        ids: NDArray[np.int32],
        offsets: Offsets,
        heads: NDArray[np.bool_],
    ) -> bool:
        size, is_busy = len(ids) * group.pitch, self.busy.is_now
        if not is_busy and self._bytes and self._bytes + size > WINDOW_BYTES:
            return False
        at = self.staging.ring.take(size)
        self._is_full = at is None
        if at is None:
            return False
        where, is_first = self.staging.address + at, not self._moving
        is_timed = self.busy.is_turn_to_time(is_first=is_first, into_engine=self._into_engine)
        if not self._into_engine:
            self._gather(group, ids, offsets, heads, where, is_timed=is_timed)
            return True
        for part in _cut(len(ids), FIRST_PAGES if is_first and is_busy else 0):
            self._moves.pages(group, offsets[part], heads[part], where + part.start * group.pitch)
        there = self._mark(self._bus, is_timed=is_timed)
        end = self._events.take(is_timed=is_timed)
        moving = self._note(end, size, (there,), (there, end) if is_timed else None)
        self._landing.append(Landing(moving, there, group, ids, where))
        if not is_busy:
            self._scatter_all()
        return True

    def _gather(
        self,
        group: Group,
        ids: NDArray[np.int32],
        offsets: Offsets,
        heads: NDArray[np.bool_],
        where: int,
        *,
        is_timed: bool,
    ) -> None:
        """A chunk of a save; of a large one the bus has the head while the rest is gathered."""
        begun, gathered = self._mark(self._bus, is_timed=True) if is_timed else None, []
        if begun is not None:  # else it might begin before
            gpu.wait_in(self._cores, begun)
        head = HEAD_BYTES // group.pitch
        parts = _cut(len(ids), head if 2 * head < len(ids) else 0)
        for part in parts:
            self._moves.kernel(group, ids[part], where + part.start * group.pitch)
            gathered.append(self._mark(self._cores, is_timed=is_timed and part is parts[-1]))
        for part, event in zip(parts, gathered, strict=True):
            gpu.wait_in(self._bus, event)
            self._moves.pages(group, offsets[part], heads[part], where + part.start * group.pitch)
        end, size = self._mark(self._bus), len(ids) * group.pitch
        if begun is None:
            self._note(end, size, tuple(gathered))
        else:
            self._note(end, size, (*gathered, begun), (begun, gathered[-1]))

    def _mark(self, stream: gpu.Handle, *, is_timed: bool = False) -> gpu.Handle:
        """An event that comes when what is in a stream now is done."""
        event = self._events.take(is_timed=is_timed)
        gpu.record(event, stream)
        return event

    def _scatter_all(self) -> None:
        """Launch all kernels; those of chunks begun ahead come here once the bus has the next."""
        while self._landing:
            landing = self._landing.popleft()
            if landing.moving.kernel is not None and gpu.is_over(landing.there):
                landing.moving.kernel = None  # it could have begun before now: we are late
            self._scatter(landing)

    def _scatter(self, landing: Landing) -> None:
        """Launch its kernel, behind its bytes."""
        gpu.wait_in(self._cores, landing.there)
        self._moves.kernel(landing.group, landing.ids, landing.staging)
        gpu.record(landing.moving.end, self._cores)

    def _note(
        self,
        end: gpu.Handle,
        size: int,
        steps: tuple[gpu.Handle, ...] = (),
        kernel: tuple[gpu.Handle, gpu.Handle] | None = None,
    ) -> Moving:
        """A chunk is under way, behind all others."""
        self._bytes += size
        self._moving.append(Moving(end, size, steps, kernel, size))
        return self._moving[-1]


def _cut(count: int, head: int) -> list[slice]:
    """So many, the first ones by themselves; 0: all together."""
    return [slice(0, head), slice(head, count)] if 0 < head < count else [slice(0, count)]
