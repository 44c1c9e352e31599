"""The whole core against an obvious model and a fake pool: it may lose, it never lies."""

import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from cache_world import (
    FILL_S,
    LEASE_S,
    NODES,
    PAGE,
    PAGES,
    POOL,
    REPLICAS,
    SPACES,
    WHICH,
    WHO,
    Life,
    Loads,
    Model,
    Promise,
    Saves,
    Who,
    has_row,
    is_turn,
    key_of,
    new_cache,
    path_to,
    ranks_of,
    rows_in,
    words,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trikv.core import room as module
from trikv.core.blocks import State
from trikv.core.errors import BadRequestError, LeaseLostError
from trikv.core.policies import DEFAULT
from trikv.core.words import InstanceName, RequestId, SpaceId


class CacheMachine(Model, RuleBasedStateMachine):
    """Two engines, four spaces of three shapes, 32 pages; copies late, failed or partial."""

    @initialize(
        entries_max=st.sampled_from([5, 12, 64]),
        batch=st.sampled_from([1, 2, 256]),
        chains_max=st.sampled_from([1, 64]),
        leases_max=st.sampled_from([1, 64]),
        leased=st.sampled_from([0.1, 0.5]),
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
            policy=self.policy,
            **self.limits,
        )
        self.now_s, self.memory = 0, {}
        self.lives, self.doomed, self.leases = {}, set(), {}
        self.asked: dict[Who, tuple[SpaceId, int]] = {}
        self.saves: Saves = []
        self.loads: Loads = []

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
        pages = []
        for rank, count in enumerate(PAGES[space]):
            first = int(self.cache.pages.offsets(slots, rank)[0]) // PAGE
            pages.append(list(range(first, first + count)))
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

    # -- time

    @rule(step_s=st.integers(0, LEASE_S))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s

    @rule(what=st.sampled_from(["leases", "fills"]))
    def sweep(self, what: str) -> None:
        if what == "leases":
            late = [who for who, one in self.leases.items() if one.deadline_s <= self.now_s]
            for who in late:
                self.end(who)
            assert self.cache.expire_leases(now_s=self.now_s) == len(late)
            return
        filling = [life for life in self.lives.values() if life.state is State.FILLING]
        lost = [life for life in filling if life.deadline_s <= self.now_s]
        for life in lost:
            self.lose(life)
        assert self.cache.expire_fills(now_s=self.now_s) == len(lost)

    # -- queries and leases

    @rule(who=WHO, space=SPACES, node=NODES, which=WHICH)
    def ask(self, who: Who, space: SpaceId, node: int, which: int) -> None:
        """For something, for what is there, or for the same as before."""
        if which < 10 and self.asked:
            who = sorted(self.asked)[which % len(self.asked)]
            space, node = self.asked[who]
        elif which < 25 and self.lives:
            space, node = sorted(self.lives)[-1 - which % len(self.lives)]
        self.asked[who] = space, node
        self.query(who, space, node)

    def query(self, who: Who, space: SpaceId, node: int) -> None:
        run: list[Life] = []
        for one in path_to(node):
            life = self.lives.get((space, one))
            if life is None or life.state is not State.SEALED:
                break
            run.append(life)
        holder = (*who, space)
        old = self.leases.get(holder)
        hit = self.cache.query(key_of(who, space), words(path_to(node)), now_s=self.now_s)
        same = old is not None and old.deadline_s > self.now_s and old.lives == run
        if old is not None and same and (old.is_whole or hit.lease.id == old.id):
            assert (hit.count, hit.lease.id) == (len(run), old.id)
            old.deadline_s = self.now_s + LEASE_S
            return
        for life in run:
            life.pins += 1
        if old is not None:
            self.end(holder)
        most = int(POOL * self.limits["leased_fraction"])
        room = (most - self.leased_bytes()) // (PAGE * sum(PAGES[space]))
        granted = run[: room if len(self.leases) < self.limits["leases_max"] else 0]
        self.unpin(run[len(granted) :])
        assert hit.count == len(granted)
        assert (hit.lease is None) == (not granted)
        if hit.lease is not None:
            assert hit.lease.entries.tolist() == [life.row for life in granted]
            ranks, until_s = ranks_of(key_of(who, space)), self.now_s + LEASE_S
            self.leases[holder] = Promise(hit.lease.id, granted, ranks, until_s)

    @rule(which=WHICH, what=st.sampled_from(["request", "request", "engine", "space"]))
    def something_ends(self, which: int, what: str) -> None:
        if what == "space" and len(self.lives) > 12:
            self.drop_space(SpaceId(1 + which % len(PAGES)))
        if what == "space" or not self.leases:
            return
        who = sorted(self.leases)[which % len(self.leases)]
        same = 2 if what == "request" else 1
        for other in [other for other in self.leases if other[:same] == who[:same]]:
            self.end(other)
        end = self.cache.release if same > 1 else self.cache.release_instance
        end(*who[:same])

    def drop_space(self, space: SpaceId) -> None:
        lost = [life for life in self.lives.values() if life.space == space]
        for life in lost:
            self.lose(life)
        assert self.dropped(self.cache, space) == len(lost)

    # -- loads

    @precondition(lambda self: self.leases)
    @rule(
        which=WHICH,
        thief=st.sampled_from([None, None, None, "one", "two"]),
        rank=st.sampled_from([0, 1, 2, 5, None, None]),
        first=st.integers(0, 3),
        count=st.integers(0, 6),
    )
    def load(self, which: int, thief: str | None, rank: int | None, first: int, count: int) -> None:
        """By one rank, maybe in vain, or by all that have not loaded yet."""
        who = sorted(self.leases)[which % len(self.leases)]
        promise = self.leases[who]
        if any(life.state is State.DOOMED for life in promise.lives):
            return  # of a space that was dropped: the store refuses it
        if rank is not None:
            self.prepare_load(who, promise, thief, rank, first, count)
            return
        for one in sorted(promise.left):
            self.prepare_load(who, promise, None, one, 0, len(promise.lives))

    def prepare_load(
        self, who: Who, promise: Promise, thief: str | None, rank: int, first: int, count: int
    ) -> None:
        caller = InstanceName(thief) if thief else who[0]
        is_lost = promise.deadline_s <= self.now_s or rank not in promise.left or caller != who[0]
        args = (promise.id, caller, rank, first, count)
        kept: dict[str, Any] = {"now_s": self.now_s, "replicas": REPLICAS.get(who[0], 1)}
        if is_lost or not first < first + count <= len(promise.lives):
            with pytest.raises(LeaseLostError if is_lost else BadRequestError):
                self.cache.prepare_load(*args, **kept)
            return
        plan, page = self.cache.prepare_load(*args, **kept), rank // kept["replicas"]
        lives = promise.lives[first : first + count]
        assert plan.entries.tolist() == [life.row for life in lives]
        assert plan.offsets.tolist() == [PAGE * life.pages[page][0] for life in lives]
        for life in lives:
            life.pins += 1
        self.loads.append((plan, lives, page))
        promise.left.remove(rank)
        if not promise.left:
            self.end(who)

    @precondition(lambda self: self.loads)
    @rule(which=WHICH, copied=st.integers(0, 6))
    def complete_load(self, which: int, copied: int) -> None:
        plan, lives, rank = self.loads.pop(which % len(self.loads))
        self.assert_readable(lives, rank)
        count = min(copied, len(lives))
        self.cache.complete_load(plan, copied_count=count, copied_bytes=count)
        self.unpin(lives)

    # -- saves

    @rule(
        who=WHO,
        space=SPACES,
        node=NODES,
        first=st.integers(0, 5),
        rank=st.integers(0, 5),
        shift=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def prepare_save(
        self, who: Who, space: SpaceId, node: int, first: int, rank: int, shift: int
    ) -> None:
        """Also with positions that are not true, so that a chain has a block twice."""
        path = path_to(node)
        first %= len(path)
        self.save(who, space, path[first:], first + shift, rank % len(ranks_of(key_of(who, space))))

    def save(self, who: Who, space: SpaceId, nodes: list[int], first: int, rank: int) -> None:
        cache, shape, key = self.cache, self.cache.spaces[space].shape, key_of(who, space)
        page, turn = rank // key.replicas, partial(is_turn, key, rank)
        block_bytes = PAGE * sum(PAGES[space])
        fraction = 0.6 if len(ranks_of(key)) == 1 else 0.4
        cap = max(0, int(POOL * fraction) - self.sum_of(State.FILLING)) // block_bytes
        absent = [node for node in nodes if (space, node) not in self.lives]
        free = min(cache.pages.free_count(shape), cache.blocks.unused_count)
        own = self.chain_of(who, space)
        evicted = cache.counters.evicted_blocks_total
        plan = cache.prepare_save(key, words(nodes), rank=rank, first=first, now_s=self.now_s)
        self.notice_evictions(evicted)
        assert all((space, node) in self.lives or node in absent for node in nodes)
        reserved = [node for node in absent if has_row(cache, space, node)]
        assert reserved == absent[: len(reserved)]
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
            and page not in life.claimed
            and turn(first + position)
        ]
        lives = [life for _, life in mine]
        assert plan.positions.tolist() == [position for position, _ in mine]
        assert plan.entries.tolist() == [life.row for life in lives]
        assert plan.offsets.tolist() == [PAGE * life.pages[page][0] for life in lives]
        due = [node for position, node in enumerate(nodes, first) if turn(position)]
        assert plan.refused_count == sum((space, node) not in self.lives for node in due)
        assert plan.present_count == len(due) - plan.refused_count - len(mine)
        for life in lives:
            life.claimed.add(page)
            life.writers += 1
            self.memory.update(dict.fromkeys(life.pages[page], plan.transfer))  # torn
        self.saves.append((plan, lives))

    def chain_of(self, who: Who, space: SpaceId) -> set[int]:
        return set(self.cache.chains.of(*who, space).entries.tolist())

    @precondition(lambda self: self.saves)
    @rule(which=WHICH, failed=st.sampled_from([0, 0, 0, 1, 5, 63]))
    def complete_save(self, which: int, failed: int) -> None:
        plan, lives = self.saves.pop(which % len(self.saves))
        copied = np.array([not failed >> i & 1 for i in range(len(lives))], np.bool_)
        for life, is_whole in zip(lives, copied.tolist(), strict=True):
            torn = dict.fromkeys(life.pages[plan.page], plan.transfer)
            self.memory.update(life.tags(plan.page) if is_whole else torn)
            life.writers -= 1
            if life.state is State.DOOMED:
                self.let_go(life)
            elif not is_whole:
                self.lose(life)
            else:
                life.filled.add(plan.page)
                if len(life.filled) == len(PAGES[life.space]):
                    life.state = State.SEALED
        self.cache.complete_save(plan, copied, copied_bytes=0)

    @rule(who=WHO, space=SPACES, node=NODES)
    def save_whole(self, who: Who, space: SpaceId, node: int) -> None:
        for rank in ranks_of(key_of(who, space)):
            self.save(who, space, path_to(node), 0, rank)
            self.complete_save(len(self.saves) - 1, 0)

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
        for shape, order in self.cache.room.orders.items():
            ours = {life.row for life in sealed if self.cache.spaces[life.space].shape == shape}
            known, parked = rows_in(order)
            assert known == ours
            assert all(self.cache.blocks.pins[row] for row in parked)

    def everything_old_can_be_evicted(self) -> None:
        """All copies and leases end; then fresh blocks take the whole pool; then all goes."""
        while self.saves or self.loads:
            if self.saves:
                self.complete_save(0, len(self.saves) % 3)
            if self.loads:
                self.complete_load(0, 1)
        self.now_s += LEASE_S + FILL_S
        self.sweep("leases")
        self.sweep("fills")
        assert not self.doomed
        for chunk in range(4):
            who = (InstanceName("fresh"), RequestId(str(chunk)))
            self.save(who, SpaceId(1), [1000 + 12 * chunk + i for i in range(12)], 0, 0)
            self.complete_save(0, 0)
        assert self.policy != DEFAULT or all(life.node >= 1000 for life in self.lives.values())
        for space in PAGES:
            self.drop_space(SpaceId(space))
        self.columns_and_sums_are_the_models()
        pages = self.cache.pages
        assert (pages.used_bytes, pages.free_slab_count) == (0, pages.slab_count)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(stateful_step_count=20, deadline=None)
