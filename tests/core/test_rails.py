"""Which NICs and addresses are chosen; offers and answers survive the way and refuse all else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core.rails import (
    PAIRS_A_PATH,
    Answer,
    Gid,
    PairFacts,
    Reach,
    Seat,
    choose_gid,
    pack_answer,
    pack_offer,
    pair_rails,
    read_answer,
    read_offer,
)

V4 = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
LOCAL_V4 = bytes(10) + b"\xff\xff\xa9\xfe\x00\x01"
GLOBAL = b"\x20\x01" + bytes(13) + b"\x01"
LOCAL = b"\xfe\x80" + bytes(13) + b"\x01"
PAIRS = st.builds(
    PairFacts,
    st.integers(1, (1 << 24) - 1),
    st.integers(0, (1 << 24) - 1),
    st.integers(0, 65_535),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 5),
    st.integers(1, 255),
)


@pytest.mark.parametrize(
    ("table", "is_ib", "wanted", "chosen"),
    [
        (
            [Gid(0, "IB/RoCE v1", LOCAL, is_up=True), Gid(1, "RoCE v2", LOCAL, is_up=True)],
            False,
            None,
            1,
        ),
        (
            [Gid(1, "RoCE v2", LOCAL, is_up=True), Gid(3, "RoCE v2", GLOBAL, is_up=True)],
            False,
            None,
            3,
        ),
        (
            [Gid(3, "RoCE v2", GLOBAL, is_up=True), Gid(5, "RoCE v2", V4, is_up=True)],
            False,
            None,
            5,
        ),
        (
            [Gid(3, "RoCE v2", LOCAL_V4, is_up=True), Gid(5, "RoCE v2", GLOBAL, is_up=True)],
            False,
            None,
            5,
        ),
        (
            [Gid(2, "RoCE v2", LOCAL, is_up=True), Gid(5, "RoCE v2", LOCAL_V4, is_up=True)],
            False,
            None,
            5,
        ),
        ([Gid(4, "IB/RoCE v1", V4, is_up=True), Gid(5, "RoCE v2", V4, is_up=True)], False, None, 5),
        (
            [Gid(3, "RoCE v2", GLOBAL, is_up=True), Gid(5, "RoCE v2", V4, is_up=False)],
            False,
            None,
            3,
        ),
        ([Gid(4, "IB/RoCE v1", V4, is_up=True)], False, None, None),
        ([Gid(0, "IB/RoCE v1", LOCAL, is_up=True)], True, None, 0),
        ([Gid(3, "RoCE v2", GLOBAL, is_up=True), Gid(5, "RoCE v2", V4, is_up=True)], False, 3, 3),
        ([Gid(3, "RoCE v2", GLOBAL, is_up=True)], False, 7, None),
        ([], False, None, None),
        ([], True, None, None),
    ],
)
def test_the_address_of_a_port(
    table: list[Gid],
    is_ib: bool,  # noqa: FBT001  # a parameter
    wanted: int | None,
    chosen: int | None,
) -> None:
    found = choose_gid(table, is_ib=is_ib, wanted=wanted)
    assert (found.index if found else None) == chosen


def test_every_rail_of_both_ends_has_a_path() -> None:
    assert pair_rails(2, 2) == [(0, 0), (1, 1)]
    assert pair_rails(1, 4) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert pair_rails(4, 2) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert pair_rails(0, 4) == pair_rails(4, 0) == []


@given(st.lists(st.tuples(st.integers(0, 3), PAIRS), min_size=1, max_size=64))
def test_an_offer_comes_back(ends: list[tuple[int, PairFacts]]) -> None:
    seats = tuple(Seat(number, rail, pair) for number, (rail, pair) in enumerate(ends))
    data = pack_offer(seats)
    assert read_offer(data, rails=4) == seats
    for bad in (data[:-1], data + b"x", b"XXXX" + data[4:], data[:4] + bytes(4) + data[8:]):
        with pytest.raises(ValueError, match="the other host sent"):
            read_offer(bad, rails=4)


@given(
    st.lists(PAIRS, max_size=4),
    st.sets(st.integers(1, 1 << 40), max_size=5),
    st.integers(1, 4),
    st.data(),
)
def test_an_answer_comes_back(
    pairs: list[PairFacts], cuts: set[int], rails: int, data: st.DataObject
) -> None:
    begins = (0, *sorted(cuts))
    key = st.integers(0, (1 << 32) - 1)
    keys = tuple(
        tuple(data.draw(st.lists(key, min_size=len(begins), max_size=len(begins))))
        for _ in range(rails)
    )
    answer = Answer(Reach(1 << 46, begins[-1] + 4_096, begins, keys), tuple(pairs))
    sent = pack_answer(answer)
    assert read_answer(sent) == answer
    for bad in (sent[:-1], sent + b"x", b"XXXX" + sent[4:]):
        with pytest.raises(ValueError, match="the other host sent"):
            read_answer(bad)


PAIR = PairFacts(7, 1, 0, V4, 3, 16)
REACH = Reach(4_096, 1 << 20, (0, 4_096), ((1, 2),))


@pytest.mark.parametrize(
    "seats",
    [
        (Seat(0, 4, PAIR),),
        (Seat(64, 0, PAIR),),
        (Seat(1, 0, PAIR), Seat(1, 1, PAIR)),
        (Seat(0, 0, PairFacts(0, 1, 0, V4, 3, 16)),),
        (Seat(0, 0, PairFacts(1 << 24, 1, 0, V4, 3, 16)),),
        (Seat(0, 0, PairFacts(7, 1 << 24, 0, V4, 3, 16)),),
        (Seat(0, 0, PairFacts(7, 1, 0, V4, 6, 16)),),
        (Seat(0, 0, PairFacts(7, 1, 0, V4, 3, 0)),),
        (),
    ],
)
def test_an_offer_that_cannot_be_is_refused(seats: tuple[Seat, ...]) -> None:
    with pytest.raises(ValueError, match="the other host sent"):
        read_offer(pack_offer(seats), rails=4)


@pytest.mark.parametrize(
    "reach",
    [
        Reach(4_096, 1 << 20, (0, 8, 8), ((1, 2, 3),)),
        Reach(4_096, 1 << 20, (8,), ((1,),)),
        Reach(4_096, 4_096, (0, 4_096), ((1, 2),)),
        Reach((1 << 63) - 1, 4_096, (0,), ((1,),)),
        Reach(4_096, 4_096, (0,), ()),
    ],
)
def test_an_answer_that_cannot_be_is_refused(reach: Reach) -> None:
    with pytest.raises(ValueError, match="the other host sent"):
        read_answer(pack_answer(Answer(reach, (PAIR,) * PAIRS_A_PATH)))


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_refused_or_read(noise: bytes, at: int) -> None:
    sent = bytearray(pack_answer(Answer(REACH, (PAIR, PAIR))))
    sent[at : at + len(noise)] = noise
    with contextlib.suppress(ValueError):
        read_answer(bytes(sent))
    sent = bytearray(pack_offer((Seat(0, 0, PAIR), Seat(1, 0, PAIR))))
    sent[at : at + len(noise)] = noise
    with contextlib.suppress(ValueError):
        assert read_offer(bytes(sent), rails=1)
