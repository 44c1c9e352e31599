"""The kernel that gathers and scatters pieces inside GPU memory, and the numbers it is given.

Decided here: how a page's pieces become a table on the GPU, and how wide its threads read. Bytes
that cross the bus are moved by the copy engine, never by this kernel: one that touches host memory
would cost the engine a quarter of its speed.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

THREADS: Final = 256
UNITS_PER_THREAD: Final = 8
BLOCKS_MAX: Final = 1_056
ROWS_MAX: Final = 960
"""Blocks of one launch: their numbers are arguments, which may have 4 KiB together."""
WIDTHS: Final = {
    16: "uint4",
    8: "uint2",
    4: "unsigned int",
    2: "unsigned short",
    1: "unsigned char",
}

_NUMBERS: Final = struct.Struct("=3Q4I")  # table, staging, pitch; pieces, each, units, into_engine

_TEMPLATE: Final = """
// Row y moves block ids.of[y]; its page lies at staging + y * pitch, as pieces one after another.
// table: base, stride and first unit of each piece.
// each: units of a piece where all have as many, else 0.
extern "C" __global__ void move_%(width)d(const unsigned long long* table, unsigned int pieces,
    unsigned int each, unsigned int units, unsigned char* staging, unsigned long long pitch,
    unsigned int into_engine, const Ids ids) {
  if (ids.of[blockIdx.y] < 0) return;  // a page that nobody wants
  const unsigned long long id = (unsigned long long)ids.of[blockIdx.y];
  %(type)s* page = (%(type)s*)(staging + blockIdx.y * pitch);
  const unsigned int step = gridDim.x * blockDim.x;
  for (unsigned int u = blockIdx.x * blockDim.x + threadIdx.x; u < units; u += step) {
    unsigned int p;
    if (each) {
      p = u / each;
    } else {
      unsigned int low = 0, high = pieces;  // the last piece whose first unit is not after u
      while (high - low > 1) {
        const unsigned int middle = (low + high) / 2;
        if (table[2 * pieces + middle] <= u) low = middle; else high = middle;
      }
      p = low;
    }
    const unsigned long long first = each ? (unsigned long long)p * each : table[2 * pieces + p];
    %(type)s* piece = (%(type)s*)(table[p] + id * table[pieces + p]) + (u - first);
    if (into_engine) *piece = page[u]; else page[u] = *piece;
  }
}
"""

SOURCE: Final = f"struct Ids {{ int of[{ROWS_MAX}]; }};\n" + "\n".join(
    _TEMPLATE % {"width": width, "type": name} for width, name in WIDTHS.items()
)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """What the kernel needs to know of one group.

    Attributes:
        width: bytes that a thread moves at once; every address and length is a multiple.
        rows: uint64[3 * pieces], addresses, strides, and first units.
        each: units of a piece, 0 where pieces differ.
        units: of a page.
    """

    width: int
    rows: NDArray[np.uint64]
    pieces: int
    each: int
    units: int

    def grid_x(self, rows: int) -> int:
        """Thread blocks for one page of `rows`: enough to keep the memory busy, and no more."""
        full = -(-self.units // (THREADS * UNITS_PER_THREAD))
        return max(1, min(full, BLOCKS_MAX // rows))


def table(
    address: NDArray[np.int64], stride: NDArray[np.int64], length: NDArray[np.int64]
) -> Table:
    """The table of a group; pages in staging are aligned to 4 KiB, so they never limit the width.

    Args:
        address: of each piece of block 0, shape (pieces,).
        stride: from block to block.
        length: bytes of each piece.
    """
    together = int(np.bitwise_or.reduce(np.concatenate((address, stride, length))))
    width = next(one for one in WIDTHS if together % one == 0)
    units = length // width
    first = np.cumsum(units) - units
    is_even = bool((units == units[0]).all())
    return Table(
        width,
        np.concatenate((address, stride, first)).astype(np.uint64),
        len(length),
        int(units[0]) if is_even else 0,
        int(units.sum()),
    )


class Arguments:
    """The kernel's arguments in memory, as a launch reads them; used again and again.

    Attributes:
        address: of the addresses of the arguments.
    """

    def __init__(self) -> None:
        self._numbers = np.zeros(_NUMBERS.size, np.uint8)
        self._ids = np.zeros(ROWS_MAX, np.int32)
        first = self._numbers.ctypes.data
        table, staging, pitch = (first + 8 * at for at in range(3))
        pieces, each, units, into_engine = (first + 24 + 4 * at for at in range(4))
        order = [table, pieces, each, units, staging, pitch, into_engine, self._ids.ctypes.data]
        self._pointers = np.array(order, np.uint64)
        self.address = int(self._pointers.ctypes.data)

    def set(
        self,
        of: Table,
        rows: int,
        ids: NDArray[np.int32],
        staging: int,
        pitch: int,
        *,
        into_engine: bool,
    ) -> None:
        """Fill in one launch.

        Args:
            of: the group's table.
            rows: address of `of.rows` on the GPU.
            ids: of the engine's blocks, at most `ROWS_MAX`; negative: that page goes nowhere.
            staging: address of the first page.
            pitch: from page to page.
            into_engine: direction.
        """
        numbers = (rows, staging, pitch, of.pieces, of.each, of.units, into_engine)
        _NUMBERS.pack_into(self._numbers.data, 0, *numbers)
        self._ids[: len(ids)] = ids
