"""What a pool that outlives its daemon says about itself: a record a slot, beside the pool.

Decided here: the layout of that memory, the order of writes that keeps it true when the daemon is
killed between any two instructions, and what of it is believed afterwards. This file does not know
where the memory comes from, or blocks.

| what happens to a slot | its record |
| --- | --- |
| its block is sealed | written, the sequence last |
| its block leaves the sealed ones, for whatever reason | sequence 0, before anything else |
| its namespace is reset | its origin's row is unused at once; the record is struck later |
| a slab is cut for another shape | the slab's row is written before any record of it |

So a record with a sequence names bytes that are whole and that nobody may write. Everything else,
pages that were being written above all, is forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import PAGES_MAX
from trikv.core.namespace import ORIGIN_BYTES
from trikv.core.pages import PAGE_ALIGN, Slots
from trikv.core.rows import newest
from trikv.core.words import Words

MAGIC: Final = b"trikv pool"
VERSION: Final = 1
ORIGINS_MAX: Final = 4_096
TENANT_BYTES_MAX: Final = 64
FACTORS: Final = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))
SHIFT: Final = np.uint64(29)

HEADER: Final = np.dtype(
    [
        ("magic", "S16"),
        ("version", "<u8"),
        ("pool_bytes", "<u8"),
        ("slab_bytes", "<u8"),
        ("check", "<u8"),
    ]
)
ORIGIN: Final = np.dtype(
    [
        ("is_used", "<u8"),
        ("name", "u1", (ORIGIN_BYTES,)),
        ("tenant", f"S{TENANT_BYTES_MAX}"),
        ("rest", "<u8", (3,)),
    ]
)
SLAB: Final = np.dtype(
    [
        ("rank_count", "<u8"),
        ("cut", "<u8"),  # names this cut: records of an earlier one are not this one's
        ("page_bytes", "<u8", (PAGES_MAX,)),
        ("check", "<u8"),
    ]
)
RECORD: Final = np.dtype(
    [
        ("sequence", "<u8"),  # 0: nothing is here
        ("words", "<u8", (4,)),
        ("origin", "<u4"),
        ("depth", "<i4"),
        ("check", "<u8"),
        ("rest", "<u8"),
    ]
)
HEADER_AT: Final = 0
ORIGINS_AT: Final = PAGE_ALIGN
SLABS_AT: Final = ORIGINS_AT + ORIGINS_MAX * ORIGIN.itemsize

Memory = NDArray[np.uint8]
Sequences = NDArray[np.uint64]


class ForeignError(Exception):
    """The memory holds something that is not ours; the message says what, in a few words."""


class StaleError(Exception):
    """The memory holds records that cannot be used here: begin with zeros; the message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """Sealed blocks that an earlier daemon has left, of one origin and one shape.

    Attributes:
        origin: namespace and cache group, as the spaces' owner names them.
        tenant: whose it is, empty when nobody said or its name is a long one.
        page_bytes: of a block on each rank, rounded up.
        slots: int64[n], where they are.
        words: uint64[n, 4], their hashes.
        depths: int32[n].
        sequences: uint64[n], higher for later ones.
    """

    origin: bytes
    tenant: str
    page_bytes: tuple[int, ...]
    slots: Slots
    words: Words
    depths: NDArray[np.int32]
    sequences: Sequences


