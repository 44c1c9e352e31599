"""The service's words as types: ids, blobs of hashes, arrays of entries.

Decided here: which numbers and texts may not be mixed up. Holds no behaviour.
"""

from typing import NewType

import numpy as np
from numpy.typing import NDArray

InstanceName = NewType("InstanceName", str)
"""One running engine, as all its processes call it."""
RequestId = NewType("RequestId", str)
"""A request as its engine calls it; means nothing without the instance."""
SessionId = NewType("SessionId", int)
"""One connection's session with this daemon; never reused."""
LeaseId = NewType("LeaseId", int)
"""A promise to an instance; never 0, never reused."""
TransferId = NewType("TransferId", int)
"""One copy in flight; never reused."""
SpaceId = NewType("SpaceId", int)
"""One cache group of one namespace in one epoch: what a block hash is unique in."""
ShapeId = NewType("ShapeId", int)
"""The bytes of each page of a block: what a slab is cut for."""
Stamp = NewType("Stamp", int)
"""A point in the order of uses; grows with each touch."""

Words = NDArray[np.uint64]
"""Block hashes, shape (n, 4): four little-endian words each, 16-byte hashes padded with zeros."""
Entries = NDArray[np.int32]
"""Entry numbers, shape (n,): rows of the block columns."""
Offsets = NDArray[np.int64]
"""Byte offsets in the pool, shape (n,)."""
Names = NDArray[np.uint64]
"""Names of keys, shape (n,): a 64-bit digest of space and hash, for what may err."""
PeerId = NewType("PeerId", int)
"""One connection of another node with this daemon; never reused."""
GrantId = NewType("GrantId", int)
"""A promise to a peer; never 0, never reused."""
