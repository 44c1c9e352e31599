"""What a disk of the tests holds."""

from typing import Any


class FakeMedium:
    """What a disk holds: bytes and records of slots, headers of regions, voids."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], object] = {}
        self.records: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.headers: dict[int, tuple[tuple[int, ...], int]] = {}
        self.voids: dict[bytes, int] = {}

    def cut(self, region: int, page_bytes: tuple[int, ...]) -> None:
        self.headers[region] = page_bytes, self.headers.get(region, ((), 0))[1] + 1
