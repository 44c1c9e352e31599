"""Kills a writer of a kept pool again and again, and looks at what it left.

    python -m tests.tiers.kept_crash FOLDER KILLS SEED

Each life is a fork of this process, so that it begins in milliseconds. It saves blocks whose bytes
follow from their names, evicts and drops. Prints a JSON line: kills, blocks found and wrong ones.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trikv.core.blocks import State
from trikv.core.cache import Cache
from trikv.core.namespace import Namespaces, origin_of
from trikv.core.plans import Key, Limits
from trikv.core.words import InstanceName, RequestId, SpaceId, Words
from trikv.nursery.keeping import keep
from trikv.tiers.kept import Kept, open_kept

PAGE = 4096
POOL, SLAB = 64 * 8 * PAGE, 8 * PAGE
SHAPES = ((PAGE,), (2 * PAGE, PAGE))


def pattern(words: Words, rank: int, page_bytes: int) -> NDArray[np.uint64]:
    """Pages of blocks: n rows of 64-bit words."""
    counts = np.arange(page_bytes // 8, dtype=np.uint64)
    return (words[:, :1] * np.uint64(0x9E3779B97F4A7C15) + np.uint64(rank)) ^ counts


class Host:
    """A daemon's core on a kept pool."""

    def __init__(self, folder: Path) -> None:
        self.kept: Kept = open_kept(folder, POOL, SLAB)
        self.cache = Cache(POOL, SLAB, entries_max=400, seed=1, limits=Limits())
        self.namespaces = Namespaces()
        self.keeper = keep(self.cache, self.namespaces, self.kept.ledger)
        self.spaces = []
        for group, page_bytes in enumerate(SHAPES):
            space = self.namespaces.reserve(b"n" * 16, group)
            self.cache.open_space(space, page_bytes)
            shape = self.cache.spaces[space].shape
            self.keeper.open_space(space, shape, origin_of(b"n" * 16, group), "")
            self.spaces.append(space)

    def pages(
        self, words: Words, slots: NDArray[np.int64], group: int
    ) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
        """What is in each page, and what should be."""
        for rank, page_bytes in enumerate(SHAPES[group]):
            should = pattern(words, rank, page_bytes)
            offsets = self.cache.pages.offsets(slots, rank).tolist()
            for offset, row in zip(offsets, should, strict=True):
                yield self.kept.pool.memory[offset : offset + page_bytes].view(np.uint64), row

    def save(self, group: int, names: list[int], turn: int) -> None:
        words = np.array([[name, turn, 0, 1] for name in names], np.uint64)
        space = self.spaces[group]
        key = Key(InstanceName("i"), RequestId(str(turn)), space)
        for rank in range(len(SHAPES[group])):
            plan = self.cache.prepare_save(key, words, rank=rank, first=0, now_s=0.0)
            should = pattern(words[plan.positions], rank, SHAPES[group][rank])
            for offset, row in zip(plan.offsets.tolist(), should, strict=True):
                self.kept.pool.memory[offset : offset + row.nbytes].view(np.uint64)[:] = row
            self.cache.complete_save(plan, np.ones(len(plan.entries), np.bool_), copied_bytes=0)
        self.cache.release(key.instance, key.request)

    def look(self) -> tuple[int, int]:
        """Blocks that are visible, and how many have other bytes than theirs."""
        found = wrong = 0
        for group, space in enumerate(self.spaces):
            mine = (self.cache.blocks.state == State.SEALED) & (self.cache.blocks.space == space)
            rows = np.flatnonzero(mine).astype(np.int32)
            words = self.cache.index.hashes_of(rows)
            found += len(rows)
            pages = self.pages(words, self.cache.blocks.slot[rows], group)
            wrong += sum(not np.array_equal(there, should) for there, should in pages)
        return found, wrong


def live(folder: Path, seed: int) -> None:
    """Save, evict, drop and reset until killed."""
    host, rng = Host(folder), random.Random(seed)
    for turn in itertools.count(seed * 100_000):
        group = rng.choice((0, 0, 0, 1))
        host.save(group, rng.sample(range(10_000), rng.randint(1, 40)), turn)
        if rng.random() < 0.02:
            host.cache.retire_space(SpaceId(host.spaces[rng.randrange(2)]))
            while host.cache.drop_retired():
                pass


def main(folder: Path, kills: int, seed: int) -> None:
    rng, found, wrong = random.Random(seed), 0, 0
    for life in range(kills):
        child = os.fork()
        if child == 0:
            try:
                live(folder, seed * kills + life)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.005, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        host = Host(folder)
        sound, unsound = host.look()
        host.cache.blocks.check()
        found, wrong = found + sound, wrong + unsound
        host.kept.pool.close()
    print(json.dumps({"kills": kills, "seed": seed, "found": found, "wrong": wrong}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
