"""Ranks that hold the same bytes: one page for all of them, and who saves which block.

Decided here: that `replicas` consecutive ranks share a page, and that they take turns block by
block. This file does not know why their bytes are equal, nor who says so.

A block is saved whole by one rank, so a rank that is lost costs its own blocks only. Whose turn it
is depends on the block's position in its request and on nothing else: all ranks agree without
asking, and so do engines with other numbers of ranks, as a page is claimed once, whoever comes
first. Loads take no turns: each rank loads every block.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trikv.core.errors import BadRequestError
from trikv.core.layout import Geometry, GroupLayout


def page_of(rank: int, replicas: int) -> int:
    """Which of a block's pages a rank holds."""
    return rank // replicas


def own_turns(rank: int, replicas: int, first: int, count: int) -> NDArray[np.bool_]:
    """Which of the blocks at positions `first` and after are this rank's to save.

    Returns:
        bool[count]; of the ranks that share a page, exactly one has each block.
    """
    if replicas == 1:
        return np.ones(count, np.bool_)
    own: NDArray[np.bool_] = np.arange(first, first + count) % replicas == rank % replicas
    return own


def pages_of(ranks: Sequence[tuple[GroupLayout, ...]]) -> tuple[tuple[Geometry, ...], ...]:
    """The pages of a block, a group, from what each rank has registered.

    Raises:
        BadRequestError: ranks disagree about their groups, or about who holds the same bytes.
    """
    if len({len(groups) for groups in ranks}) > 1:
        raise BadRequestError("ranks have different numbers of cache groups")
    return tuple(_pages(number, column) for number, column in enumerate(zip(*ranks, strict=True)))


def _pages(number: int, ranks: tuple[GroupLayout, ...]) -> tuple[Geometry, ...]:
    told = {one.replicas for one in ranks}
    if len(told) > 1 or len(ranks) % ranks[0].replicas:
        raise BadRequestError(
            f"group {number}: {len(ranks)} ranks cannot hold each page {sorted(told)} times"
        )
    step = ranks[0].replicas
    pages = tuple(one.geometry for one in ranks[::step])
    for rank, one in enumerate(ranks):
        if one.geometry != pages[page_of(rank, step)]:
            raise BadRequestError(
                f"group {number}: rank {rank} is said to hold the bytes of rank "
                f"{rank - rank % step}, but its pieces have other sizes or another layout"
            )
    return pages
