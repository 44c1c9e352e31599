"""One disk's blocks, by example: each rule of the table, and what is believed after a restart."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from cache_world import PAGE, words

from trikv.core import retired
from trikv.core.adopting import parts_of
from trikv.core.blocks import DOOMED
from trikv.core.lower import Lower, WritePlan
from trikv.core.slots import Recovered
from trikv.core.tenants import OTHERS, Quota, Rules, Tenants
from trikv.core.words import Entries, SpaceId

ORIGIN = b"o" * 32
NONE = np.empty(0, np.int32)
FIRST = 100


def new_lower(regions: int = 2, slots: int = 4, *, is_new: bool = True) -> tuple[Lower, SpaceId]:
    lower = Lower(regions, slots * PAGE, slot_bytes_min=PAGE, first_sequence=FIRST)
    origin = lower.open_origin(ORIGIN, (PAGE - 1,))
    assert origin is not None
    if is_new:
        lower.end_adopting()
    return lower, origin


def plan(lower: Lower, origin: SpaceId, nodes: Sequence[int], kin: Entries = NONE) -> WritePlan:
    depths = np.array([node.bit_length() - 1 for node in nodes], np.int32)
    return lower.prepare_write(origin, words(list(nodes)), depths, kin=kin)


def write(lower: Lower, origin: SpaceId, nodes: Sequence[int], kin: Entries = NONE) -> Entries:
    made = plan(lower, origin, nodes, kin)
    count = len(made.entries)
    sums = np.array([nodes[at] for at in made.positions.tolist()], np.uint64)
    assert lower.complete_write(made, np.ones(count, np.bool_), sums, kin=kin).all()
    return made.entries


def there(lower: Lower, origin: SpaceId, nodes: Sequence[int]) -> list[int]:
    found = lower.find(origin, words(list(nodes)))
    return [node for node, entry in zip(nodes, found.tolist(), strict=True) if entry >= 0]


def test_a_block_is_found_once_it_is_written_with_its_place_and_sum() -> None:
    lower, origin = new_lower()
    made = plan(lower, origin, [1, 2])
    assert there(lower, origin, [1, 2]) == []
    assert made.cuts == (0,)
    assert made.sequence == FIRST
    sums = np.array([11, 22], np.uint64)
    lower.complete_write(made, np.ones(2, np.bool_), sums, kin=NONE)
    assert there(lower, origin, [1, 2, 3]) == [1, 2]
    regions, slots = lower.prepare_read(made.entries)
    assert (regions.tolist(), slots.tolist()) == ([0, 0], [0, 1])
    assert lower.sums[made.entries].tolist() == [11, 22]
    assert plan(lower, origin, [3]).cuts == ()  # the region is cut already
    assert lower.next_sequence == FIRST + 2


def test_only_what_stands_before_the_first_failure_is_kept() -> None:
    lower, origin = new_lower()
    made = plan(lower, origin, [1, 2, 4, 8])
    is_written = np.array([True, False, True, True])
    kept = lower.complete_write(made, is_written, np.zeros(4, np.uint64), kin=NONE)
    assert kept.tolist() == [True, False, False, False]
    assert there(lower, origin, [1, 2, 4, 8]) == [1]
    assert lower.pages.used_bytes == PAGE
    assert lower.pages.free_count(lower._shapes[origin]) == 7


def test_a_region_whose_header_may_be_missing_is_cut_again() -> None:
    lower, origin = new_lower()
    made = plan(lower, origin, [1])
    lower.complete_write(made, np.zeros(1, np.bool_), np.zeros(1, np.uint64), kin=NONE)
    assert plan(lower, origin, [1]).cuts == (0,)


def test_wrong_bytes_are_forgotten_when_nobody_reads_them_any_more() -> None:
    lower, origin = new_lower()
    entries = write(lower, origin, [1, 2])
    for _ in range(2):
        lower.prepare_read(entries)
    lower.complete_read(entries, np.array([False, True]))
    assert there(lower, origin, [1, 2]) == [2]
    assert lower.wrong_blocks_total == 1
    assert lower.blocks.state[entries[0]] == DOOMED
    assert lower.pages.used_bytes == 2 * PAGE  # its slot is still being read
    lower.complete_read(entries, np.array([False, True]))
    assert lower.pages.used_bytes == PAGE
    lower.blocks.check()


def test_what_is_read_does_not_go_and_ancestors_do_not_go_for_their_child() -> None:
    lower, origin = new_lower(regions=1)
    read = write(lower, origin, [9])
    lower.prepare_read(read)
    kin = write(lower, origin, [1, 2])
    write(lower, origin, [7])
    made = plan(lower, origin, [4, 8], kin)
    assert made.positions.tolist() == [0]
    assert there(lower, origin, [9, 1, 2, 7]) == [9, 1, 2]
    assert not lower.blocks.pins[kin].any()


def test_ancestors_are_used_by_a_write() -> None:
    lower, origin = new_lower(regions=1)
    kin = write(lower, origin, [1])
    write(lower, origin, [9])
    write(lower, origin, [2], kin)
    write(lower, origin, [5, 6])
    assert there(lower, origin, [1, 2, 9]) == [1, 2]


def test_touched_blocks_go_last_leaves_first() -> None:
    lower, origin = new_lower(regions=1)
    path = write(lower, origin, [1, 2])
    write(lower, origin, [9])
    lower.touch(origin, path)
    write(lower, origin, [5, 6])
    assert there(lower, origin, [1, 2, 9]) == [1, 2]
    write(lower, origin, [10])
    assert there(lower, origin, [1, 2, 9]) == [1]


def test_a_region_of_another_shape_is_cut_anew() -> None:
    lower, origin = new_lower(regions=1)
    write(lower, origin, [1, 2])
    other = lower.open_origin(b"p" * 32, (2 * PAGE,))
    assert other is not None
    made = plan(lower, other, [1])
    assert (made.cuts, made.page_bytes) == ((0,), (2 * PAGE,))
    assert there(lower, origin, [1, 2]) == []


def test_what_does_not_fit_a_region_has_no_place() -> None:
    lower, _ = new_lower()
    assert lower.open_origin(b"p" * 32, (5 * PAGE,)) is None


def test_a_disk_that_is_off_has_nothing_and_takes_nothing() -> None:
    lower, origin = new_lower()
    entries = write(lower, origin, [1])
    lower.prepare_read(entries)
    lower.withhold("broken")
    lower.withhold("again")
    assert lower.fault == "broken"
    assert there(lower, origin, [1]) == []
    assert len(plan(lower, origin, [2]).entries) == 0
    lower.complete_read(entries, np.zeros(1, np.bool_))
    assert lower.wrong_blocks_total == 0
    lower.blocks.check()


def forget(lower: Lower) -> None:
    while lower.drop_retired():
        pass


def test_a_retired_origin_is_gone_and_its_floor_is_above_all_that_was_given_out() -> None:
    lower, origin = new_lower()
    write(lower, origin, [1])
    made = plan(lower, origin, [2])
    lower.retire_origin(ORIGIN)
    again = lower.open_origin(ORIGIN, (PAGE,))
    assert again is not None
    assert there(lower, again, [1, 2]) == []  # before anything was dropped
    assert lower.floor(ORIGIN) == made.sequence + 1
    assert lower.floor(b"unknown") == lower.next_sequence
    forget(lower)
    kept = lower.complete_write(made, np.ones(1, np.bool_), np.zeros(1, np.uint64), kin=NONE)
    assert not kept.any()
    assert there(lower, origin, [1, 2]) == []
    assert lower.pages.used_bytes == 0
    write(lower, again, [1])
    assert there(lower, again, [1]) == [1]


def test_what_was_being_written_when_its_origin_was_retired_goes_too() -> None:
    lower, origin = new_lower()
    made = plan(lower, origin, [1])
    lower.retire_origin(ORIGIN)
    again = lower.open_origin(ORIGIN, (PAGE,))
    assert again is not None
    lower.complete_write(made, np.ones(1, np.bool_), np.zeros(1, np.uint64), kin=NONE)
    assert there(lower, again, [1]) == []
    write(lower, again, [1])  # the same key in its new life
    forget(lower)
    assert there(lower, again, [1]) == [1]
    assert lower.pages.used_bytes == PAGE


def test_a_step_drops_few_and_numbers_of_retired_origins_are_forgotten() -> None:
    count = 3 * retired.BLOCKS
    lower = Lower(1, count * PAGE, slot_bytes_min=PAGE, first_sequence=FIRST)
    lower.end_adopting()
    origin = lower.open_origin(ORIGIN, (PAGE,))
    assert origin is not None
    nodes = np.arange(count)
    chunk = 512
    for first in range(0, count, chunk):
        part = nodes[first : first + chunk].tolist()
        made = lower.prepare_write(origin, words(part), np.zeros(chunk, np.int32), kin=NONE)
        lower.complete_write(made, np.ones(chunk, np.bool_), np.zeros(chunk, np.uint64), kin=NONE)
    held = lower.find(origin, words([7]))
    lower.prepare_read(held)
    lower.retire_origin(ORIGIN)
    used = [lower.pages.used_bytes // PAGE]
    while lower.drop_retired():
        used.append(lower.pages.used_bytes // PAGE)
    assert used[0] == count
    assert max(before - after for before, after in itertools.pairwise(used)) <= retired.BLOCKS
    assert used[-1] == 1  # somebody reads it
    assert origin in lower._shapes
    lower.complete_read(held, np.ones(1, np.bool_))
    assert lower.pages.used_bytes == 0
    assert not lower.drop_retired()
    assert origin not in lower._shapes
    assert lower.counters.dropped_blocks_total == count


# -- after a restart


def found(
    rows: Sequence[tuple[int, int, int, int]], cut: Sequence[int] = (0, 1), origin: bytes = ORIGIN
) -> Recovered:
    """Records of (region, slot, node, sequence)."""
    columns = np.array(rows, np.int64).reshape(-1, 4)
    nodes = columns[:, 2].tolist()
    return Recovered(
        np.array(cut, np.int64),
        np.full(len(cut), PAGE, np.int64),
        ((PAGE,),) * len(cut),
        columns[:, 0],
        columns[:, 1],
        np.tile(np.frombuffer(origin, np.uint8), (len(rows), 1)),
        words(nodes),
        np.array([node.bit_length() - 1 for node in nodes], np.int32),
        columns[:, 3],
        np.array(nodes, np.uint64),
        np.full(len(rows), PAGE, np.int64),
    )


def settle(lower: Lower) -> None:
    entries, keys = lower.adopted()
    lower.place(entries[np.lexsort(keys)])
    lower.end_adopting()


def test_what_is_found_can_be_read_before_all_is_found() -> None:
    lower, origin = new_lower(is_new=False)
    assert lower.adopt(found([(0, 2, 1, 5)], cut=[0])) == 1
    (entry,) = lower.find(origin, words([1]))
    regions, slots = lower.prepare_read(np.array([entry], np.int32))
    assert (regions.tolist(), slots.tolist(), lower.sums[entry]) == ([0], [2], 1)
    assert lower.sequence[entry] == 5


@pytest.mark.parametrize("newer_first", [True, False])
def test_of_a_key_that_stands_twice_the_newer_counts(newer_first: bool) -> None:  # noqa: FBT001
    lower, origin = new_lower(is_new=False)
    batches = [found([(0, 0, 1, 7)], cut=[0]), found([(1, 3, 1, 6)], cut=[1])]
    for batch in batches if newer_first else reversed(batches):
        lower.adopt(batch)
    (entry,) = lower.find(origin, words([1]))
    assert lower.sequence[entry] == 7
    regions, _ = lower.prepare_read(np.array([entry], np.int32))
    assert regions.tolist() == [0]
    assert lower.pages.used_bytes == PAGE


def test_of_a_key_that_stands_twice_in_a_batch_the_newer_counts() -> None:
    lower, origin = new_lower(is_new=False)
    assert lower.adopt(found([(0, 0, 1, 5), (0, 1, 1, 9), (0, 2, 2, 5)])) == 2
    assert lower.sequence[lower.find(origin, words([1, 2]))].tolist() == [9, 5]


def test_what_was_voided_while_it_was_looked_for_is_not_found() -> None:
    lower, origin = new_lower(is_new=False)
    lower.adopt(found([(0, 0, 1, 5)], cut=[0]))
    lower.touch(origin, lower.find(origin, words([1])))
    lower.retire_origin(ORIGIN)
    assert lower.adopt(found([(1, 0, 2, 99)], cut=[1])) == 0
    again = lower.open_origin(ORIGIN, (PAGE,))
    assert again is not None
    assert there(lower, again, [1, 2]) == []
    forget(lower)
    settle(lower)
    assert lower.pages.used_bytes == 0


def test_found_blocks_go_by_their_sequence_leaves_first() -> None:
    lower, origin = new_lower(regions=1, is_new=False)
    lower.adopt(found([(0, 0, 1, 5), (0, 1, 2, 5), (0, 2, 3, 9), (0, 3, 6, 2)], cut=[0]))
    settle(lower)
    gone = []
    for node in (16, 17, 18, 19):
        before = there(lower, origin, [1, 2, 3, 6])
        write(lower, origin, [node])
        gone += sorted(set(before) - set(there(lower, origin, [1, 2, 3, 6])))
    assert gone == [6, 2, 1, 3]


def test_a_use_while_it_is_looked_for_counts_as_the_latest() -> None:
    lower, origin = new_lower(regions=1, is_new=False)
    lower.adopt(found([(0, 0, 1, 5), (0, 1, 2, 6), (0, 2, 3, 7), (0, 3, 4, 8)], cut=[0]))
    lower.touch(origin, lower.find(origin, words([1])))
    settle(lower)
    write(lower, origin, [16, 17, 18])
    assert there(lower, origin, [1, 2, 3, 4]) == [1]


def test_a_region_that_was_found_cut_is_not_cut_again() -> None:
    lower, origin = new_lower(is_new=False)
    lower.adopt(found([], cut=[0]))
    settle(lower)
    assert plan(lower, origin, [1, 2, 3, 4, 5]).cuts == (1,)


def test_parts_are_whole_regions_and_all_of_them() -> None:
    whole = found([(0, 0, 1, 5), (1, 0, 2, 6), (1, 1, 3, 7)], cut=[0, 1, 2])
    parts = list(parts_of(whole, records_max=2))
    assert [part.cut.tolist() for part in parts] == [[0, 1, 2]] or len(parts) > 1
    assert np.concatenate([part.cut for part in parts]).tolist() == [0, 1, 2]
    assert np.concatenate([part.words for part in parts])[:, 0].tolist() == [1, 2, 3]
    for part in parts:
        assert set(part.regions.tolist()) <= set(part.cut.tolist())


def test_nothing_is_written_before_all_is_found() -> None:
    lower, origin = new_lower(is_new=False)
    with pytest.raises(AssertionError):
        plan(lower, origin, [1])


def test_a_scan_by_one_tenant_leaves_another_its_floor() -> None:
    tenants = Tenants(8 * PAGE, Rules(Quota(0.25, 1.0)))
    lower = Lower(2, 4 * PAGE, slot_bytes_min=PAGE, first_sequence=FIRST, tenants=tenants)
    lower.end_adopting()
    mine = lower.open_origin(b"m" * 32, (PAGE,), "mine")
    theirs = lower.open_origin(b"t" * 32, (PAGE,), "theirs")
    assert mine is not None
    assert theirs is not None
    for node in (11, 12, 13):
        write(lower, mine, [node])
    for node in range(100, 140):
        write(lower, theirs, [node])
    assert there(lower, mine, [11, 12, 13]) == [12, 13]
    assert [(name, used) for name, used, _, _ in tenants.rows()] == [
        ("mine", 2 * PAGE),
        ("theirs", 6 * PAGE),
    ]
    tenants.follow(Rules(Quota(0.0, 1.0)))
    for node in range(200, 240):
        write(lower, theirs, [node])
    assert there(lower, mine, [11, 12, 13]) == []


def test_recovered_blocks_become_their_tenant_s_when_they_are_used() -> None:
    tenants = Tenants(8 * PAGE, Rules(Quota(0.5, 1.0)))
    lower = Lower(2, 4 * PAGE, slot_bytes_min=PAGE, first_sequence=FIRST, tenants=tenants)
    lower.end_adopting()
    origin = lower.open_origin(ORIGIN, (PAGE,))
    assert origin is not None
    entries = write(lower, origin, [1, 2])
    assert lower.open_origin(ORIGIN, (PAGE,), "late") == origin
    lower.touch(origin, entries)
    assert [name for name, *_ in tenants.rows()] == ["late"]
    lower.retire_origin(ORIGIN)
    forget(lower)
    assert tenants.of(origin) == OTHERS
    assert lower.pages.used_bytes == 0
