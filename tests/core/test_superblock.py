"""The superblock: which copy counts, and that what was declared dead stays dead."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trikv.core import superblock
from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import (
    GROWN_MAX,
    VOIDS_MAX,
    Superblock,
    UnusableDiskError,
    Voids,
    is_unfinished,
    read,
)

GIB = 1 << 30


def block(revision: int = 5) -> Superblock:
    voids = Voids({bytes([one]) * 32: 100 + one for one in range(3)}, 17)
    return Superblock(bytes(range(16)), GIB, 1 << 24, 60, 7, revision, is_clean=False, voids=voids)


def flipped(page: bytes, bit: int) -> bytes:
    changed = bytearray(page)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_round_trip() -> None:
    page = block().pack()
    assert len(page) == PAGE_ALIGN
    assert read(page + page) == block()
    assert block().first_sequence == 7 << 40
    assert block().tag == int.from_bytes(bytes(range(8)), "little")


def test_a_disk_that_has_grown_is_of_another_version() -> None:
    """Older daemons, who would not see what was added, refuse it."""
    grown = replace(block(), grown=(3, 1, 200))
    assert read(grown.pack() * 2) == grown
    versions = [int.from_bytes(one.pack()[16:20], "little") for one in (block(), grown)]
    assert versions == [1, 2]


def test_as_many_voids_as_there_may_be_fit() -> None:
    voids = Voids()
    for one in range(VOIDS_MAX):
        voids.add(one.to_bytes(32, "big"), one + 1)
    full = replace(block(), voids=voids, grown=tuple(range(1, GROWN_MAX + 1)))
    assert read(full.pack() * 2) == full
    assert voids.floor == 0


@pytest.mark.parametrize("newer_first", [True, False])
def test_the_newer_copy_counts(newer_first: bool) -> None:  # noqa: FBT001
    pages = [block(6).pack(), block(5).pack()]
    found = read(b"".join(pages if newer_first else reversed(pages)))
    assert found == block(6)
    assert found is not None
    assert found.newest == (not newer_first)


@given(st.integers(0, PAGE_ALIGN * 8 - 1), st.booleans())
def test_a_damaged_copy_does_not_count(bit: int, is_first: bool) -> None:  # noqa: FBT001
    pages = [block(6).pack(), block(5).pack()]
    pages[not is_first] = flipped(pages[not is_first], bit)
    assert read(b"".join(pages)) == block(5 if is_first else 6)


def test_cut_after_the_first_copy() -> None:
    assert read(block().pack()) == block()


@pytest.mark.parametrize("cut", [1_000, PAGE_ALIGN - 1])
def test_damage_with_our_mark_is_refused(cut: int) -> None:
    with pytest.raises(UnusableDiskError, match="damaged"):
        read(block().pack()[:cut])


def sectors(page: bytes, *kept: int) -> bytes:
    return b"".join(
        page[at : at + 512] if at // 512 in kept else bytes(512) for at in range(0, 4096, 512)
    )


def test_what_a_power_cut_leaves_of_the_first_write_is_told() -> None:
    new = Superblock(bytes(range(16)), GIB, 1 << 24, 60).pack()
    for kept in ((0,), (7,), (0, 3)):
        assert is_unfinished(sectors(new, *kept) + bytes(PAGE_ALIGN))
    for front in (b"", bytes(8192), new + bytes(PAGE_ALIGN), new * 2, new, bytes(4096) + new):
        assert not is_unfinished(front)
    used = block().pack()
    for front in (sectors(used, 0) + bytes(4096), sectors(new, 0) * 2, b"LABELONE" * 1024):
        assert not is_unfinished(front)


@pytest.mark.parametrize("front", [b"", bytes(8192), b"LABELONE" * 1024])
def test_without_our_mark_nothing_is_said(front: bytes) -> None:
    assert read(front) is None


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superblock, "NOT_GROWN", 3)
    newer = block(9).pack()
    monkeypatch.undo()
    with pytest.raises(UnusableDiskError, match=r"has format 3 and .* up to 2:"):
        read(block().pack() + newer)


origins = st.integers(0, 4).map(lambda one: bytes([one]) * 32)


@given(st.lists(st.tuples(origins, st.integers(0, 30)), max_size=20))
def test_what_was_declared_dead_is_dead(added: list[tuple[bytes, int]]) -> None:
    voids, model = Voids(), dict[bytes, int]()
    for origin, sequence in added:
        voids.add(origin, sequence)
        model[origin] = max(sequence, model.get(origin, 0))
    pairs = [(bytes([one]) * 32, sequence) for one in range(6) for sequence in range(32)]
    table = np.frombuffer(b"".join(origin for origin, _ in pairs), np.uint8).reshape(-1, 32)
    dead = voids.are_dead(table, np.array([sequence for _, sequence in pairs]))
    assert dead.tolist() == [sequence < model.get(origin, 0) for origin, sequence in pairs]


def test_beyond_the_bound_the_oldest_takes_others_along() -> None:
    voids = Voids()
    for one in range(VOIDS_MAX + 3):
        voids.add(one.to_bytes(32, "big"), 10 * one + 10)
    assert len(voids.before) == VOIDS_MAX
    assert voids.floor == 30
    origins = np.zeros((4, 32), np.uint8)
    origins[1:, 31] = [1, 4, 5]
    dead = voids.are_dead(origins, np.array([9, 19, 49, 61]))
    assert dead.tolist() == [True, True, True, False]
    stranger = np.full((2, 32), 255, np.uint8)
    assert voids.are_dead(stranger, np.array([29, 30])).tolist() == [True, False]
