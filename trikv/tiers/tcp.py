"""Reading a peer's pool over TCP: parallel streams straight into our own pool.

Decided here: how a fetch is dealt to streams, how a stream is read, and when it is given up. Bytes
go from the socket to the landing pages in one system call a frame, in threads: then neither Trio's
loop waits for them nor they for it (the loop moves as many bytes, but stands still meanwhile).

The fence is the socket: a fetch that is over has shut its streams down and waited for their
threads, so nothing is written any more.
"""

import math
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.address import Address
from trikv.core.stripes import ALIGN_BYTES, Pieces, cut, whole_runs
from trikv.tiers import tcpframes
from trikv.tiers.peer import Fetch, Outcome
from trikv.tiers.tcpframes import BadFrameError, Status

STREAMS: Final = 4
"""Of one fetch: more are no faster."""
AHEAD: Final = 3
"""Requests of one stream that wait for their reply, so that the owner always has one to send."""
PIECE_BYTES: Final = 4 << 20
FRAME_BYTES: Final = 16 << 20
CONNECT_S: Final = 5.0
STALL_S: Final = 10.0
"""A stream that brings no byte for so long is given up."""
TICK_S: Final = 1
"""How often a thread that waits for a socket looks up."""
ROUNDS: Final = 2
"""How often what a broken stream left is asked again: an idle stream may have died unseen."""


class Memory(Protocol):
    """The pool as far as transports need it."""

    address: int
    memory: NDArray[np.uint8]


class StoppedError(Exception):
    """The fetch is over: the stream's thread ends."""


@dataclass(slots=True, eq=False)
class Work:
    """Frames of one fetch, taken by the threads of its streams.

    Attributes:
        bounds: list of (first piece, piece after the last), a frame each.
        arrived: bool[pieces]; a thread writes only what it has taken.
    """

    pieces: Pieces
    token: bytes
    bounds: deque[tuple[int, int]]
    arrived: NDArray[np.bool_] = field(init=False)
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.arrived = np.zeros(len(self.pieces), np.bool_)

    def take(self) -> tuple[int, int] | None:
        """The next frame to ask for; None when nothing is left or all is over."""
        with self._lock:
            return self.bounds.popleft() if self.bounds and not self.is_stopped else None

    def give_back(self, frames: Sequence[tuple[int, int]]) -> None:
        """Frames that a broken stream did not bring."""
        with self._lock:
            self.bounds.extendleft(reversed(frames))


def frames(pieces: Pieces, frame_bytes: int) -> deque[tuple[int, int]]:
    """Neighbours together until a frame is full."""
    bounds: deque[tuple[int, int]] = deque()
    first, done = 0, 0
    while first < len(pieces):
        last = int(np.searchsorted(pieces.ends, done + frame_bytes, side="right"))
        last = min(max(last, first + 1), first + tcpframes.PIECES_MAX)
        bounds.append((first, last))
        first, done = last, int(pieces.ends[last - 1])
    return bounds


