"""One copier as the daemon sees it: a child process from its start to its death.

Decided here: when it counts as hung, and that nobody is told of its end before it is dead. This
file does not know CUDA, nor when a copier is started or replaced.
"""

import os
import signal
import socket
import subprocess
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
STOP_POLL_S: Final = 0.02
END_S: Final = 5.0
READ_BYTES: Final = 1 << 16


@dataclass(slots=True, eq=False)
class _Pending:
    """A copy that a copier has been asked for."""

    direction: Direction
    arrived: NDArray[np.bool_]
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True, eq=False)
class _Mapping:
    """A rank's memory that a copier maps, or is asked to."""

    on_lost: Callable[[str], None]
    answered: trio.Event = field(default_factory=trio.Event)
    refusal: str = ""


class _Channel:
    """One socket to a copier."""

    def __init__(self, sock: socket.socket) -> None:
        self.stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._sending = trio.Lock()

    async def send(self, frame: bytes) -> None:
        """Send one frame whole."""
        async with self._sending:
            await self.stream.send_all(frame)

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
        nursery: trio.Nursery,
    ) -> None:
        """Take charge of a process; `run` must follow.

        Args:
            uuid: of the GPU, in hex.
            process: just started, a child of this thread.
            sockets: to it: control, saves, loads; this object's from here on.
            nursery: where orders that nobody waits for are sent from.
        """
        self._nursery = nursery
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
        self._ready = trio.Event()
        self._pending: dict[int, _Pending] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._heard_s = dict.fromkeys(Direction, 0.0)

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
        is_mapped = False
        try:
            with trio.move_on_after(START_S):
                await self._send(self._control, pack(Kind.ATTACH, number, pack_attach(order)))
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
            self._nursery.start_soon(self._send, self._control, pack(Kind.DETACH, number))

    async def copy(
        self, number: int, order: CopyOrder, is_stopped: Callable[[], bool]
    ) -> NDArray[np.bool_]:
        """Move bytes; returns which blocks are whole, when none moves any more.

        Cancellation: none; `is_stopped` ends it early.

        Raises:
            EngineLostError: the copier has ended; nothing has moved.
        """
        if self.end:
            raise EngineLostError(f"GPU {self.uuid}: {self.end}")
        if not any(one.direction is order.direction for one in self._pending.values()):
            self._heard_s[order.direction] = trio.current_time()
        way = self._ways[order.direction]
        pending = _Pending(order.direction, np.zeros(len(order.blocks), np.bool_))
        self._pending[number] = pending
        is_told = False
        with trio.CancelScope(shield=True):
            await self._send(way, pack(Kind.COPY, number, pack_copy(order)))
            while not pending.ended.is_set():
                if not is_told and is_stopped():
                    is_told = True
                    await self._send(way, pack(Kind.STOP, number))
                with trio.move_on_after(STOP_POLL_S):
                    await pending.ended.wait()
        return pending.arrived

    async def _send(self, channel: "_Channel", frame: bytes) -> None:
        """Hand an order over; one that comes too late is answered by the copier's end."""
        try:
            await channel.send(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.kill("it has closed its socket")

    # -- its life

    async def run(self) -> None:
        """Hear it until it has ended, then settle everything that hung on it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch)
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
            pending.arrived, took_s = read_ended(body)
            self.copied_s[direction] += took_s
            pending.ended.set()
        elif kind is not Kind.ALIVE:
            raise AssertionError(f"a copier does not send {kind.name} here")

    def _take(self, kind: Kind, number: int, body: bytes) -> None:
        if kind in {Kind.MAPPED, Kind.REFUSED}:
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

    async def _watch(self) -> None:
        """Kill a copier that has work and says nothing."""
        while True:
            due_s = trio.current_time() + WATCH_S
            await trio.sleep_until(due_s)
            now_s = trio.current_time()
            if now_s - due_s > WATCH_S:  # this process was stopped: it could not listen
                self._heard_s = dict.fromkeys(Direction, now_s)
            for pending in self._pending.values():
                silent_s = now_s - self._heard_s[pending.direction]
                if silent_s > HANG_S:
                    self.kill(f"it hung in a {pending.direction.name.lower()} for {silent_s:.0f} s")
                    break

    def kill(self, reason: str) -> None:
        """End it; what it has under way ends with it."""
        self.end = self.end or reason
        self._process.send_signal(signal.SIGKILL)

    async def _settle(self) -> None:
        """Wait for the death of the process, and tell everyone who counted on it.

        Ownership: until it is dead the GPU may still touch pool and engines, so nobody is told
        earlier. A process that the kernel cannot end keeps its pages for ever: they are lost, not
        reused.
        """
        for channel in (self._control, *self._ways.values()):
            await channel.stream.aclose()  # it ends by itself at this
        with trio.move_on_after(END_S):
            await self._process_ended()
        if self._process.poll() is None:
            self.kill("it did not end when told to")
            await self._process_ended()
        code = self._process.wait()
        self.end = self.end or (f"ended by signal {-code}" if code < 0 else f"ended with {code}")
        self.dead.set()
        for pending in self._pending.values():
            pending.ended.set()
        self._pending.clear()
        for mapping in list(self._mappings.values()):
            if mapping.answered.is_set():
                mapping.on_lost("the GPU's copier has ended")
            mapping.answered.set()

    async def _process_ended(self) -> None:
        pidfd = os.pidfd_open(self.pid)
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
