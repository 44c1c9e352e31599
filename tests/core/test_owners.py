"""Bounds and digests of the metaserver's state; `test_nodes.py` drives all of it."""

import numpy as np
import pytest

from tests.core.owned import GRACE_S, SILENCE_S, A, B, many, two_nodes
from trikv.core import owners as owners_module
from trikv.core.errors import OverloadedError
from trikv.core.nodes import DIGEST_MASK, Nodes
from trikv.core.owners import ROW_BYTES, Owners, capacity_for, digest_of


def test_what_does_not_fit_is_declined_and_the_rest_is_taken() -> None:
    _, nodes, one, two = two_nodes(4)
    keys = many(6)
    taken = nodes.advertise(one, A, keys)
    assert (taken.new_count, taken.declined_count) == (4, 2)
    assert nodes.locate(two, A, keys, now_s=0).block_count == 4
    taken = nodes.advertise(two, A, keys)  # known blocks need no room
    assert (taken.new_count, taken.declined_count) == (4, 2)
    assert (one.declined, two.declined) == (2, 2)
    nodes.withdraw(one, A, keys)
    nodes.withdraw(two, A, keys)
    assert nodes.advertise(two, B, keys[:4]).new_count == 4


def test_a_block_twice_in_one_message_is_one_block() -> None:
    owners, nodes, one, two = two_nodes(4)
    keys = many(2)
    twice = np.concatenate([keys, keys[::-1], keys])
    assert nodes.advertise(one, A, twice).new_count == 2
    assert len(owners) == nodes.held(one) == 2
    assert nodes.locate(two, A, twice, now_s=0).block_count == 6
    assert nodes.withdraw(one, A, twice) == 2
    assert len(owners) == nodes.held(one) == 0


def test_only_so_many_origins_are_known_and_forgotten_ones_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owners_module, "ORIGINS_MAX", 2)
    owners, nodes, one, _ = two_nodes(9)
    a, b, c = (bytes([number]) * 20 for number in range(3))
    assert nodes.advertise(one, a, many(2)).new_count == 2
    assert nodes.advertise(one, b, many(2)).new_count == 2
    assert nodes.advertise(one, c, many(2)).declined_count == 2
    nodes.withdraw(one, a, many(2))
    assert owners.origin_count == 1
    assert nodes.advertise(one, c, many(2)).new_count == 2


def test_origins_of_declined_blocks_leave_no_trace() -> None:
    owners, nodes, one, two = two_nodes(2)
    nodes.advertise(one, A, many(2))
    assert nodes.advertise(two, B, many(2, seed=1)).declined_count == 2
    assert owners.origin_count == 1


def test_tags_are_used_again_only_when_no_entry_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "TAGS_MAX", 3)
    owners = Owners(100, seed=0)
    first, second, third = owners.open(1), owners.open(2), owners.open(3)
    owners.advertise(first, A, many(50))
    owners.close(first)
    with pytest.raises(OverloadedError):
        owners.open(4)
    assert owners.sweep(10)
    owners.close(second)  # in the middle of a pass: its turn is the next one
    while len(owners._free_tags) == 0:
        owners.sweep(10)
    assert list(owners._free_tags) == [first]
    assert len(owners) == 0
    while owners.sweep(10):
        pass
    assert list(owners._free_tags) == [first, second]
    assert owners.is_clean
    assert not owners.sweep()
    owners.close(third)


def test_nodes_are_bounded() -> None:
    nodes = Nodes(Owners(1, seed=0), SILENCE_S, GRACE_S, nodes_max=2)
    one, _ = (nodes.join(name, 1, [], now_s=0) for name in ("one:1", "two:1"))
    with pytest.raises(OverloadedError):
        nodes.join("three:1", 1, [], now_s=0)
    nodes.forget(one)
    assert nodes.join("three:1", 1, [], now_s=0).number == 1


def test_a_dead_nodes_blocks_are_not_its_numbers_next_owners() -> None:
    _, nodes, one, two = two_nodes(4)
    nodes.advertise(one, A, many(4))
    nodes.forget(one)
    again = nodes.join("other:1", 1, [], now_s=0)
    assert again.number == one.number
    assert nodes.locate(two, A, many(4), now_s=0).block_count == 0


def test_forgetting_a_node_touches_no_entry() -> None:
    owners, nodes, one, two = two_nodes(2_000)
    nodes.advertise(one, A, many(1_000))
    before = owners._owners.copy()
    nodes.forget(one)
    assert np.array_equal(owners._owners, before)
    assert nodes.locate(two, A, many(1_000), now_s=0).block_count == 0


@pytest.mark.parametrize("memory_bytes", [2 << 20, 3 << 20, 100 << 20, 1 << 30, (1 << 30) + 1])
def test_the_columns_fit_into_the_memory_that_they_are_made_for(memory_bytes: int) -> None:
    capacity = capacity_for(memory_bytes)
    assert capacity > (memory_bytes - (1 << 20)) / (ROW_BYTES + 20)
    if memory_bytes <= 100 << 20:
        assert memory_bytes * 0.8 < Owners(capacity, seed=0).memory_bytes + (1 << 20)
        assert Owners(capacity, seed=0).memory_bytes <= memory_bytes


def test_a_full_sized_index_answers_for_eight_owners_and_crowds_the_ninth() -> None:
    owners = Owners(10, seed=0)
    nodes = Nodes(owners, SILENCE_S, GRACE_S)
    everyone = [nodes.join(f"n{at}:1", 1, [], now_s=0) for at in range(9)]
    taken = [nodes.advertise(one, A, many(3)) for one in everyone]
    assert [one.crowded_count for one in taken] == [0] * 8 + [3]
    assert everyone[8].crowded == 3


# -- digests


def test_digests_tell_keys_origins_and_words_apart_and_not_order() -> None:
    keys = many(5)
    assert digest_of(A, keys) == digest_of(A, keys[::-1])
    assert digest_of(A, keys) != digest_of(B, keys)
    assert digest_of(A, keys) != digest_of(A, keys[:4])
    whole = digest_of(A, keys[:2]) + digest_of(A, keys[2:])
    assert digest_of(A, keys) == whole & DIGEST_MASK
    for word in range(4):
        other = keys.copy()
        other[0, word] ^= np.uint64(1)
        assert digest_of(A, other) != digest_of(A, keys)
    swapped = keys.copy()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    assert digest_of(A, swapped) != digest_of(A, keys)


def test_nobody_is_left_half_opened_when_tags_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners_module, "TAGS_MAX", 5)
    owners = Owners(9, seed=0)
    nodes = Nodes(owners, SILENCE_S, GRACE_S)
    for name in ("one:1", "two:1"):
        nodes.join(name, 1, [], now_s=0)
    with pytest.raises(OverloadedError):
        nodes.join("three:1", 1, [], now_s=0)
    assert len(nodes.by_address) == 2
    while owners.sweep():
        pass
    assert owners.tag_count == 4
