"""A copier: the process that moves bytes between one GPU and the pool, and decides nothing else.

Decided here: how its two directions take turns among their copies, what it answers and when, and
that it ends with the daemon. A process of its own, because a broken CUDA context or a hung driver
call must cost one GPU's copies and not the daemon. This file does not know CUDA: it drives a
`Device`.

Threads: the main one maps memory; one a direction takes its orders and moves bytes. An error on
the way is the end of the process: the daemon hears why, sees it dead, and starts another one.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trikv.core.chunks import Sorted, next_copy
from trikv.tiers import processors
from trikv.tiers.devices import AttachError, Device, Key, Lane, Mapped, Target
from trikv.tiers.frames import (
    AttachOrder,
    CopyOrder,
    Direction,
    Frames,
    Kind,
    pack,
    pack_ended,
    pack_facts,
    read_attach,
    read_copy,
)

ALIVE_S: Final = 1.0
AWAKE_S: Final = 0.002 if processors.count() >= 8 else 0.0  # noqa: PLR2004
"""So long a copy that is about to come is waited for without sleep: to wake up, with cold caches,
takes as long as a chunk's first step. Not on a small host: an engine needs its processors."""
POLL_MS: Final = 1
"""How often a save looks whether the engine's work before it is over."""
READ_BYTES: Final = 256 << 10  # what a socket holds
PR_SET_PDEATHSIG: Final = 1
EXIT_FAILED: Final = 3
VALUE_MASK: Final = 0xFFFF_FFFF
"""Words are uint32 and compared cyclically."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy; lives in the direction's thread from its order to its end."""

    number: int
    mapped: Mapped
    order: CopyOrder
    sorted: Sorted
    targets: Sequence[Target]
    since_s: float
    arrived: NDArray[np.bool_]
    section: int = 0  # that is being started: a number of `targets`
    started: int = 0  # blocks of it
    under_way: int = 0  # chunks
    is_stopped: bool = False
    ahead_s: float = 0.0  # that its first chunks were under way before its order

    @property
    def bytes_left(self) -> int:
        """That have not been started."""
        sizes = [one.block_bytes for one in self.targets[self.section :]]
        return len(self.arrived) * sum(sizes) - self.started * sizes[0]

    @property
    def is_started(self) -> bool:
        """No further chunk will be started."""
        return self.is_stopped or self.section == len(self.targets)

    @property
    def value(self) -> int:
        """Of the word when this section and those before it are there."""
        return (self.order.value + 1 - len(self.targets) + self.section) & VALUE_MASK


