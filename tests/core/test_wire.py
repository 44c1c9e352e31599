"""Every bound of the wire from both sides, with real messages, and blobs there and back."""

import contextlib
from collections.abc import Callable
from typing import Any

import capnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv import wire
from trikv.core.errors import BadRequestError
from trikv.core.layout import Piece, Range

UNREADABLE = (BadRequestError, capnp.KjException, UnicodeDecodeError)  # see nursery.rpc._read
Facts = dict[str, Any]


def field(name: str = "a", value: str = "b") -> Facts:
    return {"name": name, "value": value}


def piece(**facts: int) -> Facts:
    return {"memory": 0, "offset": 0, "stride": 8, "bytes": 8, **facts}


def group(**facts: Any) -> Facts:  # noqa: ANN401
    return {"blockCount": 4, "pieces": [piece()], "layout": "f32", **facts}


MEMORY = {"process": {"address": 1 << 40, "bytes": 4096}}
CUDA = {"cudaIpc": {"handle": b"h" * 64, "allocationBytes": 4096, "deviceUuid": b"u" * 16}}
CALLS: dict[str, tuple[Any, Callable[[Any], Any], Facts]] = {
    "declare": (
        wire.SCHEMA.Instance,
        wire.read_declare,
        {"name": "engine", "rankCount": 2, "fields": [field()]},
    ),
    "register": (
        wire.SCHEMA.Rank,
        wire.read_register,
        {
            "instance": "engine",
            "rank": 1,
            "memories": [MEMORY],
            "groups": [group()],
            "fences": {"address": 1 << 41, "count": 4},
        },
    ),
    "query": (
        wire.SCHEMA.Query,
        wire.read_query,
        {"request": "r", "group": 1, "hashBytes": 16, "hashes": bytes(range(32))},
    ),
    "save": (
        wire.SCHEMA.Save,
        wire.read_save,
        {
            "rank": 1,
            "group": 2,
            "request": "r",
            "first": 3,
            "hashBytes": 32,
            "hashes": b"h" * 64,
            "blocks": b"\x05\0\0\0\xff\xff\xff\xff",
            "fence": 6,
            "generation": 1 << 63,
        },
    ),
    "load": (
        wire.SCHEMA.Load,
        wire.read_load,
        {"rank": 1, "lease": 1 << 63, "first": 2, "blocks": bytes(8), "budgetSeconds": 1.5},
    ),
}


def read(call: str, **changed: Any) -> Any:  # noqa: ANN401
    """Send a message, the usual one but for what is changed, and read it."""
    schema, reader, usual = CALLS[call]
    raw = schema.new_message(**{**usual, **changed}).to_bytes()
    with schema.from_bytes(raw, traversal_limit_in_words=wire.MESSAGE_WORDS_MAX) as message:
        return reader(message)


def test_declare() -> None:
    call = read("declare", fields=[field("z", ""), field("a", "é")])
    assert (call.instance, call.rank_count) == ("engine", 2)
    assert call.fields == (("a", "é"), ("z", ""))


def test_register() -> None:
    call = read("register", groups=[group(), group(pieces=[piece(offset=1 << 40), piece()])])
    assert (call.instance, call.rank) == ("engine", 1)
    assert call.ranges == (Range(1 << 40, 4096),)
    assert [len(one.pieces) for one in call.groups] == [1, 2]
    assert call.groups[1].pieces[0] == Piece(0, 1 << 40, 8, 8)
    assert (call.groups[0].block_count, call.groups[0].layout) == (4, "f32")
    assert [one.replicas for one in call.groups] == [1, 1], "as callers that do not know of it mean"
    assert read("register", groups=[group(replicas=8)]).groups[0].replicas == 8
    assert [one.sections for one in call.groups] == [(), ()], "likewise"
    cut = group(pieces=[piece(), piece()], sections=[7, 16])
    assert read("register", groups=[cut]).groups[0].sections == (7, 16)
    assert (call.fence_address, call.fence_count) == (1 << 41, 4)


def test_query() -> None:
    call = read("query")
    assert (call.request, call.group) == ("r", 1)
    assert call.words.tolist() == [
        [0x0706050403020100, 0x0F0E0D0C0B0A0908, 0, 0],
        [0x1716151413121110, 0x1F1E1D1C1B1A1918, 0, 0],
    ]


def test_save() -> None:
    call = read("save")
    assert (call.rank, call.group, call.request, call.first) == (1, 2, "r", 3)
    assert (call.blocks.tolist(), call.fence, call.generation) == ([5, -1], 6, 1 << 63)
    assert call.words.shape == (2, 4)


