"""The owner of the core: plain methods that never wait, and the clock they need.

Decided here: how an engine's call reaches cache and engines, in the order that keeps both right
when a call is refused. This file does not know connections, memory or tasks; nothing here has a
checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.cache import Cache
from trikv.core.calls import Declare, Load, Named, Query, Register, Save
from trikv.core.engines import Engines, Instance
from trikv.core.errors import BadRequestError, KvError, LeaseLostError
from trikv.core.insight import Insight
from trikv.core.keeper import Keeper
from trikv.core.layout import GroupLayout
from trikv.core.namespace import NAMESPACES_MAX, Namespace
from trikv.core.plans import Hit, Key, LoadPlan, SavePlan
from trikv.core.windows import Windows, salt_of
from trikv.core.words import InstanceName, RequestId, SessionId, SpaceId, Words
from trikv.nursery.recording import Recorder

ANSWERED_MAX: Final = 64  # queries that wait to be counted


def layouts_of(call: Register) -> tuple[GroupLayout, ...]:
    """A registration, checked; before anybody acts on it.

    Raises:
        BadRequestError: pieces that leave their memory, overlap, or have no bytes.
    """
    return tuple(
        GroupLayout(call.ranges, one.pieces, one.block_count, one.layout) for one in call.groups
    )


@dataclass(frozen=True, slots=True)
class Store:
    """Everything the daemon knows about blocks and engines."""

    cache: Cache
    engines: Engines
    now_s: Callable[[], float]
    windows: Windows
    _answered: list[tuple[Namespace, int, Query, Hit, float]] = field(default_factory=list)
    insight: Insight | None = None  # what other sizes and orders of eviction would give
    recorder: Recorder | None = None
    keeper: Keeper | None = None

    # -- instances

    def declare(self, session: SessionId, call: Declare) -> Named:
        """An engine's scheduler says what it is.

        Raises:
            KvError: refused; the session has said nothing.
        """
        self._make_room_for_namespace()
        try:
            instance = self.engines.declare(
                session, call.instance, rank_count=call.rank_count, fields=call.fields
            )
            return self._named(session, instance, ())
        except KvError:
            self._release_if_silent(call.instance)
            raise

    def register(
        self, session: SessionId, call: Register, groups: tuple[GroupLayout, ...]
    ) -> Named:
        """A rank says where its blocks lie.

        Args:
            session: who says so.
            call: where.
            groups: what `layouts_of` has made of it, with their places.

        Raises:
            KvError: refused; the session has said nothing.
        """
        self._make_room_for_namespace()
        try:
            instance = self.engines.register(session, call.instance, call.rank, groups)
            return self._named(session, instance, tuple(group.page_bytes for group in groups))
        except KvError:
            self._release_if_silent(call.instance)
            raise

    def _named(self, session: SessionId, instance: Instance, page_bytes: tuple[int, ...]) -> Named:
        namespace = instance.namespace
        if namespace is None:
            return Named("", page_bytes, ())
        try:
            self._open_spaces(namespace)
        except KvError:
            self.session_lost(session)
            self._forget_namespace(namespace)
            raise
        notes = self.engines.namespaces.notes(namespace)
        return Named(namespace.fingerprint.hex(), page_bytes, tuple(notes))

    def _open_spaces(self, namespace: Namespace) -> None:
        pairs = zip(namespace.spaces, namespace.pages, strict=True)
        for group, (space, page_bytes) in enumerate(pairs):
            self.cache.open_space(space, page_bytes, namespace.tenant)
            if self.keeper is not None:
                self.keeper.open_space(
                    space,
                    self.cache.spaces[space].shape,
                    fingerprint=namespace.fingerprint,
                    group=group,
                    tenant=namespace.tenant,
                )

    def _close_space(self, space: SpaceId) -> None:
        self.cache.close_space(space)
        if self.keeper is not None:
            self.keeper.close_space(space)

    def _forget_namespace(self, namespace: Namespace) -> None:
        """Drop a namespace that has neither engines nor blocks."""
        self.engines.namespaces.forget(namespace)
        for space in namespace.spaces:
            self._close_space(space)

    def _release_if_silent(self, name: InstanceName) -> None:
        """End the leases of an instance whose scheduler's word was just lost by a refusal."""
        instance = self.engines.by_name.get(name)
        if instance is None or instance.declared_by is None:
            self.cache.release_instance(name)

    def _make_room_for_namespace(self) -> None:
        """At the bound, forget namespaces that have neither engines nor blocks."""
        namespaces = self.engines.namespaces
        if len(namespaces.by_fingerprint) < NAMESPACES_MAX:
            return
        in_use = self.cache.spaces_in_use()
        for namespace in list(namespaces.by_fingerprint.values()):
            if namespace.instances == 0 and not any(space in in_use for space in namespace.spaces):
                self._forget_namespace(namespace)

    def session_lost(self, session: SessionId) -> None:
        """Forget everything a session said; its copies must have ended."""
        for name in self.engines.session_lost(session):
            self.cache.release_instance(name)

    # -- calls of a complete instance

    def query(self, name: InstanceName | None, call: Query) -> Hit:
        """How many leading blocks are at hand, with a lease.

        Raises:
            NotReadyError, BadRequestError: refused.
        """
        key = self._key(name, call.group, call.request)
        now_s = self.now_s()
        hit = self.cache.query(key, call.words, now_s=now_s)
        namespace = self._namespace(self.engines.ready(name))
        self._answered.append((namespace, namespace.epoch, call, hit, now_s))
        if len(self._answered) >= ANSWERED_MAX:
            self.settle()
        if hit.asked_before == 0:
            self._note(key, call.words, None)
        return hit

    def settle(self) -> None:
        """Do what a query left for later."""
        self.cache.settle()
        for namespace, epoch, call, hit, now_s in self._answered:
            first = hit.asked_before
            self.windows.record(
                namespace.fingerprint.hex(),
                salt_of(namespace.fingerprint, call.group, epoch),
                call.words[first:],
                (max(0, hit.count - first),),
                now_s=now_s,
            )
        self._answered.clear()

    def prepare_save(
        self, session: SessionId, name: InstanceName | None, call: Save
    ) -> tuple[SavePlan, GroupLayout]:
        """Claim pages for what the rank has to copy.

        Raises:
            NotReadyError, BadRequestError: refused, nothing claimed.
        """
        layout = self._layout(session, name, call.rank, call.group)
        layout.check_blocks(call.blocks)
        key = self._key(name, call.group, call.request)
        plan = self.cache.prepare_save(
            key, call.words, rank=call.rank, first=call.first, now_s=self.now_s()
        )
        if call.rank == 0:  # the same blocks on all ranks
            asked = max(0, plan.chain.asked_blocks - call.first)
            self._note(key, call.words[asked:], call.first + asked)
        return plan, layout

    def _note(self, key: Key, words: Words, first: int | None) -> None:
        """Show a request's blocks, asked for or saved at `first`, to those who watch."""
        if self.insight is not None:
            block_bytes = self.cache.spaces[key.space].block_bytes
            self.insight.note(key.space, words, block_bytes, is_ask=first is None)
        if self.recorder is not None:
            self.recorder.note(self.now_s(), key.instance, key.space, words, first)

    def complete_save(self, plan: SavePlan, copied: NDArray[np.bool_], layout: GroupLayout) -> None:
        """The copy has ended."""
        self.cache.complete_save(plan, copied, copied_bytes=int(copied.sum()) * layout.page_bytes)

    def prepare_load(
        self, session: SessionId, name: InstanceName | None, call: Load
    ) -> tuple[LoadPlan, GroupLayout]:
        """Pin what the rank wants to copy out.

        Raises:
            LeaseLostError, NotReadyError, BadRequestError: refused, nothing pinned.
        """
        instance = self.engines.ready(name)
        lease = self.cache.leases.use(call.lease, instance.name, call.rank, now_s=self.now_s())
        group = self._group_of(instance, lease.space)
        layout = self._layout(session, name, call.rank, group)
        layout.check_blocks(call.blocks)
        if len(np.unique(call.blocks)) < len(call.blocks):
            raise BadRequestError("an engine block stands twice in one load")
        plan = self.cache.prepare_load(
            call.lease, instance.name, call.rank, call.first, len(call.blocks), now_s=self.now_s()
        )
        return plan, layout

    def complete_load(self, plan: LoadPlan, copied: NDArray[np.bool_], layout: GroupLayout) -> None:
        """The copy has ended."""
        count = int(copied.sum())
        self.cache.complete_load(plan, copied_count=count, copied_bytes=count * layout.page_bytes)

    def release(self, name: InstanceName | None, requests: list[RequestId]) -> None:
        """These requests have ended."""
        if name is not None:
            for request in requests:
                self.cache.release(name, request)

    def reset(self, name: InstanceName | None) -> int:
        """Make every block of the instance's namespace unreachable; returns how many.

        Raises:
            NotReadyError: refused.
        """
        namespace = self._namespace(self.engines.ready(name))
        dropped = sum(
            self.cache.drop_space(space) for space in self.engines.namespaces.renew(namespace)
        )
        self._open_spaces(namespace)
        self._close_old_spaces()
        return dropped

    def _close_old_spaces(self) -> None:
        """Forget the spaces of earlier epochs whose last blocks are gone."""
        namespaces = self.engines.namespaces.by_fingerprint.values()
        keep = self.cache.spaces_in_use().union(*(one.spaces for one in namespaces))
        for space in self.cache.spaces.keys() - keep:
            self._close_space(space)

    def sweep(self) -> None:
        """End what is over: leases, and blocks whose ranks did not all save."""
        self.cache.expire_leases(now_s=self.now_s())
        self.cache.expire_fills(now_s=self.now_s())

    # -- look-ups

    def _key(self, name: InstanceName | None, group: int, request: RequestId) -> Key:
        instance = self.engines.ready(name)
        spaces = self._namespace(instance).spaces
        if group >= len(spaces):
            raise BadRequestError(f"group {group} of {len(spaces)}")
        return Key(instance.name, request, spaces[group])

    def _layout(
        self, session: SessionId, name: InstanceName | None, rank: int, group: int
    ) -> GroupLayout:
        facts = self.engines.ready(name).ranks.get(rank)
        if facts is None or facts.session != session:
            raise BadRequestError(f"rank {rank} is not registered by this session")
        if group >= len(facts.groups):
            raise BadRequestError(f"group {group} of {len(facts.groups)}")
        return facts.groups[group]

    def _group_of(self, instance: Instance, space: SpaceId) -> int:
        spaces = self._namespace(instance).spaces
        if space not in spaces:
            raise LeaseLostError("the lease is of a namespace that was reset: query again")
        return spaces.index(space)

    @staticmethod
    def _namespace(instance: Instance) -> Namespace:
        assert instance.namespace is not None
        return instance.namespace
