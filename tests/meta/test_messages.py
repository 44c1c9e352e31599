"""What a metaserver's plan must be like to be believed, and the bounds of what nodes send."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.meta.metas import A, keys
from trikv import wire
from trikv.core.adverts import Part
from trikv.core.errors import BadRequestError
from trikv.core.nodes import Nodes
from trikv.core.owners import Owners
from trikv.meta import messages


def plan_of(rows: list[tuple[int, int, int]], owner_count: int = 2) -> Any:
    message = wire.SCHEMA.LocateReply.new_message().init("ok")
    for at, owner in enumerate(message.init("owners", owner_count)):
        owner.address, owner.epoch = f"node{at}:1", at
    message.segments = np.array(rows, "<i4").tobytes()
    return message


def test_a_plan_survives_the_wire() -> None:
    nodes = Nodes(Owners(100, seed=0), 5, 1)
    one, two, three = (nodes.join(f"{at}:1", at, [], now_s=0) for at in (1, 2, 3))
    nodes.advertise(one, A, keys(1, 3))
    nodes.advertise(two, A, keys(2, 2))
    words = np.concatenate([keys(1, 3), keys(2, 2), keys(3, 1)])
    message = wire.SCHEMA.LocateReply.new_message().init("ok")
    messages.write_plan(message, nodes.locate(three, A, words, now_s=0))
    plan = messages.read_plan(message, len(words))
    assert [(s.address, s.epoch, s.first, s.count) for s in plan] == [
        ("1:1", 1, 0, 3),
        ("2:1", 2, 3, 2),
    ]
    empty = wire.SCHEMA.LocateReply.new_message().init("ok")
    messages.write_plan(empty, nodes.locate(three, A, keys(3, 1), now_s=0))
    assert messages.read_plan(empty, 1) == []


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 0, 1)],
        [(-1, 0, 1)],
        [(0, 1, 1)],
        [(0, 0, 0)],
        [(0, 0, -1)],
        [(0, 0, 11)],
        [(0, 0, 5), (1, 5, 6)],
        [(0, 0, 2), (1, 3, 1)],
        [(0, 0, 2), (1, 1, 1)],
    ],
)
def test_a_plan_that_is_none_is_refused(rows: list[tuple[int, int, int]]) -> None:
    with pytest.raises(BadRequestError):
        messages.read_plan(plan_of(rows), 10)


def test_half_a_segment_is_refused() -> None:
    message = plan_of([(0, 0, 1)])
    message.segments = bytes(message.segments)[:-4]
    with pytest.raises(BadRequestError):
        messages.read_plan(message, 10)


@given(rows=st.lists(st.tuples(*[st.integers(-2, 6)] * 3), max_size=4), asked=st.integers(0, 8))
def test_a_plan_that_is_believed_is_a_prefix(rows: list[tuple[int, int, int]], asked: int) -> None:
    try:
        plan = messages.read_plan(plan_of(rows), asked)
    except BadRequestError:
        return
    blocks = [at for one in plan for at in range(one.first, one.first + one.count)]
    assert blocks == list(range(len(blocks)))
    assert len(blocks) <= asked


def adverts_of(parts: list[Part]) -> Any:
    rows = [wire.SCHEMA.Advert.new_message() for _ in parts]
    messages.write_adverts(rows, parts)
    return rows


def test_adverts_survive_the_wire() -> None:
    parts = [Part(A, keys(1, 3), is_held=True), Part(b"b" * 20, keys(2, 2), is_held=False)]
    for sent, got in zip(parts, messages.read_adverts(adverts_of(parts)), strict=True):
        assert (got.origin, got.is_held) == (sent.origin, sent.is_held)
        assert np.array_equal(got.words, sent.words)


def test_adverts_are_bounded() -> None:
    many = Part(A, keys(1, 8_192), is_held=True)
    one = Part(A, keys(2, 1), is_held=True)
    assert len(messages.read_adverts(adverts_of([many]))) == 1
    for parts in ([many, one], [one] * 65, [Part(b"short", keys(1, 1), is_held=True)]):
        with pytest.raises(BadRequestError):
            messages.read_adverts(adverts_of(parts))


def test_rails_are_bounded() -> None:
    assert messages.read_rails(["a", "b"]) == ["a", "b"]
    for rails in (["r"] * 17, ["r" * 65], [""]):
        with pytest.raises(BadRequestError):
            messages.read_rails(rails)
