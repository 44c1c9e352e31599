"""Engines on a store, and a clock that tests set."""

from dataclasses import dataclass

import numpy as np

from trikv.core.cache import Cache
from trikv.core.calls import Declare, GroupPieces, Load, Named, Query, Register, Save
from trikv.core.engines import Engines
from trikv.core.layout import GroupLayout, Piece, Range
from trikv.core.namespace import Fields
from trikv.core.plans import Hit, Limits, LoadPlan, SavePlan
from trikv.core.windows import Windows
from trikv.core.words import InstanceName, LeaseId, RequestId, SessionId, Words
from trikv.nursery.store import Store, layouts_of

PAGE = 4096
SLAB = 8 * PAGE
LEASE_S, FILL_S = 10.0, 20.0
A, B = InstanceName("a"), InstanceName("b")
R = RequestId("r")
PLAIN: Fields = (("weights", "1"),)


def words(*hashes: int) -> Words:
    return np.array([(one, 0, 0, one) for one in hashes], np.uint64).reshape(-1, 4)


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def pieces(piece_bytes: int, replicas: int = 1) -> GroupPieces:
    piece = Piece(0, 0, piece_bytes, piece_bytes)
    return GroupPieces(8, (piece,), "f32", replicas)


@dataclass
class Engine:
    """One engine's processes: the scheduler's session, then one a rank."""

    store: Store
    name: InstanceName
    scheduler: SessionId
    rank_count: int = 1
    fields: Fields = PLAIN
    groups: tuple[GroupPieces, ...] = (pieces(PAGE),)

    def session(self, rank: int) -> SessionId:
        return SessionId(self.scheduler + 1 + rank)

    def declare(self) -> Named:
        return self.store.declare(self.scheduler, Declare(self.name, self.rank_count, self.fields))

    def register(self, rank: int = 0) -> Named:
        call = Register(self.name, rank, (Range(1 << 20, 9 * SLAB),), self.groups, 0, 0)
        return self.store.register(self.session(rank), call, layouts_of(call))

    def start(self) -> "Engine":
        self.declare()
        for rank in range(self.rank_count):
            self.register(rank)
        return self

    def query(self, *hashes: int, group: int = 0) -> Hit:
        return self.store.query(self.name, Query(R, group, words(*hashes)))

    def prepare_save(self, call: Save) -> SavePlan:
        return self.store.prepare_save(self.session(call.rank), self.name, call)[0]

    def save(self, *hashes: int, group: int = 0) -> None:
        for rank in range(self.rank_count):
            call = save(*hashes, rank=rank, group=group)
            plan, layout = self.store.prepare_save(self.session(rank), self.name, call)
            self.store.complete_save(plan, np.ones(len(plan.entries), np.bool_), layout)

    def prepare_load(self, lease: int, *blocks: int, rank: int = 0, first: int = 0) -> LoadPlan:
        call = Load(rank, LeaseId(lease), first, ids(*blocks), 0.0)
        return self.store.prepare_load(self.session(rank), self.name, call)[0]

    def lease(self, *hashes: int) -> int:
        hit = self.query(*hashes)
        assert hit.lease is not None
        return hit.lease.id


def save(*hashes: int, rank: int = 0, group: int = 0, blocks: np.ndarray | None = None) -> Save:
    where = np.arange(len(hashes), dtype=np.int32) if blocks is None else blocks
    return Save(rank, group, R, 0, words(*hashes), where, 0, 0)


def layout_of(engine: Engine) -> GroupLayout:
    return engine.store.engines.ready(engine.name).ranks[0].groups[0]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def new_store(clock: Clock) -> Store:
    """A pool of 32 pages."""
    limits = Limits(lease_s=LEASE_S, fill_s=FILL_S, filling_fraction_many_ranks=0.5)
    cache = Cache(4 * SLAB, SLAB, entries_max=64, seed=1, limits=limits)
    return Store(cache, Engines(instances_max=4), clock, Windows((60.0,), now_s=clock()))
