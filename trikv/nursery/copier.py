"""One copier as the daemon sees it: a child process from its start to its death.

Decided here: when it counts as hung, and that nobody is told of its end before it is dead. This
file does not know CUDA, nor when a copier is started or replaced.

| it is silent | while | then |
| --- | --- | --- |
| for `HANG_S` | it has copies to do | killed |
| for `START_S` | the same, but the pool is being registered: a chunk waits for its slabs | killed |
| for `MAP_S` | memory is to be mapped, its own start included | killed |
"""

import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv.core.errors import BadRequestError, EngineLostError, NotReadyError
from trikv.tiers.frames import (
    AttachOrder,
    CopyOrder,
    Direction,
    Frames,
    Kind,
    pack,
    pack_attach,
    pack_copy,
    read_ended,
    read_facts,
)

log = structlog.get_logger()

HANG_S: Final = 10.0
WATCH_S: Final = 0.5
START_S: Final = 60.0
MAP_S: Final = 120.0
"""Longer than who asks waits: a GPU that opens slowly is asked again, not killed and begun anew."""
STOP_POLL_S: Final = 0.02
END_S: Final = 5.0
READ_BYTES: Final = 1 << 16


@dataclass(slots=True, eq=False)
class _Pending:
    """A copy that a copier has been asked for."""

    direction: Direction
    block_count: int
    is_stopped: Callable[[], bool]
    ended: Callable[[NDArray[np.bool_]], None]
    is_told: bool = False  # the copier knows that it is stopped


@dataclass(slots=True, eq=False)
class _Mapping:
    """A rank's memory that a copier maps, or is asked to."""

    on_lost: Callable[[str], None]
    answered: trio.Event = field(default_factory=trio.Event)
    refusal: str = ""


class _Channel:
    """One socket to a copier.

    Orders are posted and not waited for: a call that is cancelled can then leave no half of a frame
    behind, and orders arrive as they were posted.

    At the bound: what the copier has not read yet is no more than what may be asked of it, and one
    that does not read is killed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))  # does not block
        self._left: deque[bytes] = deque()
        self._has_left = trio.Event()

    def post(self, frame: bytes) -> None:
        """Send a frame; to a copier that has ended it is not sent: its end is the answer."""
        if not self._left:
            try:
                frame = frame[self._sock.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if frame:
            self._left.append(frame)
            self._has_left.set()

    def hint(self, frame: bytes) -> None:
        """Send a frame that may be lost: not to one that does not read."""
        if not self._left:
            self.post(frame)

    async def write(self) -> None:
        """Send what the socket did not take at once; runs until cancelled."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                await self._has_left.wait()
                self._has_left = trio.Event()
                while self._left:
                    await self.stream.send_all(self._left[0])
                    self._left.popleft()

    async def hear(self, take: Callable[[Kind, int, bytes], None]) -> None:
        """Hand each frame over until the other side has ended."""
        frames = Frames()
        try:
            while data := await self.stream.receive_some(READ_BYTES):
                frames.feed(data, take)
        except trio.BrokenResourceError:
            pass


