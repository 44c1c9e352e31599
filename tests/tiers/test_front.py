"""A superblock whose writing ends anywhere, three times running, is found again."""

import random
from itertools import product

import pytest

from tests.tiers.media import SECTOR, Media, MediaRing, PowerCutError
from trikv.core.pages import PAGE_ALIGN
from trikv.core.superblock import COPIES, Superblock, is_unfinished, read
from trikv.tiers.front import Front

OPERATIONS = 5  # of an opening: what was there is synchronised, then each copy
FRONT_BYTES = COPIES * PAGE_ALIGN
TORN = {"first sectors": range(3), "last sectors": range(1, PAGE_ALIGN // SECTOR)}
ENDS = ["lost", *TORN, "killed"]
Life = tuple[int | None, str]  # operations until it ends, and how; None: it opens the disk
LIVES: list[Life] = [(None, ""), *product(range(1, OPERATIONS + 1), ENDS)]


def ended(media: Media, end: str) -> Media:
    """What is found after the power was cut, or nothing but the process has ended."""
    if end == "killed":
        return media
    for offset, data in media.unsafe:
        for sector in TORN.get(end, ()):
            part = slice(sector * SECTOR, (sector + 1) * SECTOR)
            at = offset + sector * SECTOR
            media.safe[at : at + SECTOR] = data[part]
    return Media(media.safe, bytearray(media.safe))


async def opened(media: Media, power: int | None, *, is_new: bool) -> bool:
    """Open it; whether that came to its end."""
    front = bytes(media.now)
    if not any(front) or is_unfinished(front):
        assert is_new, "a disk is gone"
        found = Superblock(bytes(range(16)), 1 << 30, 1 << 24, 60)
    else:
        found = read(front)
        assert found is not None
    ring = MediaRing(media, random.Random(1))
    ring.power = power
    try:
        await Front(found, ring.run, ring.sync).begin()
    except PowerCutError:
        return False
    return True


@pytest.mark.parametrize("first", LIVES, ids=lambda one: "-".join(map(str, one)))
async def test_a_superblock_is_found_whatever_ended_its_writing(first: Life) -> None:
    for later in product(LIVES, repeat=2):
        media = Media(bytearray(FRONT_BYTES), bytearray(FRONT_BYTES))
        epochs = 0  # that somebody was told of
        for power, end in (first, *later):
            if await opened(media, power, is_new=not epochs):
                found = read(bytes(media.now))
                assert found is not None
                assert found.epoch > epochs
                epochs = found.epoch
            media = ended(media, end)
        assert await opened(media, None, is_new=not epochs)
        found = read(bytes(media.now))
        assert found is not None
        assert found.epoch > epochs