def test_load() -> None:
    call = read("load")
    assert (call.rank, call.lease, call.first, call.budget_s) == (1, 1 << 63, 2, 1.5)
    assert call.blocks.tolist() == [0, 0]
    assert not call.is_ordered, "as callers that do not know of it mean"
    assert read("load", ordered=True).is_ordered


# -- bounds: what is changed, for the last value that is taken and the first that is not

FENCES = {"address": (1 << 63) - 8 * 65_536 - 1, "count": 65_536}
MANY = [field(str(number)) for number in range(129)]
POSITIONS = wire.POSITIONS_MAX
BOUNDS: list[tuple[str, Facts, Facts]] = [
    ("declare", {"rankCount": 1}, {"rankCount": 0}),
    ("declare", {"rankCount": 64}, {"rankCount": 65}),
    ("declare", {"rankCount": 64}, {"rankCount": 65_535}),
    ("declare", {"name": "n"}, {"name": ""}),
    ("declare", {"name": "n" * 256}, {"name": "n" * 257}),
    ("declare", {"name": "é" * 128}, {"name": "é" * 128 + "n"}),
    ("declare", {"fields": []}, {"fields": MANY}),
    ("declare", {"fields": MANY[:128]}, {"fields": MANY}),
    ("declare", {"fields": MANY[:2]}, {"fields": [*MANY[:2], MANY[0]]}),
    ("declare", {"fields": [field("n")]}, {"fields": [field("")]}),
    ("declare", {"fields": [field("n" * 64)]}, {"fields": [field("n" * 65)]}),
    ("declare", {"fields": [field(value="v" * 4096)]}, {"fields": [field(value="v" * 4097)]}),
    ("register", {"instance": "n" * 256}, {"instance": "n" * 257}),
    ("register", {"instance": "n"}, {"instance": ""}),
    ("register", {"rank": 63}, {"rank": 64}),
    ("register", {"rank": 0}, {"rank": 65_535}),
    ("register", {"memories": [MEMORY]}, {"memories": []}),
    ("register", {"memories": [MEMORY] * 4096}, {"memories": [MEMORY] * 4097}),
    (
        "register",
        {"memories": [CUDA]},
        {"memories": [{"cudaIpc": {**CUDA["cudaIpc"], "handle": b"h"}}]},
    ),
    (
        "register",
        {"memories": [CUDA]},
        {"memories": [{"cudaIpc": {**CUDA["cudaIpc"], "deviceUuid": b""}}]},
    ),
    ("register", {"memories": [CUDA]}, {"memories": [CUDA, CUDA]}),
    (
        "register",
        {"memories": [{"cudaIpc": {**CUDA["cudaIpc"], "allocationBytes": 1 << 40}}]},
        {"memories": [{"cudaIpc": {**CUDA["cudaIpc"], "allocationBytes": (1 << 40) + 1}}]},
    ),
    (
        "register",
        {"memories": [CUDA], "events": [b"e" * 64] * 256},
        {"memories": [CUDA], "events": [b"e" * 64] * 257},
    ),
    (
        "register",
        {"memories": [CUDA], "events": [b"e" * 64]},
        {"memories": [CUDA], "events": [b"e" * 63]},
    ),
    ("register", {"memories": [MEMORY]}, {"memories": [MEMORY, CUDA]}),
    ("register", {"groups": [group()]}, {"groups": []}),
    ("register", {"groups": [group()] * 16}, {"groups": [group()] * 17}),
    ("register", {"groups": [group()]}, {"groups": [group(pieces=[])]}),
    ("register", {"groups": [group(layout="l" * 256)]}, {"groups": [group(layout="l" * 257)]}),
    ("register", {"groups": [group(layout="l")]}, {"groups": [group(layout="")]}),
    ("register", {"groups": [group(replicas=1)]}, {"groups": [group(replicas=0)]}),
    ("register", {"groups": [group(replicas=64)]}, {"groups": [group(replicas=65)]}),
    ("register", {"groups": [group(sections=[8])]}, {"groups": [group(sections=[9])]}),
    ("register", {"groups": [group(sections=[1, 8])]}, {"groups": [group(sections=[1, 7])]}),
    ("register", {"groups": [group(sections=[1, 8])]}, {"groups": [group(sections=[8, 8])]}),
    ("register", {"groups": [group(sections=[1, 8])]}, {"groups": [group(sections=[0, 8])]}),
    ("register", {"groups": [group(sections=[1, 8])]}, {"groups": [group(sections=[9, 8])]}),
    (
        "register",
        {"groups": [group(pieces=[piece(bytes=9)], sections=[*range(1, 8), 9])]},
        {"groups": [group(pieces=[piece(bytes=9)], sections=[*range(1, 10)])]},
    ),
    ("register", {"fences": FENCES}, {"fences": {**FENCES, "count": 65_537}}),
    ("register", {"fences": {"count": 0}}, {"fences": {"count": (1 << 32) - 1}}),
    ("query", {"request": "r" * 512}, {"request": "r" * 513}),
    ("query", {"request": "r"}, {"request": ""}),
    ("query", {"hashBytes": 32}, {"hashBytes": 0}),
    ("query", {"hashBytes": 16}, {"hashBytes": 8}),
    ("query", {"hashBytes": 16}, {"hashBytes": 255}),
    ("query", {"hashes": b"h" * 32}, {"hashes": b"h" * 31}),
    ("query", {"hashes": b""}, {"hashes": b"h"}),
    ("query", {"hashes": bytes(16 * 65_536)}, {"hashes": bytes(16 * 65_537)}),
    (
        "query",
        {"hashBytes": 32, "hashes": bytes(32 * 65_536)},
        {"hashBytes": 32, "hashes": bytes(32 * 65_537)},
    ),
    ("save", {"request": "r" * 512}, {"request": "r" * 513}),
    ("save", {"hashes": b"", "blocks": b""}, {"hashes": b"", "blocks": bytes(4)}),
    ("save", {"blocks": bytes(8)}, {"blocks": bytes(12)}),
    ("save", {"blocks": bytes(8)}, {"blocks": bytes(4)}),
    ("save", {"blocks": bytes(8)}, {"blocks": bytes(7)}),
    ("save", {"first": POSITIONS - 2}, {"first": POSITIONS - 1}),
    ("save", {"first": 0}, {"first": (1 << 32) - 1}),
    ("load", {"blocks": b""}, {"blocks": bytes(3)}),
    ("load", {"blocks": bytes(4 * 65_536)}, {"blocks": bytes(4 * 65_537)}),
    ("load", {"budgetSeconds": 0.0}, {"budgetSeconds": -0.001}),
    ("load", {"budgetSeconds": 3599.5}, {"budgetSeconds": 3600.0}),
    ("load", {"budgetSeconds": 1e-30}, {"budgetSeconds": float("nan")}),
    ("load", {"budgetSeconds": 1.0}, {"budgetSeconds": float("inf")}),
]


