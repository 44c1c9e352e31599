"""Runs a trace through the daemon's own core with a virtual clock.

Decided here: what one replayed request does to a cache, how requests reach engines and pools, and
the service model behind estimated times. This file does not know files, tables or plots.

A request asks for its blocks, loads what it was promised, saves the rest and ends, all at its time
of arrival: nothing overlaps, so hit rates are those of an engine that is never late. Limits on
leases and filling are lifted: a small capacity here stands for a share of a large pool.
"""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.cli.traces import Trace
from trikv.core.cache import Cache
from trikv.core.plans import Key, Limits
from trikv.core.policies import MAKERS
from trikv.core.words import InstanceName, RequestId, SpaceId, Words

PAGE: Final = 4096
SPACE: Final = SpaceId(1)
SLAB_SLOTS_MIN: Final = 256
SLAB_SLOTS_MAX: Final = 1024
LIMITS: Final = Limits(
    leased_fraction=1.0, filling_fraction=1.0, filling_fraction_many_ranks=1.0, chains_max=1024
)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run a trace.

    Attributes:
        blocks: how many blocks all pools together have memory for, each stored once.
        policy: a name in `MAKERS`.
        engines: requests go to them in turn; or by session, when `by_session`.
        pools: 1: all engines share one; else as many as engines, each its own part.
        ranks: every block is stored once a rank: with 8 an eighth of the blocks fits.
    """

    blocks: int
    policy: str
    engines: int = 1
    pools: int = 1
    ranks: int = 1
    by_session: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """The service model: a request alone on its engine, nobody waits for another.

    Time to first token = tokens that miss / `prefill_tokens_s` + bytes that hit / `load_bytes_s`
    + `fixed_s`.
    """

    prefill_tokens_s: float
    load_bytes_s: float
    token_bytes: int
    fixed_s: float = 0.0

    def times_s(self, trace: Trace, hits: NDArray[np.int64]) -> NDArray[np.float64]:
        """Time to first token of each request that found `hits` blocks."""
        found = np.minimum(hits * trace.block_tokens, trace.input_tokens)
        computed_s = (trace.input_tokens - found) / self.prefill_tokens_s
        loaded_s: NDArray[np.float64] = found * self.token_bytes / self.load_bytes_s
        times_s: NDArray[np.float64] = computed_s + loaded_s + self.fixed_s
        return times_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        blocks: capacity that the pools really had.
        hits: int64, blocks found by each row of the trace.
        events: blocks asked for and blocks saved.
        cpu_s: processor time of the run.
    """

    blocks: int
    hits: NDArray[np.int64]
    events: int
    evicted: int
    refused: int
    cpu_s: float


def new_cache(blocks: int, policy: str, ranks: int) -> Cache:
    """A cache for exactly `blocks` blocks: slabs may have a few slots more than there are rows."""
    slots = blocks
    if blocks > SLAB_SLOTS_MAX:
        slots = min(range(SLAB_SLOTS_MAX, SLAB_SLOTS_MIN, -1), key=lambda one: -blocks % one)
    slab_bytes = slots * ranks * PAGE
    cache = Cache(
        -(-blocks // slots) * slab_bytes,
        slab_bytes,
        entries_max=blocks,
        seed=1,
        limits=LIMITS,
        policy=MAKERS[policy],
    )
    cache.open_space(SPACE, (PAGE,) * ranks)
    return cache


def run(trace: Trace, case: Case) -> Outcome:
    """Replay all requests."""
    each = case.blocks // case.ranks // case.pools
    caches = [new_cache(each, case.policy, case.ranks) for _ in range(case.pools)] if each else []
    hits = np.zeros(len(trace), np.int64)
    if not caches:
        return Outcome(0, hits, 0, 0, 0, 0.0)
    words, starts, times = trace.words(), trace.starts.tolist(), trace.at_s.tolist()
    firsts, saves = trace.first.tolist(), trace.is_save.tolist()
    begin_s = time.process_time()
    for row, engine in enumerate(_engines(trace, case)):
        mine = words[starts[row] : starts[row + 1]]
        if len(mine) == 0:
            continue
        cache = caches[engine % case.pools]
        key = Key(InstanceName(str(engine)), RequestId(str(row)), SPACE)
        if saves[row]:
            _save(cache, key, mine, firsts[row], case.ranks, times[row])
        else:
            count = cache.query(key, mine, now_s=times[row]).count
            hits[row] = count
            if count < len(mine):
                _save(cache, key, mine[count:], count, case.ranks, times[row])
        cache.release(key.instance, key.request)
    counters = [cache.counters for cache in caches]
    return Outcome(
        blocks=each * len(caches),
        hits=hits,
        events=sum(one.query_blocks_total + one.sealed_blocks_total for one in counters),
        evicted=sum(one.evicted_blocks_total for one in counters),
        refused=sum(one.save_refused_blocks_total for one in counters),
        cpu_s=time.process_time() - begin_s,
    )


def _engines(trace: Trace, case: Case) -> list[int]:
    """Which engine gets each row."""
    if case.by_session and bool((trace.session >= 0).all()):
        return [int(one) for one in trace.session % case.engines]
    return [row % case.engines for row in range(len(trace))]


def _save(cache: Cache, key: Key, words: Words, first: int, ranks: int, now_s: float) -> None:
    for rank in range(ranks):
        plan = cache.prepare_save(key, words, rank=rank, first=first, now_s=now_s)
        cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
    cache.expire_fills(now_s=now_s)
