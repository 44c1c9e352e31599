"""Which nodes hold a block: the columns of the metaserver's index.

Decided here: what an entry costs, how many owners it remembers, how a node is forgotten, and what
happens when there is no room. This file does not know addresses, sessions or clocks.

A block is named by its *origin* (namespace fingerprint and cache group) and its hash. An entry
remembers up to `OWNERS_MAX` owners as *tags*: a tag is one announcement of one node. A node gets
new tags when it begins to announce everything anew; when it has finished, or has died, the old tag
is closed. Closing is one write: from then on no answer names it. Its places in entries are taken
back later, a few thousand at a time, by `sweep`, and only then is the tag used again.

A node has two tags, one for what it holds in memory and one for what lies on a disk only: which
of the two holds a block costs no byte of its entry. Here they are two numbers for one node.

    open ──close──▶ closed, in entries still ──two passes of the sweep at most──▶ free
"""

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Final, NewType

import numpy as np
from numpy.typing import NDArray

from trikv.core.errors import OverloadedError
from trikv.core.index import CAPACITY_MAX, Index
from trikv.core.words import Entries, SpaceId, Words

OWNERS_MAX: Final = 8
TAGS_MAX: Final = 65_535
ORIGIN_BYTES: Final = 20
ORIGINS_MAX: Final = 4_096
SWEEP_ROWS: Final = 8_192
NO_NODE: Final = 0

ROW_BYTES: Final = 4 + 32 + 4 + 2 * OWNERS_MAX + 4  # link, key, space, owners, stack of unused rows
BUCKET_BYTES: Final = 4
FIXED_BYTES: Final = 1 << 20  # tags, and one entry more

