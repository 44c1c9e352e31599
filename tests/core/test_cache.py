"""The whole core against an obvious model and a fake pool: it may lose, it never lies."""

import sys

import numpy as np
import pytest
from cache_world import (
    FILL_S,
    LEASE_S,
    NODES,
    PAGE,
    PAGES,
    POOL,
    SPACES,
    WHO,
    Life,
    Model,
    Promise,
    Who,
    new_cache,
    path_to,
    words,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trikv.core import cache as module
from trikv.core.blocks import State
from trikv.core.cache import Key, LoadPlan, SavePlan
from trikv.core.errors import BadRequestError, LeaseLostError
from trikv.core.words import InstanceName, RequestId, SpaceId


class CacheMachine(Model, RuleBasedStateMachine):
    """Two engines, four spaces of three shapes, 32 pages; copies late, failed or partial."""

    @initialize(
        entries_max=st.sampled_from([5, 12, 64]),
        batch=st.sampled_from([1, 2, 256]),
        chains_max=st.sampled_from([1, 64]),
        leases_max=st.sampled_from([2, 64]),
        leased=st.sampled_from([0.2, 0.5]),
    )
    def begin(
        self, entries_max: int, batch: int, chains_max: int, leases_max: int, leased: float
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "EVICT_BATCH", batch)
        self.limits = {"leases_max": leases_max, "leased_fraction": leased}
        self.cache = new_cache(
            entries_max,
            lease_s=LEASE_S,
            fill_s=FILL_S,
            filling_fraction=0.6,
            filling_fraction_many_ranks=0.4,
            chains_max=chains_max,
            **self.limits,
        )
        self.now_s = 0
        self.memory: dict[int, object] = {}
        self.lives, self.doomed, self.leases = {}, set(), {}
        self.saves: list[tuple[SavePlan, list[Life]]] = []
        self.loads: list[tuple[LoadPlan, list[Life], int]] = []

    def teardown(self) -> None:
        self.patch.undo()
        if sys.exc_info()[0] is None:
            self.everything_old_can_be_evicted()

    # -- what the cache did

    def find(self, lives: list[Life]) -> list[int]:
        rows: dict[Life, int] = {}
        for space in PAGES:
            mine = [life for life in lives if life.space == space]
            found = self.cache.index.find(SpaceId(space), words([life.node for life in mine]))
            rows.update(zip(mine, found.tolist(), strict=True))
        return [rows[life] for life in lives]

    def new_life(self, space: SpaceId, node: int) -> None:
        """Pages that nobody reads, writes or was promised; what was in them is gone."""
        row = int(self.cache.index.find(space, words([node]))[0])
        slots = self.cache.blocks.slot[[row]]
        starts = [
            int(self.cache.pages.offsets(slots, r)[0]) // PAGE for r in range(len(PAGES[space]))
        ]
        pages = [
            list(range(at, at + count)) for at, count in zip(starts, PAGES[space], strict=True)
        ]
        units = {unit for page in pages for unit in page}
        assert units <= set(range(POOL // PAGE))
        for other in self.all():
            assert other.row != row
            assert units.isdisjoint(unit for page in other.pages for unit in page)
        self.lives[space, node] = Life(space, node, row, pages, self.now_s + FILL_S)
        self.memory.update(dict.fromkeys(units))

    def notice_evictions(self, before: int) -> None:
        sealed = [life for life in self.lives.values() if life.state is State.SEALED]
        gone = [life for life, row in zip(sealed, self.find(sealed), strict=True) if row < 0]
        assert len(gone) == self.cache.counters.evicted_blocks_total - before
        for life in gone:
            assert life.pins == 0
            del self.lives[life.space, life.node]

    def assert_readable(self, lives: list[Life], rank: int) -> None:
        for life in lives:
            for unit, tag in life.tags(rank).items():
                assert self.memory[unit] == tag

    # -- time

    @rule(step_s=st.integers(0, LEASE_S))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s

    @rule()
    def sweep_leases(self) -> None:
        late = [who for who, one in self.leases.items() if one.deadline_s <= self.now_s]
        for who in late:
            self.end(who)
        assert self.cache.expire_leases(now_s=self.now_s) == len(late)

    @rule()
    def sweep_fills(self) -> None:
        filling = [life for life in self.lives.values() if life.state is State.FILLING]
        late = [life for life in filling if life.deadline_s <= self.now_s]
        for life in late:
            self.lose(life)
        assert self.cache.expire_fills(now_s=self.now_s) == len(late)

    # -- queries and leases

    @rule(who=WHO, space=SPACES, node=NODES)
    def query(self, who: Who, space: SpaceId, node: int) -> None:
        run: list[Life] = []
        for one in path_to(node):
            life = self.lives.get((space, one))
            if life is None or life.state is not State.SEALED:
                break
            run.append(life)
        old = self.leases.get(who)
        hit = self.cache.query(Key(*who, space), words(path_to(node)), now_s=self.now_s)
        same = old is not None and old.deadline_s > self.now_s and old.lives == run
        if old is not None and same and (old.is_whole or hit.lease.id == old.id):
            assert (hit.count, hit.lease.id) == (len(run), old.id)
            old.deadline_s = self.now_s + LEASE_S
            return
        for life in run:
            life.pins += 1
        if old is not None:
            self.end(who)
        most = int(POOL * self.limits["leased_fraction"])
        room = (most - self.leased_bytes()) // (PAGE * sum(PAGES[space]))
        granted = run[: room if len(self.leases) < self.limits["leases_max"] else 0]
        self.unpin(run[len(granted) :])
        assert hit.count == len(granted)
        assert (hit.lease is None) == (not granted)
        if hit.lease is not None:
            assert hit.lease.entries.tolist() == [life.row for life in granted]
            left = set(range(len(PAGES[space])))
            self.leases[who] = Promise(hit.lease.id, granted, left, self.now_s + LEASE_S)

    @rule(who=WHO)
    def release(self, who: Who) -> None:
        if who in self.leases:
            self.end(who)
        self.cache.release(*who)

    @rule(who=WHO)
    def engine_lost(self, who: Who) -> None:
        for key in [key for key in self.leases if key[0] == who[0]]:
            self.end(key)
        self.cache.release_instance(who[0])

    # -- loads

    @rule(
        who=WHO,
        thief=st.sampled_from([None, None, None, "one", "two"]),
        rank=st.integers(0, 2),
        first=st.integers(0, 6),
        count=st.integers(0, 6),
    )
    def prepare_load(self, who: Who, thief: str | None, rank: int, first: int, count: int) -> None:
        promise = self.leases.get(who)
        if promise is None or any(life.state is State.DOOMED for life in promise.lives):
            return  # of a space that was dropped: the store refuses it
        caller = InstanceName(thief) if thief else who[0]
        first = min(first, max(0, len(promise.lives) - 1)) if count else first
        is_lost = promise.deadline_s <= self.now_s or rank not in promise.left or caller != who[0]
        args = (promise.id, caller, rank, first, count)
        if is_lost or not first < first + count <= len(promise.lives):
            with pytest.raises(LeaseLostError if is_lost else BadRequestError):
                self.cache.prepare_load(*args, now_s=self.now_s)
            return
        plan = self.cache.prepare_load(*args, now_s=self.now_s)
        lives = promise.lives[first : first + count]
        assert plan.entries.tolist() == [life.row for life in lives]
        assert plan.offsets.tolist() == [PAGE * life.pages[rank][0] for life in lives]
        for life in lives:
            life.pins += 1
        self.loads.append((plan, lives, rank))
        promise.left.remove(rank)
        if not promise.left:
            self.end(who)

    @rule(which=st.integers(0, 9), copied=st.integers(0, 6))
    def complete_load(self, which: int, copied: int) -> None:
        if self.loads:
            plan, lives, rank = self.loads.pop(which % len(self.loads))
            self.assert_readable(lives, rank)
            count = min(copied, len(lives))
            self.cache.complete_load(plan, copied_count=count, copied_bytes=count)
            self.unpin(lives)

    @rule(who=WHO, space=SPACES, node=NODES)
    def query_and_load(self, who: Who, space: SpaceId, node: int) -> None:
        self.query(who, space, node)
        for rank in range(len(PAGES[space])):
            self.prepare_load(who, None, rank, 0, len(path_to(node)) - rank)

    # -- saves

    @rule(
        who=WHO,
        space=SPACES,
        node=NODES,
        first=st.integers(0, 5),
        rank=st.integers(0, 2),
        shift=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def prepare_save(
        self, who: Who, space: SpaceId, node: int, first: int, rank: int, shift: int
    ) -> None:
        """Also with positions that are not true, so that a chain has a block twice."""
        path = path_to(node)
        first %= len(path)
        self.save(who, space, path[first:], first + shift, rank % len(PAGES[space]))

    def save(self, who: Who, space: SpaceId, nodes: list[int], first: int, rank: int) -> None:
        cache, shape = self.cache, self.cache.spaces[space].shape
        block_bytes = PAGE * sum(PAGES[space])
        fraction = 0.6 if len(PAGES[space]) == 1 else 0.4
        cap = max(0, int(POOL * fraction) - self.sum_of(State.FILLING)) // block_bytes
        absent = [node for node in nodes if (space, node) not in self.lives]
        free = min(cache.pages.free_count(shape), cache.blocks.unused_count)
        own = self.chain_of(who, space)
        evicted = cache.counters.evicted_blocks_total
        plan = cache.prepare_save(
            Key(*who, space), words(nodes), rank=rank, first=first, now_s=self.now_s
        )
        self.notice_evictions(evicted)
        present = [node for node in nodes if node not in absent]
        assert all((space, node) in self.lives for node in present)
        reserved = absent[: len(absent) - plan.refused_count]
        assert min(len(absent), cap, free) <= len(reserved) <= min(len(absent), cap)
        for node in reserved:
            self.new_life(space, node)
        if len(reserved) < min(len(absent), cap):
            self.assert_full(space, own | self.chain_of(who, space))
        mine = [
            (position, life)
            for position, node in enumerate(nodes)
            if (life := self.lives.get((space, node))) is not None
            and life.state is State.FILLING
            and rank not in life.claimed
        ]
        lives = [life for _, life in mine]
        assert plan.positions.tolist() == [position for position, _ in mine]
        assert plan.entries.tolist() == [life.row for life in lives]
        assert plan.offsets.tolist() == [PAGE * life.pages[rank][0] for life in lives]
        assert plan.present_count == len(nodes) - plan.refused_count - len(mine)
        for life in lives:
            life.claimed.add(rank)
            life.writers += 1
            self.memory.update(dict.fromkeys(life.pages[rank], plan.transfer))  # torn
        self.saves.append((plan, lives))

    def chain_of(self, who: Who, space: SpaceId) -> set[int]:
        chain = self.cache.chains.of(*who, space)
        return set(chain.entries[: chain.length].tolist())

    def assert_full(self, space: SpaceId, own: set[int]) -> None:
        """Refused only when nothing but the request's own blocks could have gone."""
        for life in self.lives.values():
            if PAGES[life.space] == PAGES[space] and life.state is State.SEALED:
                assert life.pins or life.row in own

    @rule(which=st.integers(0, 9), failed=st.sampled_from([0, 0, 0, 1, 5, 63]))
    def complete_save(self, which: int, failed: int) -> None:
        if not self.saves:
            return
        plan, lives = self.saves.pop(which % len(self.saves))
        copied = np.array([not failed >> i & 1 for i in range(len(lives))], np.bool_)
        for life, is_whole in zip(lives, copied.tolist(), strict=True):
            torn = dict.fromkeys(life.pages[plan.rank], plan.transfer)
            self.memory.update(life.tags(plan.rank) if is_whole else torn)
            life.writers -= 1
            if life.state is State.DOOMED:
                self.let_go(life)
            elif not is_whole:
                self.lose(life)
            else:
                life.filled.add(plan.rank)
                if len(life.filled) == len(PAGES[life.space]):
                    life.state = State.SEALED
        self.cache.complete_save(plan, copied, copied_bytes=0)

    @rule(who=WHO, space=SPACES, node=NODES)
    def save_whole(self, who: Who, space: SpaceId, node: int) -> None:
        for rank in range(len(PAGES[space])):
            self.save(who, space, path_to(node), 0, rank)
            self.complete_save(len(self.saves) - 1, 0)

    @rule(space=SPACES)
    def drop_space(self, space: SpaceId) -> None:
        lost = [life for life in self.lives.values() if life.space == space]
        for life in lost:
            self.lose(life)
        assert self.cache.drop_space(space) == len(lost)

    # -- what always holds

    @invariant()
    def columns_and_sums_are_the_models(self) -> None:
        cache, lives = self.cache, self.all()
        cache.blocks.check()
        rows = [life.row for life in lives]
        assert cache.blocks.state[rows].tolist() == [life.state for life in lives]
        assert cache.blocks.writers[rows].tolist() == [life.writers for life in lives]
        assert cache.blocks.pins[rows].tolist() == [life.pins for life in lives]
        assert cache.blocks.unused_count == cache.blocks.capacity - len(lives)
        assert len(cache.index) == len(self.lives)
        assert self.find(list(self.lives.values())) == rows[: len(self.lives)]
        assert cache.pages.used_bytes == sum(life.bytes for life in lives)
        assert cache.filling_bytes == self.sum_of(State.FILLING)
        assert cache.leases.pinned_bytes == self.leased_bytes()
        assert cache.leases.active.keys() == {one.id for one in self.leases.values()}
        assert cache.transfers == {plan.transfer for plan, *_ in [*self.saves, *self.loads]}

    @invariant()
    def promised_and_read_pages_hold_their_own_bytes(self) -> None:
        for _, lives, rank in self.loads:
            self.assert_readable(lives, rank)
        for life in self.lives.values():
            if life.state is State.SEALED:
                for rank in range(len(PAGES[life.space])):
                    self.assert_readable([life], rank)

    @invariant()
    def each_sealed_block_is_in_the_order_of_its_shape_alone(self) -> None:
        sealed = [life for life in self.lives.values() if life.state is State.SEALED]
        for shape, order in self.cache._orders.items():
            ours = {life.row for life in sealed if self.cache.spaces[life.space].shape == shape}
            parked = set(np.flatnonzero(order._turn > 0).tolist())
            known = set(np.flatnonzero((order._place > 0) | (order._turn != 0)).tolist())
            assert known == ours
            assert len(order) == len(ours)
            assert all(self.cache.blocks.pins[row] for row in parked)

    def everything_old_can_be_evicted(self) -> None:
        """All copies and leases end; then fresh blocks take the whole pool; then all goes."""
        while self.saves or self.loads:
            self.complete_save(0, len(self.saves) % 3)
            self.complete_load(0, 1)
        self.now_s += LEASE_S + FILL_S
        self.sweep_leases()
        self.sweep_fills()
        assert not self.doomed
        for chunk in range(4):
            who = (InstanceName("fresh"), RequestId(str(chunk)))
            self.save(who, SpaceId(1), [1000 + 12 * chunk + i for i in range(12)], 0, 0)
            self.complete_save(0, 0)
        assert all(life.node >= 1000 for life in self.lives.values())
        for space in PAGES:
            self.drop_space(SpaceId(space))
        self.columns_and_sums_are_the_models()
        pages = self.cache.pages
        assert (pages.used_bytes, pages.free_slab_count) == (0, pages.slab_count)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=40, deadline=None)
