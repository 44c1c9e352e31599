"""Chains of requests against lists, and the bound on how many are remembered."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core.chains import HOLE_MAX, UNKNOWN, Chain, Chains
from trikv.core.words import Entries, InstanceName, RequestId, SpaceId

ONE, TWO = InstanceName("one"), InstanceName("two")
SPACE, OTHER = SpaceId(1), SpaceId(2)


def numbers(*entries: int) -> Entries:
    return np.array(entries, np.int32)


def put(chain: Chain, first: int, *entries: int, generation: int = 1) -> None:
    chain.put(first, numbers(*entries), np.full(len(entries), generation, np.uint32))


def known(chain: Chain) -> list[tuple[int, int]]:
    """Entry and generation of each position that stands for a block."""
    rows = zip(
        chain.entries[: chain.length].tolist(),
        chain.generations[: chain.length].tolist(),
        strict=True,
    )
    return [row if row[0] != UNKNOWN else (UNKNOWN, 0) for row in rows]


PUTS = st.lists(
    st.tuples(st.integers(0, 200), st.lists(st.integers(-1, 50), max_size=80), st.integers(1, 9)),
    max_size=8,
)


@given(PUTS)
def test_a_chain_is_a_list_with_holes(puts: list[tuple[int, list[int], int]]) -> None:
    chain = Chain(SPACE)
    model: dict[int, tuple[int, int]] = {}
    length = 0
    for first, entries, generation in puts:
        put(chain, first, *entries, generation=generation)
        for position, entry in enumerate(entries, first):
            model[position] = (entry, generation if entry != UNKNOWN else 0)
        length = max(length, first + len(entries))
        assert chain.length == length
        assert known(chain) == [model.get(position, (UNKNOWN, 0)) for position in range(length)]


def test_a_hole_is_unknown_even_where_the_columns_had_room() -> None:
    chain = Chain(SPACE)
    put(chain, 0, 5, 6)
    put(chain, 10, 7)
    assert known(chain) == [(5, 1), (6, 1), *[(UNKNOWN, 0)] * 8, (7, 1)]
    put(chain, 3, 8, generation=2)
    assert known(chain)[3] == (8, 2)
    assert chain.length == 11


def test_a_shorter_answer_overwrites_the_front_only() -> None:
    chain = Chain(SPACE)
    put(chain, 0, 1, 2, 3)
    put(chain, 0, 9, generation=2)
    assert known(chain) == [(9, 2), (2, 1), (3, 1)]
    put(chain, 0)
    assert known(chain) == [(9, 2), (2, 1), (3, 1)]


def test_a_hole_has_a_bound_beyond_which_nothing_is_remembered() -> None:
    chain = Chain(SPACE)
    put(chain, 0, 5)
    put(chain, 1 + HOLE_MAX + 1, 6)
    assert (known(chain), chain.length) == ([(5, 1)], 1)
    put(chain, 1 + HOLE_MAX, 7)
    assert (chain.length, known(chain)[-1]) == (HOLE_MAX + 2, (7, 1))


def of(chains: Chains, request: str, instance: InstanceName = ONE) -> Chain:
    return chains.of(instance, RequestId(request), SPACE)


def test_a_request_keeps_its_chain_until_it_ends() -> None:
    chains = Chains(8)
    chain = of(chains, "r")
    assert of(chains, "r") is chain
    assert of(chains, "r", TWO) is not chain
    assert of(chains, "s") is not chain
    chains.forget(ONE, RequestId("r"))
    chains.forget(ONE, RequestId("never heard of"))
    assert of(chains, "r") is not chain
    assert len(chains) == 3


def test_another_space_begins_a_new_chain_in_the_same_place() -> None:
    chains = Chains(2)
    of(chains, "r")
    of(chains, "s")
    chain = chains.of(ONE, RequestId("r"), OTHER)
    assert (chain.space, chain.length, len(chains)) == (OTHER, 0, 2)
    of(chains, "t")  # forgets s: r was just used
    assert chains.of(ONE, RequestId("r"), OTHER) is chain


@pytest.mark.parametrize("used", ["a", "b", "c"])
def test_at_the_bound_the_least_recently_used_is_forgotten(used: str) -> None:
    chains = Chains(3)
    before = {name: of(chains, name) for name in "abc"}
    assert of(chains, used) is before[used]
    of(chains, "d")
    assert len(chains) == 3
    oldest = "b" if used == "a" else "a"
    for name in sorted("abc".replace(oldest, "")):
        assert of(chains, name) is before[name]
    assert of(chains, oldest) is not before[oldest]


def test_a_bound_of_one() -> None:
    chains = Chains(1)
    first = of(chains, "a")
    assert of(chains, "a") is first
    of(chains, "b")
    assert len(chains) == 1


def test_the_end_of_an_instance_ends_its_requests_only() -> None:
    chains = Chains(8)
    others = of(chains, "r", TWO)
    for name in "rst":
        of(chains, name)
    chains.forget_instance(ONE)
    assert len(chains) == 1
    assert of(chains, "r", TWO) is others
    chains.forget_instance(InstanceName("never heard of"))
