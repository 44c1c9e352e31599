"""How a fetch from another host is cut into requests, and which of its runs have come.

Decided here: which neighbours move as one, where a request ends, and when a run is whole. This
file does not know hosts, queue pairs or streams.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import Runs

ALIGN_BYTES: Final = 4_096
"""Requests of one run begin at multiples of this from its begin: no request is a few bytes."""

Begins = NDArray[np.int64]
"""Shape (n,), ascending: where memory regions begin, at one end; no request crosses a begin."""

NOWHERE: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Requests, in the order of the runs that they cover without a gap.

    Attributes:
        runs: int64[pieces, 3], as in `Runs`.
        ends: int64[pieces], bytes of the fetch up to the end of each.
    """

    runs: Runs
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.runs)


def cut(runs: Runs, *, piece_bytes: int, far: Begins = NOWHERE, near: Begins = NOWHERE) -> Pieces:
    """Make neighbours one, then cut at regions' begins and into pieces of about equal size.

    Args:
        runs: (place at the owner, place here, bytes), at least one byte each; n >= 0.
        piece_bytes: the largest piece, a multiple of 4,096.
        far: begins of regions at the owner.
        near: begins of regions here.
    """
    runs = _divide(runs[:0] if len(runs) == 0 else _join(runs), far, 0)
    runs = _divide(runs, near, 1)
    if runs[:, 2].max(initial=0) <= piece_bytes:  # as with small pages
        return Pieces(runs, np.cumsum(runs[:, 2]))
    counts = -(-runs[:, 2] // piece_bytes)
    steps = -(-runs[:, 2] // np.maximum(counts, 1))
    steps += -steps % ALIGN_BYTES
    counts = -(-runs[:, 2] // np.maximum(steps, 1))
    whole = np.repeat(runs, counts, axis=0)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = number * np.repeat(steps, counts)
    pieces = np.empty_like(whole)
    pieces[:, :2] = whole[:, :2] + begins[:, None]
    pieces[:, 2] = np.minimum(np.repeat(steps, counts), whole[:, 2] - begins)
    return Pieces(pieces, np.cumsum(pieces[:, 2]))


def whole_runs(runs: Runs, pieces: Pieces, arrived: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which runs have come with all their bytes.

    Args:
        runs: as given to `cut`.
        pieces: what it made.
        arrived: bool[pieces].
    """
    ends = np.cumsum(runs[:, 2])
    missing = np.concatenate(([0], np.cumsum(~arrived)))
    first = np.searchsorted(pieces.ends, ends - runs[:, 2], side="right")
    last = np.searchsorted(pieces.ends, ends, side="left")
    is_whole: NDArray[np.bool_] = missing[last + 1] == missing[first]
    return is_whole


def _join(runs: Runs) -> Runs:
    """Runs that go on at both ends where the one before them stops become one."""
    stops = runs[:-1, :2] + runs[:-1, 2:]
    heads = np.ones(len(runs), np.bool_)
    np.logical_or(stops[:, 0] != runs[1:, 0], stops[:, 1] != runs[1:, 1], out=heads[1:])
    if heads.all():  # as in a churned pool
        return runs
    first = np.flatnonzero(heads)
    return np.column_stack((runs[first, :2], np.add.reduceat(runs[:, 2], first)))


def _divide(runs: Runs, begins: Begins, end: int) -> Runs:
    """Cut where a region begins in the midst of a run; `end` is the column of places."""
    place = runs[:, end]
    first = np.searchsorted(begins, place, side="right")
    inside = np.searchsorted(begins, place + runs[:, 2], side="left") - first
    if not inside.any():
        return runs
    counts = inside + 1
    whole = np.repeat(runs, counts, axis=0)
    number = np.arange(len(whole)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = np.repeat(first, counts) + number  # of the begin at which the part stops
    floor = np.where(number == 0, whole[:, end], begins[np.maximum(at - 1, 0)])
    is_last = number == np.repeat(inside, counts)
    stop = whole[:, end] + whole[:, 2]
    stop = np.where(is_last, stop, begins[np.minimum(at, len(begins) - 1)])
    parts = np.empty_like(whole)
    parts[:, :2] = whole[:, :2] + (floor - whole[:, end])[:, None]
    parts[:, 2] = stop - floor
    return parts
