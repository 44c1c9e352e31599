"""What an owner lends, by example: only sealed blocks of shared spaces, pinned until it is over."""

import pytest
from cache_world import ONE, PAGE, POOL, ask, key, new_cache, save, words

from trikv.core.below import Below
from trikv.core.cache import Cache
from trikv.core.errors import OverloadedError
from trikv.core.lending import Lending, Loan
from trikv.core.shared import Shared
from trikv.core.spills import Budget, Spills
from trikv.core.words import PeerId, SpaceId

ORIGIN = b"o" * 20
PEER, OTHER = PeerId(1), PeerId(2)


def world() -> tuple[Cache, Shared, Lending]:
    cache = new_cache()
    below = Below(cache, [], Spills(Budget(None)), has_disks=False)
    shared = Shared(cache, below)
    shared.open_space(ONE, ORIGIN + bytes(12))
    return cache, shared, Lending(cache, shared)


def lend(lending: Lending, nodes: list[int], ttl_s: float = 5.0, now_s: float = 0.0) -> Loan | None:
    return lending.lend(PEER, ORIGIN, words(nodes), ttl_s=ttl_s, now_s=now_s)


def pins(cache: Cache) -> int:
    return int(cache.blocks.pins.sum())


def test_what_is_sealed_is_lent_where_it_lies() -> None:
    cache, _, lending = world()
    save(cache, key("r"), [1, 2])
    loan = lend(lending, [1, 9, 2, 1])
    assert loan is not None
    assert loan.positions.tolist() == [0, 2]  # one is absent, one stands twice
    rows = cache.index.find(ONE, words([1, 2]))
    offsets = cache.pages.offsets(cache.blocks.slot[rows], 0)
    assert loan.offsets.tolist() == [offsets.tolist()]
    assert loan.runs.tolist() == [[at, loan.page_bytes[0]] for at in offsets.tolist()]
    assert pins(cache) == 2
    assert lending.release(PEER, loan.grant.id) == (True, loan.grant)
    assert pins(cache) == 2  # until nothing of it is sent
    lending.unpin(loan.grant)
    assert pins(cache) == 0
    assert lending.release(PEER, loan.grant.id) == (False, None)


def test_filling_blocks_other_origins_and_nothing_are_not_lent() -> None:
    cache, _, lending = world()
    cache.prepare_save(key("r"), words([1]), rank=0, first=0, now_s=0.0)
    assert lend(lending, [1]) is None
    assert lend(lending, []) is None
    save(cache, key("s"), [3])
    assert lending.lend(PEER, b"x" * 20, words([3]), ttl_s=1.0, now_s=0.0) is None


def test_lent_blocks_are_not_evicted() -> None:
    cache, _, lending = world()
    save(cache, key("r"), [1])
    cache.release(key("r").instance, key("r").request)
    loan = lend(lending, [1])
    for node in range(100, 100 + 2 * POOL // PAGE):
        save(cache, key(f"r{node}"), [node])
        cache.release(key("r").instance, key(f"r{node}").request)
    assert ask(cache, key("t"), [1]) == 1
    assert loan is not None


def test_an_expired_grant_stays_pinned_until_the_fence() -> None:
    cache, _, lending = world()
    save(cache, key("r"), [1, 2])
    first, second = lend(lending, [1, 2]), lend(lending, [1], ttl_s=1.0)
    assert first is not None
    assert second is not None
    (fence,) = lending.expire(now_s=2.0)
    assert fence.grants == (second.grant,)
    assert lending.release(PEER, second.grant.id) == (False, None)
    assert pins(cache) == 3
    lending.fenced(fence)
    assert pins(cache) == 2
    gone = lending.lose(PEER)
    assert gone is not None
    assert pins(cache) == 2
    lending.fenced(gone)
    assert pins(cache) == 0
    assert lending.grants.count == lending.grants.bytes == lending.lent_blocks == 0


def test_two_grants_on_the_same_block_are_unpinned_one_by_one_by_one_fence() -> None:
    cache, _, lending = world()
    save(cache, key("r"), [1])
    lend(lending, [1])
    lend(lending, [1])
    fence = lending.lose(PEER)
    assert fence is not None
    lending.fenced(fence)
    assert pins(cache) == 0


def test_at_the_bound_less_is_lent_or_nothing_for_now() -> None:
    cache, _, lending = world()
    blocks = POOL // PAGE
    nodes = list(range(1, 1 + blocks // 2))
    save(cache, key("r"), nodes)
    loan = lend(lending, nodes)
    assert loan is not None
    assert loan.positions.tolist() == list(range(blocks // 8))  # an eighth for one peer
    with pytest.raises(OverloadedError):
        lend(lending, nodes)
    few = nodes[: blocks // 8]
    assert lending.lend(OTHER, ORIGIN, words(few), ttl_s=1.0, now_s=0.0) is not None
    with pytest.raises(OverloadedError):  # a quarter for all
        lending.lend(PeerId(3), ORIGIN, words(nodes[:1]), ttl_s=1.0, now_s=0.0)
    lending.unpin(lending.release(PEER, loan.grant.id)[1] or loan.grant)
    assert lend(lending, few) is not None


def test_a_namespace_that_was_reset_is_not_lent_again() -> None:
    """What is out at that moment is not valid either: it may be of the new weights already."""
    cache, shared, lending = world()
    save(cache, key("r"), [1])
    loan = lend(lending, [1])
    assert loan is not None
    cache.retire_space(ONE)
    shared.retire_space(ONE)
    assert lend(lending, [1]) is None
    assert lending.release(PEER, loan.grant.id) == (False, loan.grant)
    lending.unpin(loan.grant)
    again = SpaceId(3)  # the same namespace's next epoch
    shared.open_space(again, ORIGIN)
    save(cache, key("r", space=3), [1])
    assert lend(lending, [1]) is None
    assert shared.origin_of(again) is None
    assert pins(cache) == 0
