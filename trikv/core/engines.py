"""Engines as the daemon knows them: who declared what, which ranks are there, what follows.

Decided here: when an instance is complete, who may speak for it, and what its end takes along. This
file does not know connections or processes; a session is a number that the shell opens and loses.

| event | instance |
| --- | --- |
| declared or first rank registered | known, incomplete: other calls are refused as not-ready |
| declared and all ranks registered | ready: has a namespace |
| a session of it lost | incomplete; its declaration or ranks are gone |
| last session lost | forgotten; its namespace stays |
"""

from dataclasses import dataclass, field

from trikv.core.banks import ANY_BANK
from trikv.core.errors import (
    BadRequestError,
    ConflictError,
    KvError,
    NotReadyError,
    OverloadedError,
)
from trikv.core.layout import GroupLayout
from trikv.core.namespace import ALTERED_FIELD, Fields, Namespace, Namespaces
from trikv.core.replicas import pages_of
from trikv.core.words import InstanceName, SessionId


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One registered rank: whose session it is, and where its groups' blocks lie."""

    session: SessionId
    groups: tuple[GroupLayout, ...]


@dataclass(slots=True)
class Instance:
    """One running engine.

    Attributes:
        bank: of the pool, near all its ranks while it is ready; `ANY_BANK` when they are apart.
    """

    name: InstanceName
    rank_count: int = 0  # 0: not declared
    fields: Fields = ()
    declared_by: SessionId | None = None
    ranks: dict[int, RankFacts] = field(default_factory=dict)
    namespace: Namespace | None = None
    bank: int = ANY_BANK

    def missing(self) -> str:
        """What it lacks to be ready, as one phrase; empty when ready."""
        if self.namespace is not None:
            return ""
        if self.declared_by is None:
            return "its scheduler has not declared it"
        absent = [rank for rank in range(self.rank_count) if rank not in self.ranks]
        return f"rank {', '.join(map(str, absent[:8]))} of {self.rank_count} not registered"

    def replicas(self, group: int) -> int:
        """How many of its ranks hold the same page of a group; it is ready."""
        return self.ranks[0].groups[group].replicas

    def is_abandoned(self) -> bool:
        """True when no session speaks for it."""
        return self.declared_by is None and not self.ranks


