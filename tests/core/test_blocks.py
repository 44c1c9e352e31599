"""The columns of block life against `NEXT`, one block at a time, and every cell of that table."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trikv.core.blocks import NEXT, PAGES_MAX, Blocks, Event, State
from trikv.core.errors import IllegalEventError
from trikv.core.words import Entries, SpaceId

CHOICES = st.randoms(use_true_random=False)
REFUSED = (IllegalEventError, AssertionError)
ROW = np.zeros(1, np.int32)
SPACE = SpaceId(7)
COLUMNS = [name for name in vars(Blocks(1)) if isinstance(vars(Blocks(1))[name], np.ndarray)]


def rows(*numbers: int) -> Entries:
    return np.array(numbers, np.int32)


def reserve(blocks: Blocks, count: int = 1, *, page_count: int = 3) -> Entries:
    slots = np.arange(count, dtype=np.int64) + 100
    return blocks.reserve(
        slots, np.arange(count, dtype=np.int32), space=SPACE, page_count=page_count
    )


def snapshot(blocks: Blocks) -> dict[str, object]:
    columns: dict[str, object] = {name: getattr(blocks, name).tolist() for name in COLUMNS}
    return {**columns, "counts": dict(blocks.counts), "unused": blocks.unused_count}


# -- every cell: a block of three ranks in each state, held twice unless the event says "last"

PAGES_DONE = {Event.PAGE_FILLED: 1, Event.LAST_PAGE_FILLED: 2}
HOLDS = {Event.LOST: 0, Event.EVICTED: 0, Event.LAST_HOLD_ENDED: 1}


def block_in(state: State, event: Event) -> Blocks:
    """A table of one row, as the event would find it: ranks 0 and 1 write, or two readers hold."""
    blocks = Blocks(1)
    holds = HOLDS.get(event, 2)
    if state is not State.ABSENT:
        reserve(blocks)
    if state is State.FILLING:
        done = PAGES_DONE.get(event, 0)
        for rank in range(done + 1 if done else holds):
            blocks.claim(ROW, rank)
        for rank in range(done):
            blocks.fill(ROW, rank)
    if state in {State.SEALED, State.DOOMED}:
        for rank in range(3):
            blocks.claim(ROW, rank)
            blocks.fill(ROW, rank)
        for _ in range(max(holds, 1) if state is State.DOOMED else holds):
            blocks.pin(ROW)
    if state is State.DOOMED:
        blocks.drop(ROW)
    assert blocks.state[0] == state
    return blocks


def fill_next(blocks: Blocks) -> None:
    blocks.fill(ROW, int(blocks.filled[0]).bit_count())


HAPPEN: dict[Event, Callable[[Blocks], object]] = {
    Event.RESERVED: reserve,
    Event.CLAIMED: lambda blocks: blocks.claim(ROW, 2),
    Event.PAGE_FILLED: fill_next,
    Event.LAST_PAGE_FILLED: fill_next,
    Event.LOST_WHILE_HELD: lambda blocks: blocks.drop(ROW),
    Event.LOST: lambda blocks: blocks.drop(ROW),
    Event.HOLD_ENDED: lambda blocks: blocks.unpin(ROW),
    Event.LAST_HOLD_ENDED: lambda blocks: blocks.unpin(ROW),
    Event.EVICTED: lambda blocks: blocks.evict(ROW),
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_cell_of_the_table(state: State, event: Event) -> None:
    blocks = block_in(state, event)
    becomes = NEXT.get((state, event))
    if becomes is not None:
        HAPPEN[event](blocks)
        assert blocks.state[0] == becomes
        blocks.check()
        return
    before = snapshot(blocks)
    with pytest.raises(REFUSED):
        HAPPEN[event](blocks)
    assert blocks.state[0] == state
    assert blocks.counts == before["counts"]
    if event not in {Event.PAGE_FILLED, Event.LAST_PAGE_FILLED, *HOLDS, Event.HOLD_ENDED}:
        assert snapshot(blocks) == before


def test_the_table_has_no_row_that_nobody_expects() -> None:
    leads_to = {state: {NEXT[cell] for cell in NEXT if cell[0] is state} for state in State}
    assert leads_to[State.ABSENT] == {State.FILLING}
    assert leads_to[State.FILLING] == {State.FILLING, State.SEALED, State.DOOMED, State.ABSENT}
    assert leads_to[State.DOOMED] == {State.DOOMED, State.ABSENT}
    assert leads_to[State.SEALED] == {State.SEALED, State.DOOMED, State.ABSENT}
    assert [cell for cell in NEXT if NEXT[cell] is State.SEALED and cell[0] is State.FILLING] == [
        (State.FILLING, Event.LAST_PAGE_FILLED)
    ]


# -- random histories


@dataclass
class Row:
    """One block as `NEXT` sees it."""

    state: State = State.ABSENT
    page_count: int = 0
    claimed: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    pins: int = 0
    generation: int = 0

    def step(self, event: Event) -> None:
        self.state = NEXT[self.state, event]

    @property
    def is_held(self) -> bool:
        return bool(self.writing) or self.pins > 0

    def reserve(self, page_count: int) -> None:
        self.step(Event.RESERVED)
        self.page_count, self.claimed, self.filled = page_count, set(), set()
        self.generation += 1

    def claim(self, rank: int) -> None:
        self.step(Event.CLAIMED)
        self.claimed.add(rank)
        self.writing.add(rank)

    def fill(self, rank: int) -> None:
        self.writing.remove(rank)
        if self.state is State.DOOMED:
            self.let_go()
            return
        self.filled.add(rank)
        is_last = len(self.filled) == self.page_count
        self.step(Event.LAST_PAGE_FILLED if is_last else Event.PAGE_FILLED)

    def fail(self, rank: int) -> None:
        self.writing.remove(rank)
        if self.state is State.DOOMED:
            self.let_go()
        else:
            self.lose()

    def unpin(self) -> None:
        self.pins -= 1
        self.let_go()

    def let_go(self) -> None:
        self.step(Event.HOLD_ENDED if self.is_held else Event.LAST_HOLD_ENDED)

    def lose(self) -> None:
        self.step(Event.LOST_WHILE_HELD if self.is_held else Event.LOST)


class BlocksMachine(RuleBasedStateMachine):
    """Eight rows, up to three ranks; events on arrays must be the same as on each block."""

    CAPACITY = 8

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(self.CAPACITY)
        self.model = [Row() for _ in range(self.CAPACITY)]

    def some(self, choice: Random, wanted: Callable[[Row], bool]) -> list[int]:
        fit = [number for number, row in enumerate(self.model) if wanted(row)]
        return choice.sample(fit, choice.randint(min(1, len(fit)), len(fit)))

    def among(self, numbers: list[int], state: State) -> set[int]:
        return {number for number in numbers if self.model[number].state is state}

    @rule(choice=CHOICES, page_count=st.integers(1, 3))
    def reserve(self, choice: Random, page_count: int) -> None:
        count = choice.randint(0, self.blocks.unused_count)
        given = reserve(self.blocks, count, page_count=page_count).tolist()
        assert given == sorted(set(given))
        assert len(given) == count
        for number in given:
            self.model[number].reserve(page_count)
        assert self.blocks.slot[given].tolist() == list(range(100, 100 + count))
        assert self.blocks.depth[given].tolist() == list(range(count))
        assert set(self.blocks.space[given].tolist()) <= {SPACE}

    @rule(choice=CHOICES, rank=st.integers(0, 2))
    def claim(self, choice: Random, rank: int) -> None:
        chosen = self.some(
            choice,
            lambda row: (
                row.state is State.FILLING and rank < row.page_count and rank not in row.claimed
            ),
        )
        self.blocks.claim(rows(*chosen), rank)
        for number in chosen:
            self.model[number].claim(rank)

    @rule(choice=CHOICES, rank=st.integers(0, 2))
    def fill(self, choice: Random, rank: int) -> None:
        chosen = self.some(choice, lambda row: rank in row.writing)
        sealed, freed = self.blocks.fill(rows(*chosen), rank)
        for number in chosen:
            self.model[number].fill(rank)
        assert set(sealed.tolist()) == self.among(chosen, State.SEALED)
        assert set(freed.tolist()) == self.among(chosen, State.ABSENT)

    @rule(choice=CHOICES, rank=st.integers(0, 2))
    def fail(self, choice: Random, rank: int) -> None:
        chosen = self.some(choice, lambda row: rank in row.writing)
        visible = self.among(chosen, State.FILLING)
        lost, freed = self.blocks.fail(rows(*chosen))
        for number in chosen:
            self.model[number].fail(rank)
        assert set(lost.tolist()) == visible
        assert set(freed.tolist()) == self.among(chosen, State.ABSENT)

    @rule(choice=CHOICES)
    def drop(self, choice: Random) -> None:
        chosen = self.some(choice, lambda row: row.state in {State.FILLING, State.SEALED})
        freed = self.blocks.drop(rows(*chosen))
        for number in chosen:
            self.model[number].lose()
        assert set(freed.tolist()) == self.among(chosen, State.ABSENT)

    @rule(choice=CHOICES)
    def evict(self, choice: Random) -> None:
        chosen = self.some(choice, lambda row: row.state is State.SEALED and not row.is_held)
        self.blocks.evict(rows(*chosen))
        for number in chosen:
            self.model[number].step(Event.EVICTED)

    @rule(choice=CHOICES)
    def pin(self, choice: Random) -> None:
        chosen = self.some(choice, lambda row: row.state is State.SEALED)
        self.blocks.pin(rows(*chosen))
        for number in chosen:
            self.model[number].pins += 1

    @rule(choice=CHOICES)
    def unpin(self, choice: Random) -> None:
        chosen = self.some(choice, lambda row: row.pins > 0)
        evictable, freed = self.blocks.unpin(rows(*chosen))
        for number in chosen:
            self.model[number].unpin()
        unheld = {number for number in chosen if not self.model[number].is_held}
        assert set(evictable.tolist()) == self.among(chosen, State.SEALED) & unheld
        assert set(freed.tolist()) == self.among(chosen, State.ABSENT)

    @rule(choice=CHOICES, number=st.integers(0, CAPACITY - 1))
    def one_bad_block_refuses_the_whole_batch(self, choice: Random, number: int) -> None:
        bad = self.model[number]
        before = snapshot(self.blocks)
        good = self.some(choice, lambda row: row.state is State.SEALED and not row.is_held)
        batch = rows(*{*good, number})
        if bad.state is not State.SEALED or bad.is_held:
            with pytest.raises(IllegalEventError):
                self.blocks.evict(batch)
        if bad.state is not State.SEALED:
            with pytest.raises(IllegalEventError):
                self.blocks.pin(batch)
        if bad.state in {State.ABSENT, State.DOOMED}:
            with pytest.raises(IllegalEventError):
                self.blocks.drop(batch)
        for rank in bad.claimed if bad.state is State.FILLING else range(3):
            with pytest.raises(REFUSED):
                self.blocks.claim(rows(number), rank)
        assert snapshot(self.blocks) == before

    @invariant()
    def columns_are_the_models(self) -> None:
        blocks, model = self.blocks, self.model
        blocks.check()
        assert blocks.state.tolist() == [row.state for row in model]
        assert blocks.writers.tolist() == [len(row.writing) for row in model]
        assert blocks.pins.tolist() == [row.pins for row in model]
        assert blocks.generation.tolist() == [row.generation for row in model]
        live = [n for n, row in enumerate(model) if row.state in {State.FILLING, State.SEALED}]
        for column, name in ((blocks.claimed, "claimed"), (blocks.filled, "filled")):
            expected = [sum(1 << rank for rank in getattr(model[n], name)) for n in live]
            assert column[live].tolist() == expected


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(stateful_step_count=30, deadline=None)


# -- examples


def sealed_blocks(count: int) -> tuple[Blocks, Entries]:
    blocks = Blocks(count)
    entries = reserve(blocks, count, page_count=1)
    blocks.claim(entries, 0)
    blocks.fill(entries, 0)
    return blocks, entries


@pytest.mark.parametrize("complete", [lambda b: b.fill(ROW, 0), lambda b: b.fail(ROW)])
def test_a_copy_completed_twice_is_our_bug(complete: Callable[[Blocks], object]) -> None:
    blocks = Blocks(1)
    reserve(blocks, page_count=2)
    blocks.claim(ROW, 0)
    blocks.fill(ROW, 0)
    with pytest.raises(AssertionError):
        complete(blocks)
    assert blocks.state[0] == State.FILLING


def test_an_unpin_too_many_is_our_bug() -> None:
    blocks, entries = sealed_blocks(2)
    blocks.pin(entries)
    blocks.unpin(entries)
    with pytest.raises(AssertionError):
        blocks.unpin(entries[:1])


def test_a_rank_that_claims_twice_is_our_bug() -> None:
    blocks = Blocks(2)
    entries = reserve(blocks, 2)
    blocks.claim(entries[:1], 1)
    before = snapshot(blocks)
    with pytest.raises(AssertionError):
        blocks.claim(entries, 1)
    assert snapshot(blocks) == before


def test_pins_nest() -> None:
    blocks, entries = sealed_blocks(2)
    blocks.pin(entries)
    blocks.pin(entries[:1])
    evictable, _ = blocks.unpin(entries)
    assert evictable.tolist() == [1]
    assert blocks.evictable.tolist() == [False, True]
    assert blocks.unpin(entries[:1])[0].tolist() == [0]


def test_a_pinned_block_is_not_evicted_and_none_goes_with_it() -> None:
    blocks, entries = sealed_blocks(3)
    blocks.pin(entries[1:2])
    before = snapshot(blocks)
    for batch in (entries, entries[1:2]):
        with pytest.raises(IllegalEventError):
            blocks.evict(batch)
    assert snapshot(blocks) == before


def test_a_reused_row_has_another_generation_and_nothing_of_its_past() -> None:
    blocks, entries = sealed_blocks(3)
    blocks.evict(entries[1:2])
    again = reserve(blocks, page_count=2)
    assert again.tolist() == [1]
    assert blocks.generation.tolist() == [1, 2, 1]
    assert (blocks.claimed[1], blocks.filled[1], blocks.wanted[1]) == (0, 0, 0b11)
    blocks.claim(again, 0)
    assert blocks.fill(again, 0)[0].tolist() == []


def test_rows_come_ascending_fresh_ones_first_and_never_more_than_there_are() -> None:
    blocks = Blocks(6)
    first = reserve(blocks, 4)
    blocks.drop(first[[2, 0]])
    assert reserve(blocks, 3).tolist() == [0, 4, 5]
    before = snapshot(blocks)
    with pytest.raises(AssertionError):
        reserve(blocks, 2)
    assert snapshot(blocks) == before
    assert reserve(blocks, 1).tolist() == [2]


def test_as_many_ranks_as_a_mask_has_bits() -> None:
    blocks = Blocks(1)
    with pytest.raises(AssertionError):
        reserve(blocks, page_count=PAGES_MAX + 1)
    blocks = Blocks(1)
    entries = reserve(blocks, page_count=PAGES_MAX)
    for rank in reversed(range(PAGES_MAX)):
        blocks.claim(entries, rank)
        assert blocks.state[0] == State.FILLING
        sealed, _ = blocks.fill(entries, rank)
    assert sealed.tolist() == [0]
    blocks.check()
