"""Copiers: one child process a GPU, started when its first rank comes, and replaced.

Decided here: when a copier is started, and when another one takes its place. This file does not
know CUDA or what is copied.

| a copier | then |
| --- | --- |
| wanted by a rank | started; the rank is mapped, or told why not |
| has ended or hung | once it is dead: its copies have failed, its ranks' sessions are closed |
| ended a moment ago | ranks are told to come again later, and later each time |
"""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.core.banks import ANY_BANK
from trikv.core.calls import Register
from trikv.core.errors import BadRequestError, NotReadyError, OverloadedError
from trikv.core.layout import Place
from trikv.core.words import Offsets
from trikv.nursery.copier import Copier
from trikv.nursery.sessions import Attachment
from trikv.tiers.copies import Copy
from trikv.tiers.frames import AttachOrder, CopyOrder, Direction, GroupOrder

log = structlog.get_logger()

BACKOFF_S: Final = (0.0, 1.0, 5.0, 30.0)
GPUS_MAX: Final = 64
"""More than a machine has: a caller that makes them up gets no further process."""
STEADY_S: Final = 60.0
"""A copier that lived for so long has not failed to start: the next one is not held back."""


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """What a copier needs to map the pool."""

    fd: int
    bytes: int
    slab_bytes: int
    staging_bytes: int  # of GPU memory, for each direction; 0: the device's choice


Command = Callable[[str, PoolPlace, Sequence[int]], Sequence[str]]
"""Arguments to run a copier with, for a GPU's UUID in hex, the pool and descriptors of sockets."""


def gpu_command(uuid: str, pool: PoolPlace, sockets: Sequence[int]) -> list[str]:
    """A copier that drives a GPU."""
    named = {
        "uuid": uuid,
        "pool-fd": pool.fd,
        "pool-bytes": pool.bytes,
        "slab-bytes": pool.slab_bytes,
        "staging-bytes": pool.staging_bytes,
        "parent": os.getpid(),
    }
    flags = [f"--{name}={value}" for name, value in named.items()]
    program = [sys.executable, "-P", "-m", "trikv.tiers.device"]
    return [*program, *flags, "--sockets", *map(str, sockets)]


