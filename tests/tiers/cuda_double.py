"""A double of CUDA: memory in one array, streams as queues that go on only when asked.

They go on in any order that events allow. What is shown of real CUDA is shown in tests/gpu.
"""

import contextlib
import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trikv import tiers
from trikv.tiers import kernels

BLOCKS = 24
TALL_PAGES = 3
SLAB = 1 << 18
POOL = 64 << 10  # addresses; the engine's memory follows, then what is allocated
ENGINE = POOL + (2 << 20)
FREE = ENGINE + (1 << 20)
WORD = FREE - 64
END = FREE + (2 << 20)


class Cuda(ModuleType):
    """Stands in for `trikv.tiers.gpu`."""

    Handle = Any
    CudaError = RuntimeError

    def __init__(self) -> None:
        super().__init__("trikv.tiers.gpu")
        self.memory = np.zeros(END, np.uint8)
        self.streams: list[deque[Callable[[], bool]]] = []
        self.free_at = FREE
        self.choose: Callable[[int], int] = lambda _: 0
        self.rectangles = self.rows = 0
        self.tables: dict[int, Any] = {}
        self.kernel_s = 0.0  # from the moment when a kernel could begin to its end

    def new_stream(self) -> int:
        self.streams.append(deque())
        return len(self.streams) - 1

    def new_event(self, *, is_timed: bool) -> list[int]:
        return [0, 0, is_timed]  # recorded so often, come so often

    def _put(self, stream: int, work: Callable[[], object]) -> None:
        self.streams[stream].append(lambda: (work(), True)[1])

    def record(self, event: list[int], stream: int) -> None:
        event[0] += 1
        number = event[0]
        self._put(stream, lambda: event.__setitem__(1, max(event[1], number)))

    def wait_in(self, stream: int, event: list[int]) -> None:
        number = event[0]
        self.streams[stream].append(lambda: event[1] >= number)

    def wait(self, event: list[int]) -> None:
        while event[1] < event[0]:
            self.go_on()

    def is_over(self, event: list[int]) -> bool:
        return event[1] >= event[0]

    def seconds_between(self, first: list[int], second: list[int]) -> float:
        assert all(self.is_over(one) and one[2] for one in (first, second))
        return self.kernel_s

    def make_current(self, context: object) -> None:
        pass

    def open_memory(self, _handle: bytes) -> int:
        return ENGINE

    def close_memory(self, address: int) -> None:
        pass

    def go_on(self) -> None:
        """One thing that may come next."""
        busy = [one for one in self.streams if one]
        first = self.choose(len(busy))
        assert any(one[0]() and (one.popleft(), True)[1] for one in busy[first:] + busy[:first]), (
            "streams wait for each other"
        )

    def copy(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        self.rows += len(sizes)
        runs = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def move() -> None:
            for target, source, size in runs:
                self.memory[target : target + size] = self.memory[source : source + size]

        self._put(stream, move)

    def copy_run(self, target: int, source: int, size: int, stream: int) -> None:
        self.copy(np.array([target]), np.array([source]), np.array([size]), stream)

    def copy_rectangle(
        self,
        device: tuple[int, int],
        host: tuple[int, int],
        width: int,
        height: int,
        stream: int,
        *,
        into_device: bool,
    ) -> None:
        assert width <= min(device[1], host[1]), "CUDA refuses it"
        self.rectangles += 1
        target, source = (device, host) if into_device else (host, device)

        def move() -> None:
            for row in range(height):
                to, of = target[0] + row * target[1], source[0] + row * source[1]
                self.memory[to : to + width] = self.memory[of : of + width]

        self._put(stream, move)

    def upload(self, rows: Any) -> int:
        self.tables[len(self.tables) + 1] = rows.reshape(3, -1).astype(np.int64)
        return len(self.tables)

    def register(self, address: int, size: int) -> None:
        pass

    def free(self, address: int) -> None:
        pass

    def allocate(self, size: int) -> int | None:
        at, self.free_at = self.free_at, self.free_at + size
        return at if self.free_at <= END else None

    def allocate_host(self, size: int) -> int:
        at = self.allocate(size)
        assert at is not None
        return at

    def launch(
        self, kernel: int, grid: tuple[int, int], _threads: int, stream: int, arguments: int
    ) -> None:
        """As the kernel's source says; `kernel` is its width."""
        pointers = (ctypes.c_uint64 * 8).from_address(arguments)
        kinds = [ctypes.c_uint64, *[ctypes.c_uint32] * 3, *[ctypes.c_uint64] * 2, ctypes.c_uint32]
        table, _, _, units, staging, pitch, into_engine = (
            kind.from_address(at).value for kind, at in zip(kinds, pointers, strict=False)
        )
        ids = np.array((ctypes.c_int32 * grid[1]).from_address(pointers[7]))
        base, stride, first = self.tables[table]
        unit = np.arange(units)
        piece = np.searchsorted(first, unit, side="right") - 1
        inside = (unit - first[piece])[:, None] * kernel + np.arange(kernel)
        far = base[piece][:, None] + ids[:, None, None] * stride[piece][:, None] + inside
        near = staging + np.arange(grid[1])[:, None, None] * pitch
        near = near + unit[:, None] * kernel + np.arange(kernel)
        far, near = far[ids >= 0], near[ids >= 0]
        target, source = (far, near) if into_engine else (near, far)
        self._put(stream, lambda: self.memory.__setitem__(target, self.memory[source]))

    def write_word(self, address: int, value: int, stream: int) -> None:
        word = np.frombuffer(np.uint32(value).tobytes(), np.uint8)
        self._put(stream, lambda: self.memory.__setitem__(slice(address, address + 4), word))


@contextlib.contextmanager
def doubled() -> Iterator[tuple[Cuda, Any, Any]]:
    """The double, and the modules `lane` and `device` as they are with it."""
    double = Cuda()
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "trikv.tiers.gpu", double)
        patched.setattr(tiers, "gpu", double, raising=False)
        for name in ("staging", "events", "busy", "moves", "lane", "rehearsals", "device"):
            patched.delitem(sys.modules, f"trikv.tiers.{name}", raising=False)
            patched.setattr(tiers, name, None, raising=False)
        try:
            lane = import_module("trikv.tiers.lane")
            patched.setattr("trikv.tiers.staging.BYTES_MIN", 1)
            patched.setattr("trikv.tiers.moves.TALL_PAGES", TALL_PAGES)
            yield double, lane, import_module("trikv.tiers.device")
        finally:
            for name in ("staging", "events", "busy", "moves", "lane", "rehearsals", "device"):
                sys.modules.pop(f"trikv.tiers.{name}", None)


class Owner:
    """A lane's device."""

    pool_address = POOL
    slab_bytes = SLAB

    def __init__(self, staging_bytes: int) -> None:
        self.kernels = {width: width for width in kernels.WIDTHS}
        self.staging_bytes = staging_bytes

    def register_slabs(self, offsets: Any) -> None:
        pass

    def tell(self, event: str, **facts: object) -> None:
        pass
