"""Places for a disk: ours come back, others' are left alone, and what does not work is said."""

import ctypes
import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.conftest import PATIENCE_S
from tests.tiers.disks import CAPACITY, PAGE, REGION_BYTES, batch, fill, found
from trikv.core import superblock
from trikv.core.errors import BadRequestError
from trikv.core.superblock import UnusableDiskError
from trikv.tiers import diskfile, locks
from trikv.tiers.front import DiskFailedError
from trikv.tiers.ssd import open_disk


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LOCK_S", 0.02)


def content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def use_up(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb") as file:
        for _ in range(1 << 20):
            file.write(bytes(1 << 20))


async def refusal(path: Path, capacity: int = CAPACITY) -> str:
    before = content(path)
    with pytest.RaisesGroup(UnusableDiskError, allow_unwrapped=True) as refused:
        async with open_disk(str(path), capacity, region_bytes=REGION_BYTES):
            pass
    assert content(path) == before, "changed"
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


def opened(path: Path, ring: str = "auto", **options: float):  # noqa: ANN201
    return open_disk(str(path), CAPACITY, ring=ring, region_bytes=REGION_BYTES, **options)


def test_two_that_begin_at_once_do_not_delete_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that made the file may not be the one that gets the lock."""
    path = tmp_path / "disk"
    real = diskfile._lock
    others: list[diskfile.DiskFile] = []

    def late(fd: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diskfile, "_lock", real)
            others.append(diskfile.open_file(str(path), CAPACITY, region_bytes=REGION_BYTES))
        real(fd)

    monkeypatch.setattr(diskfile, "_lock", late)
    with pytest.raises(UnusableDiskError, match="in use"):
        diskfile.open_file(str(path), CAPACITY, region_bytes=REGION_BYTES)
    assert others[0].look() == ""
    others[0].close()


def test_a_disk_of_another_is_not_deleted_by_who_has_made_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may have come first, used it, and ended."""
    path = tmp_path / "disk"
    real = diskfile._lock

    def late(fd: int) -> None:
        path.write_bytes(b"a disk")
        real(fd)

    monkeypatch.setattr(diskfile, "_lock", late)
    with pytest.raises(UnusableDiskError, match="not ours"):
        diskfile.open_file(str(path), CAPACITY, region_bytes=REGION_BYTES)
    assert path.read_bytes() == b"a disk"


async def test_nobody_who_has_given_up_waits_for_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a daemon that is told to end while it starts."""
    monkeypatch.setattr(locks, "LOCK_S", PATIENCE_S)
    path = tmp_path / "disk"
    held = diskfile.open_file(str(path), CAPACITY, region_bytes=REGION_BYTES)
    count = len(os.listdir("/proc/self/fd"))
    with trio.move_on_after(0.1) as scope:
        await trio.to_thread.run_sync(diskfile.open_file, str(path), CAPACITY)
    assert scope.cancelled_caught
    assert len(os.listdir("/proc/self/fd")) == count
    held.close()


def test_a_new_disk_whose_first_sector_cannot_be_read_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut while it was written first; nothing else is there."""
    path = tmp_path / "disk"
    path.write_bytes(bytes(CAPACITY))
    pread = os.pread

    def torn(fd: int, size: int, offset: int) -> bytes:
        if offset == 0:
            raise OSError(errno.EIO, "Input/output error")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", torn)
    diskfile.open_file(str(path), CAPACITY, region_bytes=REGION_BYTES).close()


async def test_a_folder_is_a_place_for_our_file(tmp_path: Path) -> None:
    async with opened(tmp_path) as disk:
        assert disk.path == str(tmp_path / "trikv.ssd")
    assert content(tmp_path / "trikv.ssd")


async def test_a_disk_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        await fill(disk)
        with pytest.RaisesGroup(UnusableDiskError, allow_unwrapped=True) as refused:
            async with opened(path):
                pass
        assert str(refused.value) == f"{path}: in use by another process"
    async with opened(path) as disk:
        assert len(await found(disk)) == 8


@pytest.mark.parametrize(
    "content", [b"#!/bin/sh\n", b"LABELONE" * 2048, bytes(1024) + b"\x53\xef" + bytes(100_000)]
)
async def test_somebody_elses_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "disk"
    path.write_bytes(content)
    assert "not ours: it is left alone" in await refusal(path)


async def test_a_file_that_ends_in_somebodys_bytes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(CAPACITY) + b"EFI PART")
    assert "not ours" in await refusal(path)


