"""Lending the pool over TCP: streams that send what a token covers, and nothing else.

Decided here: who is sent what, how many are served at once, by which congestion control, and how
sending ends before pages are reused. Bytes are copied into the kernel: pages that it sends without
a copy (sendfile, splice) it would still read after `withdraw`. This file does not know grants or
blocks: a token stands for runs of the pool.
"""

import os
import socket
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.address import Address
from trikv.tiers import tcpframes
from trikv.tiers.tcp import STALL_S, TICK_S, Memory, rest_of, tick
from trikv.tiers.tcpframes import BadFrameError, RequestHead, Status

CONNECTIONS_MAX: Final = 2_048
REQUESTS_AHEAD: Final = 8
"""Requests of one stream that may wait for their reply; who asks for more is shut out."""
IDLE_S: Final = 600.0
"""A stream without a request for so long is closed; its reader connects again."""
BACKLOG: Final = 256
PACED: Final = b"bbr"
"""Congestion control that sets a timer for each 64 KiB: a third of the speed between near hosts."""
UNPACED: Final = (b"cubic", b"reno")
"""What is taken instead: the first that the kernel has, and allows us."""


@dataclass(slots=True, eq=False)
class _Lent:
    """What one token covers, as intervals that ascend and do not touch.

    Attributes:
        lines: streams with requests for it that are not over, and how many.
        idle: set when it is over and there are none.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_over: bool = False
    lines: "dict[_Line, int]" = field(default_factory=dict)
    idle: trio.Event = field(default_factory=trio.Event)

    def covers(self, pieces: NDArray[np.int64]) -> bool:
        """Whether each piece (offset, bytes) lies within one interval."""
        at = np.searchsorted(self.begins, pieces[:, 0], side="right") - 1
        if (at < 0).any():
            return False
        left = self.ends[at] - pieces[:, 0]
        return bool((left >= pieces[:, 1]).all())


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One request."""

    number: int
    status: Status
    lent: _Lent | None
    pieces: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Line:
    """One stream: Trio appends what is asked, the thread takes it and notes what it has sent."""

    sock: socket.socket
    waiting: deque[_Job] = field(default_factory=deque)
    sent: deque[_Lent | None] = field(default_factory=deque)
    asked: trio.Event = field(default_factory=trio.Event)


