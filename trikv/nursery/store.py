"""The owner of the core: plain methods that never wait, and the clock they need.

Decided here: how an engine's call reaches cache and engines, in the order that keeps both right
when a call is refused. This file does not know connections, memory or tasks; nothing here has a
checkpoint.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.asked import Asked, Counted
from trikv.core.below import Below
from trikv.core.blocks import DOOMED, SEALED
from trikv.core.cache import Cache
from trikv.core.calls import Declare, Load, Named, Query, Register, Save
from trikv.core.engines import Engines, Instance
from trikv.core.errors import BadRequestError, KvError, LeaseLostError
from trikv.core.insight import Insight
from trikv.core.keeper import Keeper
from trikv.core.layout import GroupLayout
from trikv.core.namespace import NAMESPACES_MAX, Namespace, origin_of
from trikv.core.plans import Hit, Key, LoadPlan, SavePlan
from trikv.core.remote import Remote
from trikv.core.shared import Shared
from trikv.core.windows import Windows, salt_of
from trikv.core.words import InstanceName, Offsets, RequestId, SessionId, SpaceId, Words
from trikv.nursery.recording import Recorder

ANSWERED_MAX: Final = 64  # queries that wait to be counted


def layouts_of(call: Register) -> tuple[GroupLayout, ...]:
    """A registration, checked; before anybody acts on it.

    Raises:
        BadRequestError: pieces that leave their memory, overlap, or have no bytes.
    """
    return tuple(
        GroupLayout(call.ranges, one.pieces, one.block_count, one.layout, replicas=one.replicas)
        for one in call.groups
    )


@dataclass(frozen=True, slots=True)
class Store:
    """Everything the daemon knows about blocks and engines."""

    cache: Cache
    engines: Engines
    now_s: Callable[[], float]
    windows: Windows
    _answered: list[tuple[Key, Query, Hit, float]] = field(default_factory=list)
    insight: Insight | None = None  # what other sizes and orders of eviction would give
    recorder: Recorder | None = None
    keeper: Keeper | None = None
    below: Below | None = None
    shared: Shared | None = None  # with other nodes
    remote: Remote | None = None  # likewise
    _asked: Asked = field(default_factory=Asked)
    _counting: dict[SpaceId, tuple[str, int]] = field(default_factory=dict)  # name and salt

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
        fingerprint = namespace.fingerprint
        for group, (space, page_bytes) in enumerate(
            zip(namespace.spaces, namespace.pages, strict=True)
        ):
            self.cache.open_space(space, page_bytes, namespace.tenant)
            salt = salt_of(fingerprint, group, namespace.epoch)
            self._counting[space] = fingerprint.hex(), salt
            origin = origin_of(fingerprint, group)
            if self.keeper is not None:
                self.keeper.open_space(
                    space, self.cache.spaces[space].shape, origin, namespace.tenant
                )
            if self.below is not None:
                self.below.open_space(space, origin, page_bytes, namespace.tenant)
            if self.shared is not None:
                self.shared.open_space(space, origin)

    def _close_space(self, space: SpaceId) -> None:
        self.cache.close_space(space)
        self._counting.pop(space, None)
        if self.keeper is not None:
            self.keeper.close_space(space)
        if self.below is not None:
            self.below.close_space(space)
        if self.shared is not None:
            self.shared.close_space(space)

    def _forget_namespace(self, namespace: Namespace) -> None:
        """Drop a namespace that has neither engines nor blocks."""
        self.engines.namespaces.forget(namespace)
        for space in namespace.spaces:
            self._close_space(space)

    def _release_if_silent(self, name: InstanceName) -> None:
        """End the leases of an instance whose scheduler's word was just lost by a refusal."""
        instance = self.engines.by_name.get(name)
        if instance is None or instance.declared_by is None:
            self._release_instance(name)

    def _release_instance(self, name: InstanceName) -> None:
        self.cache.release_instance(name)
        self._count(self._asked.ended(name), self.now_s())

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
            self._release_instance(name)

    # -- calls of a complete instance

    def query(self, name: InstanceName | None, call: Query) -> Hit:
        """How many leading blocks are at hand, with a lease.

        Raises:
            NotReadyError, BadRequestError: refused.
        """
        key = self._key(name, call.group, call.request)
        now_s = self.now_s()
        hit = self.cache.query(key, call.words, now_s=now_s)
        if self.below is not None and hit.count < len(call.words):
            hit = replace(hit, coming=self._look_further(self.below, key, call, hit.count))
            if hit.coming:
                self.cache.counters.uncount_query(len(call.words), hit.count)
        self._answered.append((key, call, hit, now_s))
        if len(self._answered) >= ANSWERED_MAX:
            self.settle()
        if hit.asked_before == 0:
            self._note(key, call.words, None)
        return hit

    def _look_further(self, below: Below, key: Key, call: Query, count: int) -> int:
        """Begin to bring up what lies behind the blocks at hand; how many may be coming."""
        space, words, _, room = self._rest(key, call, count)
        coming = below.fetch(space, words, count, room).count
        if self.remote is not None:
            coming += self.remote.seek(
                key, words[: count + room], count + coming, now_s=self.now_s()
            )
        return coming

    def coming(self, name: InstanceName | None, call: Query) -> tuple[int, int]:
        """What `query` would find: blocks at hand, and blocks behind them that are coming.

        Raises:
            NotReadyError, BadRequestError: refused.
        """
        key = self._key(name, call.group, call.request)
        found = self.cache.index.find_prefix(key.space, call.words)
        sealed = self.cache.blocks.state[found] == SEALED
        count = len(found) if bool(sealed.all()) else int(np.argmin(sealed))
        if self.below is None:
            return count, 0
        lease = self.cache.leases.of_space(key.instance, key.request, key.space)
        held = 0 if lease is None else len(lease.entries)
        space, words, _, room = self._rest(key, call, count)
        limit = max(0, room + held - count)
        coming = self.below.coming(space, words, count, limit)
        if self.remote is not None:
            coming += self.remote.pending(key, words[: count + limit], count + coming)
        return count, coming

    def _rest(self, key: Key, call: Query, count: int) -> tuple[SpaceId, Words, int, int]:
        """Space, words, how many are at hand, and how many more may be promised."""
        room = self.cache.leases.room(self.cache.spaces[key.space].block_bytes)
        return key.space, call.words, count, room

    def settle(self) -> None:
        """Do what a query left for later."""
        self.cache.settle()
        for key, call, hit, now_s in self._answered:
            self._count(self._asked.answered(key, call.words, hit), now_s)
        self._answered.clear()

    def _count(self, counted: Iterable[Counted], now_s: float) -> None:
        for one in counted:
            name, salt = self._counting.get(one.key.space, ("", 0))
            if name:  # else its namespace was forgotten
                self.windows.record(
                    name, salt, one.words[one.first : one.end], one.by_tier, now_s=now_s
                )

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
        self.cache.complete_save(
            plan, copied, copied_bytes=int(np.count_nonzero(copied)) * layout.page_bytes
        )
        self.cache.counters.save_far_bytes_total += self._far_bytes(plan.offsets[copied], layout)

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
        layout.check_targets(call.blocks)
        plan = self.cache.prepare_load(
            *(call.lease, instance.name, call.rank, call.first, len(call.blocks)),
            now_s=self.now_s(),
            replicas=layout.replicas,
        )
        return plan, layout

    def complete_load(self, plan: LoadPlan, copied: NDArray[np.bool_], layout: GroupLayout) -> None:
        """The copy has ended."""
        count = int(np.count_nonzero(copied))
        self.cache.complete_load(plan, copied_count=count, copied_bytes=count * layout.page_bytes)
        self.cache.counters.load_far_bytes_total += self._far_bytes(plan.offsets[copied], layout)

    def _far_bytes(self, offsets: Offsets, layout: GroupLayout) -> int:
        """Of pages that were copied, those in another NUMA node's memory than near their rank."""
        if layout.place is None:
            return 0
        return self.cache.pages.banks.far_count(offsets, layout.place.bank) * layout.page_bytes

    def release(self, name: InstanceName | None, requests: list[RequestId]) -> None:
        """These requests have ended."""
        if name is not None:
            self.settle()
            for request in requests:
                self.cache.release(name, request)
                self._count(self._asked.ended(name, request), self.now_s())

    def reset(self, name: InstanceName | None, altered: str = "") -> int:
        """Make every block of an instance's namespace unreachable; returns how many.

        `altered`, unless empty: its weights were changed; it leaves for a namespace of that name.

        Raises:
            NotReadyError, OverloadedError: refused.
        """
        instance = self.engines.ready(name)
        namespace = self._namespace(instance)
        if altered:
            self._make_room_for_namespace()
            self.engines.alter(instance, altered)
            self._open_spaces(self._namespace(instance))
        self.settle()
        dropped = 0
        for space in self.engines.namespaces.renew(namespace):
            dropped += self.cache.retire_space(space)
            if self.keeper is not None:
                self.keeper.retire_space(space)
            if self.below is not None:
                self.below.retire_space(space)
            if self.shared is not None:
                self.shared.retire_space(space)
        self._open_spaces(namespace)
        return dropped

    def drop_retired(self) -> bool:
        """Forget some of the blocks that a reset has made unreachable; False: none are left."""
        if self.cache.drop_retired() or (self.below is not None and self.below.drop_retired()):
            return True
        if self.cache.blocks.counts[DOOMED] == 0:  # else somebody still reads or writes some
            self._close_old_spaces()
        return False

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
        replicas = instance.replicas(group)
        return Key(instance.name, request, spaces[group], instance.bank, replicas)

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