async def test_an_empty_file_or_zeros_are_formatted(tmp_path: Path) -> None:
    for size in (0, 5, CAPACITY):
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        async with opened(path) as disk:
            await fill(disk)


async def test_a_first_writing_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path):
        whole = path.read_bytes()
    torn = whole[:512].ljust(CAPACITY, b"\0")
    path.write_bytes(torn)
    async with opened(path) as disk:
        await fill(disk)
    path.write_bytes(torn[:-4] + b"ours")
    assert "both copies of its superblock are damaged" in await refusal(path)


@pytest.mark.parametrize("copy", [0, 1])
async def test_a_copy_of_the_superblock_that_cannot_be_read_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: int
) -> None:
    """As a sector that was torn by a power cut: the drive has no bytes for it until then."""
    path, real = tmp_path / "disk", os.pread
    async with opened(path) as disk:
        blocks = await fill(disk)

    def bad(fd: int, size: int, offset: int) -> bytes:
        if offset <= copy * 4096 < offset + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    with monkeypatch.context() as patch:
        patch.setattr(diskfile.os, "pread", bad)
        file = diskfile.open_file(str(path), CAPACITY)
    assert file.superblock.newest != copy
    file.close()
    async with opened(path) as disk:
        await found(disk)
        assert await blocks.read(disk) == [True] * 8


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Path]]:
    """Two names of a device whose bytes are a file's."""
    (tmp_path / "bytes").write_bytes(bytes(CAPACITY + (1 << 20)))
    command = ["losetup", "--find", "--show", str(tmp_path / "bytes")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"no loop device can be had here: {made.stderr.strip()}")
    device = made.stdout.strip()
    made_nodes = [tmp_path / name for name in "ab"]
    for one in made_nodes:
        os.mknod(one, 0o600 | stat.S_IFBLK, Path(device).stat().st_rdev)
    yield made_nodes
    subprocess.run(["losetup", "--detach", device], check=True)


async def test_a_device_is_one_whatever_its_name(nodes: list[Path]) -> None:
    """A container has a node of its own for it, so a lock on the node would exclude nobody."""
    async with opened(nodes[0]) as disk:
        blocks = await fill(disk)
        for one in nodes:
            with pytest.raises(UnusableDiskError, match="in use: mounted, or by another"):
                diskfile.open_file(str(one), CAPACITY)
    async with opened(nodes[1]) as disk:
        await found(disk)
        assert await blocks.read(disk) == [True] * 8


async def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk"
    monkeypatch.setattr(superblock, "NOT_GROWN", 7)
    async with opened(path):
        pass
    monkeypatch.undo()
    assert "has format 7 and this daemon reads formats up to 2" in await refusal(path)


async def test_shrinking_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    async with opened(path):
        pass
    message = await refusal(path, CAPACITY - 1)
    assert f"has {CAPACITY} bytes and {CAPACITY - 1} are asked for: it can grow but not" in message


