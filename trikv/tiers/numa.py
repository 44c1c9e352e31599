"""NUMA nodes: which of them a pool should lie in, which one a GPU is near, and placing memory.

Decided here: a pool is divided among the nodes that have GPUs, or among all where none has. A
machine with one node is left alone. What is placed is a wish: a node that has no memory left gives
none, and the kernel takes another one's.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from trikv.core.banks import ANY_BANK, WHOLE, Parts, divide

SYSFS: Final = Path("/sys")
STATUS: Final = Path("/proc/self/status")
NVIDIA: Final = "0x10de"
DISPLAY_CLASSES: Final = ("0x0300", "0x0302")
HUGE_PAGE_BYTES: Final = 2 << 20
MPOL_PREFERRED: Final = 1
MBIND: Final = {"x86_64": 237, "aarch64": 235}
MASK_BITS: Final = 64

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

Spread = Callable[[int, int], Parts]
"""Places memory (address, bytes) that nobody has touched yet; says which part lies where."""


def nowhere(_address: int, _size_bytes: int) -> Parts:
    """A `Spread` that leaves the choice to the kernel."""
    return WHOLE


def pool_nodes(sysfs: Path = SYSFS, status: Path = STATUS) -> tuple[int, ...]:
    """The nodes that a pool should lie in; empty: there is nothing to choose."""
    there = _numbers(_read(sysfs / "devices/system/node/has_memory"))
    usable = sorted(there & _allowed(status))
    if len(usable) < 2:  # noqa: PLR2004  # one node: nothing to choose
        return ()
    gpus = sysfs / "bus/pci/devices"
    near = {node_of(path.name, sysfs) for path in gpus.glob("*") if _is_gpu(path)}
    return tuple(node for node in usable if node in near) or tuple(usable)


def node_of(pci_address: str, sysfs: Path = SYSFS) -> int:
    """The node near a PCI device (`0000:3b:00.0`), or `ANY_BANK`."""
    text = _read(sysfs / "bus/pci/devices" / pci_address / "numa_node")
    return int(text) if text.isdigit() else ANY_BANK


def spread(address: int, size_bytes: int, nodes: Sequence[int]) -> Parts:
    """Have memory come from these nodes, an equal part in a row from each.

    Args:
        address: of shared memory, a multiple of its page size; not touched yet.
        size_bytes: of it.
        nodes: in order; none: the kernel's choice.

    Raises:
        OSError: the kernel refuses, and may have placed a part.
    """
    parts = divide(size_bytes, nodes, unit=HUGE_PAGE_BYTES)
    ends = [begin for begin, _ in parts[1:]] + [size_bytes]
    for (begin, node), end in zip(parts, ends, strict=True):
        if node != ANY_BANK and end > begin:
            _prefer(address + begin, end - begin, node)
    return parts


def _prefer(address: int, size_bytes: int, node: int) -> None:
    number = MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"mbind is not known on {platform.machine()}")
    words = node // MASK_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % MASK_BITS
    code = _LIBC.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_long(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * MASK_BITS + 1),  # the kernel takes one less
        ctypes.c_ulong(0),
    )
    if code != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mbind: {os.strerror(error)}")


def _is_gpu(path: Path) -> bool:
    return _read(path / "vendor") == NVIDIA and _read(path / "class").startswith(DISPLAY_CLASSES)


def _allowed(status: Path) -> set[int]:
    """Nodes that this process may take memory from."""
    for line in _read(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return _numbers(value)
    return set()


def _numbers(text: str) -> set[int]:
    """`0-1,3`, as the kernel writes sets."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    """Text of the kernel's; empty where it says nothing."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
