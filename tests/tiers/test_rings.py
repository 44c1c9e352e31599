"""One suite for all that carries operations out: our ring, the package's, threads."""

import errno
import fcntl
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
from numpy.typing import NDArray
from trio.testing import wait_all_tasks_blocked

from tests.tiers.queues import transfers
from trikv.core.errors import BadRequestError
from trikv.tiers import rings, threads, uring, uring_package
from trikv.tiers.locks import patiently
from trikv.tiers.ring import Ring, open_ring
from trikv.tiers.runs import Memory
from trikv.tiers.transfers import HELD, Queue, Transfers

MIB = 1 << 20
PATIENCE_S = 60.0  # for what must happen, on any machine


@functools.cache
def why_not(kind: str) -> str:
    """Why a back end does not run here."""
    if reason := rings.why_not(kind):
        return reason
    file = os.memfd_create("probe")
    try:
        rings.make_queue(kind, file).close()
    except BadRequestError as error:
        return str(error)
    finally:
        os.close(file)
    return ""


@pytest.fixture(params=["uring", "liburing", "threads"])
def kind(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return str(request.param)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(tmp_path / "disk", flags | os.O_DIRECT)
    except OSError:
        fd = os.open(tmp_path / "disk", flags)
    os.posix_fallocate(fd, 0, 16 * MIB)
    yield fd
    os.close(fd)


@pytest.fixture
def memory() -> Memory:
    return Memory(32 * MIB)


def fill(memory: Memory, size: int, seed: int = 1) -> NDArray[np.uint8]:
    memory.bytes[:size] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return memory.bytes[:size].copy()


async def test_bytes_come_back(kind: str, fd: int, memory: Memory) -> None:
    wanted = fill(memory, 8 * MIB)
    write = transfers(128, is_write=True, size=65536, pieces=4, address=memory.address)
    read = transfers(32, size=262144, pieces=1, address=memory.address + 16 * MIB)
    async with open_ring(rings.make_queue(kind, fd), fd) as ring:
        assert ring.name == kind
        await ring.run(write)
        await ring.sync()
        await ring.run(read)
    assert not ring.is_holding
    assert not write.results.any()
    assert not read.results.any()
    assert np.array_equal(memory.bytes[16 * MIB : 24 * MIB], wanted)


async def test_many_callers_at_once(kind: str, fd: int, memory: Memory) -> None:
    wanted = fill(memory, 4 * MIB)
    async with open_ring(rings.make_queue(kind, fd), fd) as ring:
        for is_write, base in ((True, 0), (False, 16 * MIB)):
            if not is_write:
                memory.bytes[base : base + 4 * MIB] = 0
            jobs = [
                transfers(
                    1,
                    is_write=is_write,
                    size=65536,
                    address=memory.address + base + index * 65536,
                    offset=index * 65536,
                )
                for index in range(64)
            ]
            async with trio.open_nursery() as nursery:
                for job in jobs:
                    nursery.start_soon(ring.run, job)
            assert not any(job.results.any() for job in jobs)
    assert np.array_equal(memory.bytes[16 * MIB : 20 * MIB], wanted)


async def test_more_operations_than_a_queue_has_room_for(
    kind: str, fd: int, memory: Memory
) -> None:
    wanted = fill(memory, 4 * MIB)
    write = transfers(1024, is_write=True, address=memory.address)
    read = transfers(1024, address=memory.address + 16 * MIB)
    queue = rings.make_queue(kind, fd)
    reap, tickets = queue.reap, list[int]()

    def look() -> list[tuple[int, int]]:
        ended = reap()
        tickets.extend(ticket for ticket, _ in ended)
        return ended

    queue.reap = look  # type: ignore[method-assign]
    async with open_ring(queue, fd) as ring:
        await ring.run(write)
        await ring.run(read)
    assert not write.results.any()
    assert not read.results.any()
    assert np.array_equal(memory.bytes[16 * MIB : 20 * MIB], wanted)
    assert len(tickets) == len(set(tickets)) == 2048


async def test_errors_are_the_operations_own(kind: str, memory: Memory) -> None:
    file = os.open(os.devnull, os.O_RDONLY)
    write = transfers(3, is_write=True, address=memory.address)
    async with open_ring(rings.make_queue(kind, file), file) as ring:
        await ring.run(write)
    os.close(file)
    assert write.results.tolist() == [errno.EBADF] * 3


async def test_short_reads_go_on_and_the_end_is_an_error(
    kind: str, fd: int, memory: Memory
) -> None:
    os.ftruncate(fd, MIB + 4096)
    read = transfers(3, size=MIB, pieces=2, address=memory.address)
    async with open_ring(rings.make_queue(kind, fd), fd) as ring:
        await ring.run(read)
    assert read.results.tolist() == [0, errno.EIO, errno.EIO]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A reader and a writer; reading hangs until something is written."""

    def move(fd: int, offset: int, pieces: NDArray[np.uint64], *, is_write: bool) -> int:
        assert (offset, is_write) == (0, False)
        return len(os.read(fd, int(pieces[0, 1])))

    monkeypatch.setattr(threads, "move", move)  # a pipe has no offsets
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)  # whatever still hangs ends
    os.close(reader)


async def test_a_cancelled_caller_waits_for_the_kernel(
    kind: str, pipe: tuple[int, int], memory: Memory
) -> None:
    """Where the kernel can stop at once, that is at once; a thread goes on to the end."""
    reader, writer = pipe
    read = transfers(1, size=16, address=memory.address)
    is_over = trio.Event()
    scope = trio.CancelScope()

    async def call(ring: Ring) -> None:
        with scope:
            await ring.run(read)
        is_over.set()

    with trio.fail_after(PATIENCE_S):
        async with open_ring(rings.make_queue(kind, reader), reader) as ring:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call, ring)
                while not ring._live:
                    await wait_all_tasks_blocked()
                scope.cancel()
                if kind == "threads":
                    await wait_all_tasks_blocked(0.05)
                    assert not is_over.is_set()
                    os.write(writer, bytes(16))
                await is_over.wait()
            assert not ring._live
            assert not ring.is_stalled
    assert scope.cancelled_caught == (kind != "threads")
    assert read.results[0] in {0, errno.ECANCELED}


async def test_what_hangs_is_held_and_turns_the_ring_off(
    kind: str, pipe: tuple[int, int], memory: Memory
) -> None:
    reader, _ = pipe
    read, later = transfers(1, size=16, address=memory.address), transfers(2)
    with trio.fail_after(PATIENCE_S):
        async with open_ring(rings.make_queue(kind, reader), reader, io_s_max=0.2) as ring:
            await ring.run(read)
            assert ring.is_stalled
            assert ring.is_holding
            await ring.run(later)
    assert read.results.tolist() == [HELD]
    assert later.results.tolist() == [errno.ESHUTDOWN] * 2


async def test_leaving_waits_for_what_is_under_way(kind: str, fd: int, memory: Memory) -> None:
    write = transfers(16, is_write=True, size=MIB, address=memory.address)
    wanted = fill(memory, 16 * MIB)

    async def leave() -> None:
        async with open_ring(rings.make_queue(kind, fd), fd) as ring, trio.open_nursery() as own:
            own.start_soon(ring.run, write)
            while not ring._live and write.results.any():
                await trio.lowlevel.checkpoint()
            raise KeyError("on the way")

    with pytest.RaisesGroup(pytest.RaisesGroup(KeyError), flatten_subgroups=False):
        await leave()
    done = [index for index, result in enumerate(write.results) if result == 0]
    memory.bytes[16 * MIB :] = 0
    read = transfers(16, size=MIB, address=memory.address + 16 * MIB)
    async with open_ring(rings.make_queue(kind, fd), fd) as ring:
        await ring.run(read)
    for index in done:
        mine = slice(index * MIB, (index + 1) * MIB)
        assert np.array_equal(memory.bytes[16 * MIB :][mine], wanted[mine])


def test_memory_stays_locked_until_the_last_operation_has_ended(kind: str, tmp_path: Path) -> None:
    """Whoever comes after a killed process must not believe memory that a disk still writes."""
    if kind == "threads":
        pytest.skip("a thread in the kernel keeps its process")
    memory = os.open(tmp_path / "pool", os.O_RDWR | os.O_CREAT)
    how = fcntl.LOCK_EX | fcntl.LOCK_NB
    fcntl.flock(memory, how)
    reader, writer = os.pipe()
    queue = rings.make_queue(kind, reader, memory)
    os.close(memory)
    other = os.open(tmp_path / "pool", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, how)
    queue.close()
    patiently(functools.partial(fcntl.flock, other, how))
    for one in (reader, writer, other):
        os.close(one)


def test_the_ring_falls_back_to_no_flags(fd: int) -> None:
    """As on kernels before 6.1, which answer EINVAL to flags that they do not know."""
    if reason := why_not("uring"):
        pytest.skip(reason)
    queue = uring.UringQueue(fd, flags=(1 << 31, 0))
    assert not queue.is_deferred
    queue.close()


async def test_without_deferred_work(fd: int, memory: Memory) -> None:
    if reason := why_not("uring"):
        pytest.skip(reason)
    write = transfers(64, is_write=True, size=65536, address=memory.address)
    async with open_ring(uring.UringQueue(fd, flags=(0,)), fd) as ring:
        await ring.run(write)
    assert not write.results.any()


def forbid(*_: object, **__: object) -> Queue:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_threads_where_the_kernel_forbids_rings(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "UringQueue", forbid)
    monkeypatch.setitem(rings.BACK_ENDS, "uring", forbid)
    queue = rings.make_queue("auto", fd)
    assert queue.name == "threads"
    queue.close()
    with pytest.raises(BadRequestError, match=r"uring does not work here: .*not permitted"):
        rings.make_queue("uring", fd)


def test_a_ring_that_is_not_given_what_it_needs_leaves_nothing(fd: int) -> None:
    if reason := why_not("uring"):
        pytest.skip(reason)
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        uring.UringQueue(fd, 1 << 20)
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_package_that_kills_its_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring_package, "__name__", "tests.tiers.killed")
    assert rings.why_not("liburing") == "kills its process with signal 4 on this processor"
    assert rings.why_not("tape").startswith("is not one of auto, uring")
    assert rings.why_not("auto") == ""


def test_a_package_that_is_absent_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring_package, "__name__", "tests.tiers.absent")
    assert "No module named" in rings.why_not("liburing")


async def test_a_ring_whose_queue_breaks_leaves_nobody_waiting() -> None:
    """Our own bug ends the daemon; it must not hang it."""
    file = os.memfd_create("x")
    queue = threads.ThreadQueue(file)

    def broken() -> bool:
        raise OSError(errno.EEXIST, "another thread's ring")

    queue.submit = broken  # type: ignore[method-assign]
    seen: list[Transfers] = []

    async def use() -> None:
        async with open_ring(queue, file) as ring:
            seen.append(transfers(1))
            await ring.run(seen[0])

    with trio.fail_after(PATIENCE_S), pytest.RaisesGroup(OSError, flatten_subgroups=True):
        await use()
    os.close(file)
    assert seen[0].results[0] != 0
