"""The blocks of one disk: the same index, places and orders as the pool's, one slot a block.

Decided here: which blocks are on the disk, where new ones go and which make room, and what is
believed of records that were found after a restart. This file does not know files, bytes, or why
a block is read or written.

| block | event | becomes |
| --- | --- | --- |
| absent | `prepare_write` finds room | filling |
| filling | `complete_write`, its record is on the disk | sealed: can be read |
| filling | not written | absent |
| absent | `adopt`: its record was found | sealed |
| sealed | `complete_read`: its bytes were wrong | doomed until the last read ends |
| filling, sealed | `retire_origin`, and in its turn `drop_retired` | doomed until nobody holds it |

What a block hash is unique in is an *origin*: 32 bytes that stay the same over restarts; here a
small number stands for it, another one after each reset: so what was reset is out of reach at
once, and dropped bit by bit. Nothing is erased on the disk: a record is dead when its slot's region
was cut anew, a newer record of its key exists, its origin was voided, or its bytes differ.
"""

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.adopting import bring_back, by_origin
from trikv.core.blocks import SEALED, Blocks
from trikv.core.counters import Counters
from trikv.core.disklayout import SLOT_BYTES_MIN
from trikv.core.errors import KvError
from trikv.core.index import Index
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.pages import NO_SHAPE, Pages
from trikv.core.policies import leaf_first_lru
from trikv.core.retired import Retired
from trikv.core.room import Room
from trikv.core.rows import newest
from trikv.core.slots import Recovered
from trikv.core.tenants import Tenants
from trikv.core.words import Entries, ShapeId, SpaceId, Words

ROWS_MAX: Final = 1 << 22
NOTED_MAX: Final = 1_024

Bools = NDArray[np.bool_]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WritePlan:
    """Slots that are being written until `complete_write`; columns of n blocks.

    Attributes:
        origin: of all of them.
        positions: which of the blocks that were offered.
        cuts: regions that must be cut for `page_bytes` before their first record is written.
        sequence: of all records.
    """

    origin: SpaceId
    page_bytes: tuple[int, ...]
    positions: Int64s
    entries: Entries
    regions: Int64s
    slots: Int64s  # positions in their regions
    cuts: tuple[int, ...]
    sequence: int


