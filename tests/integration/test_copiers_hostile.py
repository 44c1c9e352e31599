"""What may go wrong between a daemon and its copiers: ends, hangs, lies, machines without room."""

import errno
import os
import signal
from pathlib import Path

import pytest
import trio

from tests.integration import fake_gpu
from tests.integration.fake_gpu_daemon import (
    PAGE,
    Gpu,
    Rank,
    copier,
    exists,
    fill,
    maps,
    running,
    until,
)
from trikv.core.errors import (
    BadRequestError,
    NotReadyError,
    OverloadedError,
    ShuttingDownError,
)
from trikv.core.layout import Piece
from trikv.nursery import copier as copier_module
from trikv.nursery import copiers as copiers_module
from trikv.tiers.hostmem import HeldProcess


async def test_a_copier_that_is_dead_already_may_be_killed(gpu: Gpu) -> None:
    """Whoever finds its socket closed kills it; nothing may hang on its number afterwards."""
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        (writer,) = await rank.attach()
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # unseen by tasks
        copier(daemon).kill("again")
        copier(daemon).kill("and again")
        await until(rank.session.ended.is_set)
        assert "again" in daemon.facts.shown_state


async def test_a_registration_that_is_given_up_leaves_no_half_of_an_order(gpu: Gpu) -> None:
    """The order is longer than the socket takes, and the copier does not read."""
    async with running(gpu) as daemon:
        good = Rank(daemon, "good")
        (pid,) = await good.attach()
        many = tuple(Piece(0, 32 * at, 1 << 20, 32) for at in range(20_000))
        large = Rank(daemon, "large", pieces=many, blocks=1)
        os.kill(pid, signal.SIGSTOP)
        with trio.move_on_after(0.3) as scope:
            await large.attach()
        assert scope.cancelled_caught
        os.kill(pid, signal.SIGCONT)
        inode = str(os.fstat(large.fd).st_ino)
        assert await Rank(daemon, "third").attach() == (pid,)
        assert inode not in maps(pid)
        fill(good)
        assert await good.save(["a"], [0]) == 1


async def test_a_copier_that_does_not_map_memory_is_replaced(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(gpu) as daemon:
        (pid,) = await Rank(daemon, "good").attach()
        monkeypatch.setattr(copier_module, "START_S", 0.5)
        monkeypatch.setattr(copier_module, "MAP_S", 1.0)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(NotReadyError):
            await Rank(daemon, "bad").attach()
        await until(lambda: not exists(pid))
        assert "did not map memory" in daemon.facts.shown_state


async def test_lies_about_pieces_never_reach_the_copier(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        (pid,) = await Rank(daemon, "good").attach()
        for piece in (
            Piece(7, 0, PAGE, PAGE),
            Piece(0, 0, PAGE, 0),
            Piece(0, 1 << 63, PAGE, PAGE),
            Piece(0, PAGE, PAGE, PAGE),
        ):
            liar = Rank(daemon, "liar")
            liar.pieces = (piece,)
            with pytest.raises(BadRequestError):
                await liar.attach()
            daemon.service.sessions.close(liar.session, "test")
        assert await Rank(daemon, "third").attach() == (pid,)


async def test_a_rank_that_registers_twice_at_once_is_mapped_once(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        session = rank.session = daemon.service.hello(HeldProcess(os.getpid()), "test")
        refused: list[str] = []

        async def register() -> None:
            try:
                await rank.register()
            except BadRequestError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(register)
            nursery.start_soon(register)
        assert len(refused) == 1
        pid = copier(daemon).pid
        daemon.service.sessions.close(session, "test")
        inode = str(os.fstat(rank.fd).st_ino)
        await until(lambda: inode not in maps(pid), 2.0)


async def test_a_session_that_ends_while_its_memory_is_mapped_leaves_nothing(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        (pid,) = await Rank(daemon, "good").attach()
        os.kill(pid, signal.SIGSTOP)
        late = Rank(daemon, "late")
        refused: list[str] = []

        async def register() -> None:
            try:
                await late.attach()
            except ShuttingDownError as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(register)
            await trio.sleep(0.1)
            daemon.service.sessions.close(late.session, "test")
            os.kill(pid, signal.SIGCONT)
        assert len(refused) == 1
        assert "late" not in daemon.service.store.engines.by_name
        inode = str(os.fstat(late.fd).st_ino)
        await until(lambda: inode not in maps(pid), 2.0)
        assert len(copier(daemon)._mappings) == 1


async def test_no_room_for_a_copier_is_told_and_costs_nothing_else(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(gpu) as daemon:

        def command(*_: object) -> list[str]:
            raise OSError(errno.EAGAIN, "no more processes")

        monkeypatch.setattr(daemon.facts.copiers, "command", command)
        first = Rank(daemon)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NotReadyError, match="no more processes"):
            await first.attach()
        daemon.service.sessions.close(first.session, "test")
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.setattr(copiers_module, "GPUS_MAX", 0)
        with pytest.raises(OverloadedError):
            await Rank(daemon).attach()


async def test_a_copier_is_of_the_daemon_s_own_version(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not of one that lies in the folder where the daemon was started."""
    (tmp_path / "trikv").mkdir()
    (tmp_path / "trikv" / "__init__.py").write_text("raise SystemExit(93)")
    monkeypatch.chdir(tmp_path)
    async with running(gpu) as daemon:
        daemon.facts.copiers.command = copiers_module.gpu_command
        with pytest.raises(NotReadyError) as caught:  # there is no such GPU
            await Rank(daemon).attach()
        assert "93" not in str(caught.value)


async def test_a_load_whose_time_is_over_is_not_begun(gpu: Gpu) -> None:
    async with running(gpu) as daemon:
        rank = Rank(daemon)
        await rank.attach()
        fill(rank)
        assert await rank.save(range(4), range(4)) == 4
        gpu.control[fake_gpu.BREAK] = 1  # a chunk that is begun ends the copier
        assert await rank.load(range(4), range(8, 12), budget_s=1e-9) == [0, 1, 2, 3]
        assert copier(daemon).end == ""
