"""Copiers as real processes with a fake GPU: bytes, order, priorities, deaths and restarts."""

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import PATIENCE_S
from tests.integration import fake_gpu
from tests.integration.fake_gpu_daemon import (
    BLOCKS,
    PAGE,
    UUID,
    Gpu,
    Rank,
    copier,
    exists,
    fill,
    maps,
    running,
    until,
)
from trikv.core.errors import BadRequestError, KvError, NotReadyError, OverloadedError
from trikv.core.layout import Piece
from trikv.nursery import copier as copier_module
from trikv.nursery.copiers import PoolPlace, gpu_command

PIECES = st.lists(st.sampled_from([1, 2, 48, 512, 4096, 5000]), min_size=1, max_size=5)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=PIECES, apart=st.booleans(), padding=st.sampled_from([0, 3, 64]), data=st.data())
def test_random_layouts_come_back_as_they_were(
    *, gpu: Gpu, sizes: list[int], apart: bool, padding: int, data: st.DataObject
) -> None:
    """Pieces apart (a region each) or together (block after block), with padded rows or without."""
    offset, pieces = 0, []
    row = sum(sizes) + padding
    for size in sizes:
        stride = size + padding if apart else row
        pieces.append(Piece(0, offset, stride, size))
        offset += BLOCKS * stride if apart else size
    ids = data.draw(st.permutations(range(BLOCKS)))
    count = data.draw(st.integers(1, BLOCKS // 2))

    async def main() -> None:
        async with running(gpu) as daemon:
            rank = Rank(daemon, pieces=tuple(pieces))
            await rank.attach()
            fill(rank)
            source, target = ids[:count], ids[count : 2 * count]
            before = rank.memory.copy()
            wanted = [rank.block(one) for one in source]
            assert await rank.save(range(count), source) == count
            assert np.array_equal(rank.memory, before)
            assert await rank.load(range(count), target) == []
            assert [rank.block(one) for one in target] == wanted
            for number in target:  # and nothing else was touched
                for piece in pieces:
                    at = piece.offset + number * piece.stride
                    before[at : at + piece.bytes] = rank.memory[at : at + piece.bytes]
            assert np.array_equal(rank.memory, before)

    trio.run(main)


async def test_a_save_waits_for_the_engine_s_work_and_others_do_not(gpu: Gpu) -> None:
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        saved: list[int] = []

        async def slow() -> None:
            saved.append(await rank.save(["a", "b"], [1, 2], event=3))

        nursery.start_soon(slow)
        assert await rank.save(["x"], [9]) == 1
        await trio.sleep(0.1)
        assert not saved
        assert rank.query(["a", "b"]) == (0, 0)
        rank.memory[PAGE : 3 * PAGE] = 7  # what the work writes
        rank.events[2] = 1
        await until(lambda: saved)
        assert saved == [2]
        assert await rank.load(["a", "b"], [20, 21]) == []
        assert set(rank.block(20) + rank.block(21)) == {7}


async def test_a_small_load_overtakes_a_large_one(gpu: Gpu) -> None:
    page = 256 << 10
    async with running(gpu, 64 << 20) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon, pieces=(Piece(0, 0, page, page),), blocks=256)
        await rank.attach()
        assert await rank.save(range(120), range(120)) == 120
        gpu.control[fake_gpu.PAUSE_MS] = 10
        ended: list[str] = []

        async def load(name: str, count: int, first: int) -> None:
            blocks = range(first, first + count)
            assert await rank.load(range(count), blocks, request=name) == []
            ended.append(name)

        nursery.start_soon(load, "large", 120, 128)
        await trio.sleep(0.03)
        nursery.start_soon(load, "small", 3, 250)
        await until(lambda: len(ended) == 2)
        assert ended == ["small", "large"]


async def test_a_load_that_is_reported_as_late_writes_nothing_later(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon, blocks=256)
        await rank.attach()
        fill(rank)
        assert await rank.save(range(100), range(100)) == 100
        gpu.control[fake_gpu.PAUSE_MS] = 50
        gpu.control[fake_gpu.EARLY] = 1
        failed = await rank.load(range(100), range(120, 220), budget_s=0.2)
        assert 0 < len(failed) < 100
        arrived = sorted(set(range(100)) - set(failed))
        for at in arrived:
            assert rank.block(120 + at) == rank.block(at)
        rank.memory[:] = 1
        await trio.sleep(0.3)
        assert set(rank.memory.tolist()) == {1}


async def test_a_killed_copier_fails_its_copies_and_another_takes_over(gpu: Gpu) -> None:
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon)
        (writer,) = await rank.attach()
        assert writer == copier(daemon).pid
        fill(rank)
        assert await rank.save(range(8), range(8)) == 8
        gpu.control[fake_gpu.HANG] = 1
        outcome: list[list[int]] = []

        async def load() -> None:
            outcome.append(await rank.load(range(8), range(16, 24)))

        nursery.start_soon(load)
        await trio.sleep(0.1)
        os.kill(writer, signal.SIGKILL)
        await until(lambda: outcome)
        assert outcome == [list(range(8))]
        assert not exists(writer), "reported before it was dead"
        await until(lambda: rank.session.is_closing)
        assert daemon.facts.shown_state.startswith(f"degraded: GPU {UUID.hex()}: ended by signal 9")
        gpu.control[fake_gpu.HANG] = 0
        with contextlib.suppress(NotReadyError):
            await rank.attach()
        await trio.sleep(1.1)  # the second start is held back for a second
        (other,) = await rank.attach()
        assert other != writer
        assert daemon.facts.shown_state == "serving"
        assert await rank.load(range(8), range(16, 24)) == []
        assert [rank.block(n) for n in range(8)] == [rank.block(n) for n in range(16, 24)]