class Lower:
    """One disk's blocks.

    Attributes:
        fault: why nothing is read or written any more; empty while the disk is used.
        sequence: of each row: grows with each write, over restarts too.
        sums: of each row: what its bytes must add up to.
        next_sequence: not used by any record yet; higher than all that `adopt` may bring.
        wrong_blocks_total: read with an error or with wrong bytes.
        is_adopting: what the disk holds is not known in full yet: nothing is written.

    At the bound: when slots or rows run out the least recently used blocks go, leaves first; a
    block whose own ancestors would have to go for it is not written.
    """

    def __init__(
        self,
        region_count: int,
        region_bytes: int,
        *,
        slot_bytes_min: int = SLOT_BYTES_MIN,
        first_sequence: int,
        seed: int = 0,
        tenants: Tenants | None = None,
    ) -> None:
        capacity_bytes = region_count * region_bytes
        rows = min(ROWS_MAX, max(1, capacity_bytes // slot_bytes_min))
        self.fault = ""
        self.counters = Counters()
        self.pages = Pages(capacity_bytes, region_bytes, slot_bytes_min=slot_bytes_min)
        self.index = Index(rows, seed=seed)
        self.blocks = Blocks(rows)
        self.tenants = tenants
        parts = (self.pages, self.blocks, self.index, self.counters)
        self._room = Room(*parts, maker=leaf_first_lru, tenants=tenants)
        self.recency = self._room.recency
        self.sequence = np.zeros(rows, np.int64)
        self.sums = np.zeros(rows, np.uint64)
        self.next_sequence = first_sequence
        self.wrong_blocks_total = 0
        self.is_adopting = True
        self._noted: deque[tuple[SpaceId, Entries, NDArray[np.uint32]]] = deque(maxlen=NOTED_MAX)
        self._cut_for = np.full(region_count, NO_SHAPE, np.int64)  # as the headers say
        self._origins: dict[bytes, SpaceId] = {}
        self._numbers = itertools.count()
        self._shapes: dict[SpaceId, ShapeId] = {}
        self._floors: dict[bytes, int] = {}  # older records of the origin are dead
        self._retired = Retired(self.blocks)

    # -- origins

    def open_origin(
        self, origin: bytes, page_bytes: tuple[int, ...], tenant: str | None = None
    ) -> SpaceId | None:
        """The number of an origin whose blocks have these pages; None: it has no place here.

        Whose it is may be said later: blocks change hands with their next use.

        At the bound, with too many sizes of pages or a block larger than a region: None.
        """
        assert len(origin) == ORIGIN_BYTES
        try:
            shape = self.pages.add_shape(page_bytes)
        except KvError:
            return None
        self._room.open(shape)
        known = self._origins.get(origin)
        if known is not None and self._shapes[known] != shape:  # cannot be: pages are in the name
            self.retire_origin(origin)
            known = None
        if known is None:
            known = self._origins[origin] = SpaceId(next(self._numbers))
            self._shapes[known] = shape
        if self.tenants is not None and tenant is not None:
            self.tenants.assign(known, tenant)
        return known

    def retire_origin(self, origin: bytes) -> None:
        """All blocks of an origin are out of reach, also those that `adopt` has not brought yet.

        Nobody may use its number any more; `open_origin` gives another one. What is being read or
        written under the old number ends as it would have.
        """
        self._floors[origin] = self.next_sequence
        number = self._origins.pop(origin, None)
        if number is not None:
            self._retired.add(number)

    def drop_retired(self) -> bool:
        """Forget some blocks of retired origins, in some milliseconds; False: none are left."""
        if not len(self._retired):
            self._forget_numbers()
            return False
        _, entries = self._retired.next()
        self._drop(entries)
        self.counters.dropped_blocks_total += len(entries)
        return True

    def _forget_numbers(self) -> None:
        """Retired origins whose last blocks are gone."""
        if len(self._shapes) > len(self._origins):
            gone = self._shapes.keys() - set(self._origins.values())
            for number in gone - self.blocks.used_by_space.keys():
                del self._shapes[number]
                if self.tenants is not None:
                    self.tenants.forget(number)

    def floor(self, origin: bytes) -> int:
        """Records of a retired origin with a lower sequence are dead.

        Of one that has no place here too: its records may be found again after another start.
        """
        return self._floors.get(origin, self.next_sequence)

    def withhold(self, fault: str) -> None:
        """The disk is not used any more: nothing is found, nothing is written."""
        self.fault = self.fault or fault

    # -- reading

    def find(self, origin: SpaceId, words: Words) -> Entries:
        """Rows of the blocks that can be read, -1 for the others."""
        if self.fault:
            return np.full(len(words), -1, np.int32)
        entries = self.index.find(origin, words)
        entries[self.blocks.state[entries] != SEALED] = -1
        return entries

    def prepare_read(self, entries: Entries) -> tuple[Int64s, Int64s]:
        """Keep these blocks until `complete_read`; returns their regions and slots there."""
        self.blocks.pin(entries)
        return self._places(self.blocks.slot[entries])

    def complete_read(self, entries: Entries, is_right: Bools) -> None:
        """Nothing reads these slots any more; blocks whose bytes were wrong are forgotten.

        Of a disk that is off nothing is known: its blocks may be right after the next start.
        """
        wrong = entries[~is_right] if not self.fault else entries[:0]
        self.wrong_blocks_total += len(wrong)
        self._drop(wrong[self.blocks.state[wrong] == SEALED])
        self._unpin(entries)

    def touch(self, origin: SpaceId, entries: Entries) -> None:
        """Sealed blocks, root first, are used: they are the last to go."""
        if self.is_adopting:
            self._noted.append((origin, entries, self.blocks.generation[entries]))
            return
        self._room.touch(self._shapes[origin], entries)

    # -- writing

    def prepare_write(
        self, origin: SpaceId, words: Words, depths: NDArray[np.int32], *, kin: Entries
    ) -> WritePlan:
        """Claim slots for the leading blocks that find room.

        Args:
            origin: theirs.
            words: distinct, not on this disk (those that are being written are left out), root
                first.
            depths: positions in their sequences.
            kin: rows of their ancestors, which do not go for them.
        """
        assert not self.is_adopting
        shape = self._shapes[origin]
        absent = np.flatnonzero(self.index.find(origin, words) < 0)
        count = 0 if self.fault else len(absent)
        self._room.make_beside(shape, count, kin, space=origin)
        slots = self.pages.allocate(shape, min(count, self.blocks.unused_count))
        positions = absent[: len(slots)]
        entries = self.blocks.reserve(slots, depths[positions], space=origin, page_count=1)
        if len(entries):
            self.blocks.claim(entries, 0)
            self.pages.set_owner(slots, entries)
            self.index.insert(origin, words[positions], entries)
        sequence = self.next_sequence
        self.next_sequence += 1
        self.sequence[entries] = sequence
        regions, places = self._places(slots)
        fresh = np.unique(regions[self._cut_for[regions] != shape])
        self._cut_for[fresh] = shape
        pages = self.pages.page_bytes(shape)
        cuts = tuple(fresh.tolist())
        return WritePlan(origin, pages, positions, entries, regions, places, cuts, sequence)

    def complete_write(
        self, plan: WritePlan, is_written: Bools, sums: NDArray[np.uint64], *, kin: Entries
    ) -> Bools:
        """The records are on the disk, or not: only an unbroken run from the first is kept.

        So no block is kept whose ancestor, offered before it, was lost.

        Args:
            plan: from `prepare_write`, completed once.
            is_written: bool[n].
            sums: of the blocks' bytes.
            kin: rows of their ancestors, root first, which are used by this.

        Returns:
            bool[n], the blocks that can be read now.
        """
        count = len(is_written) if bool(is_written.all()) else int(np.argmin(is_written))
        kept, lost = plan.entries[:count], plan.entries[count:]
        self.sums[kept] = sums[:count]
        sealed, freed = self.blocks.fill(kept, 0)
        self._room.free(freed)
        gone, freed = self.blocks.fail(lost)
        self.index.remove(gone)
        self._room.free(freed)
        # A region whose header may not be there is cut again by the next write.
        failed = np.setdiff1d(plan.cuts, plan.regions[:count])
        self._cut_for[failed.astype(np.int64)] = NO_SHAPE
        kin = kin[self.blocks.state[kin] == SEALED]
        self._room.touch(self._shapes[plan.origin], np.concatenate((kin, sealed)))
        found = np.zeros(len(plan.entries), np.bool_)
        found[:count] = self.blocks.state[kept] == SEALED
        return found

    # -- after a restart

    def adopt(self, found: Recovered) -> int:
        """Believe records that were found; before anything is written, each region once.

        Returns:
            How many blocks can be read now that could not before.

        Cost: a microsecond or two a record; see `parts_of`.
        """
        return sum(self._adopt_pages(pages, found) for pages in dict.fromkeys(found.page_bytes))

    def _adopt_pages(self, page_bytes: tuple[int, ...], found: Recovered) -> int:
        try:
            shape = self.pages.add_shape(page_bytes)
        except KvError:
            return 0  # their regions are free: they are cut anew in their turn
        self._room.open(shape)
        cut = found.cut[[pages == page_bytes for pages in found.page_bytes]]
        self._cut_for[cut] = shape
        rows = np.flatnonzero(np.isin(found.regions, cut))
        assert len(rows) == 0 or found.sequences[rows].max() < self.next_sequence
        count = 0
        for raw, at in by_origin(found.origins[rows]):
            origin = self.open_origin(raw, page_bytes)
            mine = rows[at]
            if origin is not None:
                mine = mine[found.sequences[mine] >= self._floors.get(raw, 0)]
                count += self._adopt(origin, shape, found, mine)
        return count

    def _adopt(self, origin: SpaceId, shape: ShapeId, found: Recovered, rows: Int64s) -> int:
        rows = newest(found.words, found.sequences, rows)
        known = self.index.find(origin, found.words[rows])
        older = (known >= 0) & (self.sequence[known] < found.sequences[rows])
        self._drop(known[older])  # of a key that stands twice, the newer
        slots = found.regions[rows] * self.pages.slots_per_slab_max + found.positions[rows]
        parts = self.pages, self.blocks, self.index
        back, entries = bring_back(
            *parts, origin, shape, slots, found.words[rows], found.depths[rows]
        )
        self.sequence[entries] = found.sequences[rows[back]]
        self.sums[entries] = found.sums[rows[back]]
        return len(entries)

    def adopted(self) -> tuple[Entries, tuple[Int64s, Int64s]]:
        """The blocks that `adopt` has brought, and keys for `lexsort`: least wanted first."""
        rows = np.flatnonzero(self.blocks.state == SEALED)
        depths = self.blocks.depth[rows].astype(np.int64)
        return rows.astype(np.int32), (-depths, self.sequence[rows])

    def place(self, entries: Entries) -> None:
        """Give adopted blocks their places in the order of eviction, some at a time.

        Args:
            entries: least wanted first; what has been dropped meanwhile is left alone.
        """
        live = entries[self.blocks.state[entries] == SEALED]
        shapes = self.pages.shapes_of(self.blocks.slot[live])
        for shape in np.unique(shapes).tolist():
            self._room.touch(ShapeId(shape), live[shapes == shape][::-1])

    def end_adopting(self) -> None:
        """All records have been adopted and placed: uses so far are made up for, writes begin."""
        self.is_adopting = False
        while self._noted:
            origin, entries, generations = self._noted.popleft()
            live = self.blocks.generation[entries] == generations
            live &= self.blocks.state[entries] == SEALED
            if origin in self._shapes:
                self.touch(origin, entries[live])

    # -- inside

    def _places(self, slots: Int64s) -> tuple[Int64s, Int64s]:
        regions = self.pages.slab_of(slots)
        return regions, slots - regions * self.pages.slots_per_slab_max

    def _unpin(self, entries: Entries) -> None:
        if len(entries):
            self._room.unpin(entries)

    def _drop(self, entries: Entries) -> None:
        """Blocks of one origin are out of sight now, and free when nobody holds them."""
        if len(entries):
            self.index.remove(entries)
            origin = SpaceId(self.blocks.space.item(entries.item(0)))
            self._room.orders[self._shapes[origin]].forget(entries)
            self._room.free(self.blocks.drop(entries))
