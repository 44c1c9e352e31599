"""What a disk of the tests holds."""

import random
from typing import Any

import numpy as np
from cache_world import words

from trikv.core.slots import Recovered


def origin_of(space: int) -> bytes:
    return bytes([space]) * 32


class FakeMedium:
    """What a disk holds: bytes and records of slots, headers of regions, voids."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], object] = {}
        self.records: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.headers: dict[int, tuple[tuple[int, ...], int]] = {}
        self.voids: dict[bytes, int] = {}

    def cut(self, region: int, page_bytes: tuple[int, ...]) -> None:
        self.headers[region] = page_bytes, self.headers.get(region, ((), 0))[1] + 1

    def found(self, rng: random.Random) -> tuple[Recovered, list[tuple[Any, ...]]]:
        """What a scan finds, in any order; also the records as they are here."""
        valid = [
            (place, record)
            for place, record in self.records.items()
            if self.headers[place[0]] == (record[3], record[4])
            and record[2] >= self.voids.get(record[0], 0)
        ]
        headers = list(self.headers.items())
        rng.shuffle(headers)
        rng.shuffle(valid)
        cut = [region for region, _ in headers]
        found = Recovered(
            np.array(cut, np.int64),
            np.array([sum(pages) for _, (pages, _) in headers], np.int64),
            tuple(pages for _, (pages, _) in headers),
            np.array([place[0] for place, _ in valid], np.int64),
            np.array([place[1] for place, _ in valid], np.int64),
            np.array([list(one[0]) for _, one in valid], np.uint8).reshape(-1, 32),
            words([one[1] for _, one in valid]),
            np.array([one[5] for _, one in valid], np.int32),
            np.array([one[2] for _, one in valid], np.int64),
            np.array([one[6] for _, one in valid], np.uint64),
            np.zeros(len(valid), np.int64),
        )
        return found, [one for _, one in valid]
