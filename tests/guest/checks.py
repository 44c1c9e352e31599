"""Runs in a guest with Soft-RoCE NICs: an owner and a reader, on the kernel's own verbs.

    python -m tests.guest.checks ibverbs pyverbs

Prints a line a check and ends with 0 when all hold, for each binding that is named. What a NIC does
late or out of order is for the double in `tests/double`: Soft-RoCE reads within the post.
"""

import ctypes
import mmap
import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Final

import numpy as np
import trio
from numpy.typing import NDArray

from tests.tiers.peers import MARK, MIB, Memory, fetch_of, rows, shuffled
from trikv.core.pauses import Pauses
from trikv.core.rails import ROCE_2, pack_answer, read_answer
from trikv.core.words import PeerId
from trikv.tiers import rails as rails_module
from trikv.tiers import verbs
from trikv.tiers.nics import list_nics
from trikv.tiers.peer import Fetch, Outcome, PeerLostError
from trikv.tiers.rails import Rails, open_rails
from trikv.tiers.rdma import RdmaTransport
from trikv.tiers.rdmaowner import RdmaOwner

SIZE: Final = 16 * MIB
SLAB_BYTES: Final = MIB
PEER: Final = PeerId(1)
HEAD: Final = struct.Struct("<cI")
PATIENCE_S: Final = 60