@dataclass(slots=True)
class Engines:
    """All instances.

    Attributes:
        instances_max: at the bound further ones are refused as overloaded.
    """

    instances_max: int
    namespaces: Namespaces = field(default_factory=Namespaces)
    by_name: dict[InstanceName, Instance] = field(default_factory=dict)

    def declare(
        self, session: SessionId, name: InstanceName, *, rank_count: int, fields: Fields
    ) -> Instance:
        """Take a scheduler's word for what an engine is.

        Raises:
            ConflictError: another session has declared it, or a registered rank does not exist.
            OverloadedError: too many instances or namespaces; the session's words are forgotten.
        """
        instance = self._known(name)
        if instance.declared_by not in {None, session}:
            raise ConflictError(
                f"instance {name!r} is declared by another live process: set another engine_id"
            )
        if any(rank >= rank_count for rank in instance.ranks):
            raise ConflictError(f"instance {name!r} has registered ranks beyond {rank_count}")
        if (instance.rank_count, instance.fields) != (rank_count, fields):
            self._leave(instance)
        self.by_name[name] = instance
        instance.declared_by, instance.rank_count, instance.fields = session, rank_count, fields
        try:
            self._complete(instance)
        except KvError:
            self.session_lost(session)
            raise
        return instance

    def register(
        self, session: SessionId, name: InstanceName, rank: int, groups: tuple[GroupLayout, ...]
    ) -> Instance:
        """Take a worker's word for where its blocks lie.

        Raises:
            ConflictError: another session has registered this rank.
            BadRequestError: the instance has no such rank.
            OverloadedError: too many instances or namespaces; the session's words are forgotten.
        """
        instance = self._known(name)
        before = instance.ranks.get(rank)
        if before is not None and before.session != session:
            raise ConflictError(f"rank {rank} of {name!r} is registered by another live process")
        if instance.rank_count and rank >= instance.rank_count:
            raise BadRequestError(f"rank {rank} of an instance of {instance.rank_count}")
        if before is not None:
            self._leave(instance)
        self.by_name[name] = instance
        instance.ranks[rank] = RankFacts(session, groups)
        try:
            self._complete(instance)
        except KvError:
            self.session_lost(session)
            raise
        return instance

    def check_altered(self, name: InstanceName | None, value: str | None) -> None:
        """Whether blocks are of the weights that an instance has now.

        Args:
            name: of the instance.
            value: of its field `altered`, empty: none, when they were computed; None: not known.

        Raises:
            BadRequestError: they are not.
        """
        instance = self.by_name.get(name) if name is not None else None
        if value is None or instance is None or instance.namespace is None:  # not ready
            return
        if dict(instance.fields).get(ALTERED_FIELD, "") != value:
            raise BadRequestError("these blocks are of before a reset")

    def alter(self, instance: Instance, value: str) -> None:
        """A ready instance's weights are no more those that its fields name: it leaves for others.

        Raises:
            OverloadedError: too many namespaces; nothing was changed.
        """
        fields = tuple(sorted({**dict(instance.fields), ALTERED_FIELD: value}.items()))
        before, instance.fields = instance.fields, fields
        old = instance.namespace
        instance.namespace = None
        try:
            self._complete(instance)
        except KvError:
            instance.fields, instance.namespace = before, old
            raise
        if old is not None:
            old.instances -= 1

    def ready(self, name: InstanceName | None) -> Instance:
        """The instance, complete.

        Raises:
            NotReadyError: the message says what is missing.
        """
        instance = self.by_name.get(name) if name is not None else None
        if instance is None:
            raise NotReadyError("declare or register first")
        if instance.namespace is None:
            raise NotReadyError(f"instance {instance.name!r}: {instance.missing()}")
        return instance

    def session_lost(self, session: SessionId) -> list[InstanceName]:
        """Forget everything a session said.

        Returns:
            Instances whose scheduler or last session this was: their leases and chains are to end.
        """
        ended = []
        for instance in list(self.by_name.values()):
            lost = [rank for rank, facts in instance.ranks.items() if facts.session == session]
            was_scheduler = instance.declared_by == session
            if not lost and not was_scheduler:
                continue
            self._leave(instance)
            for rank in lost:
                del instance.ranks[rank]
            if was_scheduler:
                instance.declared_by, instance.rank_count, instance.fields = None, 0, ()
            if instance.is_abandoned():
                del self.by_name[instance.name]
            if was_scheduler or instance.is_abandoned():
                ended.append(instance.name)
        return ended

    def _known(self, name: InstanceName) -> Instance:
        instance = self.by_name.get(name)
        if instance is None:
            if len(self.by_name) >= self.instances_max:
                raise OverloadedError(
                    f"{self.instances_max} engines are attached: raise --max-engines"
                )
            instance = Instance(name)
        return instance

    def _complete(self, instance: Instance) -> None:
        """Open the namespace when everything is known; ranks that disagree in shape are refused."""
        if instance.namespace is not None or instance.declared_by is None:
            return
        if len(instance.ranks) < instance.rank_count:
            return
        ranks = [instance.ranks[rank].groups for rank in range(instance.rank_count)]
        instance.namespace = self.namespaces.open(instance.fields, pages_of(ranks))
        instance.bank = _common_bank(instance)

    def _leave(self, instance: Instance) -> None:
        if instance.namespace is not None:
            instance.namespace.instances -= 1
            instance.namespace = None


def _common_bank(instance: Instance) -> int:
    places = [group.place for rank in instance.ranks.values() for group in rank.groups]
    banks = {ANY_BANK if place is None else place.bank for place in places}
    return banks.pop() if len(banks) == 1 else ANY_BANK
