"""Runs a trace through the daemon's own core with a virtual clock.

Decided here: what one replayed request does to a cache, how requests reach engines and pools, and
the service model behind estimated times. This file does not know files, tables or plots.

A request asks for its blocks, loads what it was promised, saves the rest and ends, all at its time
of arrival: nothing overlaps, so hit rates are those of an engine that is never late. Limits on
leases and filling are lifted: a small capacity here stands for a share of a large pool.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trikv.cli.host import SPACE, Host
from trikv.cli.traces import Trace
from trikv.core.plans import Key
from trikv.core.words import InstanceName, RequestId


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run a trace.

    Attributes:
        blocks: how many blocks all pools together have memory for, each stored once.
        policy: a name in `MAKERS`.
        engines: requests go to them in turn; or by session, when `by_session`.
        pools: 1: all engines share one; else as many as engines, each its own part.
        ranks: every block is stored once a rank: with 8 an eighth of the blocks fits.
        ssd_blocks: as `blocks`, of the disks below the pools; 0: there are none.
        write_through: the disks get every block, not only those used again or about to go.
    """

    blocks: int
    policy: str
    engines: int = 1
    pools: int = 1
    ranks: int = 1
    by_session: bool = False
    ssd_blocks: int = 0
    write_through: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """The service model: a request alone on its engine, nobody waits for another.

    Time to first token = tokens that miss / `prefill_tokens_s` + bytes that hit / `load_bytes_s`
    + bytes of these that a disk had / `ssd_bytes_s` + `fixed_s`.
    """

    prefill_tokens_s: float
    load_bytes_s: float
    token_bytes: int
    ssd_bytes_s: float = float("inf")
    fixed_s: float = 0.0

    def times_s(
        self, trace: Trace, hits: NDArray[np.int64], ssd_hits: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Time to first token of each request that found `hits` blocks, `ssd_hits` on a disk."""
        found = np.minimum(hits * trace.block_tokens, trace.input_tokens)
        computed_s = (trace.input_tokens - found) / self.prefill_tokens_s
        loaded_s: NDArray[np.float64] = found * self.token_bytes / self.load_bytes_s
        read_s = ssd_hits * trace.block_tokens * self.token_bytes / self.ssd_bytes_s
        times_s: NDArray[np.float64] = computed_s + loaded_s + read_s + self.fixed_s
        return times_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        blocks: capacity that the pools really had.
        ssd_blocks: likewise of the disks.
        hits: int64, blocks found by each row of the trace.
        ssd_hits: int64, of these, blocks that came up from a disk for it.
        written, read: blocks that the disks wrote and read.
        events: blocks asked for and blocks saved.
        cpu_s: processor time of the run.
    """

    blocks: int
    ssd_blocks: int
    hits: NDArray[np.int64]
    ssd_hits: NDArray[np.int64]
    written: int
    read: int
    events: int
    evicted: int
    refused: int
    cpu_s: float


def run(trace: Trace, case: Case) -> Outcome:
    """Replay all requests."""
    each = case.blocks // case.ranks // case.pools
    hosts = [
        Host(
            each,
            case.policy,
            case.ranks,
            ssd_blocks=case.ssd_blocks // case.ranks // case.pools,
            write_through=case.write_through,
        )
        for _ in range(case.pools if each else 0)
    ]
    hits, ssd_hits = np.zeros((2, len(trace)), np.int64)
    if not hosts:
        return Outcome(0, 0, hits, ssd_hits, 0, 0, 0, 0, 0, 0.0)
    words, starts, times = trace.words(), trace.starts.tolist(), trace.at_s.tolist()
    firsts, saves = trace.first.tolist(), trace.is_save.tolist()
    begin_s = time.process_time()
    for row, engine in enumerate(_engines(trace, case)):
        mine = words[starts[row] : starts[row + 1]]
        if len(mine) == 0:
            continue
        host = hosts[engine % case.pools]
        key = Key(InstanceName(str(engine)), RequestId(str(row)), SPACE)
        if saves[row]:
            host.save(key, mine, firsts[row], now_s=times[row])
        else:
            count, ssd_hits[row] = host.ask(key, mine, now_s=times[row])
            hits[row] = count
            if count < len(mine):
                host.save(key, mine[count:], count, now_s=times[row])
        host.end(key, now_s=times[row])
    counters = [host.cache.counters for host in hosts]
    return Outcome(
        blocks=each * len(hosts),
        ssd_blocks=sum(host.ssd_blocks for host in hosts),
        hits=hits,
        ssd_hits=ssd_hits,
        written=sum(host.written_blocks for host in hosts),
        read=sum(host.read_blocks for host in hosts),
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