FACTORS: Final = np.array(
    [0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64
)

Tag = NewType("Tag", int)
"""One announcement of one node; 1 to `TAGS_MAX`, used again once no entry holds it."""

Owned = NDArray[np.uint16]
"""Nodes of blocks, shape (n, OWNERS_MAX), in no order; `NO_NODE` where there is none."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of adverts.

    Attributes:
        new_count: owners that are remembered now and were not before.
        crowded_count: not remembered: `OWNERS_MAX` others own the block already.
        declined_count: not remembered: the index is full.
    """

    new_count: int = 0
    crowded_count: int = 0
    declined_count: int = 0


def digest_of(origin: bytes, words: Words) -> int:
    """A sum over keys, the same in whatever order and batches they come; below 2**64."""
    salt = int.from_bytes(hashlib.blake2b(origin, digest_size=8).digest(), "little")
    mixed = (words * FACTORS).sum(axis=1, dtype=np.uint64) + np.uint64(salt)
    mixed ^= mixed >> np.uint64(32)
    mixed *= FACTORS[0]
    mixed ^= mixed >> np.uint64(29)
    return int(mixed.sum(dtype=np.uint64))


def capacity_for(memory_bytes: int) -> int:
    """How many entries fit into so much memory, all columns counted."""
    best = 0
    for bits in range(1, 31):
        rest = memory_bytes - FIXED_BYTES - BUCKET_BYTES * (1 << bits)
        best = max(best, min(1 << (bits - 1), rest // ROW_BYTES))
    return min(best, CAPACITY_MAX)


class Owners:
    """From blocks to the nodes that hold them, in batches.

    At the bound: with `capacity` entries a block that is not known is declined, and with
    `OWNERS_MAX` owners of a block a further one; both are counted, and nothing else goes for them:
    whatever is missing here costs a miss.

    Cost: `memory_bytes` in all; 68 to 76 bytes an entry that is used, whatever the
    number of its owners.
    """

    def __init__(self, capacity: int, *, seed: int, owners_max: int = OWNERS_MAX) -> None:
        self.capacity = capacity
        self._index = Index(capacity, seed=seed)
        self._owners = np.zeros((capacity, owners_max), np.uint16)
        self._unused = np.arange(capacity, dtype=np.int32)[::-1].copy()
        self._unused_count = capacity
        self._high = 0  # no row from here on has ever been used
        self._node_of = np.zeros(TAGS_MAX + 1, np.uint16)
        self._held = np.zeros(TAGS_MAX + 1, np.int64)
        self._free_tags: deque[int] = deque()
        self._next_tag = 1  # this one and all above have never been used
        self._closed: list[int] = []  # since the present pass began
        self._passing: list[int] = []  # closed before it began: free when it has ended
        self._at = 0
        self._spaces: dict[bytes, SpaceId] = {}
        self._origins: dict[int, bytes] = {}
        self._blocks_of = np.zeros(ORIGINS_MAX, np.int64)

    def __len__(self) -> int:
        return self.capacity - self._unused_count

    @property
    def memory_bytes(self) -> int:
        """Memory of the columns."""
        columns = (self._owners, self._unused, self._node_of, self._held)
        return self._index.bytes + sum(column.nbytes for column in columns)

    @property
    def free_count(self) -> int:
        """Entries that are not used."""
        return self._unused_count

    @property
    def origin_count(self) -> int:
        """Origins of which a block is known."""
        return len(self._spaces)

    @property
    def tag_count(self) -> int:
        """Tags that are open, or closed and not swept."""
        return self._next_tag - 1 - len(self._free_tags)

    @property
    def is_clean(self) -> bool:
        """True when no closed tag is left to be swept."""
        return not self._closed and not self._passing

    def held(self, tag: Tag) -> int:
        """Blocks that are remembered as held under an open tag."""
        return int(self._held[tag])

    # -- tags

    def open(self, node: int) -> Tag:
        """Begin an announcement of a node.

        Raises:
            OverloadedError: closed tags have not been swept yet; nothing was changed.
        """
        assert node != NO_NODE
        if self._free_tags:
            tag = Tag(self._free_tags.popleft())
        elif self._next_tag <= TAGS_MAX:
            tag = Tag(self._next_tag)
            self._next_tag += 1
        else:
            raise OverloadedError(f"{TAGS_MAX} announcements are not forgotten yet")
        self._node_of[tag] = node
        self._held[tag] = 0
        return tag

    def close(self, tag: Tag) -> None:
        """Forget all that was announced under a tag: no answer names it from here on.

        Cost: a microsecond, whatever it held.
        """
        assert self._node_of[tag] != NO_NODE
        self._node_of[tag] = NO_NODE
        self._closed.append(tag)

    # -- blocks

    def advertise(
        self, tag: Tag, origin: bytes, words: Words, *, instead_of: tuple[Tag, ...] = ()
    ) -> Taken:
        """Remember that a tag's node holds blocks; again is fine.

        Args:
            tag: open.
            origin: 20 bytes.
            words: uint64[n, 4]; may repeat.
            instead_of: the other open tags of the same node, whose places are taken over.

        Cost: 0.5 to 1 µs a block.
        """
        if len(words) == 0:
            return Taken()
        space = self._open_space(origin)
        if space is None:
            return Taken(declined_count=len(words))
        entries = self._index.find(space, words)
        is_known = entries >= 0
        added, crowded = self._add(tag, np.unique(entries[is_known]), instead_of)
        fresh = _distinct(words[~is_known])
        room = min(len(fresh), self._unused_count)
        rows = self._take(room)
        self._owners[rows, 0] = tag
        self._index.insert(space, fresh[:room], rows)
        self._blocks_of[space] += room
        self._drop_origin(space)
        self._held[tag] += room
        return Taken(added + room, crowded, len(fresh) - room)

    def withdraw(self, tags: tuple[Tag, ...], origin: bytes, words: Words) -> int:
        """Forget that a node holds blocks; of what is not remembered too.

        Args:
            tags: all open tags of the node.
            origin: 20 bytes.
            words: uint64[n, 4]; may repeat.

        Returns:
            How many owners were forgotten.
        """
        space = self._spaces.get(origin)
        if space is None or len(words) == 0:
            return 0
        entries = self._index.find(space, words)
        rows = np.unique(entries[entries >= 0])
        owners = self._owners[rows]
        gone = 0
        for tag in tags:
            is_its = owners == tag
            owners[is_its] = 0
            count = int(is_its.sum())
            self._held[tag] -= count
            gone += count
        self._owners[rows] = owners
        self._remove(rows[~self._node_of[owners].any(axis=1)])
        return gone

    def find(self, origin: bytes, words: Words) -> Owned:
        """The nodes of the longest prefix whose blocks are all known.

        Args:
            origin: 20 bytes.
            words: uint64[n, 4] in prefix order.

        Returns:
            A row a block; its nodes may all be `NO_NODE`, when its last owner has just died.
        """
        space = self._spaces.get(origin)
        if space is None:
            return np.zeros((0, self._owners.shape[1]), np.uint16)
        found = self._index.find_prefix(space, words)
        nodes: Owned = self._node_of[self._owners[found]]
        return nodes

    # -- forgetting

    def sweep(self, row_count: int = SWEEP_ROWS) -> bool:
        """Take back places of closed tags in some more entries.

        Returns:
            Whether there is more to do.

        Cost: 0.1 µs a row, and 0.4 µs for each entry that has lost its last owner.
        """
        if self.is_clean:
            return False
        if self._at == 0 and not self._passing:
            self._passing, self._closed = self._closed, []
        stop = min(self._at + row_count, self._high)
        rows = slice(self._at, stop)
        owners = self._owners[rows]
        is_closed = (self._node_of[owners] == NO_NODE) & (owners != 0)
        if is_closed.any():
            touched = np.flatnonzero(is_closed.any(axis=1))
            owners[is_closed] = 0  # a view: the column itself
            left = touched[~owners[touched].any(axis=1)]
            self._remove((left + self._at).astype(np.int32))
        self._at = stop
        if self._at == self._high:
            self._at = 0
            self._free_tags.extend(self._passing)
            self._passing = []
        return not self.is_clean

    # -- inside

    def _add(self, tag: Tag, rows: Entries, instead_of: tuple[Tag, ...]) -> tuple[int, int]:
        """Write a tag into entries that lack it; returns how many got it, and how many are full."""
        owners = self._owners[rows]
        lacks = ~(owners == tag).any(axis=1)
        rows, owners = rows[lacks], owners[lacks]
        if len(rows) == 0:
            return 0, 0
        is_free = self._node_of[owners] == NO_NODE
        places = is_free.argmax(axis=1)
        has_room = is_free[np.arange(len(rows)), places]
        for other in instead_of:  # at most one of them is in an entry
            is_old = owners == other
            has_old = is_old.any(axis=1)
            places = np.where(has_old, is_old.argmax(axis=1), places)
            has_room |= has_old
            self._held[other] -= int(has_old.sum())
        self._owners[rows[has_room], places[has_room]] = tag
        added = int(has_room.sum())
        self._held[tag] += added
        return added, len(rows) - added

    def _take(self, count: int) -> Entries:
        """Unused rows, without owners; as consecutive as they are, which makes prefixes fast."""
        self._unused_count -= count
        rows = self._unused[self._unused_count : self._unused_count + count][::-1].copy()
        if count:
            self._high = max(self._high, int(rows.max()) + 1)
        self._owners[rows] = 0
        return rows

    def _remove(self, rows: Entries) -> None:
        """Forget entries; rows are distinct and ascending."""
        if len(rows) == 0:
            return
        spaces = self._index.spaces_of(rows)
        self._index.remove(rows)
        self._owners[rows] = 0
        self._unused[self._unused_count : self._unused_count + len(rows)] = rows[::-1]
        self._unused_count += len(rows)
        lost = np.bincount(spaces, minlength=ORIGINS_MAX)
        self._blocks_of -= lost
        for space in np.flatnonzero(lost).tolist():
            self._drop_origin(SpaceId(space))

    def _open_space(self, origin: bytes) -> SpaceId | None:
        """The number of an origin; None: there is no number left for it."""
        space = self._spaces.get(origin)
        if space is None and len(self._spaces) < ORIGINS_MAX:
            space = SpaceId(next(one for one in range(ORIGINS_MAX) if one not in self._origins))
            self._spaces[origin], self._origins[space] = space, origin
        return space

    def _drop_origin(self, space: SpaceId) -> None:
        if self._blocks_of[space] == 0:
            del self._spaces[self._origins.pop(space)]


def _distinct(words: Words) -> Words:
    """Each key once, in the order of its first appearance."""
    if len(np.unique(words[:, 0])) == len(words):
        return words
    _, first = np.unique(words, axis=0, return_index=True)
    kept: Words = words[np.sort(first)]
    return kept
