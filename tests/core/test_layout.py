"""Registrations against plain integers: what is refused, and where each piece lies."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core.errors import BadRequestError
from trikv.core.layout import ADDRESS_MAX, Geometry, GroupLayout, Piece, Range

BLOCKS_MAX = (1 << 31) - 1
PIECE_MAX = (1 << 31) - 1
UINT64_MAX = (1 << 64) - 1
EDGES = sorted(
    {
        value + step
        for value in (0, 1 << 31, 1 << 32, 1 << 62, 1 << 63, 1 << 64)
        for step in (-2, -1, 0, 1, 2)
        if 0 <= value + step <= UINT64_MAX
    }
)


@dataclass(frozen=True)
class Registration:
    """What a worker sends for one group."""

    ranges: tuple[Range, ...]
    pieces: tuple[Piece, ...]
    block_count: int

    def open(self) -> GroupLayout:
        return GroupLayout(self.ranges, self.pieces, self.block_count, "f32")


def is_sound(one: Registration) -> bool:
    """The rules in integers that cannot wrap."""
    if not 1 <= one.block_count <= BLOCKS_MAX:
        return False
    if any(r.bytes < 1 or r.base + r.bytes >= ADDRESS_MAX for r in one.ranges):
        return False
    for piece in one.pieces:
        if piece.memory >= len(one.ranges) or not 1 <= piece.bytes <= PIECE_MAX:
            return False
        last = piece.offset + (one.block_count - 1) * piece.stride
        if last + piece.bytes > one.ranges[piece.memory].bytes:
            return False
        if one.block_count > 1 and piece.stride < piece.bytes:
            return False
    spans = sorted((addresses(one, 0)[i], piece.bytes) for i, piece in enumerate(one.pieces))
    return all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))


def addresses(one: Registration, block: int) -> list[int]:
    return [one.ranges[p.memory].base + p.offset + block * p.stride for p in one.pieces]


def judge(one: Registration) -> None:
    if not is_sound(one):
        with pytest.raises(BadRequestError):
            one.open()
        return
    layout = one.open()
    blocks = sorted({0, 1 % one.block_count, one.block_count // 2, one.block_count - 1})
    found = layout.addresses(np.array(blocks, np.int32))
    assert found.dtype == np.uint64
    assert found.tolist() == [addresses(one, block) for block in blocks]
    lengths = tuple(piece.bytes for piece in one.pieces)
    assert layout.page_bytes == sum(lengths)
    assert layout.geometry == Geometry(sum(lengths), lengths, "f32")


SMALL_RANGES = st.builds(Range, st.integers(0, 60), st.integers(40, 80))
SMALL_PIECES = st.builds(
    Piece, st.sampled_from([0, 0, 0, 1]), st.integers(0, 40), st.integers(5, 16), st.integers(0, 8)
)
SMALL = st.builds(
    Registration,
    st.lists(SMALL_RANGES, min_size=1, max_size=2).map(tuple),
    st.lists(SMALL_PIECES, min_size=1, max_size=3).map(tuple),
    st.integers(1, 4),
)


@given(SMALL)
def test_small_registrations_are_judged_as_by_plain_integers(one: Registration) -> None:
    judge(one)


@given(st.data())
def test_huge_numbers_do_not_wrap_into_range(data: st.DataObject) -> None:
    edge = st.one_of(st.sampled_from(EDGES), st.integers(0, UINT64_MAX))
    size = st.sampled_from([1, 4096, 1 << 30, PIECE_MAX, PIECE_MAX + 1])
    pieces = st.builds(Piece, st.just(0), edge, edge, size)
    judge(
        Registration(
            (data.draw(st.builds(Range, edge, edge)),),
            tuple(data.draw(st.lists(pieces, min_size=1, max_size=2))),
            data.draw(st.sampled_from([0, 1, 2, 3, 1 << 16, BLOCKS_MAX, BLOCKS_MAX + 1])),
        )
    )


SOUND = Registration((Range(1000, 100),), (Piece(0, 10, 20, 15), Piece(0, 0, 25, 10)), 4)


@pytest.mark.parametrize(
    "one",
    [
        SOUND,
        # The last byte of the last block, and of the address space.
        replace(SOUND, pieces=(Piece(0, 10, 25, 15),)),
        replace(SOUND, pieces=(Piece(0, 11, 25, 14),)),
        replace(SOUND, ranges=(Range(ADDRESS_MAX - 101, 100),)),
        replace(SOUND, ranges=(Range(0, 100),)),
        # Touching pieces; strides exactly as long as their pieces.
        replace(SOUND, pieces=(Piece(0, 0, 20, 20), Piece(0, 20, 20, 20))),
        # A single block has no stride that could matter.
        Registration((Range(0, 8),), (Piece(0, 0, 0, 8),), 1),
        Registration((Range(0, 8),), (Piece(0, 0, UINT64_MAX, 8),), 1),
        Registration((Range(0, 1 << 62),), (Piece(0, 0, PIECE_MAX, PIECE_MAX),), BLOCKS_MAX),
    ],
)
def test_these_are_taken(one: Registration) -> None:
    assert is_sound(one)
    judge(one)


@pytest.mark.parametrize(
    "one",
    [
        replace(SOUND, block_count=0),
        replace(SOUND, block_count=BLOCKS_MAX + 1),
        replace(SOUND, block_count=5),
        replace(SOUND, ranges=(Range(1000, 0),)),
        replace(SOUND, ranges=()),
        replace(SOUND, ranges=(Range(1000, 84),)),
        replace(SOUND, ranges=(Range(ADDRESS_MAX - 100, 100),)),
        replace(SOUND, ranges=(Range(UINT64_MAX - 10, 100),)),
        replace(SOUND, ranges=(Range(0, 100), Range(UINT64_MAX, UINT64_MAX))),
        replace(SOUND, pieces=(Piece(1, 0, 20, 10),)),
        replace(SOUND, pieces=(Piece(0, 0, 20, 0),)),
        replace(SOUND, pieces=(Piece(0, 0, 14, 15),)),
        replace(SOUND, pieces=(Piece(0, 11, 25, 15),)),
        replace(SOUND, pieces=(Piece(0, UINT64_MAX - 5, 20, 10),)),
        # offset + 3 * stride + 15 is 70 modulo 2**64
        replace(SOUND, pieces=(Piece(0, UINT64_MAX - 3 * 20 + 56, 20, 15),)),
        # (block_count - 1) * stride is 0 modulo 2**64
        replace(SOUND, pieces=(Piece(0, 0, 1 << 62, 15),), block_count=5),
        replace(SOUND, pieces=(Piece(0, 0, 1 << 34, 15),), block_count=(1 << 30) + 1),
        # One byte shared by two pieces, in one range and in two that overlap.
        replace(SOUND, pieces=(Piece(0, 0, 20, 11), Piece(0, 10, 20, 5))),
        replace(SOUND, pieces=(Piece(0, 0, 20, 10), Piece(0, 0, 20, 10))),
        Registration((Range(0, 100), Range(50, 100)), (Piece(0, 55, 10, 5), Piece(1, 9, 9, 5)), 2),
    ],
)
def test_these_are_refused(one: Registration) -> None:
    assert not is_sound(one)
    judge(one)


def test_blocks_of_different_pieces_may_interleave() -> None:
    """K and V of one block are apart by all blocks, or neighbours: both are usual."""
    apart = Registration((Range(0, 80),), (Piece(0, 0, 10, 10), Piece(0, 40, 10, 10)), 4)
    beside = Registration((Range(0, 80),), (Piece(0, 0, 20, 10), Piece(0, 10, 20, 10)), 4)
    blocks = np.array([3, 0], np.int32)
    assert apart.open().addresses(blocks).tolist() == [[30, 70], [0, 40]]
    assert beside.open().addresses(blocks).tolist() == [[60, 70], [0, 10]]


def test_pieces_of_several_ranges_keep_the_callers_order() -> None:
    one = Registration(
        (Range(5000, 50), Range(100, 50)), (Piece(1, 1, 10, 2), Piece(0, 0, 8, 3)), 2
    )
    layout = one.open()
    assert layout.addresses(np.array([1], np.int32)).tolist() == [[111, 5008]]
    assert layout.geometry.piece_bytes == (2, 3)


def test_a_page_may_be_larger_than_four_gibibytes() -> None:
    size = PIECE_MAX
    pieces = tuple(Piece(0, number * size, 3 * size, size) for number in range(3))
    layout = GroupLayout((Range(1 << 40, 9 * size),), pieces, 3, "f32")
    assert layout.page_bytes == 3 * size
    found = layout.addresses(np.array([2], np.int32))
    assert found.tolist() == [[(1 << 40) + (6 + number) * size for number in range(3)]]


@pytest.mark.parametrize("blocks", [[], [0], [3], [0, 3, 1, 1]])
def test_registered_block_ids_pass(blocks: list[int]) -> None:
    SOUND.open().check_blocks(np.array(blocks, np.int32))


@pytest.mark.parametrize("blocks", [[4], [-1], [0, 4], [3, -1, 0], [2**31 - 1], [-(2**31)]])
def test_other_block_ids_are_refused(blocks: list[int]) -> None:
    with pytest.raises(BadRequestError):
        SOUND.open().check_blocks(np.array(blocks, np.int32))