class TcpOwner:
    """The data port of one daemon.

    Bounds: connections beyond `CONNECTIONS_MAX` are closed at once, and a stream that takes no byte
    for `STALL_S` or asks too far ahead; the limiter's threads send, and who finds none free waits.
    """

    def __init__(self, pool: Memory, *, limiter: trio.CapacityLimiter) -> None:
        self._pool = pool
        self._limiter = limiter
        self._lent: dict[bytes, _Lent] = {}
        self._connections = 0

    def lend(self, runs: NDArray[np.int64]) -> bytes:
        """Let who names the answered token read these runs (offset, bytes), until `withdraw`."""
        runs = runs[np.argsort(runs[:, 0])]
        ends = np.maximum.accumulate(runs[:, 0] + runs[:, 1])
        heads = np.ones(len(runs), np.bool_)
        heads[1:] = runs[1:, 0] > ends[:-1]
        first = np.flatnonzero(heads)
        last = np.concatenate((first[1:], [len(runs)])) - 1
        token = os.urandom(tcpframes.TOKEN_BYTES)
        self._lent[token] = _Lent(runs[first, 0], ends[last])
        return token

    async def withdraw(self, token: bytes) -> None:
        """End what is sent for a token; when this returns, none of its bytes is read any more.

        Cancellation: the token is void at once; who is cancelled does not know when sending ends.
        """
        lent = self._lent.pop(token, None)
        if lent is None:
            return
        lent.is_over = True
        for line in list(lent.lines):
            _settle(line)
        for line in lent.lines:
            _shut(line.sock)
        if lent.lines:
            await lent.idle.wait()

    async def run(
        self, address: Address, *, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; reports the port once it listens.

        Raises:
            OSError: the address cannot be had.
        """
        with socket.socket(address.family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            avoid_pacing(listener)
            listener.bind(address.target)
            listener.listen(BACKLOG)
            listener.settimeout(0)
            async with trio.open_nursery() as nursery:
                task_status.started(listener.getsockname()[1])
                while True:
                    await trio.lowlevel.wait_readable(listener)
                    try:
                        sock, _ = listener.accept()
                    except BlockingIOError:
                        continue
                    except OSError:  # no descriptor left, or the caller is gone already
                        await trio.sleep(0.1)
                        continue
                    if self._connections >= CONNECTIONS_MAX:
                        sock.close()
                        continue
                    self._connections += 1
                    nursery.start_soon(self._serve, sock)

    async def _serve(self, sock: socket.socket) -> None:
        """One stream: requests are read by Trio, replies sent by a thread."""
        line = _Line(sock)
        try:
            tick(sock)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read, line, nursery.cancel_scope)
                while await self._answer(line):
                    pass
                nursery.cancel_scope.cancel()
        finally:
            _settle(line)
            for job in line.waiting:
                _leave(job.lent, line)
            self._connections -= 1
            sock.close()

    async def _read(self, line: _Line, serving: trio.CancelScope) -> None:
        limit_s = STALL_S  # a caller that shows no token is not kept long
        while True:
            job = None
            with trio.move_on_after(limit_s):
                await trio.lowlevel.wait_readable(line.sock)
                with trio.move_on_after(STALL_S):
                    job = await self._request(line.sock)
            if job is None or len(line.waiting) >= REQUESTS_AHEAD:
                serving.cancel()
                return
            limit_s = IDLE_S if job.status is Status.OK else STALL_S
            if job.lent is not None:
                job.lent.lines[line] = job.lent.lines.get(line, 0) + 1
            line.waiting.append(job)
            line.asked.set()

    async def _request(self, sock: socket.socket) -> _Job | None:
        """The next request; None when the reader is gone or does not speak as agreed."""
        try:
            head = tcpframes.read_request(await _receive(sock, tcpframes.REQUEST_BYTES))
            body = await _receive(sock, tcpframes.body_bytes(head))
            return self._check(head, tcpframes.read_pieces(head, body))
        except (OSError, BadFrameError):
            return None

    def _check(self, head: RequestHead, pieces: NDArray[np.int64]) -> _Job:
        lent = self._lent.get(head.token)
        if lent is None:
            return _Job(head.number, Status.UNKNOWN, None, pieces)
        if not lent.covers(pieces):
            return _Job(head.number, Status.OUTSIDE, None, pieces)
        return _Job(head.number, Status.OK, lent, pieces)

    async def _answer(self, line: _Line) -> bool:
        """Send what waits, in a thread; False when the stream is of no use any more.

        Cancellation: the stream is shut down, and the thread is waited for.
        """
        await line.asked.wait()
        line.asked = trio.Event()
        watch = _Watch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_shut_when_cancelled, line.sock, watch)
            is_sent = await trio.to_thread.run_sync(self._send, line, limiter=self._limiter)
            watch.is_over = True
            nursery.cancel_scope.cancel()
        _settle(line)
        return is_sent

    def _send(self, line: _Line) -> bool:
        """In a thread: replies until no request waits; releases the GIL while bytes move."""
        memory = self._pool.memory.data
        try:
            while line.waiting:
                job = line.waiting[0]
                lent = job.lent
                size = int(job.pieces[:, 1].sum()) if lent else 0
                views = [memoryview(tcpframes.pack_reply(job.number, job.status, size))]
                if lent:
                    views += [memory[a : a + n] for a, n in job.pieces.tolist()]
                if not _send_all(line.sock, views, lent):
                    return False
                line.sent.append(lent)
                line.waiting.popleft()
        except OSError:
            return False
        return True


def avoid_pacing(listener: socket.socket) -> None:
    """Have accepted streams send at once what they may, where the host would pace them.

    A host with no other congestion control, or one that does not allow it, paces them as ever.
    """
    if not listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(PACED):
        return
    for name in UNPACED:
        with suppress(OSError):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


@dataclass(slots=True)
class _Watch:
    is_over: bool = False


def _settle(line: _Line) -> None:
    """What the thread has sent is over, though the thread may go on."""
    while line.sent:
        _leave(line.sent.popleft(), line)


def _leave(lent: _Lent | None, line: _Line) -> None:
    """A request of this stream is over: once none is, `withdraw` need not wait for it."""
    if lent is None:
        return
    lent.lines[line] -= 1
    if lent.lines[line] == 0:
        del lent.lines[line]
        if lent.is_over and not lent.lines:
            lent.idle.set()


async def _shut_when_cancelled(sock: socket.socket, watch: _Watch) -> None:
    try:
        await trio.sleep_forever()
    finally:
        if not watch.is_over:
            _shut(sock)


def _send_all(sock: socket.socket, views: list[memoryview], lent: _Lent | None) -> bool:
    silent = 0
    while views:
        if lent and lent.is_over:
            return False
        try:
            done = sock.sendmsg(views)
        except BlockingIOError:  # a tick
            silent += TICK_S
            if silent >= STALL_S:
                return False
            continue
        silent = 0
        views = rest_of(views, done)
    return True


async def _receive(sock: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, read on Trio's loop: requests are small."""
    data = b""
    while len(data) < size:
        try:
            got = sock.recv(size - len(data), socket.MSG_DONTWAIT)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if not got:
            raise ConnectionResetError("the reader has closed the stream")
        data += got
    return data


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is down already
        return
