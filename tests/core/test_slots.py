"""Layout and records of a disk: what counts, and what is found out."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trikv.core import sums
from trikv.core.disklayout import RECORD_BYTES, SLOT_BYTES_MIN, layout_for
from trikv.core.pages import PAGE_ALIGN
from trikv.core.slots import (
    RECORD,
    Regions,
    Writes,
    make_header,
    make_records,
    newest,
    slot_bytes,
    valid_records,
)

MIB = 1 << 20
TAG = 0x0123456789ABCDEF


@pytest.mark.parametrize("count", [0, 1, 7, 2_100])
@pytest.mark.parametrize("width", [31, 32, 40])
def test_row_sums_are_the_librarys(count: int, width: int) -> None:
    rows = np.random.default_rng(count).integers(0, 1 << 64, (count, width), np.uint64)
    wanted = [xxhash.xxh3_64_intdigest(row[:31].tobytes()) for row in rows]
    assert sums.of_rows(rows).tolist() == wanted


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_parts_sum_up_to_the_whole(parts: list[bytes]) -> None:
    assert sums.of_parts(map(memoryview, parts)) == sums.of_bytes(b"".join(parts))


def regions(count: int = 3, page_bytes: tuple[int, ...] = (65536, 4096)) -> Regions:
    layout = layout_for(4 * MIB * count)
    assert layout.region_count >= count
    found = Regions(layout, TAG)
    for region in range(count):
        found.cut(region, 100 + region, page_bytes)
    return found


def writes(at: list[int], positions: list[int], seed: int = 1) -> Writes:
    rng, count = np.random.default_rng(seed), len(at)
    made = Writes(
        np.array(at),
        np.array(positions),
        np.zeros((count, 2), np.uint64),
        (65536, 4096),
        rng.integers(0, 256, (count, 32), np.uint8),
        rng.integers(0, 1 << 64, (count, 4), np.uint64),
        rng.integers(0, 1000, count).astype(np.int32),
        rng.integers(0, 1 << 60, count),
    )
    made.sums[:] = rng.integers(0, 1 << 64, count, np.uint64)
    return made


def test_no_record_crosses_a_sector() -> None:
    assert 512 % RECORD.itemsize == 0


def test_records_say_what_was_written() -> None:
    wanted = writes([0, 0, 2], [3, 4, 29])
    records = make_records(regions(), wanted)
    assert valid_records(regions(), wanted.regions, wanted.positions, records).tolist() == [0, 1, 2]
    for name, column in (
        ("origin", wanted.origins),
        ("words", wanted.words),
        ("depth", wanted.depths),
        ("sequence", wanted.sequences),
        ("data_sum", wanted.sums),
    ):
        assert np.array_equal(records[name], column)
    assert records["length"].tolist() == [69632] * 3


@given(st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_record_is_found(bit: int) -> None:
    wanted = writes([1], [5])
    raw = make_records(regions(), wanted).view(np.uint8)
    raw[bit // 8] ^= 1 << bit % 8
    assert len(valid_records(regions(), wanted.regions, wanted.positions, raw.view(RECORD))) == 0


def recut(found: Regions) -> None:
    found.cut(1, 777, (65536, 4096))


def other_pages(found: Regions) -> None:
    found.cut(1, 101, (65536, 8192))


def other_ranks(found: Regions) -> None:
    found.cut(1, 101, (69632,))


def other_disk(found: Regions) -> None:
    found.tag += 1


def larger_slots(found: Regions) -> None:
    found.cut(1, 101, (MIB, MIB))  # so that position 5 is beyond the region
    found.length[1], found.rank_count[1] = 69632, 2


@pytest.mark.parametrize("change", [recut, other_pages, other_ranks, other_disk, larger_slots])
def test_a_whole_record_of_other_circumstances_does_not_count(change) -> None:  # noqa: ANN001
    wanted, found = writes([1], [5]), regions()
    records = make_records(found, wanted)
    place = wanted.regions, wanted.positions, records
    assert len(valid_records(found, *place)) == 1
    change(found)
    assert len(valid_records(found, *place)) == 0


def test_a_record_elsewhere_does_not_count() -> None:
    wanted, found = writes([1], [5]), regions()
    records = make_records(found, wanted)
    assert len(valid_records(found, np.array([2]), np.array([5]), records)) == 0
    assert len(valid_records(found, np.array([1]), np.array([6]), records)) == 0


def headers(found: Regions, pages: list[tuple[int, ...]]) -> NDArray[np.uint8]:
    raw = b"".join(
        make_header(found.tag, region, 10 + region, page) for region, page in enumerate(pages)
    )
    return np.frombuffer(raw, np.uint8).copy()


PAGES = [(4096,), (65536,) * 3, (MIB, 8192)]


def test_headers_say_how_regions_are_cut() -> None:
    made = regions()
    found = Regions(made.layout, TAG)
    found.adopt(0, headers(found, PAGES))
    assert [found.page_bytes[region] for region in range(3)] == PAGES
    assert found.slot_bytes[:3].tolist() == [slot_bytes(page) for page in PAGES]
    assert found.slot_bytes[0] == SLOT_BYTES_MIN
    assert found.generation[:3].tolist() == [10, 11, 12]
    assert found.slots(np.arange(3)).tolist() == [64, 10, 1]
    assert found.record_pages(np.arange(3)).tolist() == [4, 1, 1]
    assert not found.slot_bytes[3:].any()


@given(st.integers(0, PAGE_ALIGN * 8 - 1))
def test_any_flipped_bit_of_a_header_is_found(bit: int) -> None:
    found = Regions(regions().layout, TAG)
    raw = headers(found, PAGES)
    raw[PAGE_ALIGN + bit // 8] ^= 1 << bit % 8
    found.adopt(0, raw)
    assert (found.slot_bytes[:3] != 0).tolist() == [True, False, True]


def test_headers_elsewhere_or_of_another_disk_do_not_count() -> None:
    found, other = Regions(regions().layout, TAG), Regions(regions().layout, TAG + 1)
    found.adopt(0, headers(other, PAGES))
    assert not found.slot_bytes.any()
    found.adopt(0, headers(found, PAGES)[PAGE_ALIGN:])
    assert not found.slot_bytes.any()


keys = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))


@given(st.lists(st.tuples(keys, st.integers(0, 9)), max_size=30))
def test_of_a_key_the_newest_is_kept(found: list[tuple[tuple[int, int, int], int]]) -> None:
    records = np.zeros(len(found), RECORD)
    best: dict[tuple[int, int, int], int] = {}
    for row, (key, sequence) in enumerate(found):
        records["origin"][row, [0, 16]] = key[:2]
        records["words"][row] = [key[2], 0, 0, key[2]]
        records["sequence"][row] = sequence
        if key not in best or found[best[key]][1] < sequence:
            best[key] = row
    assert newest(records).tolist() == sorted(best.values())