@pytest.mark.parametrize("ring", ["auto", "threads"])
async def test_a_disk_grows_and_keeps_what_it_has(tmp_path: Path, ring: str) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk)
        count = disk.region_count
        await disk.close()
    for capacity in (2 * CAPACITY, 2 * CAPACITY + 1, 3 * CAPACITY):
        async with open_disk(str(path), capacity, ring=ring) as disk:
            assert disk.was_clean
            last = disk.region_count - 1
            assert last == count + 2 if capacity < 3 * CAPACITY else last > count + 4
            there = await found(disk)
            assert there.keys() >= set(blocks.writes.words[:, 0].tolist())
            assert await blocks.read(disk) == [True] * 8
            if not disk._regions.slot_bytes[last]:
                assert await disk.cut(last, PAGE)
                more = batch(disk, 4, region=last, seed=capacity)
                assert (await disk.write(more.writes)).all()
            assert await more.read(disk) == [True] * 4
            await disk.close()
        assert path.stat().st_size <= capacity
    assert f"has {3 * CAPACITY} bytes" in await refusal(path, 2 * CAPACITY)
    assert path.stat().st_size > 2 * CAPACITY


async def test_what_cannot_grow_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "disk"
    async with opened(path) as disk:
        blocks = await fill(disk)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5000) + b"somebody's")
    assert "not ours is behind it: it cannot grow" in await refusal(path, 2 * CAPACITY)
    os.truncate(path, size)

    def full(*_: object) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(diskfile._LIBC, "fallocate64", full)
    assert "No space left" in await refusal(path, 2 * CAPACITY)
    monkeypatch.undo()
    async with opened(path) as disk:
        await found(disk)
        assert await blocks.read(disk) == [True] * 8


async def test_places_that_are_none(tmp_path: Path) -> None:
    assert "No such file" in await refusal(tmp_path / "absent" / "disk")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a disk" in await refusal(tmp_path / "pipe")
    assert "hold no region" in await refusal(tmp_path / "small", 1 << 20)
    assert not (tmp_path / "small").exists()
    with pytest.raises(BadRequestError, match="tape is not one of auto"):
        async with opened(tmp_path / "disk", "tape"):
            pass
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
async def test_a_path_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As root sees no read-only files, the system call answers for one."""

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(diskfile.os, "open", refuse)
        assert os.strerror(code) in await refusal(tmp_path / "disk")


@pytest.mark.parametrize("capacity", [1 << 50, 1 << 60])
async def test_no_room_leaves_nothing_behind(tmp_path: Path, capacity: int) -> None:
    path = tmp_path / "disk"
    message = await refusal(path, capacity)
    assert "cannot be allocated" in message
    assert not path.exists()
    path.touch()
    await refusal(path, capacity)
    assert path.stat().st_blocks == 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "small"
    place.mkdir()
    if libc.mount(b"tmpfs", str(place).encode(), b"tmpfs", 0, b"size=12m"):
        pytest.skip(f"a file system cannot be mounted: {os.strerror(ctypes.get_errno())}")
    yield place
    libc.umount2(str(place).encode(), 2)


async def test_a_full_file_system_takes_nothing_from_us(small: Path) -> None:
    async with opened(small) as disk:
        with pytest.raises(OSError, match="No space left"):
            use_up(small / "other")
        blocks = await fill(disk, 32)
        assert await blocks.read(disk) == [True] * 32
        await disk.close()
    (small / "other").unlink()
    assert "cannot be allocated" in await refusal(small / "another", 16 << 20)


def test_a_file_without_direct_io_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def pick(path: str, flags: int, mode: int = 0o777) -> int:
        fd = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT:
            os.close(fd)  # as the kernel does it: the file has been made by then
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return fd

    monkeypatch.setattr(diskfile.os, "open", pick)
    file = diskfile.open_file(str(tmp_path / "disk"), CAPACITY, region_bytes=REGION_BYTES)
    assert "no direct I/O" in file.look()
    file.close()


async def test_a_disk_that_cannot_be_started_gives_the_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(DiskFailedError, match="Input/output"):
        async with opened(tmp_path / "disk"):
            pass
    monkeypatch.undo()
    async with opened(tmp_path / "disk") as disk:
        assert await found(disk) == {}
