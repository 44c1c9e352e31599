"""Keys, origins and times for tests of who owns what."""

import numpy as np

from trikv.core.nodes import Node, Nodes
from trikv.core.owners import Owners
from trikv.core.words import Words

SILENCE_S, GRACE_S = 4, 1
A, B = b"a" * 20, b"b" * 20
Pair = tuple[int, int]


def words(*rows: Pair) -> Words:
    """Hashes that differ in the first word, or only in the last."""
    made = np.zeros((len(rows), 4), np.uint64)
    for row, (first, last) in enumerate(rows):
        made[row, 0], made[row, 3] = first, last
    return made


def many(count: int, *, seed: int = 0) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 4), np.uint64)


def two_nodes(capacity: int) -> tuple[Owners, Nodes, Node, Node]:
    owners = Owners(capacity, seed=0)
    made = Nodes(owners, SILENCE_S, GRACE_S)
    one, two = (made.join(name, 1, [], now_s=0) for name in ("one:1", "two:1"))
    return owners, made, one, two
