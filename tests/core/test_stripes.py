"""Every byte of a fetch is in one request, none crosses a region, and runs are judged right."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trikv.core.stripes import Pieces, cut, whole_runs

KIB4 = 4_096
Rows = list[tuple[int, int, int]]


@st.composite
def fetches(draw: st.DrawFn) -> Rows:
    """Runs of which some go on where the one before stops, at one end or both."""
    rows: Rows = []
    far, near = 0, 1 << 40
    for _ in range(draw(st.integers(1, 12))):
        far += draw(st.sampled_from([0, 0, 1, 64])) * KIB4
        near += draw(st.sampled_from([0, 0, 1, 64])) * KIB4
        length = draw(st.integers(1, 40 * KIB4))
        rows.append((far, near, length))
        far, near = far + length, near + length
    return rows


@given(fetches(), st.integers(1, 12), st.sets(st.integers(1, 600), max_size=8), st.data())
def test_pieces_cover_the_runs_and_judge_them(
    rows: Rows, limit: int, cuts: set[int], data: st.DataObject
) -> None:
    runs = np.array(rows, np.int64)
    far = np.array(sorted(one * KIB4 for one in cuts), np.int64)
    near = far[::2] + (1 << 40) + 8
    pieces = cut(runs, piece_bytes=limit * KIB4, far=far, near=near)

    wanted = [(a + i, b + i) for a, b, n in rows for i in (0, n // 2, n - 1)]
    spans = pieces.runs.tolist()
    for a, b in wanted:  # both ends of a byte are in one piece
        assert sum(x <= a < x + n and y <= b < y + n and b - y == a - x for x, y, n in spans) == 1
    assert pieces.runs[:, 2].sum() == runs[:, 2].sum()
    assert (pieces.runs[:, 2] > 0).all()
    assert (pieces.runs[:, 2] <= limit * KIB4).all()
    for x, y, n in spans:
        assert not ((far > x) & (far < x + n)).any()
        assert not ((near > y) & (near < y + n)).any()

    arrived = np.array(
        data.draw(st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)))
    )
    expected = [
        all(ok for (x, _, n), ok in zip(spans, arrived, strict=True) if x < a + m and a < x + n)
        for a, _, m in rows
    ]
    assert whole_runs(runs, pieces, arrived).tolist() == expected


def test_neighbours_are_one_request_and_large_runs_are_cut_evenly() -> None:
    runs = np.array([(i * KIB4, (1 << 30) + i * KIB4, KIB4) for i in range(256)], np.int64)
    assert len(cut(runs, piece_bytes=1 << 20)) == 1
    runs = np.array([(0, 1 << 30, (1 << 20) + KIB4)], np.int64)
    assert cut(runs, piece_bytes=1 << 20).runs[:, 2].tolist() == [129 * KIB4, 128 * KIB4]


def test_a_fetch_of_nothing_has_no_pieces() -> None:
    runs = np.empty((0, 3), np.int64)
    pieces = cut(runs, piece_bytes=KIB4)
    assert isinstance(pieces, Pieces)
    assert len(pieces) == 0
    assert whole_runs(runs, pieces, np.empty(0, np.bool_)).tolist() == []
