"""XXH3-64 sums: of one run of bytes, and of many short rows at once.

Decided here: that all sums on disk are XXH3-64, so that any tool can check them. `of_rows` computes
the same function in numpy columns: a call of the library for each of a million records holds the
GIL nearly all of the time, numpy lets go of it, and is faster (tests compare the two).
"""

from collections.abc import Iterable
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

ROW_WORDS: Final = 31
"""Words of a row: the one length that `of_rows` knows."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME64_1: Final = 0x9E3779B185EBCA87
_START: Final = np.array(
    [
        0xC2B2AE3D,
        _PRIME64_1,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x85EBCA77,
        0x27D4EB2F165667C5,
        0x9E3779B1,
    ],
    np.uint64,
)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)


def of_bytes(data: bytes | memoryview) -> int:
    """The sum of one run of bytes; releases the GIL while it reads many."""
    return xxhash.xxh3_64_intdigest(data)


def of_parts(parts: Iterable[memoryview]) -> int:
    """The sum of runs of bytes, one after another."""
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return total.intdigest()


def of_rows(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The sum of each row's `ROW_WORDS` words.

    Args:
        rows: (n, m) with m >= `ROW_WORDS`; words beyond are left out.

    Cost: 0.2 µs a row, and ten times the rows' memory meanwhile: give it some thousand at a time.
    """
    assert rows.shape[1] >= ROW_WORDS
    total = np.tile(_START, (len(rows), 1))
    for stripe in range(3):
        _accumulate(total, rows[:, 8 * stripe : 8 * stripe + 8], _key(8 * stripe, 8))
    _accumulate(total, rows[:, ROW_WORDS - 8 : ROW_WORDS], _key(192 - 64 - 7, 8))
    mixed = total ^ _key(11, 8)
    start = np.uint64(ROW_WORDS * 8 * _PRIME64_1 & (1 << 64) - 1)
    folded = _folded_product(mixed[:, 0::2], mixed[:, 1::2])
    found: NDArray[np.uint64] = folded.sum(axis=1, dtype=np.uint64) + start
    found ^= found >> np.uint64(37)
    found *= np.uint64(0x165667919E3779F9)
    found ^= found >> _HALF
    return found


def _key(offset: int, words: int) -> NDArray[np.uint64]:
    return np.frombuffer(_SECRET[offset : offset + 8 * words], "<u8")


def _accumulate(
    total: NDArray[np.uint64], words: NDArray[np.uint64], key: NDArray[np.uint64]
) -> None:
    """One stripe of 64 bytes into the eight sums of each row."""
    keyed = words ^ key
    total[:, 0::2] += words[:, 1::2]
    total[:, 1::2] += words[:, 0::2]
    total += (keyed & _LOW) * (keyed >> _HALF)


def _folded_product(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Both halves of the 128-bit products, exclusive-ored."""
    a_low, a_high, b_low, b_high = a & _LOW, a >> _HALF, b & _LOW, b >> _HALF
    low = a_low * b_low
    cross = (low >> _HALF) + (a_high * b_low & _LOW) + a_low * b_high
    high = (a_high * b_low >> _HALF) + (cross >> _HALF) + a_high * b_high
    folded: NDArray[np.uint64] = np.bitwise_xor(high, (cross << _HALF) | (low & _LOW))
    return folded
