"""Files of disks through all that happens to them: kills, cuts, deletions, flipped bits."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import trio

from tests.tiers.disks import (
    CAPACITY,
    HEADERS_AT,
    ORIGIN,
    PAGE,
    RECORDS_AT,
    REGION_BYTES,
    REGIONS_AT,
    batch,
    fill,
    found,
)
from tests.tiers.test_rings import why_not
from trikv.core.superblock import UnusableDiskError
from trikv.tiers.front import DiskFailedError
from trikv.tiers.ssd import open_disk


def opened(path: Path, ring: str = "auto", **options: float):  # noqa: ANN201
    return open_disk(str(path), CAPACITY, ring=ring, region_bytes=REGION_BYTES, **options)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("ring", ["auto", "threads"])
async def test_blocks_come_back_after_a_clean_end(tmp_path: Path, ring: str) -> None:
    path = tmp_path / "disk"
    async with opened(path, ring) as disk:
        assert disk.was_clean
        blocks = await fill(disk)
        assert await blocks.read(disk) == [True] * 8
        await disk.close()
    assert path.stat().st_size <= CAPACITY
    assert mode(path) == 0o600
    async with opened(path, ring) as disk:
        assert disk.was_clean
        sums = zip(blocks.writes.words[:, 0].tolist(), blocks.writes.sums.tolist(), strict=True)
        assert await found(disk) == dict(sums)
        assert await blocks.read(disk) == [True] * 8
        assert disk.first_sequence > int(blocks.writes.sequences.max())
    async with opened(path) as disk:
        assert not disk.was_clean


async def test_a_deleted_file_serves_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk)
        assert disk.state() == ""
        path.unlink()
        assert disk.state() == "its file was deleted: what it holds is lost at the next start"
        assert await blocks.read(disk) == [True] * 8
        await disk.close()
    async with opened(path) as disk:
        assert await found(disk) == {}


async def test_a_file_that_was_cut_loses_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    rng = random.Random(1)
    for size in [
        8192,
        4096,
        REGIONS_AT,
        *(rng.randrange(4096, CAPACITY) for _ in "abcd"),
    ]:
        path.unlink(missing_ok=True)
        async with opened(path) as disk:
            blocks = await fill(disk, 32)
            await disk.close()
        os.truncate(path, size)
        async with opened(path) as disk:
            there = await found(disk)
            right = await blocks.read(disk) if len(disk._regions.page_bytes) else []
            offsets = REGIONS_AT + (1 + np.arange(32)) * PAGE[0]
            assert right in ([], [bool(end <= size) for end in offsets])
            assert bool(there) == (size >= RECORDS_AT + 4096)
    os.truncate(path, 100)
    with pytest.raises(UnusableDiskError, match="damaged"):
        async with opened(path):
            pass


async def test_a_file_cut_under_a_running_disk(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk, 8)
        os.truncate(path, REGIONS_AT + 5 * PAGE[0])
        assert await blocks.read(disk) == [True] * 5 + [False] * 3
        assert disk.fault == ""


def flip(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    byte = os.pread(fd, 1, offset)[0]
    os.pwrite(fd, bytes([byte ^ 4]), offset)
    os.close(fd)


async def test_flipped_bits_are_misses(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk)
        await disk.close()
    flip(path, REGIONS_AT + 2 * PAGE[0] + 1234)
    flip(path, RECORDS_AT + 5 * 256 + 100)
    flip(path, 30)  # the first superblock
    async with opened(path) as disk:
        words = blocks.writes.words[:, 0].tolist()
        assert sorted(await found(disk)) == sorted(words[:5] + words[6:])
        assert await blocks.read(disk) == [True, True, False] + [True] * 5
        assert disk.sum_error_count == 1
        assert disk.io_error_count == 0
    flip(path, HEADERS_AT + 40)
    async with opened(path) as disk:
        assert await found(disk) == {}


async def test_voids_survive_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk)
        await disk.void(ORIGIN, int(blocks.writes.sequences[5]))
    async with opened(path) as disk:
        assert sorted(await found(disk)) == sorted(blocks.writes.words[5:, 0].tolist())
        await disk.void(ORIGIN, disk.first_sequence)
        again = batch(disk, 2, first=8)
        assert (await disk.write(again.writes)).all()
    async with opened(path) as disk:
        assert sorted(await found(disk)) == sorted(again.writes.words[:, 0].tolist())


async def test_a_void_during_the_scan_counts_at_once(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        await fill(disk)
    async with opened(path) as disk:
        await disk.void(ORIGIN, disk.first_sequence)
        assert await found(disk) == {}


async def test_what_cannot_be_synchronised_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "disk") as disk:
        blocks = await fill(disk)

        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(DiskFailedError, match="Input/output error"):
            await disk.void(ORIGIN, 1)
        assert "cannot be synchronised" in disk.state()
        assert not any(await blocks.read(disk))
        with pytest.raises(DiskFailedError):
            await disk.close()


async def test_without_threads_a_disk_of_rings_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not("uring"):
        pytest.skip(reason)
    async with opened(tmp_path / "disk", "uring") as disk:
        blocks = await fill(disk, 32)  # more than is summed without a thread

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr("trio._threads.start_thread_soon", refuse)
        assert await blocks.read(disk) == [True] * 32
        with pytest.raises(DiskFailedError, match="can't start new thread"):
            await disk.close()


async def test_without_threads_a_disk_of_threads_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "disk", "threads") as disk:
        blocks = await fill(disk, 4)

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(trio.lowlevel, "start_thread_soon", refuse)
        assert await blocks.read(disk) == [False] * 4
        assert disk.io_error_count == 5


async def test_cancelled_at_any_checkpoint_nothing_is_left_running(tmp_path: Path) -> None:
    """After a cancellation the memory is ours again and the disk goes on."""
    async with opened(tmp_path / "disk") as disk:
        first = await fill(disk, 8)
        for steps in range(30):
            blocks = batch(disk, 16, first=8, seed=steps)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_after, scope, steps)
                    await disk.write(blocks.writes)
                    await blocks.read(disk)
            blocks.memory.bytes[:] = 0
        assert await first.read(disk) == [True] * 8
        last = batch(disk, 16, first=8, seed=99)
        assert (await disk.write(last.writes)).all()
        assert await last.read(disk) == [True] * 16


async def cancel_after(scope: trio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()
