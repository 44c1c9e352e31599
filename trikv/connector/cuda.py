"""GPU memory of this process, described so that the daemon's copier can map it.

Decided here: that an allocation is exported once, by its raw IPC handle, and what an engine is told
when its memory cannot be. Calls the CUDA driver by ctypes, because an engine has that and torch and
need not have more. This file does not know layers or blocks.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from trikv.connector.jobs import SIGNAL_COUNT
from trikv.connector.layouts import LayoutError, Plan

HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
EVENT_COUNT: Final = 32
"""A save waits for the latest record of its event: with few of them, for that of a later step."""
WORD_BYTES: Final = 4
INVALID_VALUE: Final = 1
NOT_SUPPORTED: Final = 801


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the driver's, as others may map it."""

    address: int
    size_bytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Export:
    """All memory of a plan.

    Attributes:
        device: 16 bytes, the GPU's UUID.
        places: for each memory of the plan: number of its allocation, and its offset inside.
    """

    device: bytes
    allocations: tuple[Allocation, ...]
    places: tuple[tuple[int, int], ...]


class Driver:
    """The driver's calls that are needed, on the device that is current in this thread."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LayoutError(f"the CUDA driver cannot be loaded: {error}") from None

    def allocation(self, address: int) -> Allocation:
        """The allocation that an address lies in, exported.

        Raises:
            LayoutError: it is of a kind that cannot be exported; names the setting.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        code = self._library.cuIpcGetMemHandle(handle, base)
        if code in {INVALID_VALUE, NOT_SUPPORTED}:
            raise LayoutError(
                "the KV cache lies in virtual memory that CUDA IPC cannot share: start without "
                "expandable_segments:True (PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF), "
                "--enable-sleep-mode and --enable-cumem-allocator"
            )
        _check("cuIpcGetMemHandle", code)
        return Allocation(base.value, size.value, bytes(handle))

    def uuid(self) -> bytes:
        """Of the current device.

        Raises:
            LayoutError: it is a part of a GPU.
        """
        device = ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        whole, part = (ctypes.c_ubyte * UUID_BYTES)(), (ctypes.c_ubyte * UUID_BYTES)()
        self._call("cuDeviceGetUuid", whole, device)
        self._call("cuDeviceGetUuid_v2", part, device)
        if bytes(whole) != bytes(part):
            raise LayoutError("MIG is not supported: CUDA IPC does not reach instances of a GPU")
        return bytes(whole)

    def wait_word(self, stream: int, address: int, value: int) -> None:
        """What follows in the stream waits until the uint32 there has reached `value`, cyclically.

        Raises:
            LayoutError: this GPU or driver cannot.
        """
        self._word("cuStreamWaitValue32_v2", stream, address, value)

    def write_word(self, stream: int, address: int, value: int) -> None:
        """The uint32 there becomes `value` after what is in the stream.

        Raises:
            LayoutError: this GPU or driver cannot.
        """
        self._word("cuStreamWriteValue32_v2", stream, address, value)

    def _word(self, name: str, stream: int, address: int, value: int) -> None:
        at, flags = ctypes.c_uint64(address), ctypes.c_uint(0)  # wait: greater or equal, cyclically
        self._call(name, ctypes.c_void_p(stream), at, ctypes.c_uint32(value), flags)

    def _call(self, name: str, *arguments: object) -> None:
        _check(name, getattr(self._library, name)(*arguments))


def _check(name: str, code: int) -> None:
    if code != 0:
        raise LayoutError(f"{name} failed with CUDA error {code}")


def export(plan: Plan, driver: Driver) -> Export:
    """Export what a plan's memories lie in.

    Raises:
        LayoutError: not possible; the message says why.
    """
    allocations: list[Allocation] = []
    places = []
    for memory in plan.memories:
        number = next(
            (
                at
                for at, one in enumerate(allocations)
                if one.address <= memory.address < one.address + one.size_bytes
            ),
            None,
        )
        if number is None:
            number = len(allocations)
            allocations.append(driver.allocation(memory.address))
        places.append((number, memory.address - allocations[number].address))
    return Export(driver.uuid(), tuple(allocations), tuple(places))


