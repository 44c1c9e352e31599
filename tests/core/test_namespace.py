"""Fingerprints that no two different inputs share, epochs, and what the operator is told."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core import namespace as module
from trikv.core.errors import OverloadedError
from trikv.core.layout import Geometry
from trikv.core.namespace import Fields, Namespace, Namespaces, Pages, differing, fingerprint

Input = tuple[Fields, Pages]

# Few letters, among them all that a careless spelling would use between its parts.
TEXTS = st.text(alphabet="ax1,=:/\0\xff", max_size=3)
NAMES = st.one_of(TEXTS.filter(bool), st.sampled_from(["field", "page", "label", "0", "1"]))
FIELDS = st.dictionaries(NAMES, TEXTS, max_size=3).map(lambda known: tuple(sorted(known.items())))
PIECES = st.lists(st.sampled_from([1, 2, 11, 12]), min_size=1, max_size=4).map(tuple)
GEOMETRIES = st.builds(lambda pieces, text: Geometry(sum(pieces), pieces, text), PIECES, TEXTS)


# Groups may have different numbers of pages: in one, ranks hold the same bytes, in another not.
GROUP = st.lists(GEOMETRIES, min_size=1, max_size=3).map(tuple)
GROUPS = st.lists(GROUP, min_size=1, max_size=3).map(tuple)


def page(*pieces: int, layout: str = "f/HN") -> Geometry:
    return Geometry(sum(pieces), pieces, layout)


def meaning(one: Input) -> Input:
    fields, geometries = one
    return tuple(pair for pair in fields if pair[0] != "label"), geometries


def permuted(draw: st.DrawFn, one: Input) -> Input:
    """Something that looks much like `one`: the same parts, put together otherwise."""
    fields, geometries = one
    what = draw(st.integers(0, 5))
    if what == 0:
        return fields, tuple(draw(st.permutations(geometries)))
    if what == 1 and len(set(map(len, geometries))) == 1:
        return fields, tuple(zip(*geometries, strict=True))  # pages become groups
    if what == 2:
        pieces = draw(st.permutations(geometries[0][0].piece_bytes))
        first = replace(geometries[0][0], piece_bytes=tuple(pieces))
        return fields, ((first, *geometries[0][1:]), *geometries[1:])
    if what == 3:
        names = draw(st.permutations([name for name, _ in fields]))
        values = [value for _, value in fields]
        return tuple(sorted(zip(names, values, strict=True))), geometries
    if what == 4 and fields:
        name, value = fields[0]
        joined = name + value
        cut = draw(st.integers(1, len(joined)))
        return tuple(sorted({**dict(fields[1:]), joined[:cut]: joined[cut:]}.items())), geometries
    return draw(FIELDS), geometries


@given(st.data())
def test_the_same_fingerprint_means_the_same_input(data: st.DataObject) -> None:
    one = data.draw(st.tuples(FIELDS, GROUPS))
    other = permuted(data.draw, one)
    for _ in range(data.draw(st.integers(0, 2))):
        other = permuted(data.draw, other)
    assert (fingerprint(*one) == fingerprint(*other)) == (meaning(one) == meaning(other))


A, B = page(4, 4), page(8)
BASE: Input = ((("dtype", "f16"), ("label", "m")), ((A,), (B,)))
NEAR_MISSES: list[tuple[Input, Input]] = [
    # A field's name, value and neighbours cannot run into each other.
    (((("a", "bc"),), ((A,),)), ((("ab", "c"),), ((A,),))),
    (((("a", ""), ("b", "")), ((A,),)), ((("a", "b"),), ((A,),))),
    (((("a", "b"), ("c", "d")), ((A,),)), ((("a", "d"), ("c", "b")), ((A,),))),
    (((("a", "\x01\0\0\0b"),), ((A,),)), ((("a", ""), ("b", "")), ((A,),))),
    (((), ((A,),)), ((("", ""),), ((A,),))),
    # A field cannot imitate a page.
    (((("page", "0"),), ((A,),)), ((), ((A,),))),
    # Which page is which: order of pages, order of groups, pages against groups.
    (((), ((A,), (B,))), ((), ((B,), (A,)))),
    (((), ((A, B),)), ((), ((B, A),))),
    (((), ((A, B),)), ((), ((A,), (B,)))),
    (((), ((A,), (A,))), ((), ((A,),))),
    (((), ((A, A),)), ((), ((A,),))),
    (((), ((A,), (A, A))), ((), ((A, A), (A,)))),
    (((), ((A,), (A, B))), ((), ((A, B), (A,)))),
    # The pieces of a page: sizes, order and number, with the sum the same.
    (((), ((page(4, 4),),)), ((), ((page(8),),))),
    (((), ((page(1, 2),),)), ((), ((page(2, 1),),))),
    (((), ((page(1, 2, 2),),)), ((), ((page(1, 1, 1, 2),),))),
    (((), ((page(1, 2, 1, 2),),)), ((), ((page(1, 1, 2, 2),),))),
    (((), ((page(1, *[1] * 21),),)), ((), ((page(*[11] * 2),),))),
    # Order and type inside a piece.
    (((), ((page(8, layout="f16/NHD"),),)), ((), ((page(8, layout="f16/HND"),),))),
    (((), ((page(8, layout=""),),)), ((), ((page(8, layout="0"),),))),
]


@pytest.mark.parametrize(("one", "other"), NEAR_MISSES)
def test_near_misses_have_different_fingerprints(one: Input, other: Input) -> None:
    assert fingerprint(*one) != fingerprint(*other)


def test_the_label_is_left_out_and_nothing_else() -> None:
    _, geometries = BASE
    known = fingerprint(*BASE)
    assert len(known) == 16
    assert fingerprint((("dtype", "f16"), ("label", "other")), geometries) == known
    assert fingerprint((("dtype", "f16"),), geometries) == known
    assert fingerprint((("dtype", "f16"), ("labels", "m")), geometries) != known
    assert fingerprint((("dtype", "f32"), ("label", "m")), geometries) != known


def test_fingerprints_do_not_depend_on_the_process() -> None:
    """Hosts must agree, and a daemon must find its own blocks after a restart."""
    assert fingerprint(*BASE).hex() == "1920456e40f31083341c27688c3298cb"


# -- namespaces


def test_equal_instances_share_and_are_counted() -> None:
    known = Namespaces()
    first = known.open(*BASE)
    assert known.open(*BASE) is first
    assert first.instances == 2
    other = known.open((("dtype", "f32"),), BASE[1])
    assert other is not first
    assert (other.instances, len(known.by_fingerprint)) == (1, 2)
    assert (first.label, other.label) == ("m", "?")


def test_pages_are_listed_a_group() -> None:
    opened = Namespaces().open((), ((page(4), page(5)), (page(6, 2), page(7))))
    assert opened.pages == ((4, 5), (8, 7))
    assert len(opened.spaces) == len(set(opened.spaces)) == 2


def test_a_new_epoch_has_spaces_that_were_never_used() -> None:
    known = Namespaces()
    one = known.open(*BASE)
    other = known.open((), ((A,),))
    seen = [*one.spaces, *other.spaces]
    for epoch in range(1, 4):
        before = one.spaces
        assert known.renew(one) == before
        assert one.epoch == epoch
        assert len(one.spaces) == 2
        seen += one.spaces
    assert len(set(seen)) == len(seen)
    assert (one.instances, other.epoch) == (1, 0)
    assert known.open(*BASE) is one


def test_only_an_unused_namespace_can_be_forgotten_and_its_spaces_never_come_back() -> None:
    known = Namespaces()
    one = known.open(*BASE)
    with pytest.raises(AssertionError):
        known.forget(one)
    one.instances = 0
    known.forget(one)
    again = known.open(*BASE)
    assert again is not one
    assert not set(again.spaces) & set(one.spaces)


def test_namespaces_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMESPACES_MAX", 2)
    known = Namespaces()
    first = known.open((("n", "1"),), ((A,),))
    known.open((("n", "2"),), ((A,),))
    with pytest.raises(OverloadedError):
        known.open((("n", "3"),), ((A,),))
    assert len(known.by_fingerprint) == 2
    assert known.open((("n", "1"),), ((A,),)) is first


def fields(**known: str) -> Fields:
    return tuple(sorted(known.items()))


def test_engines_that_hash_differently_are_told() -> None:
    known = Namespaces()
    one = known.open(fields(label="m", dtype="f16", hash_probe="aa"), ((A,),))
    assert known.notes(one) == []
    other = known.open(fields(label="n", dtype="f16", hash_probe="bb"), ((A,),))
    for mine, theirs in itertools.permutations([one, other]):
        (note,) = known.notes(mine)
        assert "PYTHONHASHSEED" in note
        assert theirs.fingerprint.hex()[:8] in note
        assert "\n" not in note


@pytest.mark.parametrize(
    "other",
    [
        (fields(dtype="f32", hash_probe="bb"), ((A,),)),
        (fields(dtype="f16", hash_probe="aa"), ((B,),)),
        (fields(dtype="f16", hash_probe="bb"), ((page(4, 5),),)),
        (fields(dtype="f16", hash_probe="bb"), ((A,), (A,))),
        (fields(hash_probe="bb"), ((A,),)),
    ],
)
def test_engines_that_differ_in_more_are_not_told(other: Input) -> None:
    known = Namespaces()
    one = known.open(fields(dtype="f16", hash_probe="aa"), ((A,),))
    assert known.notes(known.open(*other)) == []
    assert known.notes(one) == []


def test_a_probe_that_only_one_side_has_is_a_difference() -> None:
    known = Namespaces()
    known.open(fields(dtype="f16", hash_probe="aa"), ((A,),))
    assert len(known.notes(known.open(fields(dtype="f16"), ((A,),)))) == 1


@given(FIELDS, FIELDS)
def test_differing_names_what_a_person_would_name(ours: Fields, theirs: Fields) -> None:
    mine, yours = dict(ours), dict(theirs)
    expected = {
        name
        for name in {*mine, *yours} - {"label"}
        if (name in mine, mine.get(name)) != (name in yours, yours.get(name))
    }
    assert differing(ours, theirs) == sorted(expected)
    assert Namespace(b"", ours, (), ()).label == mine.get("label", "?")
