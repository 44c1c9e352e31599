"""The metaserver's whole state: which nodes are alive, what they hold, where to fetch it.

Decided here: epochs, when a node counts as dead, how it announces everything anew without its
blocks being unknown meanwhile, and which of a block's owners is named: those that have it on a disk
only where nobody has it in memory. Answers are hints: a wrong
one costs a miss. This file does not know connections, messages or secrets.

    join ──▶ partial ──begin, advertise…, finish──▶ complete ──silence, a newer epoch, leave──▶ gone
                ▲                                      │
                └───────────────begin──────────────────┘
"""

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trikv.core.errors import ConflictError, NotReadyError, OverloadedError
from trikv.core.owners import NO_NODE, Owned, Owners, Tag, Taken, digest_of
from trikv.core.routes import Segment, route
from trikv.core.words import Words

NODES_MAX: Final = 4_096
ROUNDS_MAX: Final = 64
"""Nodes that announce everything at once; others wait, so that questions do not."""
ROUND_S: Final = 30.0
"""A node that takes longer counts no more among these."""
RAILS_MAX: Final = 64
HALF_LIFE_S: Final = 1.0
"""After which half of the blocks that a node was named for count as fetched."""
FAR_COST: Final = 1e12
"""Of a node without a common rail: others are asked first, whatever their load."""
DIGEST_MASK: Final = 2**64 - 1

Tags = tuple[Tag, Tag]
"""Of what a node has in memory, and of what it has on a disk only: `NODES_MAX` above its number."""


