"""One pool, two models: who gives way when blocks of both are cold."""

from cache_world import ONE, ask, key, save

from trikv.core.cache import Cache
from trikv.core.plans import Limits
from trikv.core.words import SpaceId


def test_a_few_cold_blocks_of_its_own_do_not_cost_a_model_its_warm_ones() -> None:
    """What goes at once is not all of a small share, while another one is full of colder blocks."""
    slab, stale, new = 20 * 4096, SpaceId(2), SpaceId(3)
    cache = Cache(64 * slab, slab, entries_max=4096, seed=1, limits=Limits())
    for space, size in ((ONE, 1), (stale, 2), (new, 2)):
        cache.open_space(space, (size * 4096,))
    for space, prompts, length in ((ONE, 20, 200), (stale, 20, 100), (ONE, 40, 200)):
        for number in range(prompts):
            first = 1 + 1_000_000 * space + 1000 * number
            who, blocks = key(f"{space} {number}", space), list(range(first, first + length))
            save(cache, who, blocks)
            assert ask(cache, who, blocks) == length
    save(cache, key("a", new), list(range(1, 41)))
    save(cache, key("b", new), list(range(101, 121)))
    assert ask(cache, key("b", new), list(range(101, 121))) == 20
    assert ask(cache, key("a", new), list(range(1, 41))) >= 36
