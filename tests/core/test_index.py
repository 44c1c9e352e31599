"""The index against a dict from (space, hash) to entry."""

from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trikv.core.index import RUN_SHORT, RUN_WINDOW_MIN, Index
from trikv.core.words import Entries, SpaceId, Words

SMALL = 13


def chains_of(space: int) -> list[int]:
    index = Index(SMALL, seed=0)
    return index._bucket_of(np.array([0, 1, 2**64 - 1], np.uint64), index._salt(space)).tolist()


A = SpaceId(0)
B = SpaceId(next(one for one in range(1, 1000) if chains_of(one)[:2] == chains_of(A)[:2]))

Pair = tuple[int, int]
PAIRS = st.tuples(st.sampled_from([0, 1, 2**64 - 1]), st.integers(0, 5))
KEYS = st.lists(PAIRS, unique=True)
SPACES = st.sampled_from([A, B])
CHOICES = st.randoms(use_true_random=False)


def words(*rows: Pair) -> Words:
    """Hashes that differ in the first word (which chooses the bucket) or only in the last."""
    hashes = np.zeros((len(rows), 4), np.uint64)
    for row, (first, last) in enumerate(rows):
        hashes[row, 0], hashes[row, 3] = first, last
    return hashes


def many(count: int, *, seed: int = 0) -> Words:
    return np.random.default_rng(seed).integers(0, 2**64, (count, 4), np.uint64)


def numbers(*entries: int) -> Entries:
    return np.array(entries, np.int32)


