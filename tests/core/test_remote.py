"""What is looked for at other nodes, fetched, and told to metaservers, by example."""

from collections.abc import Iterable

import numpy as np
from cache_world import ONE, PAGE, POOL, ask, key, new_cache, save, words

from trikv.core.adverts import Part
from trikv.core.below import Below
from trikv.core.remote import AGAIN_S, PART_BLOCKS_MAX, WAITING_MAX, FetchPart, Remote, Source
from trikv.core.shared import Shared
from trikv.core.spills import Budget, Spills
from trikv.core.words import RequestId, Words

ORIGIN = b"o" * 20
A, B = "10.0.0.1:1", "10.0.0.2:1"


class World:
    """One node, and what it has told."""

    def __init__(self, **options: int) -> None:
        self.cache = new_cache(**options)
        self.below = Below(
            self.cache, [], Spills(Budget(None), write_through=False), has_disks=False
        )
        self.shared = Shared(self.cache, self.below)
        self.remote = Remote(self.cache, self.below, self.shared)
        self.remote.has_others = lambda: True
        self.held: set[tuple[bytes, int]] = set()
        self.anew = 0
        self.shared.tell = self.note
        self.shared.announce_anew = self.note_anew
        self.shared.open_space(ONE, ORIGIN)

    def note(self, part: Part) -> None:
        told = names(part.origin, part.words)
        self.held = self.held | told if part.is_held else self.held - told

    def note_anew(self) -> None:
        self.anew += 1

    def seek(self, nodes: list[int], first: int = 0, request: str = "r", now_s: float = 0) -> int:
        return self.remote.seek(key(request), words(nodes), first, now_s=now_s)

    def found(self, *sources: Source) -> list[FetchPart]:
        return self.remote.found(self.remote.begun.popleft(), sources)

    def end(self, part: FetchPart, arrived: Iterable[int], unfenced: Iterable[int] = ()) -> None:
        mask = np.zeros((2, len(part.rows)), np.bool_)
        mask[0, list(arrived)] = True
        mask[1, list(unfenced)] = True
        self.remote.end(part, mask[0], mask[1])


def names(origin: bytes, told: Words) -> set[tuple[bytes, int]]:
    return {(origin, node) for node in told[:, 0].tolist()}


def nodes_of(part: FetchPart) -> list[int]:
    return part.words[:, 0].tolist()


def test_blocks_of_several_owners_land_as_copies() -> None:
    world = World()
    save(world.cache, key("q"), [1])
    assert world.seek([1, 2, 4, 8], 1) == 3
    first, second = world.found(Source(A, 0, 2), Source(B, 2, 1))
    assert (first.address, nodes_of(first)) == (A, [2, 4])
    assert (second.address, nodes_of(second)) == (B, [8])
    assert world.remote.pending(key("r"), words([1, 2, 4, 8]), 1) == 0
    world.end(first, [0, 1])
    world.end(second, [0])
    assert ask(world.cache, key("t"), [1, 2, 4, 8]) == 4
    rows = world.cache.index.find(ONE, words([1, 2, 4, 8]))
    assert world.cache.blocks.replica[rows].tolist() == [False, True, True, True]
    assert world.held == {(ORIGIN, node) for node in (1, 2, 4, 8)}
    assert not world.cache.transfers


def test_what_is_here_or_on_its_way_is_not_fetched() -> None:
    world = World()
    world.seek([1, 2, 4])
    world.seek([1, 2, 4], request="s")
    save(world.cache, key("q"), [2])
    (part,) = world.found(Source(A, 0, 3))
    assert nodes_of(part) == [1, 4]
    assert world.found(Source(A, 0, 3)) == []  # both wait for the same fetch
    world.end(part, [0, 1])
    assert ask(world.cache, key("t"), [1, 2, 4]) == 3


def test_a_request_asks_once_and_again_after_a_while() -> None:
    world = World()
    assert world.seek([1, 2]) == 2
    assert world.seek([1, 2]) == 2  # still open
    assert len(world.remote.begun) == 1
    assert world.found() == []
    assert world.seek([1, 2]) == 0
    assert world.seek([1, 2], now_s=AGAIN_S) == 2
    (part,) = world.found(Source(A, 0, 1))
    world.end(part, [])
    assert world.seek([1, 2], now_s=AGAIN_S + 1) == 0  # the fetch failed: one miss, no loop