@pytest.mark.parametrize(("call", "taken", "refused"), BOUNDS, ids=range(len(BOUNDS)))
def test_both_sides_of_a_bound(call: str, taken: Facts, refused: Facts) -> None:
    read(call, **taken)
    with pytest.raises(BadRequestError) as caught:
        read(call, **refused)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000


def test_a_group_has_at_most_so_many_pieces() -> None:
    message = wire.SCHEMA.Rank.new_message(**CALLS["register"][2])
    for count, is_taken in ((65_536, True), (65_537, False)):
        message.init("groups", 1)[0].layout = "f32"
        message.groups[0].init("pieces", count)
        with contextlib.nullcontext() if is_taken else pytest.raises(BadRequestError):
            assert len(wire.read_register(message).groups[0].pieces) == count


@pytest.mark.parametrize("address", [(1 << 64) - 1, (1 << 64) - 8, 1 << 63, (1 << 63) - 16, 0])
def test_fences_lie_in_the_address_space(address: int) -> None:
    with pytest.raises(BadRequestError):
        read("register", fences={"address": address, "count": 2})
    read("register", fences={"address": address, "count": 0})


@pytest.mark.parametrize(
    ("requests", "is_taken"),
    [
        ([], True),
        (["r"] * 4096, True),
        (["r"] * 4097, False),
        (["r" * 512], True),
        (["r", "r" * 513], False),
        ([""], False),
    ],
)
def test_bounds_of_a_release(requests: list[str], *, is_taken: bool) -> None:
    message = wire.SCHEMA.DeclareReply.new_message()  # has a list of texts, as the call has
    message.init("ok").notes = requests
    with contextlib.nullcontext() if is_taken else pytest.raises(BadRequestError):
        assert wire.read_requests(message.as_reader().ok.notes) == requests