def tick(sock: socket.socket) -> None:
    """Make a socket's calls block, but return once a tick."""
    sock.settimeout(None)
    limit = struct.pack("@ll", TICK_S, 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def rest_of(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of buffers after a call has filled or sent `done` bytes."""
    for number, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[number + 1 :]]
        done -= len(view)
    return []


class Stream:
    """One connection; its calls block, and come from one thread at a time."""

    def __init__(self, sock: socket.socket, pool: Memory, stall_s: float) -> None:
        self._sock = sock
        self._pool = pool
        self._ticks_max = math.ceil(stall_s / TICK_S)
        self._number = 0
        self.is_usable = True

    def pull(self, work: Work) -> None:
        """Ask for frames and receive them until none is left; afterwards writes nothing.

        What it took and could not bring is given back; then it is not usable any more.
        """
        waiting: deque[tuple[int, tuple[int, int]]] = deque()
        try:
            while True:
                while len(waiting) < AHEAD and (frame := work.take()) is not None:
                    waiting.append((self._number, frame))
                    self._ask(work, frame)
                if not waiting:
                    return
                number, (first, last) = waiting[0]
                self._receive(work, number, first, last)
                waiting.popleft()
                work.arrived[first:last] = True
        except (OSError, BadFrameError, StoppedError):
            self.is_usable = False
            work.give_back([frame for _, frame in waiting])

    def stop(self) -> None:
        """From another thread: no call waits any more, and the stream is not usable."""
        self.is_usable = False
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is down already
            return

    def close(self) -> None:
        """Give the descriptor back; no call is under way."""
        self._sock.close()

    def _ask(self, work: Work, frame: tuple[int, int]) -> None:
        pieces = work.pieces.runs[slice(*frame)][:, [0, 2]]
        views = [memoryview(tcpframes.pack_request(self._number, work.token, pieces))]
        self._number = (self._number + 1) % (1 << 32)
        self._move(views, work, self._sock.sendmsg)

    def _receive(self, work: Work, number: int, first: int, last: int) -> None:
        """One reply, its bytes straight to their places."""
        runs = work.pieces.runs[first:last]
        head = bytearray(tcpframes.REPLY_BYTES)
        self._fill([memoryview(head)], work)
        if tcpframes.read_reply(bytes(head), number, int(runs[:, 2].sum())) is not Status.OK:
            work.is_stopped = True  # the owner has spoken: no stream will do better
            raise StoppedError
        memory = self._pool.memory.data
        begins = (runs[:, 1] - self._pool.address).tolist()
        places = zip(begins, runs[:, 2].tolist(), strict=True)
        self._fill([memory[begin : begin + size] for begin, size in places], work)

    def _fill(self, views: list[memoryview], work: Work) -> None:
        self._move(
            views, work, lambda left: self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        )

    def _move(self, views: list[memoryview], work: Work, call: "_Call") -> None:
        silent = 0
        while views:
            if work.is_stopped or not self.is_usable:
                raise StoppedError
            try:
                done = call(views)
            except BlockingIOError:  # a tick
                silent += 1
                if silent >= self._ticks_max:
                    raise TimeoutError("no byte for too long") from None
                continue
            if done == 0:
                raise ConnectionResetError("the owner has closed the stream")
            silent = 0
            views = rest_of(views, done)


class _Call(Protocol):
    def __call__(self, left: list[memoryview], /) -> int:
        """Move bytes; returns how many."""
        ...


class TcpTransport:
    """Streams to one owner; a `Transport`.

    Bounds: `streams_max` streams at once, of all fetches together; a fetch that finds none free
    waits until its deadline. Streams stay open between fetches.
    """

    name = "tcp"

    def __init__(
        self,
        address: Address,
        pool: Memory,
        *,
        limiter: trio.CapacityLimiter,
        streams: int = STREAMS,
        streams_max: int = 2 * STREAMS,
        stall_s: float = STALL_S,
    ) -> None:
        """Nothing is connected yet.

        Args:
            address: the owner's data port.
            pool: where all landing addresses lie.
            limiter: threads that all transports of this process may use.
            streams: of one fetch.
            streams_max: of all fetches.
            stall_s: see `STALL_S`.
        """
        self._address = address
        self._pool = pool
        self._limiter = limiter
        self._streams = streams
        self._stall_s = stall_s
        self._seats = trio.Semaphore(streams_max)
        self._idle: list[Stream] = []

    async def fetch(self, fetch: Fetch) -> None:
        """See `Transport`."""
        total = int(fetch.runs[:, 2].sum())
        share = -(-total // self._streams)
        frame_bytes = min(FRAME_BYTES, share + -share % ALIGN_BYTES)
        pieces = cut(fetch.runs, piece_bytes=max(ALIGN_BYTES, min(PIECE_BYTES, frame_bytes)))
        work = Work(pieces, fetch.token, frames(pieces, frame_bytes))
        try:
            with trio.move_on_at(fetch.deadline_s):
                for _ in range(ROUNDS):
                    count = min(self._streams, len(work.bounds))
                    async with trio.open_nursery() as nursery:
                        for _ in range(count):
                            nursery.start_soon(self._use_one, work)
                    if work.is_stopped or not work.bounds:
                        return
                    await self.aclose()  # one has broken, and idle ones may have died with it
        finally:
            fetch.outcome[whole_runs(fetch.runs, pieces, work.arrived)] = Outcome.ARRIVED

    async def aclose(self) -> None:
        """See `Transport`; closes idle streams, and does not wait."""
        while self._idle:
            self._idle.pop().close()

    async def _use_one(self, work: Work) -> None:
        """One stream works on a fetch until nothing is left to take or it breaks."""
        async with self._seats:
            if not work.bounds:  # others were faster
                return
            stream = self._idle.pop() if self._idle else await self._connect()
            if stream is None:
                return
            try:
                await self._pull(stream, work)
            finally:
                if stream.is_usable:
                    self._idle.append(stream)
                else:
                    stream.close()

    async def _pull(self, stream: Stream, work: Work) -> None:
        """Run the thread; a cancellation shuts the stream down, and the thread is waited for."""
        async with trio.open_nursery() as nursery:
            watch = nursery.cancel_scope
            nursery.start_soon(_stop_when_cancelled, stream, watch)
            await trio.to_thread.run_sync(stream.pull, work, limiter=self._limiter)
            watch.deadline = -math.inf

    async def _connect(self) -> Stream | None:
        with trio.move_on_after(CONNECT_S):
            try:
                made = await trio.open_tcp_stream(self._address.host, self._address.port)
            except OSError:
                return None
            sock = socket.socket(fileno=made.socket.detach())
            tick(sock)
            return Stream(sock, self._pool, self._stall_s)
        return None


async def _stop_when_cancelled(stream: Stream, scope: trio.CancelScope) -> None:
    try:
        await trio.sleep_forever()
    finally:
        if scope.deadline > -math.inf:  # not because the thread has ended
            stream.stop()
