"""Callers with bad intent: without the secret, and with it."""

import asyncio
import contextlib
import random
import socket
import struct
import time
from pathlib import Path
from typing import Any

import capnp
import trio

from tests.meta.callers import ONE, SECRET, TWO, greeting, on_wire
from tests.meta.metas import A, LightNode, RunningMeta, finds, in_cluster, keys, until
from trikv import address as addresses
from trikv import wire
from trikv.meta import gate
from trikv.meta.link import MetaError, dial
from trikv.meta.messages import NODE, TOOL, write_greeting

FUZZ_S = 2.0
GROWTH_BYTES_MAX = 64 << 20


def test_strangers_do_not_take_the_places_of_nodes(guarded: RunningMeta) -> None:
    host, _, port = guarded.address.rpartition(":")
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(gate.UNPROVEN_MAX + 20)]
        for sock in sockets:
            sock.settimeout(60)
            sock.connect((host, int(port)))

        @in_cluster
        async def serve() -> None:
            """As soon as the silent ones have been hung up on, nodes come through."""
            node = LightNode(ONE, [guarded.address], SECRET)
            async with trio.open_nursery() as nursery:
                await nursery.start(node.run)
                await until(lambda: node.is_announced)
                nursery.cancel_scope.cancel()

        serve()
        silent = stack.pop_all()
    with silent:  # they have been hung up on, the first ones not at once
        assert sockets[0].recv(1) == b""
        assert time.monotonic() - began_s > gate.PROVE_S / 2


def resident_bytes(meta: RunningMeta) -> int:
    text = Path(f"/proc/{meta.process.pid}/statm").read_text()
    return int(text.split()[1]) * 4096


def frames(chance: random.Random, template: bytes) -> bytes:
    """What comes through a socket: noise, absurd headers, true messages with some bits wrong."""
    kind = chance.randrange(4)
    if kind == 0:
        return chance.randbytes(chance.randrange(1, 4_000))
    if kind == 1:
        return struct.pack("<II", chance.choice([0, 1, 511, 2**32 - 1]), chance.getrandbits(32))
    broken = bytearray(template)
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(broken))
        broken[at] = chance.randrange(256) if kind == 2 else broken[at] ^ (1 << chance.randrange(8))
    return bytes(broken)


def recorded() -> bytes:
    """The first bytes of a true caller: its bootstrap message and its greeting."""
    said = bytearray()

    async def main() -> None:
        async with capnp.kj_loop():
            ours, theirs = socket.socketpair()
            ours.setblocking(False)  # noqa: FBT003
            theirs.setblocking(False)  # noqa: FBT003
            stream = await capnp.AsyncIoStream.create_unix_connection(sock=ours)
            client = capnp.TwoPartyClient(stream)
            meta = client.bootstrap().cast_as(wire.SCHEMA.Meta)
            request = meta.hello_request()
            write_greeting(request.greeting, greeting())
            call = request.send()
            await asyncio.sleep(0.1)
            with contextlib.suppress(BlockingIOError):
                said.extend(theirs.recv(65_536))
            stream.close()
            client.close()
            del call, meta, request
            theirs.close()

    asyncio.run(main())
    return bytes(said)


def test_broken_frames_do_no_harm(guarded: RunningMeta) -> None:
    chance = random.Random(7)
    template = recorded()
    assert len(template) > 200
    host, _, port = guarded.address.rpartition(":")
    before = resident_bytes(guarded)
    end_s, count = time.monotonic() + FUZZ_S, 0
    while time.monotonic() < end_s:
        with socket.socket() as sock:
            sock.settimeout(0.02)
            sock.connect((host, int(port)))
            with contextlib.suppress(OSError):
                for _ in range(chance.randrange(1, 4)):
                    sock.sendall(frames(chance, template))
                sock.recv(4_096)
        count += 1
    print(f"{count} connections with broken frames")  # noqa: T201
    assert count > 20
    assert guarded.process.poll() is None, guarded.log.read_text()[-2_000:]
    assert resident_bytes(guarded) - before < GROWTH_BYTES_MAX
    is_served(guarded)