@dataclass(slots=True, eq=False)
class Node:
    """One daemon that has joined.

    Attributes:
        number: 1 to `NODES_MAX`; used again after the node is gone.
        session: of its latest join; calls of earlier ones are refused.
        rails: a bit for each network that it can be reached by.
        tags, previous: its announcement, and the one that this takes the place of; of what it has
            in memory and of what it has on a disk only.
        digest: of what it has told since it last finished an announcement.
        is_complete: it has told all that it holds.
        declined: adverts since `begin` for which there was no room.
        crowded: likewise, because others own the block already.
        lent: blocks that it is sending now, by its own word.
        planned: blocks that it was named for lately, at `planned_s`.
    """

    number: int
    address: str
    epoch: int
    session: int
    deadline_s: float
    tags: Tags
    rails: int = 0
    previous: Tags | None = None
    digest: int = 0
    is_complete: bool = False
    declined: int = 0
    crowded: int = 0
    lent: int = 0
    planned: float = 0.0
    planned_s: float = 0.0

    @property
    def all_tags(self) -> tuple[Tag, ...]:
        """Those that its blocks may have."""
        return self.tags if self.previous is None else self.tags + self.previous

    @property
    def name_digest(self) -> int:
        """Tells sets of nodes apart, summed over them."""
        text = f"{self.address} {self.epoch}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to fetch the leading blocks.

    Attributes:
        nodes: those that the segments name, by number.
        segments: from block 0 on, without a gap.
    """

    nodes: dict[int, Node]
    segments: list[Segment]

    @property
    def block_count(self) -> int:
        """How many leading blocks it covers."""
        return sum(segment.count for segment in self.segments)


@dataclass(slots=True)
class Nodes:
    """All nodes, and who owns which blocks.

    Attributes:
        silence_s: a node that says nothing for so long is gone.
        grace_s: likewise once its connection is lost; in this time it may come back.
        nodes_max: at the bound `join` refuses as overloaded; at most `NODES_MAX`.
    """

    owners: Owners
    silence_s: float
    grace_s: float
    nodes_max: int = NODES_MAX
    by_address: dict[str, Node] = field(default_factory=dict)
    by_number: dict[int, Node] = field(default_factory=dict)
    complete_count: int = 0
    complete_digest: int = 0
    """Sum of the names of complete nodes: two metas with the same one know the same."""
    _rounds: dict[int, float] = field(default_factory=dict)  # by node: when it began
    _sessions: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _rails: dict[str, int] = field(default_factory=dict)

    # -- who is there

    def join(self, address: str, epoch: int, rails: list[str], *, now_s: float) -> Node:
        """A node says that it lives; again after a lost connection.

        What it had announced in this epoch stays; an older epoch's is forgotten.

        Raises:
            ConflictError: the address belongs to a younger epoch; nothing was changed.
            OverloadedError: `nodes_max` nodes are here; nothing was changed.
        """
        known = self.by_address.get(address)
        if known is not None and epoch < known.epoch:
            raise ConflictError(
                f"node {address} is here with epoch {known.epoch}, younger than {epoch}: "
                "two daemons have the same address, or a clock was set back"
            )
        if known is not None and epoch > known.epoch:
            self.forget(known)
            known = None
        if known is None:
            known = self._add(address, epoch)
        known.session = next(self._sessions)
        known.deadline_s = now_s + self.silence_s
        known.rails = self._rail_bits(rails)
        return known

    def use(self, node: Node, session: int, *, now_s: float) -> None:
        """A call of a node's session arrived: it lives.

        Raises:
            NotReadyError: the node was forgotten, by its silence or a younger epoch: join again.
            ConflictError: the node has joined again by another connection.
        """
        if self.by_number.get(node.number) is not node:
            raise NotReadyError(f"node {node.address} was forgotten: join again")
        if node.session != session:
            raise ConflictError(f"node {node.address} has joined by another connection")
        node.deadline_s = now_s + self.silence_s

    def disconnected(self, node: Node, session: int, *, now_s: float) -> None:
        """A session's connection is lost: the node has `grace_s` seconds to come back."""
        if node.session == session:
            node.deadline_s = min(node.deadline_s, now_s + self.grace_s)

    def excuse(self, late_s: float) -> None:
        """This process was stopped for so long: nobody was silent meanwhile."""
        for node in self.by_number.values():
            node.deadline_s += late_s

    def expire(self, *, now_s: float) -> list[Node]:
        """Forget nodes whose time is over.

        Returns:
            Those that were forgotten.
        """
        gone = [node for node in self.by_number.values() if node.deadline_s <= now_s]
        for node in gone:
            self.forget(node)
        return gone

    def forget(self, node: Node) -> None:
        """A node is gone: no answer names it from here on.

        Cost: microseconds, whatever it holds.
        """
        del self.by_address[node.address], self.by_number[node.number]
        self._close(node.tags)
        if node.previous is not None:
            self._close(node.previous)
        self._rounds.pop(node.number, None)
        self._set_complete(node, is_complete=False)

    # -- what they hold

    def begin(self, node: Node, *, now_s: float) -> None:
        """A node announces everything anew; what it had announced counts until it has finished.

        Raises:
            OverloadedError: others do, or have not been forgotten yet; nothing was changed.
        """
        late = [one for one, since_s in self._rounds.items() if since_s + ROUND_S <= now_s]
        for number in late:
            del self._rounds[number]
        if len(self._rounds) >= ROUNDS_MAX and node.number not in self._rounds:
            raise OverloadedError(f"{ROUNDS_MAX} nodes are announcing everything: wait")
        tags = self._open(node.number)
        self._rounds[node.number] = now_s
        if node.previous is not None:  # it did not finish the last time
            self._close(node.tags)
        else:
            node.previous = node.tags
        node.tags = tags
        node.declined = node.crowded = 0
        self._set_complete(node, is_complete=False)

    def finish(self, node: Node) -> None:
        """All was announced: what was not said again since `begin` is not held any more."""
        if node.previous is not None:
            self._close(node.previous)
            node.previous = None
        node.digest = 0
        self._rounds.pop(node.number, None)
        self._set_complete(node, is_complete=True)

    def advertise(
        self, node: Node, origin: bytes, words: Words, *, is_below: bool = False
    ) -> Taken:
        """A node holds blocks, in memory or on a disk only; what it last said of each counts."""
        node.digest = (node.digest + digest_of(origin, words)) & DIGEST_MASK
        tag = node.tags[is_below]
        others = tuple(one for one in node.all_tags if one != tag)
        taken = self.owners.advertise(tag, origin, words, instead_of=others)
        node.declined += taken.declined_count
        node.crowded += taken.crowded_count
        return taken

    def withdraw(self, node: Node, origin: bytes, words: Words) -> int:
        """A node no longer holds blocks; returns how many of them were known."""
        node.digest = (node.digest - digest_of(origin, words)) & DIGEST_MASK
        return self.owners.withdraw(node.all_tags, origin, words)

    def held(self, node: Node) -> int:
        """Blocks of which the node is remembered as an owner."""
        return sum(self.owners.held(tag) for tag in node.all_tags)

    # -- where to fetch

    def locate(self, asker: Node, origin: bytes, words: Words, *, now_s: float) -> Plan:
        """Plan from which other nodes the leading blocks are to be fetched.

        Of each block those who have it on a disk are named only when nobody has it in memory. Then
        nodes with which the asker shares a rail come first, then those with the least to send:
        what they say that they lend, and what they were named for in the last seconds.

        Cost: 0.1 to 0.3 µs a block, and that of `route`.
        """
        owned = named_of(self.owners.find(origin, words), asker.number)
        named = [self.by_number[one] for one in np.unique(owned).tolist() if one != NO_NODE]
        costs = np.zeros(NODES_MAX + 1, np.float64)
        for node in named:
            node.planned *= 0.5 ** ((now_s - node.planned_s) / HALF_LIFE_S)
            node.planned_s = now_s
            is_far = asker.rails and not asker.rails & node.rails
            costs[node.number] = node.lent + node.planned + (FAR_COST if is_far else 0.0)
        segments = route(owned, costs, turn=asker.number)
        for segment in segments:
            self.by_number[segment.node].planned += segment.count
        return Plan({one.node: self.by_number[one.node] for one in segments}, segments)

    # -- inside

    def _add(self, address: str, epoch: int) -> Node:
        if len(self.by_number) >= self.nodes_max:
            raise OverloadedError(f"{self.nodes_max} nodes are here already: raise --max-nodes")
        number = next(one for one in range(1, self.nodes_max + 1) if one not in self.by_number)
        node = Node(number, address, epoch, 0, 0.0, self._open(number))
        self.by_address[address] = self.by_number[number] = node
        return node

    def _open(self, number: int) -> Tags:
        """Tags for an announcement.

        Raises:
            OverloadedError: there are none; nothing was changed.
        """
        first = self.owners.open(number)
        try:
            return first, self.owners.open(number + NODES_MAX)
        except OverloadedError:
            self.owners.close(first)
            raise

    def _close(self, tags: Tags) -> None:
        for tag in tags:
            self.owners.close(tag)

    def _set_complete(self, node: Node, *, is_complete: bool) -> None:
        if node.is_complete == is_complete:
            return
        node.is_complete = is_complete
        sign = 1 if is_complete else -1
        self.complete_count += sign
        self.complete_digest = (self.complete_digest + sign * node.name_digest) & DIGEST_MASK

    def _rail_bits(self, rails: list[str]) -> int:
        """A bit a rail; at the bound of `RAILS_MAX` known rails, others are as good as none."""
        bits = 0
        for rail in rails:
            if rail not in self._rails and len(self._rails) < RAILS_MAX:
                self._rails[rail] = len(self._rails)
            if rail in self._rails:
                bits |= 1 << self._rails[rail]
        return bits


def named_of(owned: Owned, asker: int) -> Owned:
    """The nodes that may be named for each block, without the asker.

    Args:
        owned: numbers of nodes in places; those above `NODES_MAX` have the block on a disk only.
        asker: its number.
    """
    owned[(owned == asker) | (owned == asker + NODES_MAX)] = NO_NODE
    is_below = owned > NODES_MAX
    if is_below.any():
        has_better = ((owned != NO_NODE) & ~is_below).any(axis=1)
        owned = np.where(is_below, owned - np.uint16(NODES_MAX), owned)
        owned[is_below & has_better[:, None]] = NO_NODE
    return owned
