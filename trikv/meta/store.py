"""The border between the metaserver's calls and where its state lives.

Decided here: what a place for the state must be able to do. The only one now is memory
(`core/nodes.py`); one that several metaservers share would be another class of this form.
"""

from typing import Protocol

from trikv.core.nodes import Node, Nodes, Plan
from trikv.core.owners import Owners, Taken, capacity_for
from trikv.core.words import Words


class Store(Protocol):
    """All nodes and what they hold; methods do not wait. See `core/nodes.py`."""

    def join(self, address: str, epoch: int, rails: list[str], *, now_s: float) -> Node:
        """A node says that it lives."""

    def use(self, node: Node, session: int, *, now_s: float) -> None:
        """A call of a node's session arrived."""

    def disconnected(self, node: Node, session: int, *, now_s: float) -> None:
        """A session's connection is lost."""

    def excuse(self, late_s: float) -> None:
        """This process was stopped for so long."""

    def expire(self, *, now_s: float) -> list[Node]:
        """Forget nodes whose time is over."""

    def forget(self, node: Node) -> None:
        """A node is gone."""

    def begin(self, node: Node, *, now_s: float) -> None:
        """A node announces everything anew."""

    def finish(self, node: Node) -> None:
        """All was announced."""

    def advertise(
        self, node: Node, origin: bytes, words: Words, *, is_below: bool = False
    ) -> Taken:
        """A node holds blocks, in memory or on a disk only."""

    def withdraw(self, node: Node, origin: bytes, words: Words) -> int:
        """A node no longer holds blocks."""

    def locate(self, asker: Node, origin: bytes, words: Words, *, now_s: float) -> Plan:
        """Plan where to fetch blocks."""


def open_memory(
    memory_bytes: int, *, seed: int, silence_s: float, grace_s: float, nodes_max: int
) -> Nodes:
    """An empty state in this process's memory, of at most so many bytes.

    Raises:
        MemoryError: there is not so much.
    """
    return Nodes(Owners(capacity_for(memory_bytes), seed=seed), silence_s, grace_s, nodes_max)