class StepEvents:
    """Events that the engine records after its work, for copies to wait for, in turns."""

    def __init__(self, events: Sequence[Any], stream: Callable[[], Any]) -> None:
        """Take charge of events.

        Args:
            events: of the GPU that the tensors are on.
            stream: gives the stream that the engine computes in there, whatever GPU is current.
        """
        self._events = events
        self._stream = stream
        self._next = 0

    @property
    def handles(self) -> list[bytes]:
        """For the daemon."""
        return [bytes(event.ipc_handle()) for event in self._events]

    def record(self) -> int:
        """Note what the engine's stream holds now; returns the event's number, from 1."""
        at = self._next
        self._next = (at + 1) % len(self._events)
        self._events[at].record(self._stream())
        return at + 1


class SignalWords:
    """Words of the GPU in which copiers show that a load has ended, and streams wait for that.

    Waiting and writing are done by the GPU's front end: no kernel, no thread.
    """

    def __init__(
        self,
        words: Any,  # noqa: ANN401
        allocation: Allocation,
        stream: Callable[[], Any],
        side: Any,  # noqa: ANN401
        driver: Driver,
    ) -> None:
        """Take charge of words.

        Args:
            words: int32 tensor, zeros.
            allocation: what it lies in, exported.
            stream: gives the stream that the engine computes in.
            side: a stream that waits for no other.
            driver: to it.
        """
        self._words = words  # keeps the memory
        self._seen = words.new_empty(len(words), device="cpu").pin_memory()
        self.allocation = allocation
        self.count = len(words)
        self.offset = words.data_ptr() - allocation.address
        self._stream = stream
        self._side = side
        self._driver = driver

    @property
    def stream(self) -> int:
        """What the engine puts its work into now."""
        return int(self._stream().cuda_stream)

    def hold(self, number: int, value: int) -> None:
        """What is put into the engine's stream from now on waits for the word to be `value`."""
        self._driver.wait_word(self.stream, self._address(number), value)

    def write(self, number: int, value: int) -> None:
        """The word becomes `value` at once, whatever the GPU does; any thread."""
        with on_device(str(self._words.device)):
            self._driver.write_word(self._side.cuda_stream, self._address(number), value)

    def read(self) -> list[int]:
        """All words as they are now, of an idle GPU: else a copy's chunk may be waited for."""
        from torch.cuda import stream  # noqa: PLC0415  # an engine without a GPU may have none

        with stream(self._side):
            self._seen.copy_(self._words, non_blocking=True)
        self._side.synchronize()
        values: list[int] = self._seen.tolist()
        return values

    def _address(self, number: int) -> int:
        return int(self._words.data_ptr()) + WORD_BYTES * (number - 1)


def signal_words(name: str, driver: Driver, count: int = 2 * SIGNAL_COUNT) -> SignalWords | None:
    """Words on a device that is current now; None: its streams cannot wait for words."""
    import torch  # noqa: PLC0415  # an engine without a GPU may have no CUDA torch

    words = torch.zeros(count, dtype=torch.int32, device=name)
    side = torch.cuda.Stream(name)
    try:
        allocation = driver.allocation(words.data_ptr())
        made = SignalWords(words, allocation, lambda: torch.cuda.current_stream(name), side, driver)
        torch.cuda.synchronize(name)  # the zeros are there
        made.write(1, 1)
        driver.wait_word(side.cuda_stream, words.data_ptr(), 1)
        side.synchronize()
    except (LayoutError, AttributeError):
        return None
    return made if int(words[0]) == 1 else None


def on_device(name: str) -> AbstractContextManager[Any]:
    """Make a device ("cuda:1") the current one for a while: drivers and events ask for no other."""
    from torch.cuda import device  # noqa: PLC0415  # an engine without a GPU may have no CUDA torch

    made_current: AbstractContextManager[Any] = device(name)
    return made_current


def step_events(name: str, count: int = EVENT_COUNT) -> StepEvents:
    """Events that other processes can wait for, of a device that is current now."""
    from torch.cuda import Event, current_stream  # noqa: PLC0415  # as above

    events = [Event(enable_timing=False, interprocess=True) for _ in range(count)]
    return StepEvents(events, lambda: current_stream(name))
