"""An owner and a reader of blocks in one process: real data streams, and no capnp between."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import trio

from tests.conftest import PATIENCE_S
from tests.tiers.peers import MARK, Memory
from trikv.address import Address
from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.lending import Lending
from trikv.core.plans import Key, Limits
from trikv.core.remote import FetchPart, Remote, Source
from trikv.core.shared import Shared
from trikv.core.spills import Budget, Spills
from trikv.core.words import InstanceName, PeerId, RequestId, SpaceId, Words
from trikv.nursery import neighbours
from trikv.nursery.borrowing import Local, Result
from trikv.nursery.neighbours import Neighbour
from trikv.nursery.owning import Owner
from trikv.nursery.peerlink import Borrowed
from trikv.tiers.peer import PeerLostError

PAGE, SLAB, POOL = 64 << 10, 1 << 20, 4 << 20
SPACE, ORIGIN = SpaceId(1), b"o" * 20
COUNT = 4
ADDRESS = "10.0.0.1:50055"


def new_cache() -> Cache:
    cache = Cache(POOL, SLAB, entries_max=256, seed=1, limits=Limits())
    cache.open_space(SPACE, (PAGE,))
    return cache


def new_below(cache: Cache) -> Below:
    return Below(cache, [], Spills(Budget(None), write_through=False), has_disks=False)


def words(count: int = COUNT) -> Words:
    return np.array([(at + 1, 0, 0, 7) for at in range(count)], np.uint64)


def key(request: str = "r") -> Key:
    return Key(InstanceName("i"), RequestId(request), SPACE)


@dataclass
class OwnerSide:
    """A pool with four blocks, and what its owner answers."""

    cache: Cache
    memory: Memory
    owner: Owner
    peer: PeerId
    calls: list[str] = field(default_factory=list)
    dialled: int = 0
    fails: list[Exception] = field(default_factory=list)  # by the next calls of `lend`
    before_fetch: Any = None
    joins: bool = True  # queue pairs

    def content(self, at: int) -> np.ndarray:
        row = self.cache.index.find(SPACE, words())[at]
        (offset,) = self.cache.pages.offsets(self.cache.blocks.slot[[row]], 0)
        return self.memory.memory[offset : offset + PAGE]

    @property
    def pins(self) -> int:
        return int(self.cache.blocks.pins.sum())


class Link:
    """What `PeerLink` does, in this process."""

    def __init__(self, side: OwnerSide) -> None:
        self._side = side
        self.data_port, self.rail_count = side.owner.data_port, side.owner.rail_count
        self.is_closed = False

    async def lend(
        self, origin: bytes, wanted: Words, *, seconds: float, wants_sums: bool
    ) -> Borrowed:
        side = self._side
        if side.fails:
            raise side.fails.pop(0)
        lent = await side.owner.lend(
            side.peer, origin, wanted, ttl_s=seconds, wants_sums=wants_sums
        )
        if lent is None:
            return Borrowed(0, 0.0, (), np.empty((0, len(wanted)), np.int64), b"")
        loan, token, left_s = lent
        offsets = np.full((1, len(wanted)), -1, np.int64)
        offsets[:, loan.positions] = loan.offsets
        if wants_sums:  # they are of what is there now
            with trio.fail_after(PATIENCE_S):
                await side.owner._lent[loan.grant.id].summed.wait()
        if side.before_fetch is not None:
            side.before_fetch()
        return Borrowed(loan.grant.id, left_s, loan.page_bytes, offsets, token)

    async def release(self, grant: Any, _count: int, *, wants_sums: bool) -> Any:
        self._side.calls.append("release with sums" if wants_sums else "release")
        return await self._side.owner.release(self._side.peer, grant, wants_sums=wants_sums)

    async def connect(self, offer: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._side.joins:
            raise PeerLostError("no queue pair is joined")
        return self._side.owner.connect(self._side.peer, offer)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class ReaderSide:
    cache: Cache
    memory: Memory
    remote: Remote
    node: Neighbour

    def wanted(self, request: str = "r") -> FetchPart:
        self.remote.seek(key(request), words(), 0, now_s=0.0)
        search = self.remote.begun.popleft()
        (part,) = self.remote.found(search, [Source(ADDRESS, 0, COUNT)])
        return part

    async def bring(self, part: FetchPart) -> Result:
        """As `Fetching` does it."""
        count = len(part.rows)
        result = Result(np.zeros(count, np.bool_), np.zeros(count, np.bool_))
        try:
            await self.node.bring(part, result)
        finally:
            self.remote.end(part, result.arrived & ~result.unfenced, result.unfenced)
        return result

    def is_right(self, part: FetchPart, side: OwnerSide) -> bool:
        places = part.landing.offsets[0].tolist()
        return all(
            np.array_equal(self.memory.memory[offset : offset + PAGE], side.content(at))
            for at, offset in enumerate(places)
        )

    def hits(self) -> int:
        return self.cache.query(key("q"), words(), now_s=0.0).count


@asynccontextmanager
async def owning(rails: Any = None) -> AsyncIterator[OwnerSide]:
    """An owner of four blocks; `rails` makes open NICs of its pool."""
    cache, memory = new_cache(), Memory(np.zeros(POOL, np.uint8))
    shared = Shared(cache, new_below(cache))
    shared.open_space(SPACE, ORIGIN)
    plan = cache.prepare_save(key(), words(), rank=0, first=0, now_s=0.0)
    for offset in plan.offsets:
        noise = np.random.default_rng(int(offset)).integers(0, 128, PAGE, np.uint8)
        memory.memory[offset : offset + PAGE] = noise
    cache.complete_save(plan, np.ones(COUNT, np.bool_), copied_bytes=0)
    owner = Owner(Lending(cache, shared), memory, trio.current_time)
    nics = await rails(memory) if rails else None
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(owner.run, Address(host="127.0.0.1"), nics)
            yield OwnerSide(cache, memory, owner, owner.enter("10.0.0.2:50055"))
            nursery.cancel_scope.cancel()
    finally:
        if nics is not None:
            nics.close()


@asynccontextmanager
async def reading(
    side: OwnerSide, monkeypatch: pytest.MonkeyPatch, rails: Any = None, *, verifies: bool = False
) -> AsyncIterator[ReaderSide]:
    """A node that fetches from there."""

    async def dial(*_: object) -> Link:
        await trio.lowlevel.checkpoint()
        side.dialled += 1
        return Link(side)

    async def at_once(call: Any) -> Any:
        return await call

    monkeypatch.setattr(neighbours, "dial_peer", dial)
    monkeypatch.setattr(neighbours, "on_asyncio", at_once)
    for name in ("CALL_S", "DIAL_S", "LOAN_S"):  # a machine that stalls loses no block
        monkeypatch.setattr(neighbours, name, PATIENCE_S)
    cache, memory = new_cache(), Memory(np.full(POOL, MARK, np.uint8))
    below = new_below(cache)
    shared = Shared(cache, below)
    shared.open_space(SPACE, ORIGIN)
    remote = Remote(cache, below, shared)
    remote.has_others = lambda: True
    nics = await rails(memory) if rails else None
    local = Local(
        "10.0.0.2:50055", None, memory, trio.CapacityLimiter(8), trio.CapacityLimiter(2),
        lambda: nics, int(verifies),
    )  # fmt: skip
    node = Neighbour(Address(host="127.0.0.1", port=50055), local)
    node._pause_s = PATIENCE_S
    try:
        yield ReaderSide(cache, memory, remote, node)
    finally:
        with trio.CancelScope(shield=True):
            await node.aclose()
        if nics is not None:
            nics.close()


async def gone(side: OwnerSide) -> None:
    with trio.fail_after(PATIENCE_S):
        while side.pins or side.owner.lending.grants.count:  # noqa: ASYNC110
            await trio.sleep(0.01)
