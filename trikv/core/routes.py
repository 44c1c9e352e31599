"""From which nodes a prefix is best fetched: a plan of segments.

Decided here: how runs of blocks are given to owners. This file does not know what a node is.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

CHUNK_BLOCKS: Final = 256
"""A longer run is given out in parts of this size, so that several owners share it."""
SEGMENTS_MAX: Final = 64
"""At the bound the plan ends: a shorter answer is right too."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of one node."""

    node: int
    first: int
    count: int


def covered(owned: NDArray[np.uint16]) -> int:
    """How many leading rows name a node; 0 stands for none."""
    has_owner = np.asarray(owned.any(axis=1))
    return len(has_owner) if has_owner.all() else int(has_owner.argmin())


def route(owned: NDArray[np.uint16], costs: NDArray[np.float64], *, turn: int) -> list[Segment]:
    """Give each block of a prefix to one of its owners.

    The next run goes to the cheapest of the owners whose run is at least half as long as the
    longest one; each block that a node is given makes it dearer by one.

    Args:
        owned: owners of each block, one row a block; 0 stands for none. Rows after the first
            without an owner are not looked at.
        costs: by node; changed to what they are after this plan.
        turn: decides between equals, so that different askers go to different owners.

    Returns:
        Segments from block 0 on without a gap; neighbours are of different nodes.

    Cost: 5 µs a segment or `CHUNK_BLOCKS` blocks where neighbours have the same owners, 40 µs else.
    """
    segments: list[Segment] = []
    at, end = 0, covered(owned)
    while at < end:
        node, count = _choose(owned[at : min(at + CHUNK_BLOCKS, end)], costs, turn)
        costs[node] += count
        if segments and segments[-1].node == node:
            last = segments.pop()
            segments.append(Segment(node, last.first, last.count + count))
        elif len(segments) == SEGMENTS_MAX:
            break
        else:
            segments.append(Segment(node, at, count))
        at += count
    return segments


def _choose(window: NDArray[np.uint16], costs: NDArray[np.float64], turn: int) -> tuple[int, int]:
    """The node for the first blocks of a window, and how many."""
    first = window[0]
    nodes = sorted({node for node in first.tolist() if node})
    if len(window) == 1 or window.tobytes() == first.tobytes() * len(window):
        runs = [len(window)] * len(nodes)
    else:
        has = (window[:, None, :] == np.array(nodes, np.uint16)[:, None]).any(axis=2)
        runs = [len(one) if one.all() else int(one.argmin()) for one in has.T]
    enough = max(runs) / 2
    fit = [(node, run) for node, run in zip(nodes, runs, strict=True) if run >= enough]
    return min(fit, key=lambda one: (costs[one[0]], -one[1], (one[0] + turn) % len(costs)))