def new_pool() -> Memory:
    """Shared memory, as the daemon's pool is."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, SIZE)
    mapping = mmap.mmap(fd, SIZE)
    return Memory(np.frombuffer(mapping, np.uint8))


def content(seed: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(SIZE), np.uint8) & 0x7F


async def new_rails(binding: str, pool: Memory) -> Rails:
    facts = {"address": pool.address, "size": SIZE, "slab_bytes": SLAB_BYTES}
    return await open_rails(verbs.load(binding), list_nics(), **facts)


# The owner: one process, told what to do over a socket, a letter and a blob each way.


async def own(binding: str, sock: socket.socket) -> None:
    pool = new_pool()
    pool.memory[:] = content(1)
    rails = await new_rails(binding, pool)
    owner = RdmaOwner(rails)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
    while (told := await take(stream)) is not None:
        kind, blob = told
        answer = b""
        if kind == b"c":
            answer = owner.connect(PEER, blob)
        elif kind == b"f":
            owner.fence(PEER)
            pool.memory[:] = content(2)  # the pages are others' now
        await give(stream, kind, answer)
    owner.close()
    rails.close()


async def take(stream: trio.SocketStream) -> tuple[bytes, bytes] | None:
    head = await exactly(stream, HEAD.size)
    if head is None:
        return None
    kind, size = HEAD.unpack(head)
    return kind, await exactly(stream, size) or b""


async def exactly(stream: trio.SocketStream, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        try:
            got = await stream.receive_some(size - len(data))
        except trio.BrokenResourceError:
            return None
        if not got:
            return None
        data += got
    return data


async def give(stream: trio.SocketStream, kind: bytes, blob: bytes) -> None:
    await stream.send_all(HEAD.pack(kind, len(blob)) + blob)


# The reader.


class Reader:
    def __init__(self, rails: Rails, pool: Memory, stream: trio.SocketStream) -> None:
        self.rails, self.pool, self.stream = rails, pool, stream
        self.alter: Callable[[bytes], bytes] = bytes
        self.transport = self.new_transport()

    def new_transport(self) -> RdmaTransport:
        count = len(self.rails.rails)
        return RdmaTransport(self.rails, count, self.dial, pause_s=0.05)

    async def ask(self, kind: bytes, blob: bytes = b"") -> bytes:
        try:
            await give(self.stream, kind, blob)
            told = await take(self.stream)
        except trio.BrokenResourceError:
            raise PeerLostError from None
        if told is None:
            raise PeerLostError
        return told[1]

    async def dial(self, offer: bytes) -> bytes:
        return self.alter(await self.ask(b"c", offer))

    async def fetch(self, fetch: Fetch) -> Fetch:
        self.pool.memory[:] = MARK
        with trio.fail_after(PATIENCE_S):
            await self.transport.fetch(fetch)
        return fetch


def is_right(reader: Reader, fetch: Fetch, source: NDArray[np.uint8]) -> bool:
    if not (fetch.outcome == Outcome.ARRIVED).all():
        return False
    places = [(a, b - reader.pool.address, n) for a, b, n in fetch.runs.tolist()]
    return all((source[a : a + n] == reader.pool.memory[b : b + n]).all() for a, b, n in places)


async def read(binding: str, sock: socket.socket, owner: int) -> None:
    pool, source = new_pool(), content(1)
    rails = await new_rails(binding, pool)
    say("two rails", len(rails.rails) == 2)
    gids = [rail.nic.facts.gid for rail in rails.rails]
    is_mapped = all(one.kind == ROCE_2 and one.gid[10:12] == b"\xff\xff" for one in gids)
    say("RoCE v2 by an IPv4 address", is_mapped)
    say("several regions", len(rails.begins) == 4)
    reader = Reader(rails, pool, trio.SocketStream(trio.socket.from_stdlib_socket(sock)))

    whole = rows(pool, (0, 0, SIZE))
    fetch = await reader.fetch(fetch_of(whole))
    say("16 MiB over two rails and all regions", is_right(reader, fetch, source))
    say("two queue pairs a path", len(reader.transport._lanes) == 4)
    fetch = await reader.fetch(fetch_of(shuffled(pool, count=256, size=64 << 10)))
    say("256 scattered runs", is_right(reader, fetch, source))
    fetch = await reader.fetch(fetch_of(rows(pool, (5, 7, 1), (MIB - 3, 3 * MIB + 1, MIB + 5))))
    say("odd places and lengths", is_right(reader, fetch, source))
    await wakes(reader)
    await wrong_keys(reader, whole, source)
    await cancelled(reader, whole, source)
    await fenced(reader, whole, source)
    os.kill(owner, signal.SIGKILL)
    fetch = await reader.fetch(fetch_of(whole, seconds=20))
    is_over = not (fetch.outcome == Outcome.ARRIVED).any()
    say(
        "an owner that is dead is a miss", is_over and not (fetch.outcome == Outcome.UNFENCED).any()
    )
    await reader.transport.aclose()
    rails.close()


async def wakes(reader: Reader) -> None:
    """The descriptor of the completion channel works with Trio."""
    lane = next(iter(reader.transport._lanes.values()))
    job = reader.transport._job(fetch_of(rows(reader.pool, (0, 0, MIB))), lane.reach)
    chain = job.take(lane.node)
    assert chain is not None
    lane.pair.arm()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.wait_readable, lane.pair.fd)
            await trio.lowlevel.checkpoint()
            job.post(lane, *chain)
    lane.pair.drain()
    say("the completion channel wakes Trio", lane.pair.poll() == [(chain[1] - 1, 0)])


async def wrong_keys(reader: Reader, runs: NDArray[np.int64], source: NDArray[np.uint8]) -> None:
    def spoil(answer: bytes) -> bytes:
        told = read_answer(answer)
        keys = tuple(tuple(key ^ 0x55 for key in rail) for rail in told.reach.keys)
        reach = type(told.reach)(told.reach.address, told.reach.bytes, told.reach.begins, keys)
        return pack_answer(type(told)(reach, told.pairs))

    await reader.transport.aclose()
    reader.transport, reader.alter = reader.new_transport(), spoil
    reader.transport._pauses = Pauses(len(reader.rails.rails), 3_600)
    fetch = await reader.fetch(fetch_of(runs))
    say("wrong keys read nothing", bool((reader.pool.memory == MARK).all()))
    say("and are a miss", bool((fetch.outcome == Outcome.FAILED).all()))
    await reader.transport.aclose()
    reader.transport, reader.alter = reader.new_transport(), bytes
    fetch = await reader.fetch(fetch_of(runs))
    say("new queue pairs read again", is_right(reader, fetch, source))


async def cancelled(reader: Reader, runs: NDArray[np.int64], source: NDArray[np.uint8]) -> None:
    reader.pool.memory[:] = MARK
    with trio.move_on_after(0.02):
        while True:  # some reads end, one is cancelled
            await reader.transport.fetch(fetch_of(runs))
    reader.pool.memory[:] = MARK
    await trio.sleep(0.3)
    say("cancelled, nothing is written later", bool((reader.pool.memory == MARK).all()))
    fetch = await reader.fetch(fetch_of(runs))
    say("then reads again", is_right(reader, fetch, source))


async def fenced(reader: Reader, runs: NDArray[np.int64], source: NDArray[np.uint8]) -> None:
    """The owner reuses its pages after the fence: no fetch may come with bytes of both."""
    reader.transport._pauses = Pauses(len(reader.rails.rails), 3_600)
    bad = good = 0
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.ask, b"f")
            while True:
                fetch = await reader.fetch(fetch_of(runs))
                if not (fetch.outcome == Outcome.ARRIVED).all():
                    break
                good += is_right(reader, fetch, source)
                bad += not is_right(reader, fetch, source)
    say(f"fenced by the owner, after {good} fetches", bad == 0)
    await reader.transport.aclose()
    reader.transport = reader.new_transport()
    fetch = await reader.fetch(fetch_of(runs))
    say("dialled again after the fence", is_right(reader, fetch, content(2)))


def say(what: str, is_so: bool) -> None:  # noqa: FBT001
    print(f"{'ok  ' if is_so else 'FAIL'} {what}", flush=True)
    if not is_so:
        failed.append(what)


failed: list[str] = []


def run_forked(main: Callable[[], None]) -> int:
    """In a process of its own that has imported all already; returns its number."""
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it dies with us
    try:
        main()
    except BaseException:  # noqa: BLE001  # told, and the process ends
        traceback.print_exc()
        os._exit(1)
    os._exit(bool(failed))


def check(binding: str) -> int:
    print(f"---- {binding}", flush=True)
    near, far = socket.socketpair()
    owner = run_forked(lambda: (near.close(), trio.run(own, binding, far))[-1])
    far.close()
    reader = run_forked(lambda: trio.run(read, binding, near, owner))
    near.close()
    _, status = os.waitpid(reader, 0)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    rails_module.REGION_BYTES_MAX = SIZE // 4
    codes = [check(binding) for binding in sys.argv[1:]]
    print("all checks hold" if not any(codes) else f"failed: {codes}", flush=True)
    sys.exit(any(codes))