@dataclass(slots=True)
class Copiers:
    """All copiers of a daemon.

    Attributes:
        refusal: why there can be none, as one line; empty: there can.
        faults: by GPU, why its last copier ended; gone when a new one has mapped a rank.
    """

    pool: PoolPlace
    refusal: str = ""
    command: Command = gpu_command
    faults: dict[str, str] = field(default_factory=dict)
    by_gpu: dict[str, Copier] = field(default_factory=dict)
    _end_counts: dict[str, int] = field(default_factory=dict)
    _by_attachment: dict[int, Copier] = field(default_factory=dict)
    _ends: dict[str, tuple[int, float]] = field(default_factory=dict)  # in a row, when the last
    _nursery: trio.Nursery | None = None
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep copiers until cancelled; then all have ended when this returns."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(trio.sleep_forever)  # copiers come and go
            task_status.started()

    async def attach(self, call: Register, on_lost: Callable[[str], None]) -> Attachment:
        """Have a rank's memory mapped; see `Memory`."""
        gpu = call.gpu
        assert gpu is not None
        if self.refusal:
            raise BadRequestError(self.refusal)
        copier = self._copier(gpu.device.hex())
        groups = tuple(GroupOrder(one.block_count, one.pieces, one.sections) for one in call.groups)
        number = next(self._numbers)
        words = gpu.signals
        signals = None if words is None else (words.memory, words.offset)
        order = AttachOrder(gpu.handles, gpu.events, groups, signals)
        await copier.attach(number, order, on_lost)
        self._by_attachment[number] = copier
        self.faults.pop(copier.uuid, None)
        bank = int(copier.facts.get("node", ANY_BANK))
        signal_count = 0 if words is None else words.count
        return Attachment(number, len(gpu.events), copier.pid, bank, signal_count)

    def detach(self, attachment: Attachment) -> None:
        """Have it unmapped; see `Memory`."""
        self._by_attachment.pop(attachment.number).detach(attachment.number)

    def expect(self, attachment: Attachment, *, into_engine: bool) -> None:
        """A copy is about to come; see `Memory`."""
        way = Direction.LOAD if into_engine else Direction.SAVE
        self._by_attachment[attachment.number].expect(way)

    def bring(self, place: Place, lease: int, offsets: Offsets) -> None:
        """A load of these pages is about to come; see `Memory`."""
        blocks = np.zeros(len(offsets), np.int32)  # nobody knows yet
        way = Direction.LOAD
        order = CopyOrder(place.attachment, place.group, way, 0, blocks, offsets, lease=lease)
        self._by_attachment[place.attachment].bring(order)

    def begin(
        self,
        copy: Copy,
        place: Place,
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        """Have bytes moved; see `Memory`."""
        order = CopyOrder(
            place.attachment,
            place.group,
            Direction.LOAD if copy.into_engine else Direction.SAVE,
            copy.event,
            copy.blocks,
            copy.offsets,
            copy.signal,
            copy.value,
            copy.is_ordered,
            copy.lease,
        )
        copier = self._by_attachment[place.attachment]
        copier.begin(next(self._numbers), order, is_stopped, ended)

    def end_count(self, uuid: str) -> int:
        """How often a copier of this GPU has ended."""
        return self._end_counts.get(uuid, 0)

    def _copier(self, uuid: str) -> Copier:
        """The GPU's copier, started if there is none.

        Raises:
            NotReadyError: it ended a moment ago, or cannot be started now.
            OverloadedError: too many GPUs.
        """
        copier = self.by_gpu.get(uuid)
        if copier is None:
            if uuid not in self._ends and len(self._ends | self.by_gpu) >= GPUS_MAX:
                raise OverloadedError(f"{GPUS_MAX} GPUs have been named to this daemon")
            count, ended_s = self._ends.get(uuid, (0, 0.0))
            until_s = ended_s + BACKOFF_S[min(count, len(BACKOFF_S) - 1)]
            wait_s = until_s - trio.current_time()
            if wait_s > 0:
                raise NotReadyError(
                    f"GPU {uuid}: {self.faults[uuid]}; its copier is started again in "
                    f"{wait_s:.0f} s"
                )
            copier = self.by_gpu[uuid] = self._start(uuid)
        return copier

    def _start(self, uuid: str) -> Copier:
        """Start a process; on this thread, which lives as long as the daemon: it dies with it.

        It finds the modules that this process has, and none in the current folder: the two speak
        no protocol that has versions.

        Raises:
            NotReadyError: this machine has no room for another process or descriptor.
        """
        assert self._nursery is not None
        try:
            with contextlib.ExitStack() as undo:
                pairs = []
                for _ in range(1 + len(Direction)):
                    pairs.append(socket.socketpair())
                    for end in pairs[-1]:
                        undo.callback(end.close)
                theirs = [pair[1].fileno() for pair in pairs]
                process = subprocess.Popen(
                    self.command(uuid, self.pool, theirs),
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                    pass_fds=(self.pool.fd, *theirs),
                    stdin=subprocess.DEVNULL,
                )
                undo.callback(process.wait)
                undo.callback(process.kill)
                copier = Copier(uuid, process, [our for our, _ in pairs])
                undo.pop_all()
        except OSError as error:
            raise NotReadyError(f"GPU {uuid}: no copier could be started: {error}") from None
        for _, their in pairs:
            their.close()
        self._nursery.start_soon(self._keep, copier)
        return copier

    async def _keep(self, copier: Copier) -> None:
        try:
            await copier.run()
        finally:
            now_s = trio.current_time()
            del self.by_gpu[copier.uuid]
            count, _ = self._ends.get(copier.uuid, (0, 0.0))
            is_steady = now_s - copier.since_s > STEADY_S
            self._ends[copier.uuid] = (1 if is_steady else count + 1, now_s)
            self.faults[copier.uuid] = copier.end
            self._end_counts[copier.uuid] = self.end_count(copier.uuid) + 1
        log.error("copier.ended", gpu=copier.uuid, pid=copier.pid, reason=copier.end)
