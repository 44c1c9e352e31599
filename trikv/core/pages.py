"""Where the pages of a block lie in the pool.

Decided here: how the pool is cut. Slabs of one size are given to shapes on demand; a shape is the
bytes of each page of a block; a slot of a slab holds one block. This file does not know:
the memory itself, what a block is called, or what to evict (it says which slabs are coldest).

| slab | event | becomes |
| --- | --- | --- |
| free | `allocate` finds no room in the shape's own slabs | the shape's |
| the shape's | its last used slot is freed | free |

Inside a slab all blocks' first pages come first, then all second ones and so on: consecutive slots
are contiguous in memory, page by page. A slot id is slab * `slots_per_slab_max` + position.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.banks import ANY_BANK, WHOLE, Banks, Parts
from trikv.core.errors import BadRequestError, OverloadedError
from trikv.core.rows import is_all
from trikv.core.words import Entries, Offsets, ShapeId

PAGE_ALIGN: Final = 4096
SHAPES_MAX: Final = 256  # each has columns of its own, and real hosts run a few models
NO_SHAPE: Final = -1
NEVER: Final = -1

Slots = NDArray[np.int64]
Slabs = NDArray[np.int64]
Positions = NDArray[np.int64]
Mine = NDArray[np.int64] | slice


@dataclass(frozen=True, slots=True)
class _Cut:
    """How slabs are cut for one shape, and what is in them.

    The columns cover all slabs, but only the rows of this shape's slabs are ever touched and
    thereby resident: 5 bytes a slot.
    """

    page_bytes: tuple[int, ...]  # of each page, rounded up
    slot_bytes: int  # all of them, or the least that a slot may have
    slots_per_slab: int
    free: NDArray[np.int64]  # [slab]: free slots of this shape's slabs, 0 for all other slabs
    taken: NDArray[np.bool_]  # [slab * slots_per_slab + position]
    owner: NDArray[np.int32]  # [slab * slots_per_slab + position]: entry + 1, 0 without owner


class Pages:
    """Hands out slots of a pool of `capacity_bytes`, rounded down to whole slabs.

    Attributes:
        capacity_bytes: what the slabs add up to.
        slab_bytes: size of each slab.
        slab_count: all slabs, free ones included.
        slots_per_slab_max: slots in a slab that is cut for the smallest page.
        newest_use: int64[slab], the highest stamp given to `used`, -1 since the slab was free.
        banks: whose memory each slab lies in.

    At the bound: `allocate` returns fewer slots than wanted, down to none.

    Cost: 5 bytes a slot, and 8 bytes a slab and shape.
    """

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        *,
        slot_bytes_min: int = PAGE_ALIGN,
        parts: Parts = WHOLE,
    ) -> None:
        """Cut nothing yet.

        Args:
            capacity_bytes: of all slabs.
            slab_bytes: of one, a multiple of `PAGE_ALIGN`.
            slot_bytes_min: smaller blocks get slots of this size.
            parts: of the memory, where it lies in several banks.
        """
        assert slab_bytes > 0
        assert slab_bytes % PAGE_ALIGN == 0
        self._slot_bytes_min = slot_bytes_min
        self.slab_bytes = slab_bytes
        self.slab_count = capacity_bytes // slab_bytes
        self.capacity_bytes = self.slab_count * slab_bytes
        self.slots_per_slab_max = slab_bytes // slot_bytes_min
        self.newest_use = np.full(self.slab_count, NEVER, np.int64)
        self._newest_stamp = NEVER
        self._shape_of = np.full(self.slab_count, NO_SHAPE, np.int64)
        self.banks = Banks(parts, self.slab_count, slab_bytes)
        self._free_slabs = self.banks.order()[::-1].tolist()  # a stack, lowest on top
        self._ids: dict[tuple[int, ...], ShapeId] = {}
        self._cuts: list[_Cut] = []
        self._used_slots: list[int] = []
        self._slabs_of: list[int] = []

    # -- shapes

    def add_shape(self, page_bytes: tuple[int, ...]) -> ShapeId:
        """Make a shape known; sizes that round to the same pages get the same id.

        Args:
            page_bytes: size of each page of a block; rounded up to `PAGE_ALIGN`.

        Raises:
            BadRequestError: no page, an empty one, or a slot larger than a slab.
            OverloadedError: `SHAPES_MAX` shapes are known. Nothing was changed.
        """
        if not page_bytes or min(page_bytes) <= 0:
            raise BadRequestError("a block needs pages with bytes", page_bytes=page_bytes)
        rounded = tuple(-(-one // PAGE_ALIGN) * PAGE_ALIGN for one in page_bytes)
        known = self._ids.get(rounded)
        if known is not None:
            return known
        slot_bytes = max(self._slot_bytes_min, sum(rounded))
        slots_per_slab = self.slab_bytes // slot_bytes
        if slots_per_slab == 0:
            message = (
                f"a block of {slot_bytes} bytes does not fit a slab of {self.slab_bytes} bytes"
            )
            raise BadRequestError(message, page_bytes=page_bytes)
        if len(self._cuts) == SHAPES_MAX:
            raise OverloadedError("too many different page sizes", shape_count=SHAPES_MAX)
        shape = self._ids[rounded] = ShapeId(len(self._cuts))
        slot_count = self.slab_count * slots_per_slab
        free = np.zeros(self.slab_count, np.int64)
        taken, owner = np.zeros(slot_count, np.bool_), np.zeros(slot_count, np.int32)
        self._cuts.append(_Cut(rounded, slot_bytes, slots_per_slab, free, taken, owner))
        self._used_slots.append(0)
        self._slabs_of.append(0)
        return shape

    def page_bytes(self, shape: ShapeId) -> tuple[int, ...]:
        """Rounded size of each page: how far consecutive slots of a slab are apart."""
        return self._cuts[shape].page_bytes

    def slot_bytes(self, shape: ShapeId) -> int:
        """Pool bytes of one block: all its pages, with their padding."""
        return self._cuts[shape].slot_bytes

    def slot_count(self, shape: ShapeId) -> int:
        """Slots of a shape if the whole pool were cut for it."""
        return self.slab_count * self._cuts[shape].slots_per_slab

    # -- allocation

    def allocate(self, shape: ShapeId, count: int, *, near: int = ANY_BANK) -> Slots:
        """Take up to `count` slots, in as few contiguous runs as is cheap to find.

        The shape's own slabs come first, those with most free slots before the others, then free
        slabs; ascending positions in each. All those of the bank `near` come before the rest. Call
        `used` and `set_owner` for the new slots.

        Returns:
            int64[m], m <= count, grouped by slab.

        Cost: 20 µs and 0.05 µs a slot from one slab; 1 byte read a slot of each slab touched, and
        a sort of the shape's slabs when one slab is not enough.
        """
        cut = self._cuts[shape]
        count = min(count, self.free_count(shape))
        if count <= 0:
            return np.empty(0, np.int64)
        is_near = near != ANY_BANK and self.banks.is_split
        slabs = self._near_first(shape, count, near) if is_near else self._slabs_for(shape, count)
        taken = cut.taken.reshape(-1, cut.slots_per_slab).take(slabs, axis=0)
        found = (~taken).ravel().nonzero()[0][:count]
        rows = found // cut.slots_per_slab
        chosen, positions = slabs.take(rows), found - rows * cut.slots_per_slab
        assert len(found) == count
        cut.taken[chosen * cut.slots_per_slab + positions] = True
        cut.free[slabs] -= np.bincount(rows, minlength=len(slabs))
        self._used_slots[shape] += count
        return chosen * self.slots_per_slab_max + positions

    def take(self, shape: ShapeId, slots: Slots) -> Slots:
        """Take slots that somebody has found in use; call `used` and `set_owner` for them.

        Args:
            shape: what their slabs are cut for.
            slots: int64[n], distinct.

        Returns:
            int64[m]: those that were free, in slabs that are free or this shape's; in their order.
        """
        cut = self._cuts[shape]
        slabs = self.slab_of(slots)
        positions = slots - slabs * self.slots_per_slab_max
        fits = (slabs < self.slab_count) & (positions < cut.slots_per_slab)
        fits[fits] &= np.isin(self._shape_of.take(slabs[fits]), (shape, NO_SHAPE))
        slots, slabs, positions = slots[fits], slabs[fits], positions[fits]
        touched = np.unique(slabs)
        fresh = touched[self._shape_of.take(touched) == NO_SHAPE]
        if len(fresh):
            self._cut_free(shape, fresh)
        indices = slabs * cut.slots_per_slab + positions
        is_free = ~cut.taken.take(indices)
        cut.taken[indices[is_free]] = True
        np.subtract.at(cut.free, slabs[is_free], 1)
        self._used_slots[shape] += int(is_free.sum())
        return slots[is_free]

    def free(self, slots: Slots) -> None:
        """Give slots back, of any shapes; a slab that is wholly free becomes anybody's.

        Args:
            slots: int64[n], each allocated and named once; their owners are forgotten.

        Cost: a sort of the slots.
        """
        slots = np.sort(slots)
        assert is_all(slots[1:] != slots[:-1])
        for shape, slabs, positions, _ in self._by_shape(slots):
            cut = self._cuts[shape]
            indices = slabs * cut.slots_per_slab + positions
            assert is_all(cut.taken.take(indices))
            cut.taken[indices] = False
            cut.owner[indices] = 0
            changes = (slabs[1:] != slabs[:-1]).nonzero()[0] + 1
            bounds = np.concatenate(((0,), changes, (len(slabs),)))
            touched = slabs.take(bounds[:-1])
            cut.free[touched] += bounds[1:] - bounds[:-1]
            self._used_slots[shape] -= len(slabs)
            self._give_back(shape, touched[cut.free.take(touched) == cut.slots_per_slab])

    def free_count(self, shape: ShapeId) -> int:
        """Slots that `allocate` could give now."""
        slabs = self._slabs_of[shape] + len(self._free_slabs)
        return slabs * self._cuts[shape].slots_per_slab - self._used_slots[shape]

    # -- places

    def offsets(self, slots: Slots, page: int) -> Offsets:
        """Byte offsets in the pool of one page of each block; the slots may be of any shapes."""
        found = np.empty(len(slots), np.int64)
        for shape, slabs, positions, mine in self._by_shape(slots):
            cut = self._cuts[shape]
            base = sum(cut.page_bytes[:page]) * cut.slots_per_slab
            found[mine] = slabs * self.slab_bytes + (positions * cut.page_bytes[page] + base)
        return found

    def slab_of(self, slots: Slots) -> Slabs:
        """The slab of each slot, int64[n]."""
        return slots // self.slots_per_slab_max

    def shape_of_slab(self, slab: int) -> ShapeId:
        """The shape a slab is cut for, -1 while it is free."""
        return ShapeId(self._shape_of.item(slab))

    def shapes_of(self, slots: Slots) -> NDArray[np.int64]:
        """The shape of each slot's slab, int64[n]."""
        shapes: NDArray[np.int64] = self._shape_of.take(self.slab_of(slots))
        return shapes

    # -- who is in a slab, and how cold it is

    def set_owner(self, slots: Slots, entries: Entries) -> None:
        """Remember whose blocks are in slots, until they are freed."""
        assert len(slots) == len(entries)
        for shape, slabs, positions, mine in self._by_shape(slots):
            cut = self._cuts[shape]
            indices = slabs * cut.slots_per_slab + positions
            assert is_all(cut.taken.take(indices))
            cut.owner[indices] = entries[mine] + np.int32(1)

    def entries_in_slab(self, slab: int) -> Entries:
        """Owners of a slab's slots, by position."""
        shape = self._shape_of.item(slab)
        if shape == NO_SHAPE:
            return np.empty(0, np.int32)
        cut = self._cuts[shape]
        first = slab * cut.slots_per_slab
        owners = cut.owner[first : first + cut.slots_per_slab]
        entries: Entries = owners[owners > 0] - np.int32(1)
        return entries

    def used(self, slots: Slots, stamp: int) -> None:
        """Raise the newest use of the slots' slabs to `stamp`, if it is older."""
        slabs = self.slab_of(slots)
        if stamp < self._newest_stamp:
            self.newest_use[slabs] = np.maximum(self.newest_use.take(slabs), stamp)
        else:
            self.newest_use[slabs] = self._newest_stamp = stamp

    def slabs_of_other_shapes(self, shape: ShapeId) -> Slabs:
        """Slabs that other shapes use, oldest `newest_use` first; a scan and sort of the slabs."""
        others = np.flatnonzero((self._shape_of != shape) & (self._shape_of != NO_SHAPE))
        return others[np.argsort(self.newest_use[others], kind="stable")]

    # -- sizes for status

    @property
    def free_slab_count(self) -> int:
        """Slabs that no shape uses."""
        return len(self._free_slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes of used slots, padding of pages included, unused rests of slabs not."""
        return sum(
            used * cut.slot_bytes for used, cut in zip(self._used_slots, self._cuts, strict=True)
        )

    def used_slots(self, shape: ShapeId) -> int:
        """Slots of a shape that are allocated."""
        return self._used_slots[shape]

    def slabs_in_use(self, shape: ShapeId) -> int:
        """Slabs that are cut for a shape."""
        return self._slabs_of[shape]

    # -- inside

    def _slabs_for(self, shape: ShapeId, count: int) -> Slabs:
        """Slabs that together have `count` free slots, in the order in which to fill them."""
        cut = self._cuts[shape]
        best = int(cut.free.argmax())
        if cut.free[best] >= count:
            return np.array([best], np.int64)
        own = np.flatnonzero(cut.free)
        own = own[np.argsort(-cut.free[own], kind="stable")]
        total = np.cumsum(cut.free[own])
        missing = count - (total.item(-1) if len(own) else 0)
        if missing <= 0:
            enough: Slabs = own[: int(np.searchsorted(total, count)) + 1]
            return enough
        return np.append(own, self._claim(shape, -(-missing // cut.slots_per_slab)))

    def _near_first(self, shape: ShapeId, count: int, near: int) -> Slabs:
        """As `_slabs_for`, a bank's own and free slabs before all others."""
        cut = self._cuts[shape]
        chosen = [np.empty(0, np.int64)]
        for is_near in (self.banks.of_slab == near, self.banks.of_slab != near):
            own = np.flatnonzero(is_near & (cut.free > 0))
            own = own[np.argsort(-cut.free[own], kind="stable")]
            total = np.cumsum(cut.free[own])
            own = own[: int(np.searchsorted(total, count)) + 1]
            chosen.append(own)
            count -= int(cut.free[own].sum())
            if count > 0:
                free = np.array(self._free_slabs[::-1], np.int64)
                fresh = free[is_near[free]][: -(-count // cut.slots_per_slab)]
                self._cut_free(shape, fresh)
                chosen.append(fresh)
                count -= len(fresh) * cut.slots_per_slab
            if count <= 0:
                break
        return np.concatenate(chosen)

    def _claim(self, shape: ShapeId, count: int) -> Slabs:
        """Cut free slabs for a shape."""
        slabs = np.array(self._free_slabs[-count:][::-1], np.int64)
        self._cut_free(shape, slabs)
        return slabs

    def _cut_free(self, shape: ShapeId, slabs: Slabs) -> None:
        gone = set(slabs.tolist())
        self._free_slabs = [slab for slab in self._free_slabs if slab not in gone]
        self._shape_of[slabs] = shape
        self._cuts[shape].free[slabs] = self._cuts[shape].slots_per_slab
        self._slabs_of[shape] += len(slabs)

    def _give_back(self, shape: ShapeId, slabs: Slabs) -> None:
        """Slabs without a used slot become free."""
        self._shape_of[slabs] = NO_SHAPE
        self.newest_use[slabs] = NEVER
        self._cuts[shape].free[slabs] = 0
        self._slabs_of[shape] -= len(slabs)
        self._free_slabs.extend(slabs[::-1].tolist())

    def _by_shape(self, slots: Slots) -> Iterator[tuple[ShapeId, Slabs, Positions, Mine]]:
        """Split slots by shape, in their order: slabs, positions and where they were in `slots`.

        A batch usually has one shape; slots of free slabs are a bug of the caller.
        """
        slabs = self.slab_of(slots)
        positions = slots - slabs * self.slots_per_slab_max
        shapes = self._shape_of.take(slabs)
        if len(shapes) == 0:
            return
        first = shapes.item(0)
        if is_all(shapes == first):
            assert first != NO_SHAPE
            yield ShapeId(first), slabs, positions, slice(None)
            return
        for shape in np.unique(shapes).tolist():
            assert shape != NO_SHAPE
            mine = np.flatnonzero(shapes == shape)
            yield ShapeId(shape), slabs[mine], positions[mine], mine
