"""All disks below one pool: what can be had from them, what is brought up, what is written down.

Decided here: how the pool's blocks and the disks' move together: that a fetch reads only what is
missing and each block once, that a block is written with or after its ancestors, and which disk
gets it. This file does not know files, tasks or clocks.
"""

from collections import deque
from collections.abc import Callable, Container, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import SEALED
from trikv.core.cache import Cache
from trikv.core.ceiling import TIERS
from trikv.core.chains import Chain
from trikv.core.landing import Landing
from trikv.core.lower import Lower
from trikv.core.parts import Coming, ReadPart, SpillPart
from trikv.core.reading import REQUESTS, Reading
from trikv.core.spills import Spills
from trikv.core.words import Entries, SpaceId, Words

SSD: Final = TIERS.index("ssd")
ABSENT: Final = -1
LOOKED_AT_ONCE: Final = 1 << 16

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]


class Below:
    """The disks of one pool.

    Attributes:
        begun: reads that were prepared and that nobody has begun; whoever reads takes them.
        reading: for whom the pool's rows are being read.
        ended: told of each part of a read that has ended, and which of its blocks have arrived.
        lost: called when a disk is not used any more.
        voids: origins whose older records are to be voided, and the disks that have done so. Nobody
            is told before all have.
        quarantined_bytes: of the pool, that a hung disk may still touch: never used again.
    """

    def __init__(
        self, cache: Cache, lowers: Sequence[Lower], spills: Spills, *, has_disks: bool = True
    ) -> None:
        self.cache = cache
        self.lowers = list(lowers)
        self.spills = spills
        self.begun: deque[ReadPart] = deque()
        self.voids: dict[bytes, set[int]] = {}
        self.quarantined_bytes = 0
        self.reading = Reading(cache.blocks.capacity)
        self.ended: Callable[[ReadPart, Bools], object] = lambda _part, _arrived: None
        self.lost: Callable[[], object] = lambda: None
        self._origins: dict[SpaceId, tuple[bytes, tuple[SpaceId | None, ...]]] = {}
        if has_disks:
            cache.attach_spills(spills)

    # -- spaces

    def open_space(
        self, space: SpaceId, origin: bytes, page_bytes: tuple[int, ...], tenant: str = ""
    ) -> None:
        """Blocks of a space are called `origin` on the disks; may be called again."""
        numbers = tuple(lower.open_origin(origin, page_bytes, tenant) for lower in self.lowers)
        self._origins[space] = origin, numbers

    def close_space(self, space: SpaceId) -> None:
        """The pool has forgotten a space; unknown ones are fine."""
        self._origins.pop(space, None)

    def retire_space(self, space: SpaceId) -> None:
        """Nobody can reach a space any more, on any disk; see `Lower.retire_origin`.

        Its origin is in `voids` now. What is being read or written for it ends as it would have;
        nothing more is found, read or written.
        """
        origin, _ = self._origins[space]
        for lower in self.lowers:
            lower.retire_origin(origin)
        self._origins[space] = origin, ()
        self.voids[origin] = set()  # anew, where it was retired before

    def drop_retired(self) -> bool:
        """Forget some of what was retired, on one disk; False: there was nothing to do."""
        return any(lower.drop_retired() for lower in self.lowers)

    def numbers(self, space: SpaceId) -> tuple[SpaceId | None, ...]:
        """What a space's origin is called on each disk; None: it has no place there."""
        return self._origins[space][1]

    def origin(self, space: SpaceId) -> bytes:
        """What a space's blocks are called on the disks."""
        return self._origins[space][0]

    def floor(self, disk: int, origin: bytes) -> int:
        """Records of an origin with a lower sequence are dead on a disk."""
        return self.lowers[disk].floor(origin)

    # -- up

    def has(self, space: SpaceId, words: Words) -> Bools:
        """Which blocks some disk has."""
        found = np.zeros(len(words), np.bool_)
        for disk, origin in self._open(space):
            found |= self.lowers[disk].find(origin, words) >= 0
        return found

    def coming(self, space: SpaceId, words: Words, first: int, limit: int) -> int:
        """How many blocks from `first` on are at hand, on their way, or on a disk; no gap."""
        return len(self.find(space, words[first : first + limit])[0])

    def fetch(self, space: SpaceId, words: Words, first: int, limit: int) -> Coming:
        """Begin to bring up what lies behind the blocks at hand.

        Args:
            space: theirs.
            words: of a request, from its first block on.
            first: so many are at hand.
            limit: how many more may be promised.

        At the bound: what finds no room in the pool is not fetched; the answer is shorter.
        """
        if self.reading.peer_rows:
            line = self.cache.index.find(space, words[first : first + limit])
            self.reading.promote(line[line >= 0])
        disks, rows = self.find(space, words[first : first + limit])
        if len(disks) == 0:
            return Coming(0)
        end = first + len(disks)
        wanted = np.zeros(end, np.bool_)
        wanted[first:] = disks >= 0
        if not bool(wanted.any()):
            return Coming(len(disks))
        landing = self.cache.prepare_fetch(space, words[:end], wanted, source=SSD)
        at = landing.positions - first
        parts = self.prepare(landing, disks[at], rows[at], REQUESTS)
        for part in parts:
            self._touch(part.disk, space, words[:end])
        self.begun += parts
        count = len(disks)
        if len(landing.positions) < int(np.count_nonzero(wanted)):
            found = self.cache.index.find(space, words[first:end])
            count = int(np.argmin(found >= 0)) if bool((found < 0).any()) else count
        return Coming(count, tuple(parts))

    def end_read(self, part: ReadPart, arrived: Bools) -> None:
        """The disk has filled these pages, or will not."""
        self.reading.end(part.pool_entries)
        self.lowers[part.disk].complete_read(part.entries, arrived)
        self.cache.complete_fetch(part.landing, part.rows, arrived)
        landed = part.landing.entries[part.rows[arrived]]
        self.cache.blocks.below[landed[self.cache.blocks.state[landed] == SEALED]] = True
        self.ended(part, arrived)

    def quarantine_read(self, part: ReadPart, arrived: Bools, held: Bools) -> None:
        """As `end_read` with a disk that hangs: what it `held` it may fill at any time."""
        rest, lost = part.take(np.flatnonzero(~held)), part.take(np.flatnonzero(held))
        self.reading.end(lost.pool_entries)
        self.cache.abandon_fetch(lost.landing, lost.rows)
        self.quarantined_bytes += lost.bytes
        self.ended(lost, np.zeros(len(lost.rows), np.bool_))
        self.end_read(rest, arrived[~held])

    def give_up(self, part: ReadPart) -> None:
        """A read that was not begun is not wanted any more: its blocks stay where they are."""
        self.reading.end(part.pool_entries)
        self.lowers[part.disk].complete_read(part.entries, np.ones(len(part.rows), np.bool_))
        self.cache.complete_fetch(part.landing, part.rows, np.zeros(len(part.rows), np.bool_))
        self.ended(part, np.zeros(len(part.rows), np.bool_))

    def prepare(
        self, landing: Landing, disks: Int64s, rows: Entries, reader: int
    ) -> list[ReadPart]:
        """Prepare the reads of a landing: of which disk each block is read, and its row there."""
        parts = []
        for disk in np.unique(disks).tolist():
            mine = np.flatnonzero(disks == disk)
            entries = rows[mine]
            regions, slots = self.lowers[disk].prepare_read(entries)
            sums = self.lowers[disk].sums[entries]
            parts.append(ReadPart(disk, landing, mine, entries, regions, slots, sums))
        self.reading.begin(landing.entries, reader)
        return parts

    def find(self, space: SpaceId, words: Words) -> tuple[Int64s, Entries]:
        """For leading blocks: which disk has it and its row there; -1: the pool has, or gets it."""
        cache = self.cache
        line = cache.index.find(space, words)
        rows = np.full(len(words), ABSENT, np.int32)
        disks = np.full(len(words), ABSENT, np.int64)
        at_hand = (line >= 0) & (
            (cache.blocks.state[line] == SEALED) | cache.landings.is_landing[line]
        )
        for disk, origin in self._open(space):
            missing = np.flatnonzero((line < 0) & (disks < 0))
            if len(missing) == 0:
                break
            found = self.lowers[disk].find(origin, words[missing])
            rows[missing], disks[missing[found >= 0]] = found, disk
        gaps = np.flatnonzero(~at_hand & (disks < 0))
        end = gaps.item(0) if len(gaps) else len(words)
        return disks[:end], rows[:end]

    def _open(self, space: SpaceId) -> list[tuple[int, SpaceId]]:
        """Disks that are used, and what the space's origin is called there."""
        _, numbers = self._origins.get(space, (b"", ()))
        return [
            (disk, origin)
            for disk, origin in enumerate(numbers)
            if origin is not None and not self.lowers[disk].fault
        ]

    def _touch(self, disk: int, space: SpaceId, words: Words) -> None:
        """A request's whole chain on one disk: no parent is older than its child."""
        origin = self._origins[space][1][disk]
        assert origin is not None
        entries = self.lowers[disk].find(origin, words)
        self.lowers[disk].touch(origin, entries[entries >= 0])

    # -- down

    def spill(
        self, chain: Chain, bytes_max: int, idle: Container[int]
    ) -> tuple[tuple[SpillPart, ...], bool]:
        """Begin to write what of a request no disk has yet; the rest counts as used there.

        Args:
            chain: the request's.
            bytes_max: for each disk; one block at least.
            idle: disks that take blocks now; others hold what they hold, and are written later.

        Returns:
            (parts, has_more): one part a disk at most; has_more: `idle` disks can be given more.
        """
        cache, space = self.cache, chain.space
        disks = self._open(space)
        takers = [disk for disk, _ in disks if disk in idle and not self.lowers[disk].is_adopting]
        live = cache.uses.live(chain)
        if not takers or len(live) == 0 or space not in cache.spaces:
            return (), False
        words, depths = cache.index.hashes_of(live), cache.blocks.depth[live]
        kin = {disk: self._kin(disk, origin, chain, words) for disk, origin in disks}
        live, words, depths = self._unbroken(live, words, depths, kin)
        is_known = self._mark_below(live, words, disks)
        todo = np.flatnonzero(~is_known)
        most = max(1, bytes_max // cache.spaces[space].block_bytes)
        share = words[todo, 0] % np.uint64(len(takers))
        counts = np.cumsum(share[:, None] == np.arange(len(takers), dtype=np.uint64), axis=0)
        fit = int(np.count_nonzero((counts <= most).all(axis=1)))
        has_more, todo, share = fit < len(todo), todo[:fit], share[:fit]
        parts, places = [], {disk: number for number, disk in enumerate(takers)}
        for disk, origin in disks:
            mine = todo[share == places[disk]] if disk in places else todo[:0]
            if len(mine):
                blocks = live[mine], words[mine], depths[mine]
                parts.append(self._begin_spill(disk, origin, chain, *blocks, kin[disk]))
            else:
                self.lowers[disk].touch(origin, kin[disk])
        is_short = sum(len(part.entries) for part in parts) < len(todo)
        return tuple(part for part in parts if self._has_begun(part)), has_more and not is_short

    def _begin_spill(
        self,
        disk: int,
        origin: SpaceId,
        chain: Chain,
        live: Entries,
        words: Words,
        depths: NDArray[np.int32],
        kin: Entries,
    ) -> SpillPart:
        cache, pages = self.cache, range(self.cache.spaces[chain.space].page_count)
        plan = self.lowers[disk].prepare_write(origin, words, depths, kin=kin)
        at = plan.positions
        cache.blocks.pin(live[at])
        slots = cache.blocks.slot[live[at]]
        offsets = np.array([cache.pages.offsets(slots, page) for page in pages], np.int64)
        return SpillPart(disk, plan, chain, live[at], offsets, words[at], depths[at], kin)

    def unwritten(self) -> tuple[int, int]:
        """Blocks that can be found in the pool and that no disk has; and their bytes.

        Cost: a look-up of each that is not known to be on a disk.
        """
        cache, count, size = self.cache, 0, 0
        rows = np.flatnonzero((cache.blocks.state == SEALED) & ~cache.blocks.below).astype(np.int32)
        spaces = cache.blocks.space[rows]
        reachable = [space for space, (_, numbers) in self._origins.items() if numbers]
        for space in reachable:
            mine = rows[spaces == space]
            for first in range(0, len(mine), LOOKED_AT_ONCE):
                words = cache.index.hashes_of(mine[first : first + LOOKED_AT_ONCE])
                missing = int(np.count_nonzero(~self.has(space, words)))
                count, size = count + missing, size + missing * cache.spaces[space].block_bytes
        return count, size

    def _mark_below(self, live: Entries, words: Words, disks: list[tuple[int, SpaceId]]) -> Bools:
        """Note which blocks a disk has; returns these and those that are being written."""
        is_below = np.zeros(len(live), np.bool_)
        is_known = np.zeros(len(live), np.bool_)
        for disk, origin in disks:
            rows = self.lowers[disk].index.find(origin, words)
            is_known |= rows >= 0
            is_below |= (rows >= 0) & (self.lowers[disk].blocks.state[rows] == SEALED)
        self.cache.blocks.below[live[is_below]] = True
        return is_known

    def end_spill(self, part: SpillPart, is_written: Bools, sums: NDArray[np.uint64]) -> int:
        """Nothing reads the pool's pages any more; returns how many blocks the disk has now."""
        return self._end_spill(part, is_written, sums, part.entries)

    def quarantine_spill(self, part: SpillPart, sums: NDArray[np.uint64], held: Bools) -> None:
        """As `end_spill` with a disk that hangs: what it `held` it may read at any time.

        Such blocks keep their pins for good: they can be read, but their pages are never reused.
        """
        self.quarantined_bytes += int(held.sum()) * sum(part.plan.page_bytes)
        self._end_spill(part, np.zeros(len(held), np.bool_), sums, part.entries[~held])

    def _end_spill(
        self, part: SpillPart, is_written: Bools, sums: NDArray[np.uint64], unread: Entries
    ) -> int:
        lower = self.lowers[part.disk]
        found = lower.complete_write(part.plan, is_written, sums, kin=part.kin)
        self.cache.blocks.below[part.entries[found]] = True
        if len(unread):
            self.cache.room.unpin(unread)
        rows = np.concatenate((part.kin, part.plan.entries[found]))
        part.chain.kin[part.disk] = rows, lower.blocks.generation[rows]
        return int(found.sum())

    def _has_begun(self, part: SpillPart) -> bool:
        if len(part.entries) == 0:
            self.end_spill(part, np.empty(0, np.bool_), np.empty(0, np.uint64))
        return len(part.entries) > 0

    def _kin(self, disk: int, origin: SpaceId, chain: Chain, words: Words) -> Entries:
        """A request's blocks that a disk has, root first, also those that the pool has not."""
        lower = self.lowers[disk]
        rows, generations = chain.kin.get(disk, (np.empty(0, np.int32), np.empty(0, np.uint32)))
        rows = rows[lower.blocks.generation[rows] == generations]
        rows = rows[lower.blocks.state[rows] == SEALED]
        found = lower.find(origin, words)
        rows = np.union1d(rows, found[found >= 0])
        rows = rows[np.argsort(lower.blocks.depth[rows], kind="stable")].astype(np.int32)
        chain.kin[disk] = rows, lower.blocks.generation[rows]
        return rows

    def _unbroken(
        self,
        live: Entries,
        words: Words,
        depths: NDArray[np.int32],
        kin: dict[int, Entries],
    ) -> tuple[Entries, Words, NDArray[np.int32]]:
        """The pool's blocks up to the first position that neither pool nor a disk has.

        A block behind a gap could not be found; it would only take the place of others.
        """
        below = [self.lowers[disk].blocks.depth[rows] for disk, rows in kin.items()]
        held = np.unique(np.concatenate((depths, *below)))
        gaps = np.flatnonzero(held != np.arange(len(held)))
        end = gaps.item(0) if len(gaps) else len(held)
        for disk, rows in kin.items():  # root first: none is used without its ancestors
            kin[disk] = rows[self.lowers[disk].blocks.depth[rows] < end]
        keep = depths < end
        return live[keep], words[keep], depths[keep]