def is_served(meta: RunningMeta) -> None:
    """Nodes find each other as ever."""

    @in_cluster
    async def check() -> None:
        one, two = (LightNode(address, [meta.address], SECRET) for address in (ONE, TWO))
        one.held[A] = [keys(1, 100)]
        async with trio.open_nursery() as nursery:
            for node in (one, two):
                await nursery.start(node.run)
            await finds(two, A, keys(1, 100), [ONE] * 100)
            nursery.cancel_scope.cancel()

    check()


class _Misuse:
    """Calls of somebody who knows the secret, in any order and with any arguments."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def data(self) -> bytes:
        sizes = [0, 1, 16, 20, 31, 32, 64, 640, 32 * 8_192, 32 * 8_193, 32 * 16_385]
        return self.chance.randbytes(self.chance.choice(sizes))

    def origin(self) -> bytes:
        return self.chance.choice([A, b"", self.chance.randbytes(20), b"x" * 21])

    def adverts(self) -> list[dict[str, Any]]:
        chance = self.chance
        return [
            {
                "origin": self.origin(),
                "isHeld": chance.random() < 0.8,
                "hashBytes": self.width(),
                "hashes": self.data() if chance.random() < 0.3 else chance.randbytes(640),
            }
            for _ in range(chance.choice([0, 1, 2, 3, 70]))
        ]

    def width(self) -> int:
        return self.chance.choice([0, 16, 16, 32, 32, 255])

    def call(self, session: Any) -> Any:
        chance = self.chance
        calls: list[Any] = [
            lambda: session.join(
                epoch=chance.getrandbits(64),
                rails=["r" * chance.randrange(70)] * chance.randrange(20),
            ),
            session.begin,
            session.finish,
            *[lambda: session.announce(adverts=self.adverts())] * 3,
            lambda: session.locate(
                origin=self.origin(), hashBytes=self.width(), hashes=self.data()
            ),
            lambda: session.heartbeat(lentBlocks=chance.getrandbits(32)),
            session.leave if chance.random() < 0.1 else session.status,
        ]
        return chance.choice(calls)()


async def misuse_once(misuse: _Misuse, place: addresses.Address) -> int:
    """One connection; returns how many calls it made."""
    chance = misuse.chance
    link = await dial(place, NODE, f"10.9.0.{chance.randrange(5)}:1", SECRET)
    calls = []
    try:
        for _ in range(chance.randrange(1, 40)):
            with contextlib.suppress(capnp.KjException):
                calls.append(asyncio.ensure_future(_awaited(misuse.call(link._session))))
                if chance.random() < 0.2:
                    await calls[-1]
        if chance.random() < 0.7:
            await asyncio.gather(*calls)
    finally:
        link.close()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    return len(calls)


async def _awaited(call: Any) -> None:
    with contextlib.suppress(capnp.KjException):  # a message over the limit, or we hung up
        await call


@on_wire
async def test_random_calls_of_somebody_with_the_secret_do_no_harm(guarded: RunningMeta) -> None:
    misuse = _Misuse(random.Random(11))
    place = addresses.parse(guarded.address)
    before = resident_bytes(guarded)
    end_s, count = time.monotonic() + FUZZ_S, 0
    while time.monotonic() < end_s:
        with contextlib.suppress(MetaError):
            count += await misuse_once(misuse, place)
    print(f"{count} random calls")  # noqa: T201
    assert count > 50
    assert guarded.process.poll() is None, guarded.log.read_text()[-2_000:]
    assert resident_bytes(guarded) - before < GROWTH_BYTES_MAX
    link = await dial(place, TOOL, "", SECRET)
    calls = {(one["method"], one["outcome"]) for one in (await link.status())["calls"]}
    link.close()
    for method in ("join", "begin", "announce", "finish", "locate", "heartbeat"):
        assert (method, "ok") in calls, "else this test proves little"
    assert ("announce", "bad-request") in calls


def test_after_all_that_nodes_are_served_and_the_end_is_clean(guarded: RunningMeta) -> None:
    is_served(guarded)
    assert guarded.end() == 0
    text = guarded.log.read_text()
    assert "Traceback" not in text
    assert SECRET.decode() not in text
