"""Records of a pool that outlives its daemon, against a dict, and killed between any two writes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from trikv.core import ledger as module
from trikv.core.ledger import ForeignError, Found, Ledger, StaleError, bytes_for, check_header
from trikv.core.pages import PAGE_ALIGN

SLAB = 8 * PAGE_ALIGN
SLABS = 3
MEASURES = {"pool_bytes": SLABS * SLAB, "slab_bytes": SLAB}
ORIGINS = (b"a" * 32, b"b" * 32)
SHAPES = ((PAGE_ALIGN,), (PAGE_ALIGN, 2 * PAGE_ALIGN))

Block = tuple[bytes, tuple[int, ...], int, int]  # origin, page bytes, word, depth


def fresh() -> NDArray[np.uint8]:
    return np.zeros(bytes_for(**MEASURES), np.uint8)


def words_of(numbers: list[int]) -> NDArray[np.uint64]:
    return np.array([[n, n + 1, n + 2, n + 3] for n in numbers], np.uint64).reshape(-1, 4)


def enter(ledger: Ledger, blocks: dict[int, Block]) -> None:
    """One call; all of one origin and shape."""
    origin, page_bytes, _, _ = next(iter(blocks.values()))
    ledger.enter(
        np.array(list(blocks), np.int64),
        words_of([block[2] for block in blocks.values()]),
        np.array([block[3] for block in blocks.values()], np.int32),
        origin=origin,
        tenant=tenant_of(origin),
        page_bytes=page_bytes,
    )


def tenant_of(origin: bytes) -> str:
    return "zoë" if origin == ORIGINS[1] else ""


def shown(found: list[Found]) -> dict[int, Block]:
    assert all(one.tenant == tenant_of(one.origin) for one in found)
    return {
        slot: (one.origin, one.page_bytes, int(words[0]), int(depth))
        for one in found
        for slot, words, depth in zip(one.slots.tolist(), one.words, one.depths, strict=True)
    }


def reopened(memory: NDArray[np.uint8]) -> dict[int, Block]:
    return shown(list(Ledger(memory.copy(), **MEASURES).recover()))


class Pool(RuleBasedStateMachine):
    """Slabs are cut, blocks sealed and struck; a daemon may end at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = fresh()
        self.ledger = Ledger(self.memory, **MEASURES)
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.model: dict[int, Block] = {}
        self.words = iter(range(10, 1 << 30, 10))

    def free(self, slab: int, shape: tuple[int, ...]) -> list[int]:
        first = slab * (SLAB // PAGE_ALIGN)
        slots = range(first, first + SLAB // sum(shape))
        return [slot for slot in slots if slot not in self.model]

    @rule(
        slab=st.integers(0, SLABS - 1),
        shape=st.sampled_from(SHAPES),
        origin=st.sampled_from(ORIGINS),
        count=st.integers(1, 4),
        depth=st.integers(0, 100),
    )
    def seal(
        self, slab: int, shape: tuple[int, ...], origin: bytes, count: int, depth: int
    ) -> None:
        in_use = [slot for slot in self.model if slot // (SLAB // PAGE_ALIGN) == slab]
        if in_use and self.shapes[slab] != shape:
            return
        self.shapes[slab] = shape
        slots = self.free(slab, shape)[:count]
        if slots:
            blocks = {
                slot: (origin, shape, next(self.words), depth + at) for at, slot in enumerate(slots)
            }
            enter(self.ledger, blocks)
            self.model.update(blocks)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def strike(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        self.ledger.strike(np.array(gone, np.int64))
        for slot in gone:
            del self.model[slot]

    @rule()
    def restart(self) -> None:
        self.ledger = Ledger(self.memory, **MEASURES)
        assert shown(list(self.ledger.recover())) == self.model

    @invariant()
    def another_daemon_would_find_all_of_it(self) -> None:
        assert reopened(self.memory) == self.model


TestPool = Pool.TestCase


class KilledError(Exception):
    """The daemon ends here."""


class Column:
    """A record array that dies in the midst of its writes, after `lives` values in all."""

    def __init__(self, rows: NDArray[Any], lives: list[int]) -> None:
        self._rows, self._lives = rows, lives

    def __getitem__(self, key: object) -> Any:  # noqa: ANN401  # as numpy
        found = self._rows[key]
        return Column(found, self._lives) if isinstance(key, str) else found

    def __len__(self) -> int:
        return len(self._rows)

    def __setitem__(self, rows: NDArray[Any], values: NDArray[Any]) -> None:
        rows = np.atleast_1d(np.asarray(rows))
        values = np.broadcast_to(np.asarray(values), (len(rows), *self._rows.shape[1:]))
        for row, value in zip(rows, values, strict=True):
            if self._lives[0] == 0:
                raise KilledError
            self._lives[0] -= 1
            self._rows[row] = value


@pytest.mark.parametrize("lives", range(40))
def test_killed_between_any_two_writes_a_block_is_whole_or_absent(lives: int) -> None:
    memory = fresh()
    ledger = Ledger(memory, **MEASURES)
    old = {slot: (ORIGINS[0], SHAPES[0], 10 * slot, slot) for slot in range(4)}
    enter(ledger, old)
    new = {slot: (ORIGINS[1], SHAPES[0], 1_000 + 10 * slot, 50 + slot) for slot in (1, 2, 4, 5)}
    ledger._records = Column(ledger._records, [lives])  # type: ignore[assignment]
    was_killed = False
    try:
        ledger.strike(np.array([1, 2]))
        enter(ledger, new)
    except KilledError:
        was_killed = True
    found = reopened(memory)
    assert was_killed == (lives < 22)
    kept = {slot: block for slot, block in old.items() if slot not in {1, 2}}
    assert found.items() >= kept.items()
    for slot, block in found.items():
        assert block in {old.get(slot), new.get(slot)}
    if not was_killed:
        assert found == kept | new


def test_records_of_an_earlier_cut_are_never_those_of_this_one() -> None:
    memory = fresh()
    ledger = Ledger(memory, **MEASURES)
    enter(ledger, {3: (ORIGINS[0], SHAPES[0], 10, 0)})
    stale = memory.copy()
    ledger.strike(np.array([3]))
    enter(ledger, {0: (ORIGINS[0], SHAPES[1], 20, 0)})
    enter(ledger, {1: (ORIGINS[0], SHAPES[1], 30, 1)})
    ledger.strike(np.array([0, 1]))
    enter(ledger, {0: (ORIGINS[0], SHAPES[0], 40, 0)})
    start = module._records_at(SLABS)
    records, old = (one[start:].view(module.RECORD) for one in (memory, stale))
    records[3] = old[3]
    assert reopened(memory) == {0: (ORIGINS[0], SHAPES[0], 40, 0)}


def test_of_two_records_of_a_block_the_later_counts() -> None:
    memory = fresh()
    ledger = Ledger(memory, **MEASURES)
    enter(ledger, {0: (ORIGINS[0], SHAPES[0], 10, 0)})
    enter(ledger, {9: (ORIGINS[0], SHAPES[0], 10, 7)})
    assert reopened(memory) == {9: (ORIGINS[0], SHAPES[0], 10, 7)}


@pytest.mark.parametrize("byte", range(module.RECORD.itemsize - 8))
def test_a_changed_byte_costs_the_record(byte: int) -> None:
    memory = fresh()
    enter(Ledger(memory, **MEASURES), {0: (ORIGINS[0], SHAPES[0], 10, 3)})
    start = len(memory) // PAGE_ALIGN * PAGE_ALIGN - PAGE_ALIGN
    memory[start + byte] ^= 1
    assert reopened(memory) == {}


def test_sequences_go_on_after_a_restart() -> None:
    memory = fresh()
    ledger = Ledger(memory, **MEASURES)
    for word in range(5):
        enter(ledger, {0: (ORIGINS[0], SHAPES[0], 10 * word, 0)})
    again = Ledger(memory, **MEASURES)
    (before,) = again.recover()
    enter(again, {1: (ORIGINS[0], SHAPES[0], 990, 0)})
    (after,) = Ledger(memory, **MEASURES).recover()
    assert after.sequences[list(after.slots).index(1)] > before.sequences.max()


def test_an_origin_without_blocks_gives_up_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORIGINS_MAX", 1)
    memory = fresh()
    ledger = Ledger(memory, **MEASURES)
    enter(ledger, {0: (ORIGINS[0], SHAPES[0], 10, 0)})
    enter(ledger, {1: (ORIGINS[1], SHAPES[0], 20, 0)})
    assert reopened(memory) == {0: (ORIGINS[0], SHAPES[0], 10, 0)}
    ledger.strike(np.array([0]))
    again = Ledger(memory, **MEASURES)
    assert list(again.recover()) == []
    enter(again, {1: (ORIGINS[1], SHAPES[0], 20, 0)})
    assert reopened(memory) == {1: (ORIGINS[1], SHAPES[0], 20, 0)}


def test_what_is_not_ours_is_refused_and_what_is_stale_is_told() -> None:
    memory = fresh()
    assert check_header(memory, **MEASURES)
    for kept in range(1, len(module.MAGIC) + 1):  # killed while it wrote its name
        memory[:kept] = np.frombuffer(module.MAGIC[:kept], np.uint8)
        with pytest.raises(StaleError, match="torn"):
            check_header(memory, **MEASURES)
    memory[:5] = np.frombuffer(b"hello", np.uint8)
    with pytest.raises(ForeignError):
        check_header(memory, **MEASURES)
    memory = fresh()
    Ledger(memory, **MEASURES)
    assert not check_header(memory, **MEASURES)
    with pytest.raises(StaleError, match="another size"):
        check_header(memory, pool_bytes=2 * SLAB, slab_bytes=SLAB)
    row = memory[: module.HEADER.itemsize].view(module.HEADER)
    row["version"] = 2
    with pytest.raises(StaleError, match="torn"):
        check_header(memory, **MEASURES)
    row["check"] = module._sum_header((2, SLABS * SLAB, SLAB))
    with pytest.raises(StaleError, match="version 2, these of 1"):
        check_header(memory, **MEASURES)