async def test_a_copier_that_hangs_is_killed_and_the_rest_goes_on(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "HANG_S", 1.0)
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        await rank.save(["a"], [0])
        gpu.control[fake_gpu.HANG] = 1
        with trio.fail_after(PATIENCE_S):
            assert await rank.load(["a"], [5]) == [0]
        assert "it hung in a load" in daemon.facts.shown_state


async def test_a_long_copy_that_makes_progress_is_no_hang(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "HANG_S", 1.5)
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        await rank.save(range(60), range(60))
        gpu.control[fake_gpu.PAUSE_MS] = 250
        assert await rank.load(range(60), range(60)) == []
        assert copier(daemon).end == ""


async def test_an_engine_s_event_that_never_comes_is_no_hang_and_ends_with_the_session(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier_module, "HANG_S", 3.0)
    async with running(gpu) as daemon, trio.open_nursery() as nursery:
        rank = Rank(daemon)
        await rank.attach()
        saved: list[int] = []

        async def save() -> None:
            saved.append(await rank.save(["a"], [0], event=1))

        nursery.start_soon(save)
        await trio.sleep(5.0)
        assert copier(daemon).end == ""
        daemon.service.sessions.close(rank.session, "test")
        await until(lambda: saved)
        assert saved == [0]
        await until(rank.session.ended.is_set)
        pages = daemon.service.store.cache.pages
        assert pages.used_bytes == 0


