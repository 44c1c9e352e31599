"""CUDA as this project uses it: the only file that imports cuda-python.

Decided here: nothing but that a call that fails raises. The driver's interface alone is used, so
that no CUDA runtime library is needed; NVRTC compiles the one kernel. Runs in copiers, never in the
daemon. Handles of streams, events and kernels are opaque to callers; addresses are ints.
"""

import ctypes
from typing import Any, Final, TypeAlias

import cuda.bindings
import numpy as np
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

Handle: TypeAlias = Any
SUCCESS: Final = driver.CUresult.CUDA_SUCCESS
NOT_READY: Final = driver.CUresult.CUDA_ERROR_NOT_READY
NO_MEMORY: Final = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
BINDINGS: Final[str] = cuda.bindings.__version__


class CudaError(Exception):
    """A call failed; after most errors the context, and so this process, is of no more use."""


def _ok(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401  # whatever the call returns
    """The value of a call.

    Raises:
        CudaError: it failed.
    """
    if answer[0] != SUCCESS:
        raise CudaError(answer[0].name)
    return answer[1] if len(answer) > 1 else None


# -- opening


def driver_version() -> int:
    """What the driver speaks, as 1000 x major + 10 x minor.

    Raises:
        CudaError: there is no usable driver.
    """
    try:
        return int(_ok(driver.cuDriverGetVersion()))
    except RuntimeError as error:  # cuda-python's own, where the library is missing
        raise CudaError(str(error)) from None


def find_device(uuid: bytes) -> Handle | None:
    """The device with this UUID, whatever number it has here; None: it is not visible."""
    _ok(driver.cuInit(0))
    for number in range(_ok(driver.cuDeviceGetCount())):
        device = _ok(driver.cuDeviceGet(number))
        if bytes(_ok(driver.cuDeviceGetUuid(device)).bytes) == uuid:
            return device
    return None


def describe(device: Handle) -> tuple[str, int]:
    """Name and compute capability (90: 9.0)."""
    kinds = driver.CUdevice_attribute
    major = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    name = _ok(driver.cuDeviceGetName(256, device)).partition(b"\0")[0].decode()
    version = [int(_ok(driver.cuDeviceGetAttribute(kind, device))) for kind in (major, minor)]
    return name, 10 * version[0] + version[1]


def memory_bytes(device: Handle) -> int:
    """Of the whole device."""
    return int(_ok(driver.cuDeviceTotalMem(device)))


def pci_address(device: Handle) -> str:
    """Where the kernel lists it, `0000:3b:00.0`."""
    kinds = driver.CUdevice_attribute
    places = (
        kinds.CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID,
        kinds.CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
        kinds.CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID,
    )
    domain, bus, slot = (int(_ok(driver.cuDeviceGetAttribute(one, device))) for one in places)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def open_context(device: Handle) -> Handle:
    """The device's primary context, current in this thread."""
    context = _ok(driver.cuDevicePrimaryCtxRetain(device))
    make_current(context)
    return context


def make_current(context: Handle) -> None:
    """Use this context in the calling thread."""
    _ok(driver.cuCtxSetCurrent(context))


def compile_kernels(source: str, names: list[str], capability: int) -> list[Handle]:
    """Compile CUDA C++ for the current device.

    Raises:
        CudaError: NVRTC is missing, or the source is wrong.
    """
    try:
        error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], [])
        flags = [f"--gpu-architecture=sm_{capability}".encode()]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{error.name}: {log.decode(errors='replace').strip()}")
        binary = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, binary)
    except RuntimeError as error:  # cuda-python's own, where the library is missing
        raise CudaError(f"NVRTC cannot be used: {error}") from None
    module = _ok(driver.cuModuleLoadData(binary))
    return [_ok(driver.cuModuleGetFunction(module, name.encode())) for name in names]


# -- memory


def allocate(size: int) -> int | None:
    """Memory on the current device; None: there is not so much."""
    result, pointer = driver.cuMemAlloc(size)
    if result == NO_MEMORY:
        return None
    return int(_ok((result, pointer)))


def allocate_host(size: int) -> int:
    """Pinned memory of this process, until it ends."""
    return int(_ok(driver.cuMemHostAlloc(size, 0)))


def free(address: int) -> None:
    """Give back what `allocate` gave; waits for what the device does."""
    _ok(driver.cuMemFree(address))


def upload(rows: NDArray[np.uint64]) -> int:
    """A copy on the device; `free` it.

    Raises:
        CudaError: no memory, among others.
    """
    address = int(_ok(driver.cuMemAlloc(rows.nbytes)))
    _ok(driver.cuMemcpyHtoD(address, rows.ctypes.data, rows.nbytes))
    return address


def register(address: int, size: int) -> None:
    """Pin a part of the pool, so that the copy engine reaches it; faults it in."""
    _ok(driver.cuMemHostRegister(address, size, driver.CU_MEMHOSTREGISTER_PORTABLE))


def open_memory(handle: bytes) -> int:
    """Map another process's allocation; returns where it begins here.

    Raises:
        CudaError: not possible.
    """
    raw = driver.CUipcMemHandle()
    raw.reserved = handle
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(_ok(driver.cuIpcOpenMemHandle(raw, flags)))


