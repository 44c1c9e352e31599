"""What a metaserver does for nodes, one method a call of the schema.

Decided here: what is counted and logged. This file knows neither capnp nor secrets: who calls has
been found out already.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
import trio

from trikv.core.adverts import Part
from trikv.core.errors import NotReadyError
from trikv.core.nodes import Node, Nodes, Plan
from trikv.core.owners import Taken
from trikv.core.words import Words
from trikv.meta.counters import Counters
from trikv.meta.messages import Beat
from trikv.meta.store import Store

log = structlog.get_logger()

SWEEP_S = 0.25
FORGET_PAUSE_S = 0.002
"""Between two portions of entries that are swept, so that calls are answered meanwhile."""


@dataclass(slots=True, eq=False)
class NodeSession:
    """A connection of a node that has joined."""

    node: Node
    number: int


@dataclass(slots=True)
class MetaService:
    """The calls of nodes.

    Attributes:
        state: the nodes in memory, for status and sweeping; the same object as `store` now.
    """

    store: Store
    state: Nodes
    now_s: Callable[[], float]
    counters: Counters = field(default_factory=Counters)

    def join(self, address: str, epoch: int, rails: list[str]) -> NodeSession:
        """See the schema.

        Raises:
            ConflictError, OverloadedError: see `Nodes.join`.
        """
        node = self.store.join(address, epoch, rails, now_s=self.now_s())
        self.counters.node_joined_total += 1
        log.info("node.joined", addr=address, epoch=epoch, block_count=self.state.held(node))
        return NodeSession(node, node.session)

    def disconnected(self, session: NodeSession) -> None:
        """The connection is lost."""
        self.store.disconnected(session.node, session.number, now_s=self.now_s())

    def begin(self, session: NodeSession | None) -> None:
        """See the schema.

        Raises:
            KvError: see `_node`; or too many announcements at once.
        """
        self.store.begin(self._node(session), now_s=self.now_s())

    def finish(self, session: NodeSession | None) -> None:
        """See the schema.

        Raises:
            KvError: see `_node`.
        """
        node = self._node(session)
        self.store.finish(node)
        log.info(
            "node.announced",
            addr=node.address,
            block_count=self.state.held(node),
            block_count_declined=node.declined,
            block_count_crowded=node.crowded,
        )

    def announce(self, session: NodeSession | None, parts: list[Part]) -> Taken:
        """See the schema.

        Raises:
            KvError: see `_node`.
        """
        node = self._node(session)
        new = crowded = declined = 0
        for part in parts:
            if not part.is_held:
                self.counters.withdrawn_blocks_total += len(part.words)
                self.store.withdraw(node, part.origin, part.words)
                continue
            taken = self.store.advertise(node, part.origin, part.words, is_below=part.is_below)
            self.counters.advertised_blocks_total += len(part.words)
            new += taken.new_count
            crowded += taken.crowded_count
            declined += taken.declined_count
        self.counters.crowded_blocks_total += crowded
        self.counters.declined_blocks_total += declined
        return Taken(new, crowded, declined)

    def locate(self, session: NodeSession | None, origin: bytes, words: Words) -> Plan:
        """See the schema.

        Raises:
            KvError: see `_node`.
        """
        plan = self.store.locate(self._node(session), origin, words, now_s=self.now_s())
        self.counters.locate_total += 1
        self.counters.locate_blocks_total += len(words)
        self.counters.locate_found_blocks_total += plan.block_count
        return plan

    def heartbeat(self, session: NodeSession | None, lent: int) -> Beat:
        """See the schema.

        Raises:
            KvError: see `_node`.
        """
        node = self._node(session)
        node.lent = lent
        state = self.state
        free_count = state.owners.free_count
        return Beat(
            node.digest, state.complete_count, state.complete_digest, node.declined, free_count
        )

    def leave(self, session: NodeSession | None) -> None:
        """See the schema.

        Raises:
            KvError: see `_node`.
        """
        node = self._node(session)
        log.info("node.left", addr=node.address, block_count=self.state.held(node))
        self.store.forget(node)

    def _node(self, session: NodeSession | None) -> Node:
        """The node that calls, which lives as this shows.

        Raises:
            NotReadyError: it has not joined, or was forgotten.
            ConflictError: it has joined by another connection.
        """
        if session is None:
            raise NotReadyError("join first")
        self.store.use(session.node, session.number, now_s=self.now_s())
        return session.node

    async def watch(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Forget nodes that are silent; runs until cancelled."""
        task_status.started()
        while True:
            due_s = trio.current_time() + SWEEP_S
            await trio.sleep_until(due_s)
            late_s = trio.current_time() - due_s
            if late_s > SWEEP_S:  # this process was stopped: nobody else was silent meanwhile
                self.store.excuse(late_s)
            for node in self.store.expire(now_s=self.now_s()):
                self.counters.node_lost_total += 1
                log.warning("node.lost", addr=node.address, epoch=node.epoch)

    async def sweep(self) -> None:
        """Take back the memory of what was forgotten, between calls; runs until cancelled."""
        while True:
            has_more = self.state.owners.sweep()
            await trio.sleep(FORGET_PAUSE_S if has_more else SWEEP_S)
