"""A pool above disks whose bytes one can see, and everything that may happen to them."""

import random
import sys

import numpy as np
from below_medium import FakeMedium, origin_of
from cache_world import LEASE_S, PAGE, PAGES, SLAB, Who, path_to, words
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trikv.core.adopting import parts_of
from trikv.core.below import Below
from trikv.core.blocks import ABSENT, SEALED
from trikv.core.cache import Cache
from trikv.core.lower import Lower
from trikv.core.parts import ReadPart, SpillPart  # noqa: TC001  # nothing else is in it
from trikv.core.plans import Key, Limits
from trikv.core.spills import Budget, Spills
from trikv.core.words import Entries, InstanceName, RequestId, SpaceId

REGION = 5 * PAGE
REGIONS = 2
NODES = st.sampled_from([*range(1, 16), 31, 47, 63, 127, 255])
WHO = st.tuples(
    st.just("one").map(InstanceName), st.sampled_from(["r", "s", "t", "u"]).map(RequestId)
)
WHICH = st.integers(0, 99)
MASK = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 2, 4, 63])


def sum_of(tag: object) -> int:
    return hash(tag) & (2**64 - 1)


class BelowMachine(RuleBasedStateMachine):
    """Two spaces, a pool of 16 pages, one or two disks of 10; everything late, failed or torn."""

    spaces = (1, 2)
    disks_max = 2
    is_strict = False  # one disk, one space, nothing wrong: no block outlives its parent

    @initialize(disks=st.integers(1, 2), through=st.booleans(), seed=st.integers(0, 99))
    def begin(self, disks: int, through: bool, seed: int) -> None:  # noqa: FBT001  # hypothesis
        self.rng = random.Random(seed)
        self.mediums = [FakeMedium() for _ in range(min(disks, self.disks_max))]
        self.through = through
        self.now_s, self.openings = 0.0, 0
        self.epochs = dict.fromkeys(self.spaces, 0)
        self.start()

    def start(self) -> None:
        """A daemon starts: an empty pool, disks as they are."""
        self.openings += 1
        limits = Limits(lease_s=LEASE_S, filling_fraction=0.9, filling_fraction_many_ranks=0.9)
        self.cache = Cache(2 * SLAB, SLAB, entries_max=64, seed=1, limits=limits)
        self.lowers = [
            Lower(REGIONS, REGION, slot_bytes_min=PAGE, first_sequence=self.openings << 40, seed=2)
            for _ in self.mediums
        ]
        spills = Spills(Budget(None), write_through=self.through)
        self.below = Below(self.cache, self.lowers, spills)
        self.memory: dict[int, object] = {}
        self.prompts: dict[Who, int] = {}
        self.reads: list[ReadPart] = []
        self.writes: list[SpillPart] = []
        self.number = {space: SpaceId(10 * self.epochs[space] + space) for space in self.spaces}
        for space in self.spaces:
            self.open(space)
        for lower, medium in zip(self.lowers, self.mediums, strict=True):
            self.recover(lower, medium)

    def open(self, space: int) -> None:
        page_bytes = tuple(PAGE * count for count in PAGES[space])
        self.cache.open_space(self.number[space], page_bytes)
        self.below.open_space(self.number[space], origin_of(space), page_bytes)

    def recover(self, lower: Lower, medium: FakeMedium) -> None:
        found, records = medium.found(self.rng)
        for part in parts_of(found, self.rng.choice([1, 5, 100])):
            lower.adopt(part)
        entries, keys = lower.adopted()
        lower.place(entries[np.lexsort(keys)])
        lower.end_adopting()
        kept: dict[tuple[bytes, int], int] = {}
        for one in records:
            kept[one[0], one[1]] = max(one[2], kept.get((one[0], one[1]), 0))
        assert self.on_disk(lower) == set(kept)
        for row in np.flatnonzero(lower.blocks.state == SEALED).tolist():
            assert lower.sequence[row] == kept[self.name(lower, row)]

    # -- what is where

    def name(self, lower: Lower, row: int) -> tuple[bytes, int]:
        origins = {number: raw for raw, number in lower._origins.items()}
        node = int(lower.index.hashes_of(np.array([row], np.int32))[0, 0])
        return origins[SpaceId(lower.blocks.space.item(row))], node

    def on_disk(self, lower: Lower) -> set[tuple[bytes, int]]:
        rows = np.flatnonzero(lower.blocks.state == SEALED).tolist()
        known = set(lower._origins.values())
        rows = [row for row in rows if lower.blocks.space[row] in known]  # the others were reset
        names = [self.name(lower, row) for row in rows]
        assert len(set(names)) == len(names)
        return set(names)

    def sealed(self, lower: Lower) -> set[tuple[int, int]]:
        """All blocks of a disk, also those that were reset and not dropped yet."""
        rows = np.flatnonzero(lower.blocks.state == SEALED)
        return set(zip(rows.tolist(), lower.blocks.generation[rows].tolist(), strict=True))

    def in_pool(self, space: int, nodes: list[int]) -> Entries:
        found = self.cache.index.find(self.number[space], words(nodes))
        found[self.cache.blocks.state[found] != SEALED] = -1
        return found

    def units(self, entries: Entries, space: int) -> list[list[int]]:
        """The pool's 4 KiB units of each block, all ranks."""
        slots = self.cache.blocks.slot[entries]
        parts = [
            self.cache.pages.offsets(slots, rank)[:, None] // PAGE + np.arange(count)
            for rank, count in enumerate(PAGES[space])
        ]
        return np.concatenate(parts, axis=1).tolist()

    def put(self, entries: Entries, space: int, tags: list[object]) -> None:
        for units, tag in zip(self.units(entries, space), tags, strict=True):
            self.memory.update({unit: (tag, at) for at, unit in enumerate(units)})

    def space_of(self, number: int) -> int:
        return number % 10

    def tag(self, space: int, node: int) -> object:
        return space, self.epochs[space], node

    # -- engines

    def is_one_prompt(self, who: Who, node: int) -> None:
        """A request's blocks are those of one prompt, which only grows."""
        before = self.prompts.get(who, 1)
        if node in path_to(before):  # its beginning
            return
        if self.is_strict and before not in path_to(node):
            self.cache.release(*who)
        self.prompts[who] = node

    @rule(who=WHO, space=WHICH, node=NODES, failed=MASK)
    def save(self, who: Who, space: int, node: int, failed: int) -> None:
        space = self.spaces[space % len(self.spaces)]
        self.is_one_prompt(who, node)
        nodes, key = path_to(node), Key(*who, self.number[space])
        for rank in range(len(PAGES[space])):
            plan = self.cache.prepare_save(key, words(nodes), rank=rank, first=0, now_s=self.now_s)
            if rank == 0:
                fresh = [nodes[at] for at in plan.positions.tolist()]
                self.put(plan.entries, space, [self.tag(space, one) for one in fresh])
            copied = np.array([not failed >> at & 1 for at in range(len(plan.entries))], np.bool_)
            self.cache.complete_save(plan, copied, copied_bytes=0)

    @rule(who=WHO, space=WHICH, node=NODES)
    def ask(self, who: Who, space: int, node: int) -> None:
        space = self.spaces[space % len(self.spaces)]
        self.is_one_prompt(who, node)
        nodes, number = path_to(node), self.number[space]
        resident = self.in_pool(space, nodes)
        hit = self.cache.query(Key(*who, number), words(nodes), now_s=self.now_s)
        most = int(np.argmin(resident >= 0)) if (resident < 0).any() else len(nodes)
        assert hit.count <= most
        limit = self.cache.leases.room(self.cache.spaces[number].block_bytes)
        held = [set(zip(*self.keys(part.entries, part.disk), strict=True)) for part in self.reads]
        pinned = np.flatnonzero(self.cache.blocks.pins > 0)
        lives = self.cache.blocks.generation[pinned].tolist()
        coming = self.below.fetch(number, words(nodes), hit.count, limit)
        assert self.cache.blocks.generation[pinned].tolist() == lives
        assert coming.count <= min(limit, len(nodes) - hit.count)
        behind = nodes[hit.count : hit.count + coming.count]
        entries = self.cache.index.find(number, words(behind))
        assert (entries >= 0).all()  # on its way, or there
        assert (self.in_pool(space, nodes[: hit.count]) == resident[: hit.count]).all()
        for part in coming.parts:
            for keys in held:  # each block is read once for all who want it
                assert keys.isdisjoint(zip(*self.keys(part.entries, part.disk), strict=True))
            self.put(part.landing.entries[part.rows], space, [part] * len(part.rows))  # torn
        self.reads += coming.parts

    def keys(self, entries: Entries, disk: int) -> tuple[list[int], list[int]]:
        return [disk] * len(entries), entries.tolist()

    @rule(who=WHO)
    def release(self, who: Who) -> None:
        self.cache.release(*who)

    @rule(step_s=st.integers(0, LEASE_S))
    def time_passes(self, step_s: int) -> None:
        self.now_s += step_s
        self.cache.expire_leases(now_s=self.now_s)

    # -- disks

    @precondition(lambda self: self.reads)
    @rule(which=WHICH, failed=MASK, gives_up=st.sampled_from([False, False, False, True]))
    def read(self, which: int, failed: int, gives_up: bool) -> None:  # noqa: FBT001  # hypothesis
        part = self.reads.pop(which % len(self.reads))
        if gives_up:
            self.below.give_up(part)
            return
        medium = self.mediums[part.disk]
        stored = [
            medium.bytes.get(place)
            for place in zip(part.regions.tolist(), part.slots.tolist(), strict=True)
        ]
        failed &= 0 if self.is_strict else failed
        arrived = np.array(
            [
                sum_of(tag) == one and not failed >> at & 1
                for at, (tag, one) in enumerate(zip(stored, part.sums.tolist(), strict=True))
            ],
            np.bool_,
        )
        space = self.space_of(part.landing.space)
        self.put(part.landing.entries[part.rows], space, stored)
        before = self.on_disk(self.lowers[part.disk])
        self.below.end_read(part, arrived)
        assert len(before) - len(self.on_disk(self.lowers[part.disk])) <= int((~arrived).sum())

    @rule(is_full=st.booleans(), most=st.sampled_from([PAGE, 4 * PAGE, 100 * PAGE]))
    def spill(self, is_full: bool, most: int) -> None:  # noqa: FBT001  # hypothesis
        busy = {part.disk for part in self.writes}  # one batch at a time on each, as the shell does
        idle = set(range(len(self.lowers))) - busy
        if not idle:
            return
        waiting = self.below.spills.next(is_full=is_full, now_s=self.now_s)
        if waiting is None:
            return
        before = [self.sealed(lower) for lower in self.lowers]
        evicted = [lower.counters.evicted_blocks_total for lower in self.lowers]
        parts, has_more = self.below.spill(waiting.chain, most, idle)
        if has_more:
            self.below.spills.put_back(waiting)
        for lower, old, count in zip(self.lowers, before, evicted, strict=True):
            gone = old - self.sealed(lower)
            assert len(gone) == lower.counters.evicted_blocks_total - count
        for part in parts:
            for region in part.plan.cuts:
                self.mediums[part.disk].cut(region, part.plan.page_bytes)
        self.writes += parts
        names = [
            (one.chain.space, node) for one in self.writes for node in one.words[:, 0].tolist()
        ]
        assert len(set(names)) == len(names)  # no two disks write one block at a time

    @precondition(lambda self: self.writes)
    @rule(which=WHICH, failed=MASK)
    def write(self, which: int, failed: int) -> None:
        part = self.writes.pop(which % len(self.writes))
        medium, plan = self.mediums[part.disk], part.plan
        space = self.space_of(part.chain.space)
        written = np.array([not failed >> at & 1 for at in range(len(part.entries))], np.bool_)
        sums = np.zeros(len(part.entries), np.uint64)
        offsets = part.offsets.T // PAGE
        for at, place in enumerate(zip(plan.regions.tolist(), plan.slots.tolist(), strict=True)):
            units = [
                first + unit
                for first, count in zip(offsets[at].tolist(), PAGES[space], strict=True)
                for unit in range(count)
            ]
            tags = {self.memory[unit][0] for unit in units}  # type: ignore[index]
            (tag,) = tags  # the page was not anybody else's while it was read
            medium.bytes[place] = tag if written[at] else "torn"
            sums[at] = sum_of(tag)
            if written[at]:
                node = int(part.words[at, 0])
                pages, generation = medium.headers[place[0]]
                medium.records[place] = (
                    origin_of(space), node, plan.sequence, pages, generation,
                    int(part.depths[at]), int(sums[at]),
                )  # fmt: skip
            elif self.rng.random() < 0.5:
                medium.records.pop(place, None)
        self.below.end_spill(part, written, sums)

    @rule(which=WHICH, count=st.integers(1, 9))
    def work_goes_well(self, which: int, count: int) -> None:
        while self.reads:
            self.read(which, 0, gives_up=False)
        for _ in range(count):
            self.spill(is_full=True, most=100 * PAGE)
            while self.writes:
                self.write(which, 0)

    @precondition(lambda self: not self.is_strict)
    @rule(which=WHICH)
    def bit_flips(self, which: int) -> None:
        medium = self.mediums[which % len(self.mediums)]
        if medium.bytes:
            medium.bytes[sorted(medium.bytes)[which % len(medium.bytes)]] = "flipped"

    @precondition(lambda self: not self.is_strict)
    @rule(which=WHICH)
    def disk_fails(self, which: int) -> None:
        if which < 3:
            self.lowers[which % len(self.lowers)].withhold("it is broken")

    @rule(which=WHICH, kills=st.booleans())
    def reset(self, which: int, kills: bool) -> None:  # noqa: FBT001  # hypothesis
        if which > 15:
            return
        space = self.spaces[which % len(self.spaces)]
        old = self.number[space]
        self.cache.retire_space(old)
        self.below.retire_space(old)
        origin, _ = self.below.voids.popitem()
        for lower, medium in zip(self.lowers, self.mediums, strict=True):
            medium.voids[origin] = lower.floor(origin)
        assert not self.below.has(old, words(list(range(64)))).any()
        self.epochs[space] += 1
        self.number[space] = SpaceId(10 * self.epochs[space] + space)
        self.open(space)
        if kills and not self.is_strict:
            self.start()

    @rule(steps=st.integers(1, 3))
    def forget(self, steps: int) -> None:
        """The daemon's task drops some of what was reset."""
        for _ in range(steps):
            if not self.cache.drop_retired():
                self.below.drop_retired()

    @precondition(lambda self: not self.is_strict)  # evicted records are found again after it
    @rule(which=WHICH)
    def killed(self, which: int) -> None:
        if which < 10:
            self.start()

    # -- what must be true

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "cache"):
            return
        blocks = self.cache.blocks
        blocks.check()
        for space in self.spaces:
            nodes = list(range(256))
            found = self.in_pool(space, nodes)
            at = np.flatnonzero(found >= 0)
            for node, units in zip(at.tolist(), self.units(found[at], space), strict=True):
                wanted = {unit: (self.tag(space, node), i) for i, unit in enumerate(units)}
                assert {unit: self.memory.get(unit) for unit in units} == wanted
        landing = np.flatnonzero(self.cache.landings.is_landing)
        rows = [row for part in self.reads for row in part.landing.entries[part.rows].tolist()]
        assert sorted(rows) == landing.tolist()
        sizes = [len(part.rows) * sum(part.landing.lengths) for part in self.reads]
        assert self.cache.landings.bytes == sum(sizes)
        for disk, lower in enumerate(self.lowers):
            lower.blocks.check()
            pins = np.zeros(lower.blocks.capacity, np.int64)
            for part in self.reads:
                np.add.at(pins, part.entries[[part.disk == disk] * len(part.entries)], 1)
            assert (lower.blocks.pins == pins).all()
            used = lower.blocks.counts[ABSENT]
            assert lower.pages.used_bytes >= PAGE * (lower.blocks.capacity - used)
            if self.is_strict:
                self.no_orphans(lower)

    def no_orphans(self, lower: Lower) -> None:
        names = {node for _, node in self.on_disk(lower)}
        assert all(node == 1 or node // 2 in names for node in names), sorted(names)

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None or not hasattr(self, "cache"):
            return
        while self.reads:
            self.below.give_up(self.reads.pop())
        while self.writes:
            part = self.writes.pop()
            count = len(part.entries)
            self.below.end_spill(part, np.zeros(count, np.bool_), np.zeros(count, np.uint64))
        self.cache.release_instance(InstanceName("one"))
        for space in self.spaces:
            self.cache.retire_space(self.number[space])
            self.below.retire_space(self.number[space])
        while self.cache.drop_retired() or self.below.drop_retired():
            pass
        assert self.cache.pages.used_bytes == 0
        assert not self.cache.transfers
        assert self.cache.filling_bytes == 0
        for lower in self.lowers:
            assert lower.pages.used_bytes == 0
            assert lower.blocks.counts[ABSENT] == lower.blocks.capacity
            assert not lower._shapes


class StrictMachine(BelowMachine):
    """One disk, one space, no restart, every read right: no block outlives its parent there."""

    spaces = (1,)
    disks_max = 1
    is_strict = True