async def test_a_broken_gpu_is_named_and_costs_only_its_copies(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        gpu.control[fake_gpu.BREAK] = 1
        assert await rank.save(["a"], [0]) == 0
        await until(lambda: "fallen off the bus" in daemon.facts.shown_state)


async def test_memory_that_cannot_be_mapped_is_refused_and_others_are_served(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        good, bad = Rank(daemon, "good"), Rank(daemon, "bad")
        await good.attach()
        bad.fd = 987_654
        with pytest.raises(BadRequestError, match="no such memory"):
            await bad.attach()
        fill(good)
        assert await good.save(["a"], [0]) == 1
        with pytest.raises(BadRequestError, match="event 9 of 8"):
            await good.save(["b"], [0], event=9)


async def test_blocks_are_saved_near_their_gpu_and_what_comes_from_afar_is_counted(
    gpu: Gpu,
) -> None:
    """A pool of two halves in two NUMA nodes, and a GPU near the second."""
    gpu.control[fake_gpu.NODE] = 1 + 1
    half, names = 4 << 20, range(32)
    async with running(gpu, 2 * half, ((0, 0), (half, 1))) as daemon:
        rank = Rank(daemon, pieces=(Piece(0, 0, 256 << 10, 256 << 10),), blocks=32)
        await rank.attach()
        fill(rank)
        counters = daemon.service.store.cache.counters
        assert await rank.save(names[:16], names[:16]) == 16
        assert counters.save_far_bytes_total == 0
        assert set(daemon.pool.memory[:half].tolist()) == {0}
        assert await rank.save(names[16:28], names[16:28]) == 12  # the near half is full
        assert counters.save_far_bytes_total == 12 * rank.page_bytes
        assert await rank.load(names[:16], names[:16]) == []
        assert counters.load_far_bytes_total == 0
        assert await rank.load(names[16:28], names[:12], request="far") == []
        assert counters.load_far_bytes_total == 12 * rank.page_bytes


async def test_a_session_s_end_unmaps_its_memory(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        (pid,) = await rank.attach()
        inode = str(os.fstat(rank.fd).st_ino)
        assert inode in maps(pid)
        daemon.service.sessions.close(rank.session, "test")
        await until(lambda: inode not in maps(pid), 10.0)


async def test_a_daemon_without_cuda_says_so(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        daemon.facts.copiers.refusal = "this daemon has no CUDA"
        with pytest.raises(KvError, match="no CUDA"):
            await Rank(daemon).attach()


OLD_DRIVER = """
from bench import fake_cuda
made_up = fake_cuda.module
def module():
    made = made_up()
    made.driver_version, made.BINDINGS = (lambda: 12_040), "13.3.1"
    return made
fake_cuda.module = module
fake_cuda.main()
"""


async def test_a_driver_older_than_the_bindings_is_told_to_the_engine(gpu: Gpu) -> None:
    """The real copier, on a driver that says it is one of CUDA 12."""

    def command(uuid: str, pool: PoolPlace, sockets: Sequence[int]) -> list[str]:
        real = gpu_command(uuid, pool, sockets)
        return [sys.executable, "-c", OLD_DRIVER, *real[real.index("trikv.tiers.device") + 1 :]]

    async with running(gpu) as daemon:
        daemon.facts.copiers.command = command
        with pytest.raises(NotReadyError, match=r"speaks CUDA 12\.4.*install trikv\[cu12\]"):
            await Rank(daemon).attach()
        assert "install trikv[cu12] instead of trikv[cu13]" in daemon.facts.shown_state


async def test_a_copier_that_cannot_start_is_not_started_all_the_time(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        daemon.facts.copiers.command = lambda *_: [sys.executable, "-c", "raise SystemExit(7)"]
        reasons = []
        for _ in range(20):
            with pytest.raises(NotReadyError) as caught:
                await Rank(daemon).attach()
            reasons.append(str(caught.value))
            await trio.sleep(0.01)
        assert "ended with 7" in reasons[0]
        assert "started again in" in reasons[-1]
        assert daemon.facts.copiers.end_count(UUID.hex()) <= 3


def test_copiers_die_with_a_daemon_that_is_killed(gpu: Gpu, tmp_path: Path) -> None:
    """Not by reading its socket's end: it is stopped, and the kernel ends it."""
    pid_file = tmp_path / "pid"

    async def main() -> None:
        async with running(gpu) as daemon:
            (pid,) = await Rank(daemon).attach()
            os.kill(pid, signal.SIGSTOP)
            pid_file.write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            trio.run(main)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the daemon did not come so far"
    pid = int(pid_file.read_text())
    trio.run(partial(until, lambda: not is_running(pid)))
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # orphans come to the run of tests


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


async def test_an_engine_that_hangs_with_all_saves_it_may_have_holds_up_nobody(gpu: Gpu) -> None:
    async with running(gpu, 64 << 20) as daemon, trio.open_nursery() as nursery:
        stuck, other = Rank(daemon, "stuck", blocks=512), Rank(daemon, "other")
        await stuck.attach()
        await other.attach()
        refused: list[str] = []

        async def save(number: int) -> None:
            try:
                await stuck.save([f"s{number}"], [number], event=1)
            except OverloadedError as error:
                refused.append(str(error))

        for number in range(300):
            nursery.start_soon(save, number)
        await until(lambda: refused)
        assert "copies of this session are waiting" in refused[0]
        fill(other)
        with trio.fail_after(PATIENCE_S):
            assert await other.save(["a"], [0]) == 1
        daemon.service.sessions.close(stuck.session, "test")