class Ledger:
    """Records of a pool of `slab_count` slabs, in memory that the caller has mapped.

    At the bound: of more than `ORIGINS_MAX` origins the further ones have no records, and their
    blocks are not found again.

    Cost: 64 bytes a slot of 4 KiB, of which only those of slots in use are ever touched.
    """

    def __init__(self, memory: Memory, *, pool_bytes: int, slab_bytes: int) -> None:
        """Use memory that is all zeros, or what an earlier daemon of the same measures left.

        Args:
            memory: `bytes_for` bytes.
            pool_bytes: whole slabs.
            slab_bytes: size of each.

        Raises:
            ForeignError: something that is not ours is there; nothing was changed.
            StaleError: ours, and not usable; nothing was changed.
        """
        self._slots_per_slab_max = slab_bytes // PAGE_ALIGN
        slab_count = pool_bytes // slab_bytes
        self._header = memory[HEADER_AT:][: HEADER.itemsize].view(HEADER)
        self._origins = _rows(memory, ORIGINS_AT, ORIGIN, ORIGINS_MAX)
        self._slabs = _rows(memory, SLABS_AT, SLAB, slab_count)
        slots = slab_count * self._slots_per_slab_max
        self._records = _rows(memory, _records_at(slab_count), RECORD, slots)
        self._shapes: list[tuple[int, ...] | None] = [None] * slab_count
        self._cuts = np.zeros(slab_count, np.uint64)
        self._ids: dict[bytes, int] = {}
        self._voided: set[int] = set()
        self._sequence = 0
        self._begin_or_go_on(pool_bytes, slab_bytes)

    def enter(
        self,
        slots: Slots,
        words: Words,
        depths: NDArray[np.int32],
        *,
        origin: bytes,
        tenant: str,
        page_bytes: tuple[int, ...],
    ) -> None:
        """Blocks of one origin and shape have been sealed in these slots."""
        number = self._origin(origin, tenant)
        if number is None or len(slots) == 0:
            return
        slabs = slots // self._slots_per_slab_max
        for slab in np.unique(slabs).tolist():
            if self._shapes[slab] != page_bytes:
                self._cut(slab, page_bytes)
        self._sequence += 1
        sequences = np.full(len(slots), self._sequence, np.uint64)
        records = self._records
        records["words"][slots] = words
        records["origin"][slots] = number
        records["depth"][slots] = depths
        records["check"][slots] = _check(self._cuts[slabs], sequences, words, number, depths)
        records["sequence"][slots] = sequences

    def strike(self, slots: Slots) -> None:
        """These slots hold no sealed block any more."""
        self._records["sequence"][slots] = 0

    def void(self, origin: bytes) -> int | None:
        """No record of an origin counts any more; its later blocks are told from these.

        Returns:
            What `reuse` is to be given once all its records are struck.
        """
        number = self._ids.pop(origin, None)
        if number is not None:
            self._origins["is_used"][number] = 0
            self._voided.add(number)
        return number

    def reuse(self, number: int | None) -> None:
        """A voided origin has no records: its place may be given to another."""
        self._voided.discard(-1 if number is None else number)

    def recover(self) -> Iterator[Found]:
        """What an earlier daemon has left; records that are not right are struck.

        Called once, before anything is entered. Of two records of one block the later counts.
        """
        names = {number: name for name, number in self._ids.items()}
        found = [one for slab in range(len(self._slabs)) for one in self._recover_slab(slab)]
        live: set[int] = set()
        by_group: dict[tuple[int, tuple[int, ...]], list[tuple[Slots, NDArray[np.void]]]] = {}
        for page_bytes, slots, rows in found:
            for number in np.unique(rows["origin"]).tolist():
                mine = rows["origin"] == number
                if number not in names:
                    self.strike(slots[mine])
                    continue
                live.add(number)
                by_group.setdefault((number, page_bytes), []).append((slots[mine], rows[mine]))
        for number in names.keys() - live:
            self._origins[number]["is_used"] = 0
            del self._ids[names[number]]
        for (number, page_bytes), parts in by_group.items():
            slots = np.concatenate([part[0] for part in parts])
            rows = np.concatenate([part[1] for part in parts])
            keep = self._latest(slots, rows)
            slots, rows = slots[keep], rows[keep]
            yield Found(
                names[number],
                bytes(self._origins["tenant"][number]).decode(errors="replace"),
                page_bytes,
                slots,
                np.ascontiguousarray(rows["words"]),
                rows["depth"].copy(),
                rows["sequence"].copy(),
            )

    def _latest(self, slots: Slots, rows: NDArray[np.void]) -> NDArray[np.int64]:
        """Rows whose key stands in no later record; the others are struck."""
        words, sequences = rows["words"], rows["sequence"].astype(np.int64)
        keep = newest(words, sequences, np.arange(len(rows)))
        is_kept = np.zeros(len(rows), np.bool_)
        is_kept[keep] = True
        self.strike(slots[~is_kept])
        return keep

    def _recover_slab(self, slab: int) -> Iterator[tuple[tuple[int, ...], Slots, NDArray[np.void]]]:
        row = self._slabs[slab]
        count = int(row["rank_count"])
        if not 1 <= count <= PAGES_MAX or row["check"] != _check_slab(row):
            return
        page_bytes = tuple(row["page_bytes"][:count].tolist())
        slab_bytes = self._slots_per_slab_max * PAGE_ALIGN
        first = slab * self._slots_per_slab_max
        rows = self._records[first : first + slab_bytes // sum(page_bytes)]
        at = np.flatnonzero(rows["sequence"])
        rows = rows[at]
        cuts = np.full(len(rows), row["cut"], np.uint64)
        right = rows["check"] == _check(
            cuts, rows["sequence"], rows["words"], rows["origin"], rows["depth"]
        )
        self.strike(first + at[~right])
        self._sequence = max(self._sequence, int(row["cut"]))
        if right.any():
            self._shapes[slab], self._cuts[slab] = page_bytes, row["cut"]
            self._sequence = max(self._sequence, int(rows["sequence"][right].max()))
            yield page_bytes, (first + at[right]).astype(np.int64), rows[right]

    def _cut(self, slab: int, page_bytes: tuple[int, ...]) -> None:
        row = self._slabs[slab : slab + 1]
        self._sequence += 1
        row["rank_count"] = 0  # while the row is being written it says nothing
        row["cut"] = self._sequence
        row["page_bytes"][0, : len(page_bytes)] = page_bytes
        row["page_bytes"][0, len(page_bytes) :] = 0
        filled = row.copy()
        filled["rank_count"] = len(page_bytes)
        row["check"] = _check_slab(filled[0])
        row["rank_count"] = len(page_bytes)
        self._shapes[slab], self._cuts[slab] = page_bytes, self._sequence

    def _origin(self, name: bytes, tenant: str) -> int | None:
        assert len(name) == ORIGIN_BYTES
        number = self._ids.get(name)
        if number is None and len(self._ids) + len(self._voided) < ORIGINS_MAX:
            unused = np.flatnonzero(self._origins["is_used"] == 0).tolist()
            number = next(one for one in unused if one not in self._voided)
            self._origins["name"][number] = np.frombuffer(name, np.uint8)
            whose = tenant.encode()
            self._origins["tenant"][number] = whose if len(whose) <= TENANT_BYTES_MAX else b""
            self._origins["is_used"][number] = 1
            self._ids[name] = number
        return number

    def _begin_or_go_on(self, pool_bytes: int, slab_bytes: int) -> None:
        if check_header(self._header.view(np.uint8), pool_bytes=pool_bytes, slab_bytes=slab_bytes):
            self._begin(pool_bytes, slab_bytes)
        for number in np.flatnonzero(self._origins["is_used"]).tolist():
            self._ids[self._origins["name"][number].tobytes()] = number

    def _begin(self, pool_bytes: int, slab_bytes: int) -> None:
        row, measures = self._header, (VERSION, pool_bytes, slab_bytes)
        row["magic"] = MAGIC
        row["version"], row["pool_bytes"], row["slab_bytes"] = measures
        row["check"] = _sum_header(measures)


def check_header(memory: Memory, *, pool_bytes: int, slab_bytes: int) -> bool:
    """Look whether a `Ledger` can use memory that begins so; True: nothing is there yet.

    Raises:
        ForeignError, StaleError: as `Ledger`.
    """
    row = memory[: HEADER.itemsize].view(HEADER)
    there_bytes = memory[: HEADER.itemsize].tobytes().rstrip(b"\0")
    if not there_bytes:
        return True
    if MAGIC.startswith(there_bytes):  # it was killed while it wrote the first field
        raise StaleError("its header is torn")
    if bytes(row["magic"][0]) != MAGIC:
        raise ForeignError("something else is there")
    there = tuple(int(row[name][0]) for name in ("version", "pool_bytes", "slab_bytes"))
    if int(row["check"][0]) != _sum_header(there):
        raise StaleError("its header is torn")
    if there[0] != VERSION:
        raise StaleError(f"its records are of version {there[0]}, these of {VERSION}")
    if there[1:] != (pool_bytes, slab_bytes):
        raise StaleError("pool or slabs were of another size")
    return False


def bytes_for(*, pool_bytes: int, slab_bytes: int) -> int:
    """Size of the memory of a `Ledger`, whole pages."""
    slab_count = pool_bytes // slab_bytes
    size = _records_at(slab_count) + slab_count * (slab_bytes // PAGE_ALIGN) * RECORD.itemsize
    return -(-size // PAGE_ALIGN) * PAGE_ALIGN


def _records_at(slab_count: int) -> int:
    return -(-(SLABS_AT + slab_count * SLAB.itemsize) // PAGE_ALIGN) * PAGE_ALIGN


def _rows(memory: Memory, start: int, kind: np.dtype[np.void], count: int) -> NDArray[np.void]:
    return memory[start : start + count * kind.itemsize].view(kind)


def _mix(sums: Sequences, more: Sequences) -> Sequences:
    mixed = (sums ^ more) * FACTORS[0]
    mixed ^= mixed >> SHIFT
    mixed *= FACTORS[1]
    return mixed


def _check(
    cuts: Sequences,
    sequences: Sequences,
    words: Words,
    origins: int | NDArray[np.uint32],
    depths: NDArray[np.int32],
) -> Sequences:
    """A sum of each record: tells a half-written one from a whole one."""
    sums = _mix(sequences, cuts)
    for word in range(4):
        sums = _mix(sums, words[:, word])
    places = depths.astype(np.uint64) << np.uint64(32) | np.asarray(origins, np.uint64)
    return _mix(sums, places)


def _check_slab(row: np.void) -> np.uint64:
    values = np.append(row["page_bytes"], (row["cut"], row["rank_count"])).astype(np.uint64)
    sums = np.zeros(1, np.uint64)
    for value in values:
        sums = _mix(sums, value)
    return np.uint64(sums[0])


def _sum_header(measures: tuple[int, ...]) -> int:
    sums = np.zeros(1, np.uint64)
    for value in measures:
        sums = _mix(sums, np.full(1, value, np.uint64))
    return int(sums[0])
