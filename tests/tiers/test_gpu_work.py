"""A copier's loads on a double of CUDA: several at once, stopped, on a GPU now busy, now not."""

import contextlib
import math
import socket
import threading
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import PATIENCE_S
from tests.tiers.cuda_double import BLOCKS, END, ENGINE, SLAB, WORD, Cuda, Owner, doubled
from tests.tiers.test_gpu_lane import expected, pieces_of
from trikv.core.pages import PAGE_ALIGN
from trikv.tiers.copier import Copier, Sockets, Work
from trikv.tiers.frames import (
    CopyOrder,
    Direction,
    Frames,
    GroupOrder,
    Kind,
    pack,
    pack_copy,
    read_ended,
)

LENGTHS = [3000, 1000, 90]
PAGE = sum(LENGTHS)
ENDS = (3000, 4000, PAGE)
PITCH = -(-PAGE // PAGE_ALIGN) * PAGE_ALIGN
VALUE = 9


class Loads:
    """Loads of one lane, each with a word of its own, and what may be seen of them when."""

    def __init__(self, cuda: Cuda, lane: Any, mapped: Any, *, is_cut: bool) -> None:
        self.is_cut = is_cut
        self.cuda, self.lane, self.pieces = cuda, lane, pieces_of(LENGTHS)
        self.ours, self.theirs = socket.socketpair()
        self.work = Work(Direction.LOAD, None, self.theirs, {0: mapped}, threading.Lock())  # type: ignore[arg-type]
        self.orders: dict[int, CopyOrder] = {}
        self.before = cuda.memory.copy()
        self.frames, self.ended = Frames(), dict[int, np.ndarray]()
        self.kept: dict[int, np.ndarray] = {}  # of an ended load: its blocks' bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ours.close()
        self.theirs.close()

    def announce(self, places: list[int], lease: int) -> None:
        """Of a load of some of these pages."""
        pages = np.array(places, np.int64)
        blocks = np.zeros(len(pages), np.int32)
        order = CopyOrder(0, 0, Direction.LOAD, 0, blocks, pages, lease=lease)
        self.work._obey(Kind.AHEAD, 0, pack_copy(order))
        if self.work._is_expecting and not self.work._moving:
            self.work._prepare(self.lane)

    def begin(self, ids: list[int], places: list[int], lease: int, *, is_ordered: bool) -> None:
        number = len(self.orders) + 1
        blocks, offsets = np.array(ids, np.int32), np.array(places, np.int64)
        rest = (number, VALUE, is_ordered, lease)
        order = CopyOrder(0, 0, Direction.LOAD, 0, blocks, offsets, *rest)
        self.orders[number] = order
        self.work._obey(Kind.COPY, number, pack_copy(order))

    def bytes_of(self, order: CopyOrder, memory: np.ndarray, end: int) -> np.ndarray:
        """Of its blocks, up to a place in each page."""
        parts, at = [], 0
        for piece in self.pieces:
            size = min(piece.bytes, end - at)
            at += piece.bytes
            for block in order.blocks.tolist() if size > 0 else ():
                begin = ENGINE + piece.offset + block * piece.stride
                parts.append(memory[begin : begin + size])
        return np.concatenate(parts)

    def check(self) -> None:
        """What words and reports say is true, and what has ended is never written again."""
        self.theirs.sendall(pack(Kind.ALIVE, 0))
        self.frames.feed(self.ours.recv(1 << 20), self._hear)
        words = self.cuda.memory[WORD : WORD + 16].view(np.uint32)
        for number, order in self.orders.items():
            value = int(words[number - 1])
            after = expected(self.before, self.pieces, order, 0, PAGE)
            is_cut = order.is_ordered and self.is_cut
            shown = max(0, value - VALUE + len(ENDS)) if is_cut else 3 * (value == VALUE)
            if shown:
                end = ENDS[shown - 1]
                seen = self.bytes_of(order, self.cuda.memory, end)
                assert np.array_equal(seen, self.bytes_of(order, after, end))
            if number in self.ended:
                now = self.bytes_of(order, self.cuda.memory, PAGE)
                assert np.array_equal(self.kept.setdefault(number, now), now)
                whole = order.blocks[self.ended[number]]
                part = CopyOrder(0, 0, order.direction, 0, whole, order.offsets[: len(whole)])
                if len(whole):
                    seen = self.bytes_of(part, self.cuda.memory, PAGE)
                    assert np.array_equal(seen, self.bytes_of(part, after, PAGE))

    def _hear(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.ENDED:
            assert number not in self.ended
            self.ended[number] = read_ended(body)[0]


def shorten(lane_module: Any, data: st.DataObject) -> None:
    """Copies of a few pages have all that large ones have."""
    is_bridge = data.draw(st.booleans())
    lane_module.tail_blocks = lambda count, **_: (count // 2, is_bridge)
    lane_module.TAIL_BYTES = data.draw(st.sampled_from([0, PITCH, math.inf]))
    lane_module.CHUNK_BYTES = 2 * PITCH
    lane_module.DIRECT_WINDOW_BYTES = lane_module.WINDOW_BYTES = 4 * PITCH


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    staging_pages=st.sampled_from([0, 2, 5, 40]),
    is_cut=st.booleans(),
    data=st.data(),
)
def test_words_and_reports_are_true_and_every_load_ends(
    *, counts: list[int], staging_pages: int, is_cut: bool, data: st.DataObject
) -> None:
    """Some are announced: before others, with more pages than they want, or never come."""
    with contextlib.ExitStack() as stack:
        cuda, lane_module, device_module = stack.enter_context(doubled())
        shorten(lane_module, data)
        cuda.choose = lambda count: data.draw(st.integers(0, count - 1))
        cuda.memory[:] = np.random.default_rng(1).integers(0, 256, END, np.uint8)
        cuda.memory[WORD : WORD + 16] = 0
        group = device_module._map_group(
            GroupOrder(BLOCKS, tuple(pieces_of(LENGTHS)), ENDS if is_cut else ()),
            [ENGINE],
            contextlib.ExitStack(),
        )
        mapped = lane_module.GpuMemory((), (), (group,), SLAB, WORD)
        lane = lane_module.GpuLane(Owner(staging_pages * PITCH), into_engine=True)
        loads = stack.enter_context(Loads(cuda, lane, mapped, is_cut=is_cut))
        lane_module.KEEP_AHEAD_S = data.draw(st.sampled_from([0, math.inf]))
        ids = list(data.draw(st.permutations(range(BLOCKS))))
        pages = list(data.draw(st.permutations(range(SLAB // PITCH))))
        pending = [(ids[6 * at :][:n], pages[6 * at :][:n]) for at, n in enumerate(counts)]
        steps = ["begin", "turn", "turn", "go on", "busy", "stop", "announce", "announce"]
        step = st.sampled_from(steps)
        while pending or len(loads.ended) < len(loads.orders):
            what = data.draw(step)
            if what == "begin" and pending:
                blocks, places = pending.pop()
                lease, is_ordered = 1 + len(pending), data.draw(st.booleans())
                loads.begin(blocks, [PITCH * one for one in places], lease, is_ordered=is_ordered)
            elif what == "announce":
                lease = data.draw(st.integers(1, len(counts) + 1))
                places = pending[lease - 1][1] if lease <= len(pending) else []
                more = data.draw(st.sets(st.sampled_from(pages), min_size=not places))
                loads.announce([PITCH * one for one in {*places, *more}], lease)
            elif what == "busy":
                lane.busy.until_s = data.draw(st.sampled_from([math.inf, -math.inf]))
            elif what == "stop" and loads.orders:
                number = data.draw(st.sampled_from(sorted(loads.orders)))
                if data.draw(st.integers(0, 3)) == 0:
                    loads.work._obey(Kind.STOP, number, b"")
            elif what == "go on" and any(cuda.streams):
                cuda.go_on()
            else:
                loads.work._turn(lane)
            loads.check()
        while any(cuda.streams):
            cuda.go_on()
            loads.check()
        lane.forget()
        idle = [*lane._events.idle[0], *lane._events.idle[1]]
        assert len({id(one) for one in idle}) == len(idle)
        assert not any((lane._moving, lane._landing, lane._bytes, lane.staging.ring._taken))
        for number in loads.orders:
            shown = int(cuda.memory[WORD + 4 * number - 4 :][:4].view(np.uint32)[0])
            assert (shown == VALUE) == bool(loads.ended[number].all())


def test_nothing_is_unmapped_while_bytes_are_brought_for_it() -> None:
    """The last rank takes the staging along, and that is where they go."""
    said: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def bring(*_: object) -> None:
        begun.set()
        may_end.wait(PATIENCE_S)
        said.append("brought")

    pages = np.zeros(1, np.int64)
    order = CopyOrder(1, 0, Direction.LOAD, 0, pages.astype(np.int32), pages, lease=7)
    mapped = SimpleNamespace(
        has_sections=lambda _: False, targets=lambda _: [None], sort=lambda _: None
    )
    lane: Any = SimpleNamespace(bring=bring, rehearse=lambda: None)
    device: Any = SimpleNamespace(detach=lambda _: said.append("unmapped"))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(one) for _ in range(3) for one in socket.socketpair()]
        copier = Copier(device, Sockets(*socks[::2]))
        copier._mapped[1] = mapped  # type: ignore[assignment]
        work = copier._work[Direction.LOAD]
        for _ in range(2):  # the second time it is not mapped any more
            work._coming = order
            preparing = threading.Thread(target=work._prepare, args=(lane,))
            preparing.start()
            if not said:
                assert begun.wait(PATIENCE_S)
                unmapping = threading.Thread(target=copier._obey, args=(Kind.DETACH, 1, b""))
                unmapping.start()
                unmapping.join(0.05)
                assert said == []
                may_end.set()
                unmapping.join(PATIENCE_S)
            preparing.join(PATIENCE_S)
    assert said == ["brought", "unmapped"]
