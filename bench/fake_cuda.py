"""A copier whose GPU is made up: the real copier, device and lanes on a CUDA that only counts time.

    python -m bench.fake_cuda ...       the arguments of `trikv.tiers.device`

Stands in for `trikv.tiers.gpu`. A copy of n bytes keeps its stream busy for n / 55 GB/s, a kernel
for 20 microseconds; nothing moves. So what such a process uses of a processor is the Python around
CUDA's calls, without the calls themselves (about 0.03 ms a chunk where they were measured).
"""

import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import trikv.tiers

BUS_BYTES_S: Final = 55e9
KERNEL_S: Final = 20e-6
GPU_BYTES: Final = 140 << 30
BINDINGS: Final = "13.0"


class CudaError(Exception):
    """Never raised here."""


@dataclass(eq=False)
class Clock:
    """A stream, or an event: when all that is in it has ended."""

    end_s: float = 0.0

    def busy(self, for_s: float) -> None:
        """More work, behind the rest."""
        self.end_s = max(self.end_s, time.perf_counter()) + for_s


def copy(_targets: object, _sources: object, sizes: NDArray[np.int64], stream: Clock) -> None:
    """Keep the bus busy."""
    stream.busy(float(sizes.sum()) / BUS_BYTES_S)


def copy_run(_target: int, _source: int, size: int, stream: Clock) -> None:
    """Keep the bus busy."""
    stream.busy(size / BUS_BYTES_S)


def copy_rectangle(
    _device: object,
    _host: object,
    width: int,
    height: int,
    stream: Clock,
    *,
    into_device: bool,  # both directions are as fast
) -> None:
    """Keep the bus busy."""
    stream.busy(width * height / BUS_BYTES_S)


def launch(_kernel: object, _grid: object, _threads: int, stream: Clock, _arguments: int) -> None:
    """Keep the cores busy."""
    stream.busy(KERNEL_S)


def record(event: Clock, stream: Clock) -> None:
    """The event comes after what is in the stream now."""
    event.end_s = max(stream.end_s, time.perf_counter())


def wait_in(stream: Clock, event: Clock) -> None:
    """What is put into the stream from now on comes after the event."""
    stream.end_s = max(stream.end_s, event.end_s)


def is_over(event: Clock) -> bool:
    """Whether the event has come."""
    return event.end_s <= time.perf_counter()


def wait(event: Clock) -> None:
    """Sleep until the event has come."""
    left_s = event.end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class Addresses:
    """Memory of the GPU, of which only the addresses exist."""

    def __init__(self) -> None:
        self._next = 1 << 40

    def take(self, size: int) -> int:
        """Addresses that nobody else has."""
        self._next += -(-size // 4096) * 4096
        return self._next - size


def module() -> Any:  # noqa: ANN401
    """What has the functions of `trikv.tiers.gpu` that a copier calls."""
    addresses = Addresses()

    def nothing(*_: object) -> None:
        pass

    return SimpleNamespace(
        BINDINGS=BINDINGS,
        CudaError=CudaError,
        Handle=Any,
        allocate=addresses.take,
        allocate_host=addresses.take,
        close_event=nothing,
        close_memory=nothing,
        compile_kernels=lambda _source, names, _capability: names,
        copy=copy,
        copy_rectangle=copy_rectangle,
        copy_run=copy_run,
        describe=lambda _: ("made up", 90),
        driver_version=lambda: 13_000,
        find_device=lambda uuid: uuid,
        free=nothing,
        is_over=is_over,
        launch=launch,
        make_current=nothing,
        memory_bytes=lambda _: GPU_BYTES,
        new_event=lambda **_: Clock(),
        new_stream=Clock,
        open_context=lambda _: None,
        open_event=lambda _: Clock(),
        open_memory=lambda _: addresses.take(GPU_BYTES),
        pci_address=lambda _: "none",
        record=record,
        register=nothing,
        seconds_between=lambda first, second: second.end_s - first.end_s,
        upload=lambda rows: addresses.take(rows.nbytes),
        wait=wait,
        wait_in=wait_in,
        write_word=nothing,
    )


def install() -> Any:  # noqa: ANN401
    """Put it in the place of `trikv.tiers.gpu`, before anything imports that; returns it."""
    made_up = module()
    sys.modules["trikv.tiers.gpu"] = made_up
    trikv.tiers.gpu = made_up
    return made_up


def main() -> None:
    """Be a copier."""
    install()
    from trikv.tiers import device  # noqa: PLC0415  # it looks for `gpu` when it is loaded

    device.main()


if __name__ == "__main__":
    main()