# -- texts that are none, and messages that are cut


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("declare", {"name": "MARK"}),
        ("declare", {"fields": [field("MARK")]}),
        ("declare", {"fields": [field(value="MARK")]}),
        ("register", {"instance": "MARK"}),
        ("register", {"groups": [group(layout="MARK")]}),
        ("query", {"request": "MARK"}),
        ("save", {"request": "MARK"}),
    ],
)
@pytest.mark.parametrize("text", [b"\xff\xfe\xfd\xfc", b"ab\xc3\xc3", b"\xed\xa0\x80a"])
def test_malformed_utf8_is_the_senders_fault(call: str, changed: Facts, text: bytes) -> None:
    schema, reader, usual = CALLS[call]
    raw = schema.new_message(**{**usual, **changed}).to_bytes()
    assert raw.count(b"MARK") == 1
    with (
        schema.from_bytes(raw.replace(b"MARK", text)) as message,
        pytest.raises(UNREADABLE),
    ):
        reader(message)


@given(st.data())
def test_a_damaged_message_is_read_or_refused(data: st.DataObject) -> None:
    """Pointers into nowhere, wrong sizes, other unions: never another exception, never a crash."""
    call = data.draw(st.sampled_from(sorted(CALLS)))
    schema, reader, usual = CALLS[call]
    raw = bytearray(schema.new_message(**usual).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(8, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(raw), len(raw) - 8]))
    with (
        contextlib.suppress(*UNREADABLE),
        schema.from_bytes(bytes(raw[:cut]), traversal_limit_in_words=1 << 12) as message,
    ):
        reader(message)


# -- blobs


@given(st.integers(0, 40), st.sampled_from([16, 32]), st.randoms(use_true_random=False))
def test_hashes_there_and_back(count: int, hash_bytes: int, choice: Any) -> None:  # noqa: ANN401
    blob = choice.randbytes(count * hash_bytes)
    words = wire.hashes_to_words(blob, hash_bytes)
    assert words.shape == (count, 4)
    assert words.dtype == np.uint64
    assert wire.words_to_hashes(words, hash_bytes) == blob
    for row, number in zip(words.tolist(), range(count), strict=True):
        one = blob[number * hash_bytes : (number + 1) * hash_bytes].ljust(32, b"\0")
        assert b"".join(word.to_bytes(8, "little") for word in row) == one


def test_a_short_hash_is_not_a_long_one_with_zeros_by_chance() -> None:
    """Both read as the same words: sizes must not be mixed in one namespace (DESIGN)."""
    short = wire.hashes_to_words(b"h" * 16, 16)
    assert (short == wire.hashes_to_words(b"h" * 16 + bytes(16), 32)).all()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
def test_ids_there_and_back(ids: list[int]) -> None:
    blob = wire.array_to_ids(np.array(ids, np.int32))
    assert len(blob) == 4 * len(ids)
    assert wire.ids_to_array(blob).tolist() == ids
    assert wire.array_to_ids(np.array(ids, np.int64)[::-1]) == b"".join(
        one.to_bytes(4, "little", signed=True) for one in reversed(ids)
    )


@given(st.binary(max_size=100))
def test_any_blob_is_read_or_refused(blob: bytes) -> None:
    for hash_bytes in range(34):
        is_sound = hash_bytes in {16, 32} and len(blob) % hash_bytes == 0
        with contextlib.nullcontext() if is_sound else pytest.raises(BadRequestError):
            assert len(wire.hashes_to_words(blob, hash_bytes)) == len(blob) // hash_bytes
    with contextlib.nullcontext() if len(blob) % 4 == 0 else pytest.raises(BadRequestError):
        assert len(wire.ids_to_array(blob)) == len(blob) // 4


def test_a_text_is_measured_in_bytes() -> None:
    assert wire.text("é" * 4, "t", bytes_max=8) == "é" * 4
    with pytest.raises(BadRequestError, match="t must have 1 to 7 bytes"):
        wire.text("é" * 4, "t", bytes_max=7)
    assert wire.text("", "t", bytes_min=0) == ""


def test_the_largest_messages_fit_the_limit_of_a_message() -> None:
    sizes = [
        (32 + 4) * wire.BLOCKS_MAX + wire.REQUEST_BYTES_MAX + 1024,
        wire.FIELDS_MAX * (wire.FIELD_NAME_BYTES_MAX + wire.TEXT_BYTES_MAX + 64),
        wire.REQUESTS_MAX * (wire.REQUEST_BYTES_MAX + 16),
        wire.PIECES_MAX * 32,
    ]
    assert max(sizes) < 8 * wire.MESSAGE_WORDS_MAX
    assert wire.PROTOCOL >= 1