class Work:
    """One direction: what waits, what moves, and the thread that sees to it.

    Its orders come, and its reports go, over a socket of its own: nobody wakes anybody.

    At the bound: the daemon sends no more copies at once than its own queue lets through.
    """

    def __init__(
        self,
        direction: Direction,
        device: Device,
        sock: socket.socket,
        mapped: Mapping[int, Mapped],
        mapping: threading.Lock,
    ) -> None:
        self._direction = direction
        self._device = device
        self._sock = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._mapped = mapped
        self._mapping = mapping  # held while memory is unmapped
        self._frames = Frames()
        self._waiting: list[Transfer] = []
        self._moving: deque[tuple[Transfer, slice | None]] = deque()  # blocks whole after it
        self._alive_s = 0.0
        self._is_expecting = False
        self._coming: CopyOrder | None = None  # what is expected, where that is known
        self._soon_until_s = 0.0

    def run(self) -> None:
        """Move bytes until the daemon closes the socket."""
        lane = self._device.lane(self._direction)
        while self._take_orders():
            self._show_life()
            if self._is_expecting and not self._moving:
                self._prepare(lane)
            self._is_expecting = False
            self._turn(lane)

    def _turn(self, lane: Lane) -> None:
        """Begin a chunk, or wait for the end of the oldest."""
        ready = self._ready()
        if ready:
            chosen = ready[next_copy(ready, now_s=time.perf_counter())]
            if not self._start(lane, chosen):
                self._finish(lane)
        elif self._moving:
            self._finish(lane)

    def _prepare(self, lane: Lane) -> None:
        """Begin what can be begun without an order, and wait for that awake."""
        order, self._coming = self._coming, None
        with self._mapping:
            mapped = self._mapped.get(order.attachment) if order is not None else None
            if order is not None and mapped is not None and not mapped.has_sections(order.group):
                (target,) = mapped.targets(order)
                lane.bring(_key(order), target, mapped.sort(order))
        lane.rehearse()
        self._soon_until_s = time.perf_counter() + AWAKE_S

    def _ready(self) -> list[Transfer]:
        """Copies whose engine's work is over; each event is asked once, however many wait."""
        seen: dict[tuple[int, int], bool] = {}
        ready = []
        for one in self._waiting:
            key = (one.order.attachment, one.order.event)
            if key not in seen:
                seen[key] = one.mapped.is_over(one.order.event)
            if seen[key]:
                ready.append(one)
        return ready

    def _take_orders(self) -> bool:
        """Take what has come; with nothing to do, wait for it. False: nothing will come."""
        patience_ms: int | None = None
        if self._moving or time.perf_counter() < self._soon_until_s:
            patience_ms = 0
        elif self._waiting:  # a save that waits for its engine is looked at again
            patience_ms = POLL_MS
        if not self._readable.poll(patience_ms):
            return True
        data = self._sock.recv(READ_BYTES)
        self._frames.feed(data, self._obey)
        return bool(data)

    def _obey(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.COPY:
            self._waiting.append(self._transfer(number, read_copy(body)))
            self._is_expecting, self._soon_until_s = False, 0.0
            return
        if kind in {Kind.SOON, Kind.AHEAD}:
            self._coming = read_copy(body) if kind is Kind.AHEAD else None
            self._is_expecting = not self._waiting
            return
        assert kind is Kind.STOP, f"a daemon does not send {kind.name} here"
        for transfer in self._waiting:
            if transfer.number == number:
                transfer.is_stopped = True
                self._waiting.remove(transfer)
                self._end_if_over(transfer)
                break

    def _transfer(self, number: int, order: CopyOrder) -> Transfer:
        since_s = time.perf_counter()
        mapped = self._mapped[order.attachment]
        return Transfer(
            number,
            mapped,
            order,
            mapped.sort(order),
            mapped.targets(order),
            since_s,
            np.zeros(len(order.blocks), np.bool_),
        )

    def _show_life(self) -> None:
        now_s = time.perf_counter()
        if now_s - self._alive_s >= ALIVE_S:
            self._alive_s = now_s
            self._sock.sendall(pack(Kind.ALIVE, 0))

    def _start(self, lane: Lane, transfer: Transfer) -> bool:
        begin, count = transfer.started, len(transfer.arrived)
        target = transfer.targets[transfer.section]
        parts = self._land(lane, transfer)
        if not parts:
            part = lane.next_part(target, begin, count, transfer.section * count + begin)
            if not lane.start(target, transfer.sorted, part):
                assert self._moving, "a chunk that never fits"
                return False
            parts = (part,)
        is_last = transfer.section == len(transfer.targets) - 1
        self._moving += ((transfer, part if is_last else None) for part in parts)
        transfer.started = parts[-1].stop
        transfer.under_way += len(parts)
        if transfer.started == count:
            if transfer.order.signal:
                lane.signal(transfer.mapped, transfer.order.signal, transfer.value)
            transfer.section, transfer.started = transfer.section + 1, 0
            if transfer.is_started:
                self._waiting.remove(transfer)
        return True

    def _land(self, lane: Lane, transfer: Transfer) -> Sequence[slice]:
        """Chunks of a copy that were begun before its order came; first of all of its own."""
        if transfer.section or transfer.started or not transfer.order.lease:
            return ()
        landed = lane.land(_key(transfer.order), transfer.sorted)
        transfer.sorted = landed.blocks
        transfer.ahead_s = max(0.0, min(landed.bus_s, transfer.since_s - landed.since_s))
        return landed.parts

    def _finish(self, lane: Lane) -> None:
        lane.wait()
        transfer, whole = self._moving.popleft()
        if whole is not None:
            transfer.arrived[transfer.sorted.order[whole]] = True
        transfer.under_way -= 1
        self._end_if_over(transfer)
        if not self._moving and not self._ready():
            lane.rest()

    def _end_if_over(self, transfer: Transfer) -> None:
        if transfer.is_started and transfer.under_way == 0:
            took_s = time.perf_counter() - transfer.since_s + transfer.ahead_s
            body = pack_ended(transfer.arrived, took_s)
            self._sock.sendall(pack(Kind.ENDED, transfer.number, body))


def _key(order: CopyOrder) -> Key:
    return order.attachment, order.group, order.lease


@dataclass(frozen=True, slots=True)
class Sockets:
    """To the daemon."""

    control: socket.socket
    save: socket.socket
    load: socket.socket


class Copier:
    """The main thread's part: memory mapped and unmapped, and what concerns all."""

    def __init__(self, device: Device, socks: Sockets) -> None:
        self._device = device
        self._sock = socks.control
        self._sending = threading.Lock()
        self._mapped: dict[int, Mapped] = {}
        self._mapping = threading.Lock()
        self._work = [
            Work(Direction.SAVE, device, socks.save, self._mapped, self._mapping),
            Work(Direction.LOAD, device, socks.load, self._mapped, self._mapping),
        ]

    def send(self, frame: bytes) -> None:
        """Report to the daemon; any thread."""
        with self._sending:
            self._sock.sendall(frame)

    def run(self) -> None:
        """Serve until the daemon closes the socket."""
        self.send(pack(Kind.READY, os.getpid(), pack_facts(**self._device.facts)))
        for work in self._work:
            self._spawn(work.run)
        self._spawn(lambda: self._device.prepare_pool(self._note))
        frames = Frames()
        while data := self._sock.recv(READ_BYTES):
            frames.feed(data, self._obey)

    def _note(self, facts: bytes) -> None:
        self.send(pack(Kind.NOTE, 0, facts))

    def _spawn(self, run: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(run,), daemon=True).start()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except OSError:
            os._exit(0)  # the daemon is gone
        except BaseException as error:  # noqa: BLE001  # whatever it is, this process is of no more use
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Say why, and end at once: what is under way on the GPU ends with the process."""
        text = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            self.send(pack(Kind.FAILED, 0, text.encode()))
        os._exit(EXIT_FAILED)

    def _obey(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.ATTACH:
            self._attach(number, read_attach(body))
        elif kind is Kind.DETACH:
            with self._mapping:
                mapped = self._mapped.pop(number, None)
                if mapped is not None:  # else it was refused
                    self._device.detach(mapped)
        else:
            raise AssertionError(f"a daemon does not send {kind.name} here")

    def _attach(self, number: int, order: AttachOrder) -> None:
        try:
            self._mapped[number] = self._device.attach(order)
        except AttachError as error:
            self.send(pack(Kind.REFUSED, number, str(error).encode()))
        else:
            self.send(pack(Kind.MAPPED, number))


def die_with(parent: int) -> None:
    """Have the kernel end this process when the daemon ends, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)  # it has ended already


def serve(open_device: Callable[[], Device], descriptors: Sequence[int], parent: int) -> None:
    """Be a copier until the daemon closes the sockets or ends.

    Args:
        open_device: makes the device; what it raises is reported as the reason of the end.
        descriptors: of the sockets to the daemon: control, saves, loads.
        parent: the daemon's pid.
    """
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the daemon's to handle
    socks = Sockets(*(socket.socket(fileno=one) for one in descriptors))
    try:
        copier = Copier(open_device(), socks)
    except Exception as error:  # noqa: BLE001  # the daemon logs it, in its own format
        with contextlib.suppress(OSError):
            socks.control.sendall(pack(Kind.FAILED, 0, str(error).encode()))
        os._exit(EXIT_FAILED)
    try:
        copier.run()
    except OSError:
        pass  # the daemon is gone
    except Exception as error:  # noqa: BLE001  # as in the other threads
        copier.fail(error)
    os._exit(0)  # threads and the context end with the process