class Copier:
    """One copier process, from its start to its end.

    Attributes:
        facts: what it said about the GPU; empty until it is ready.
        copied_s: seconds from each order's arrival to the copy's end, summed.
        end: why it has ended; empty while it lives.
    """

    def __init__(
        self,
        uuid: str,
        process: subprocess.Popen[bytes],
        sockets: Sequence[socket.socket],
    ) -> None:
        """Take charge of a process; `run` must follow.

        Args:
            uuid: of the GPU, in hex.
            process: just started, a child of this thread.
            sockets: to it: control, saves, loads; this object's from here on.

        Raises:
            OSError: no descriptor is left to watch it with.
        """
        self._pidfd = os.pidfd_open(process.pid)  # it was not waited for: this is no other process
        self.uuid = uuid
        self.pid = process.pid
        self.facts: dict[str, str | int | float] = {}
        self.registered_bytes = 0
        self.copied_s = dict.fromkeys(Direction, 0.0)
        self.end = ""
        self.since_s = trio.current_time()
        self.dead = trio.Event()
        self._process = process
        channels = [_Channel(sock) for sock in sockets]
        self._control, self._ways = channels[0], dict(zip(Direction, channels[1:], strict=True))
        self._pending: dict[int, _Pending] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._asked_s: dict[int, float] = {}  # memory to be mapped, since when
        self._heard_s = dict.fromkeys(Direction, 0.0)
        self._has_copies = trio.Event()

    # -- what is asked of it

    async def attach(self, number: int, order: AttachOrder, on_lost: Callable[[str], None]) -> None:
        """Have a rank's memory mapped.

        Raises:
            BadRequestError: it cannot be mapped; the message says why.
            NotReadyError: the copier has ended, and says why, or did not answer in time.
        """
        if self.end:
            raise NotReadyError(f"GPU {self.uuid}: {self.end}")
        mapping = self._mappings[number] = _Mapping(on_lost)
        self._asked_s[number] = trio.current_time()
        self._control.post(pack(Kind.ATTACH, number, pack_attach(order)))
        is_mapped = False
        try:
            with trio.move_on_after(START_S):
                await mapping.answered.wait()
            self._check(mapping)
            is_mapped = True
        finally:
            if not is_mapped:
                self.detach(number)

    def _check(self, mapping: "_Mapping") -> None:
        if self.end:
            raise NotReadyError(f"GPU {self.uuid}: {self.end}")
        if not mapping.answered.is_set():
            raise NotReadyError(f"GPU {self.uuid}: its copier has not mapped the memory yet")
        if mapping.refusal:
            raise BadRequestError(f"GPU {self.uuid}: {mapping.refusal}")

    def detach(self, number: int) -> None:
        """Have memory unmapped that was or may have been mapped; its copies have ended."""
        if self._mappings.pop(number, None) is not None and not self.end:
            self._control.post(pack(Kind.DETACH, number))

    def expect(self, direction: Direction) -> None:
        """A copy is about to come: to one that sleeps, so that its thread is awake by then."""
        if self._is_resting(direction):
            self._ways[direction].hint(pack(Kind.SOON, 0))

    def bring(self, order: CopyOrder) -> None:
        """A load is about to come, to blocks that are not known yet."""
        if self._is_resting(order.direction):
            self._ways[order.direction].hint(pack(Kind.AHEAD, 0, pack_copy(order)))

    def _is_resting(self, direction: Direction) -> bool:
        """Whether it could make use of knowing what comes."""
        return not self.end and all(one.direction != direction for one in self._pending.values())

    def begin(
        self,
        number: int,
        order: CopyOrder,
        is_stopped: Callable[[], bool],
        ended: Callable[[NDArray[np.bool_]], None],
    ) -> None:
        """Have bytes moved.

        Args:
            number: of the copy.
            order: what to move.
            is_stopped: asked every `STOP_POLL_S`; the copy ends early once it says so.
            ended: called once, maybe at once, with what is whole, when no byte moves any more.

        Raises:
            EngineLostError: the copier has ended; nothing has moved.
        """
        if self.end:
            raise EngineLostError(f"GPU {self.uuid}: {self.end}")
        if is_stopped():
            ended(np.zeros(len(order.blocks), np.bool_))
            return
        if not any(one.direction is order.direction for one in self._pending.values()):
            self._heard_s[order.direction] = trio.current_time()
        way = self._ways[order.direction]
        self._pending[number] = _Pending(order.direction, len(order.blocks), is_stopped, ended)
        way.post(pack(Kind.COPY, number, pack_copy(order)))
        self._has_copies.set()

    # -- its life

    async def run(self) -> None:
        """Hear it until it has ended, then settle everything that hung on it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
                nursery.start_soon(self._pass_stops_on)
                for channel in (self._control, *self._ways.values()):
                    nursery.start_soon(channel.write)
                for direction, way in self._ways.items():
                    nursery.start_soon(way.hear, partial(self._take_report, direction))
                await self._control.hear(self._take)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._settle()

    def _take_report(self, direction: Direction, kind: Kind, number: int, body: bytes) -> None:
        self._heard_s[direction] = trio.current_time()
        if kind is Kind.ENDED:
            pending = self._pending.pop(number)
            arrived, took_s = read_ended(body)
            self.copied_s[direction] += took_s
            pending.ended(arrived)
        elif kind is not Kind.ALIVE:
            raise AssertionError(f"a copier does not send {kind.name} here")

    def _take(self, kind: Kind, number: int, body: bytes) -> None:
        if kind in {Kind.MAPPED, Kind.REFUSED}:
            self._asked_s.pop(number, None)
            mapping = self._mappings.get(number)
            if mapping is not None:  # else nobody waits any more
                mapping.refusal = body.decode() if kind is Kind.REFUSED else ""
                mapping.answered.set()
        elif kind is Kind.READY:
            self.facts = read_facts(body)
            log.info("copier.ready", gpu=self.uuid, pid=self.pid, **self.facts)
        elif kind is Kind.NOTE:
            self._note(read_facts(body))
        elif kind is Kind.FAILED:
            self.end = body.decode(errors="replace")
        else:
            raise AssertionError(f"a copier does not send {kind.name} here")

    def _note(self, facts: dict[str, str | int | float]) -> None:
        event = str(facts.pop("event"))
        if event == "pool.registered":
            self.registered_bytes = int(facts["bytes"])
        log.info(event, gpu=self.uuid, **facts)

    async def _pass_stops_on(self) -> None:
        """Tell the copier of copies that are to stop, while there are any copies."""
        while True:
            await self._has_copies.wait()
            while self._pending:
                for number, pending in self._pending.items():
                    if not pending.is_told and pending.is_stopped():
                        pending.is_told = True
                        self._ways[pending.direction].post(pack(Kind.STOP, number))
                await trio.sleep(STOP_POLL_S)
            self._has_copies = trio.Event()

    async def _watch(self) -> None:
        """Kill a copier that has work and says nothing."""
        while True:
            due_s = trio.current_time() + WATCH_S
            await trio.sleep_until(due_s)
            now_s = trio.current_time()
            if now_s - due_s > WATCH_S:  # this process was stopped: it could not listen
                self._heard_s = dict.fromkeys(Direction, now_s)
                self._asked_s = dict.fromkeys(self._asked_s, now_s)
            problem = self._hang(now_s)
            if problem:
                self.kill(problem)

    def _hang(self, now_s: float) -> str:
        """What it has been silent about for too long, or nothing."""
        limit_s = HANG_S if self.registered_bytes else max(HANG_S, START_S)
        for direction in {pending.direction for pending in self._pending.values()}:
            silent_s = now_s - self._heard_s[direction]
            if silent_s > limit_s:
                return f"it hung in a {direction.name.lower()} for {silent_s:.0f} s"
        silent_s = now_s - min(self._asked_s.values(), default=now_s)
        return f"it did not map memory within {silent_s:.0f} s" if silent_s > MAP_S else ""

    def kill(self, reason: str) -> None:
        """End it; what it has under way ends with it."""
        if not self.dead.is_set():
            self.end = self.end or reason
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def _settle(self) -> None:
        """Wait for the death of the process, and tell everyone who counted on it.

        Ownership: until it is dead the GPU may still touch pool and engines, so nobody is told
        earlier. A process that the kernel cannot end keeps its pages for ever: they are lost, not
        reused.
        """
        for channel in (self._control, *self._ways.values()):
            await channel.stream.aclose()  # it ends by itself at this
        with trio.move_on_after(END_S):
            await trio.lowlevel.wait_readable(self._pidfd)
        if self._process.poll() is None:
            self.kill("it did not end when told to")
            await trio.lowlevel.wait_readable(self._pidfd)
        code = self._process.wait()
        self.end = self.end or (f"ended by signal {-code}" if code < 0 else f"ended with {code}")
        self.dead.set()
        os.close(self._pidfd)
        pending, self._pending = self._pending, {}
        with contextlib.ExitStack() as ends:  # all of them, even if one's end should raise
            for one in pending.values():
                ends.callback(one.ended, np.zeros(one.block_count, np.bool_))
            ends.callback(self._lose_mappings)  # first of all

    def _lose_mappings(self) -> None:
        for mapping in list(self._mappings.values()):
            if mapping.answered.is_set():
                mapping.on_lost("the GPU's copier has ended")
            mapping.answered.set()