def test_behind_what_came_from_elsewhere_it_is_looked_for_again() -> None:
    world = World()
    world.seek([1, 2, 4, 8])
    (part,) = world.found(Source(A, 0, 1))
    world.end(part, [0])
    assert world.seek([1, 2, 4, 8], 1) == 0  # that nobody has the next one is known
    save(world.cache, key("q"), [2])
    assert world.seek([1, 2, 4, 8], 2) == 2


def test_nobody_is_asked_when_there_is_nobody_or_nothing_to_ask() -> None:
    world = World()
    assert world.seek([1], 1) == 0
    assert world.remote.seek(key("r", space=3), words([1]), 0, now_s=0) == 0
    world.remote.has_others = lambda: False
    assert world.seek([1]) == 0
    assert not world.remote.begun


def test_too_many_searches_are_misses() -> None:
    world = World()
    for number in range(WAITING_MAX):
        assert world.seek([1], request=f"r{number}") == 1
    assert world.seek([1], request="one more") == 0


def test_a_request_that_has_ended_is_not_fetched_for() -> None:
    world = World()
    world.seek([1])
    world.remote.ended(key("r").instance, [RequestId("r")])
    assert world.found(Source(A, 0, 1)) == []
    assert world.cache.pages.used_bytes == 0


def test_what_fails_leaves_nothing_behind() -> None:
    world = World()
    world.seek([1, 2])
    (part,) = world.found(Source(A, 0, 2))
    world.end(part, [])
    assert world.cache.pages.used_bytes == 0
    assert not world.held
    assert not world.cache.transfers


def test_pages_that_a_nic_may_write_are_never_used_again() -> None:
    world = World()
    world.seek([1, 2])
    (part,) = world.found(Source(A, 0, 2))
    world.end(part, [0], unfenced=[1])
    assert ask(world.cache, key("t"), [1, 2]) == 1
    assert world.remote.unfenced_bytes == sum(part.landing.lengths)
    lost = part.landing.offsets[0][1]
    for node in range(100, 100 + 2 * POOL // PAGE):
        save(world.cache, key(f"r{node}"), [node])
        rows = world.cache.index.find(ONE, words([node]))
        assert world.cache.pages.offsets(world.cache.blocks.slot[rows], 0)[0] != lost
        world.cache.release(key("r").instance, key(f"r{node}").request)


def test_copies_go_before_older_blocks_that_nobody_else_has() -> None:
    world = World()
    for node in range(1, POOL // PAGE + 1):
        if node == 6:
            world.seek([1000])
            (part,) = world.found(Source(A, 0, 1))
            world.end(part, [0])
        save(world.cache, key(f"r{node}"), [node])
        world.cache.release(key("r").instance, key(f"r{node}").request)
    assert (ORIGIN, 1000) not in world.held
    assert (ORIGIN, 5) in world.held


def test_a_large_fetch_is_asked_for_in_parts() -> None:
    count = PART_BLOCKS_MAX + 10
    world = World(entries_max=4 * count, pool=4 * count * PAGE)
    nodes = list(range(1, count + 1))
    world.seek(nodes)
    parts = world.found(Source(A, 0, count))
    assert [len(part.rows) for part in parts] == [PART_BLOCKS_MAX, 10]
    for part in parts:
        world.end(part, range(len(part.rows)))
    assert ask(world.cache, key("t"), nodes) == count


def test_a_reset_ends_sharing_and_withdraws() -> None:
    world = World()
    save(world.cache, key("q"), [1, 2])
    world.seek([1, 2, 4], 2)
    world.cache.retire_space(ONE)
    world.shared.retire_space(ONE)
    assert world.found(Source(A, 0, 1)) == []  # of the weights before, perhaps
    while world.cache.drop_retired():
        pass
    assert not world.held
    assert world.seek([1, 2, 4], request="s") == 0
    assert list(world.shared.snapshot()) == []


def test_blocks_that_are_found_in_an_old_pool_are_announced_anew() -> None:
    world = World()
    save(world.cache, key("q"), [1])
    again = Shared(world.cache, world.below)
    told: list[int] = []
    again.announce_anew = lambda: told.append(1)
    again.open_space(ONE, ORIGIN)
    again.open_space(ONE, ORIGIN)
    assert told == [1]
    assert [names(part.origin, part.words) for part in again.snapshot()] == [{(ORIGIN, 1)}]