class IndexMachine(RuleBasedStateMachine):
    """Few first words, so that most keys of both spaces share a chain; entries in any order."""

    CAPACITY = SMALL

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(self.CAPACITY, seed=0)
        self.model: dict[tuple[SpaceId, int, int], int] = {}

    @rule(space=SPACES, keys=KEYS, choice=CHOICES, in_order=st.booleans())
    def insert(self, space: SpaceId, keys: list[Pair], choice: Random, *, in_order: bool) -> None:
        unused = sorted(set(range(self.CAPACITY)) - set(self.model.values()))
        if not in_order:
            choice.shuffle(unused)
        absent = [key for key in keys if (space, *key) not in self.model][: len(unused)]
        self.index.insert(space, words(*absent), numbers(*unused[: len(absent)]))
        for key, entry in zip(absent, unused, strict=False):
            self.model[space, *key] = entry

    @rule(choice=CHOICES, count=st.integers(0, CAPACITY))
    def remove(self, choice: Random, count: int) -> None:
        gone = choice.sample(sorted(self.model), min(count, len(self.model)))
        self.index.remove(numbers(*(self.model.pop(key) for key in gone)))

    @rule(space=SPACES, keys=st.lists(PAIRS))
    def find(self, space: SpaceId, keys: list[Pair]) -> None:
        expected = [self.model.get((space, *key), -1) for key in keys]
        assert self.index.find(space, words(*keys)).tolist() == expected
        gap = expected.index(-1) if -1 in expected else len(expected)
        assert self.index.find_prefix(space, words(*keys)).tolist() == expected[:gap]

    @rule(space=SPACES, choice=CHOICES, ordered=st.booleans())
    def find_prefix_of_present(self, space: SpaceId, choice: Random, *, ordered: bool) -> None:
        present = [key for key in self.model if key[0] == space]
        choice.shuffle(present)
        if ordered:
            present.sort(key=self.model.__getitem__)
        hashes = words(*((first, last) for _, first, last in present), (5, 5))
        expected = [self.model[key] for key in present]
        assert self.index.find_prefix(space, hashes).tolist() == expected

    @invariant()
    def knows_what_the_model_knows(self) -> None:
        assert len(self.index) == len(self.model)
        for space in (A, B):
            rows = [key for key in self.model if key[0] == space]
            hashes = words(*((first, last) for _, first, last in rows))
            entries = self.index.find(space, hashes)
            assert entries.tolist() == [self.model[key] for key in rows]
            assert np.array_equal(self.index.hashes_of(entries), hashes)

    @invariant()
    def every_chain_ends_and_holds_only_used_entries(self) -> None:
        links, buckets = self.index._links, self.index._buckets
        seen = []
        for bucket in range(buckets):
            place = links.item(bucket)
            while place != self.index._end:
                seen.append(place - buckets)
                assert len(seen) <= self.CAPACITY
                place = links.item(place)
        assert sorted(seen) == sorted(self.model.values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_nothing_is_found_in_an_empty_index() -> None:
    index = Index(1, seed=0)
    assert index.find(A, many(3)).tolist() == [-1, -1, -1]
    assert index.find_prefix(A, many(3)).tolist() == []


def test_empty_batches_change_nothing() -> None:
    index = Index(4, seed=0)
    index.insert(A, words(), numbers())
    index.remove(numbers())
    assert index.find(A, words()).tolist() == []
    assert index.find_prefix(A, words()).dtype == np.int32
    assert len(index) == 0


def test_capacity_one_is_used_again_and_again() -> None:
    index = Index(1, seed=0)
    for last in range(5):
        index.insert(A, words((9, last)), numbers(0))
        assert index.find(A, words((9, last), (9, last + 1))).tolist() == [0, -1]
        index.remove(numbers(0))
        assert index.find_prefix(A, words((9, last))).tolist() == []


def test_spaces_do_not_see_each_other() -> None:
    index = Index(4, seed=0)
    index.insert(A, words((1, 1)), numbers(0))
    index.insert(B, words((1, 1)), numbers(1))
    index.remove(numbers(0))
    assert index.find(A, words((1, 1))).tolist() == [-1]
    assert index.find_prefix(B, words((1, 1))).tolist() == [1]


def test_the_same_hash_of_two_spaces_in_one_chain() -> None:
    keys = words((0, 1), (1, 1))
    index = Index(SMALL, seed=0)
    index.insert(A, keys, numbers(0, 1))
    assert index.find(B, keys).tolist() == [-1, -1]
    index.insert(B, keys, numbers(2, 3))
    assert index.find(A, keys).tolist() == [0, 1]
    assert index.find(B, keys).tolist() == [2, 3]
    assert index.find_prefix(A, keys).tolist() == [0, 1]


def test_a_run_goes_on_into_another_space_no_further_than_the_key() -> None:
    index = Index(4, seed=0)
    index.insert(A, words((1, 1)), numbers(0))
    index.insert(B, words((2, 2)), numbers(1))
    assert index.find_prefix(A, words((1, 1), (2, 2))).tolist() == [0]


def test_a_removed_key_ends_the_run_though_its_row_still_holds_it() -> None:
    index = Index(8, seed=0)
    hashes = many(8)
    index.insert(A, hashes, np.arange(8, dtype=np.int32))
    index.remove(numbers(5))
    assert index.find_prefix(A, hashes).tolist() == [0, 1, 2, 3, 4]


def test_a_hash_must_be_equal_in_all_words() -> None:
    index = Index(4, seed=0)
    key = np.array([[1, 2, 3, 4]], np.uint64)
    index.insert(A, key, numbers(2))
    for word in range(4):
        other = key.copy()
        other[0, word] += np.uint64(1)
        assert index.find(A, other).tolist() == [-1]
        assert index.find_prefix(A, other).tolist() == []


@pytest.mark.parametrize(
    "run", [1, RUN_SHORT - 1, RUN_SHORT, RUN_WINDOW_MIN * 9, RUN_WINDOW_MIN * 9 + 1, 9000]
)
def test_prefixes_of_any_fragmentation_are_found(run: int) -> None:
    count = 8000
    index = Index(count, seed=1)
    runs = np.array_split(np.arange(count, dtype=np.int32), -(-count // run))
    np.random.default_rng(run).shuffle(runs := list(runs))
    entries = np.concatenate(runs)
    hashes = many(count + 1)
    index.insert(A, hashes[:count], entries)
    assert np.array_equal(index.find_prefix(A, hashes), entries)
    assert np.array_equal(index.find(A, hashes[:count]), entries)
    index.remove(entries[[7000]])
    assert np.array_equal(index.find_prefix(A, hashes), entries[:7000])


def test_the_last_entry_ends_a_run() -> None:
    index = Index(4, seed=0)
    hashes = many(4)
    index.insert(A, hashes, numbers(2, 3, 0, 1))
    assert index.find_prefix(A, hashes).tolist() == [2, 3, 0, 1]


def test_chains_stay_short_for_hashes_that_count_up() -> None:
    index = Index(4096, seed=5)
    hashes = words(*((number, 0) for number in range(4096)))
    buckets = index._bucket_of(hashes[:, 0], index._salt(A))
    assert np.bincount(buckets, minlength=4096).max() <= 4


def test_an_entry_in_use_is_refused() -> None:
    index = Index(4, seed=0)
    index.insert(A, words((1, 1)), numbers(0))
    with pytest.raises(AssertionError):
        index.insert(A, words((2, 2)), numbers(0))
    with pytest.raises(AssertionError):
        index.insert(A, words((2, 2), (3, 3)), numbers(1, 1))
    with pytest.raises(AssertionError):
        index.remove(numbers(2))
