"""How fast one host fetches another's memory, by TCP and, where both have NICs, by RDMA READ.

    python -m bench.hosts own HOST:PORT [--mebibytes 4096]     on one host: an address of its own
    python -m bench.hosts read HOST:PORT [--rounds 10]         on the other: the same address

Both pools are churned: runs of 2 MiB in different orders at both ends. Bytes are compared. Needs no
secret: whoever reaches the port can read the pool, which holds nothing but noise. Run iperf3 and
`ib_read_bw` beside it. Not measured by its authors on 400 Gb NICs: they had none.
"""

import argparse
import json
import struct
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Final

import numpy as np
import trio

from bench.lines import Line, print_json
from tests.tiers.peers import Memory, is_right, noise, runs_of
from trikv.address import Address, parse
from trikv.core.chunks import Runs
from trikv.core.words import PeerId
from trikv.tiers import tcp, verbs
from trikv.tiers.nics import list_nics
from trikv.tiers.pairs import NicError
from trikv.tiers.peer import Fetch, Outcome, PeerLostError, Transport
from trikv.tiers.pool import open_pool
from trikv.tiers.rails import Rails, open_rails
from trikv.tiers.rdma import RdmaTransport
from trikv.tiers.rdmaowner import RdmaOwner
from trikv.tiers.tcp import TcpTransport
from trikv.tiers.tcpowner import TcpOwner

MIB: Final = 1 << 20
RUN_BYTES: Final = 2 * MIB
SLAB_BYTES: Final = 64 * MIB
HEAD: Final = struct.Struct("<I")


async def rails_of(pool: Memory) -> Rails | None:
    """This host's NICs, knowing the pool; None when there are none."""
    nics = list_nics()
    if not nics:
        return None
    facts = {"address": pool.address, "size": len(pool.memory), "slab_bytes": SLAB_BYTES}
    return await open_rails(verbs.load(), nics, **facts)


async def own(address: Address, size: int) -> None:
    """Serve a pool until killed; tells the port once it does."""
    pool = open_pool(size, use_hugepages=False)
    pool.memory[:] = noise(size)
    rails = await rails_of(pool)
    lender = TcpOwner(pool, limiter=trio.CapacityLimiter(8))
    reads = RdmaOwner(rails) if rails else None
    token = lender.lend(np.array([(0, size)], np.int64))
    peers = iter(range(1, 1 << 30))

    async def serve(stream: trio.SocketStream) -> None:
        peer = PeerId(next(peers))
        count = len(rails.rails) if rails else 0
        facts = {"bytes": size, "port": port, "token": token.hex(), "rails": count}
        await give(stream, json.dumps(facts).encode())
        while reads and (offer := await take(stream)):
            try:
                await give(stream, reads.connect(peer, offer))
            except (ValueError, NicError):
                break
        if reads:
            reads.fence(peer)

    async with trio.open_nursery() as nursery:
        port = await nursery.start(lender.run, Address(host=address.host))
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
        print(listeners[0].socket.getsockname()[1], flush=True)
        await trio.serve_listeners(serve, listeners)


async def give(stream: trio.SocketStream, blob: bytes) -> None:
    """One message."""
    await stream.send_all(HEAD.pack(len(blob)) + blob)


async def take(stream: trio.SocketStream) -> bytes:
    """The next message; empty when the other end is gone."""
    size = HEAD.size
    for is_head in (True, False):
        data = b""
        while len(data) < size:
            try:
                got = await stream.receive_some(size - len(data))
            except trio.BrokenResourceError:
                return b""
            if not got:
                return b""
            data += got
        if is_head:
            (size,) = HEAD.unpack(data)
    return data


async def timed(transport: Transport, runs: Runs, token: bytes) -> float:
    """Seconds of one fetch of which every run arrives."""
    fetch = Fetch(runs, trio.current_time() + 300, token)
    begin_s = time.perf_counter()
    await transport.fetch(fetch)
    took_s = time.perf_counter() - begin_s
    if not (fetch.outcome == Outcome.ARRIVED).all():
        sys.exit(
            f"{(fetch.outcome != Outcome.ARRIVED).sum()} runs did not arrive by {transport.name}"
        )
    return took_s


async def read(address: Address, rounds: int) -> list[Line]:
    """Fetch from an owner that was started elsewhere, by each way that there is."""
    async with await trio.open_tcp_stream(address.host, address.port) as stream:
        facts = json.loads(await take(stream))
        size, token = int(facts["bytes"]), bytes.fromhex(facts["token"])
        pool = open_pool(size, use_hugepages=False)
        pool.populate(0, size)
        there = Address(host=address.host, port=int(facts["port"]))
        rails = await rails_of(pool) if facts["rails"] else None

        async def dial(offer: bytes) -> bytes:
            await give(stream, offer)
            answer = await take(stream)
            if not answer:
                raise PeerLostError
            return answer

        ways: list[Transport] = [TcpTransport(there, pool, limiter=trio.CapacityLimiter(8))]
        if rails:
            ways.append(RdmaTransport(rails, int(facts["rails"]), dial))
        speeds = {way.name: await _speed(way, pool, size, token, rounds) for way in ways}
        for way in ways:
            await way.aclose()
        if rails:
            rails.close()
    return list(_lines(speeds, size, len(rails.rails) if rails else 0))


async def _speed(way: Transport, pool: Memory, size: int, token: bytes, rounds: int) -> float:
    runs = runs_of(pool, size // RUN_BYTES, RUN_BYTES)
    times = [await timed(way, runs, token) for _ in range(rounds + 1)][1:]
    if not is_right(runs, noise(size), pool):
        sys.exit(f"bytes differ by {way.name}")
    return size / median(times) / 1e9


def _lines(speeds: dict[str, float], size: int, rails: int) -> Iterator[Line]:
    how = {"tcp": f"{tcp.STREAMS} streams", "rdma": f"{rails} rails"}
    for name, speed in speeds.items():
        case = f"{name.upper()} between hosts, {size // MIB} MiB, runs of 2 MiB, {how[name]}"
        yield Line(case, "fetch", speed, "GB/s", more_is_better=True)


def main() -> None:
    """Serve, or measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("own", "read"))
    parser.add_argument("address", type=parse, metavar="HOST:PORT")
    parser.add_argument("--mebibytes", type=int, default=4_096)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if options.part == "own":
        trio.run(own, options.address, options.mebibytes * MIB)
    else:
        print_json("hosts", trio.run(read, options.address, options.rounds))


if __name__ == "__main__":
    main()