def close_memory(address: int) -> None:
    """Unmap; the other process's memory is free when it has freed it too."""
    _ok(driver.cuIpcCloseMemHandle(address))


# -- order


def open_event(handle: bytes) -> Handle:
    """Another process's event.

    Raises:
        CudaError: not possible.
    """
    raw = driver.CUipcEventHandle()
    raw.reserved = handle
    return _ok(driver.cuIpcOpenEventHandle(raw))


def close_event(event: Handle) -> None:
    """Forget an event."""
    _ok(driver.cuEventDestroy(event))


def is_over(event: Handle) -> bool:
    """Whether everything before the event's last record is done."""
    (result,) = driver.cuEventQuery(event)
    if result == NOT_READY:
        return False
    _ok((result,))
    return True


def new_stream() -> Handle:
    """A stream that waits for no other."""
    return _ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def new_event(*, is_timed: bool) -> Handle:
    """An event of this process; a timed one knows when it came, and its stream pauses for that."""
    flags = driver.CUevent_flags
    return _ok(
        driver.cuEventCreate(flags.CU_EVENT_DEFAULT if is_timed else flags.CU_EVENT_DISABLE_TIMING)
    )


def record(event: Handle, stream: Handle) -> None:
    """The event comes after what is in the stream now."""
    _ok(driver.cuEventRecord(event, stream))


def wait_in(stream: Handle, event: Handle) -> None:
    """What is put into the stream from now on comes after the event."""
    _ok(driver.cuStreamWaitEvent(stream, event, 0))


def wait(event: Handle) -> None:
    """Block this thread until the event has come; other threads run."""
    _ok(driver.cuEventSynchronize(event))


def seconds_between(first: Handle, second: Handle) -> float:
    """How much later the second event has come; both have, and both are timed."""
    return float(_ok(driver.cuEventElapsedTime(first, second))) / 1e3


def write_word(address: int, value: int, stream: Handle) -> None:
    """A uint32 of the device becomes `value` after what is in the stream now; needs no kernel."""
    _ok(driver.cuStreamWriteValue32(stream, address, value, 0))


# -- work


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER: Final = _Attributes(source_order=1)
_FIRST: Final = (ctypes.c_size_t * 1)(0)


def _find(name: str) -> Any:  # noqa: ANN401  # a function of ctypes
    """A call of the driver; None: it has none.

    By ctypes where cuda-python's way takes longer than the work: 1.5 µs a run of a copy of many,
    some 50 µs a launch with cold caches.
    """
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name, None)
    except OSError:
        return None


_BATCH: Final = _find("cuMemcpyBatchAsync_v2")  # CUDA 13
_LAUNCH: Final = _find("cuLaunchKernel")
if _LAUNCH is not None:
    _LAUNCH.argtypes = (ctypes.c_void_p, *7 * (ctypes.c_uint,), *3 * (ctypes.c_void_p,))


def copy_run(target: int, source: int, size: int, stream: Handle) -> None:
    """Copy bytes between the device and registered memory."""
    _ok(driver.cuMemcpyAsync(target, source, size, stream))


def copy(
    targets: NDArray[np.int64], sources: NDArray[np.int64], sizes: NDArray[np.int64], stream: Handle
) -> None:
    """Copy runs between the device and registered memory, in any order among themselves."""
    if _BATCH is None or len(sizes) == 1:
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            copy_run(target, source, size, stream)
        return
    targets, sources, sizes = (np.ascontiguousarray(one) for one in (targets, sources, sizes))
    code = _BATCH(
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(_IN_STREAM_ORDER),
        _FIRST,
        ctypes.c_size_t(1),
        ctypes.c_void_p(int(stream)),
    )
    if code != 0:
        raise CudaError(driver.CUresult(code).name)


def copy_rectangle(
    device: tuple[int, int],
    host: tuple[int, int],
    width: int,
    height: int,
    stream: Handle,
    *,
    into_device: bool,
) -> None:
    """Copy rows that lie at equal distances, between the device and registered memory.

    Args:
        device: address of the first row there, and bytes from row to row.
        host: likewise.
        width: bytes of a row.
        height: rows.
        stream: that it goes into.
        into_device: direction.
    """
    kinds, it = driver.CUmemorytype, driver.CUDA_MEMCPY2D()
    if into_device:
        it.srcMemoryType, it.srcHost, it.srcPitch = kinds.CU_MEMORYTYPE_HOST, *host
        it.dstMemoryType, it.dstDevice, it.dstPitch = kinds.CU_MEMORYTYPE_DEVICE, *device
    else:
        it.srcMemoryType, it.srcDevice, it.srcPitch = kinds.CU_MEMORYTYPE_DEVICE, *device
        it.dstMemoryType, it.dstHost, it.dstPitch = kinds.CU_MEMORYTYPE_HOST, *host
    it.WidthInBytes, it.Height = width, height
    _ok(driver.cuMemcpy2DAsync(it, stream))


def launch(
    kernel: Handle, grid: tuple[int, int], threads: int, stream: Handle, arguments: int
) -> None:
    """Run a kernel; `arguments` is the address of an array of addresses."""
    code = _LAUNCH(int(kernel), *grid, 1, threads, 1, 1, 0, int(stream), arguments, None)
    if code != 0:
        raise CudaError(driver.CUresult(code).name)
