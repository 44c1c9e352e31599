"""A node's door for other nodes: strangers, and callers with the secret and bad intent."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import capnp
import numpy as np
import pytest

from tests.conftest import PATIENCE_S, Start
from tests.integration.daemons import (
    IS_INSIDE,
    RunningDaemon,
    attached,
    daemon_command,
    start_daemon,
    status,
    wait_for,
)
from tests.integration.disks import (
    BLOCKS,
    PAGE,
    content,
    engine_options,
    load,
    prompt,
    save,
    shown,
)
from tests.integration.pages import ANY_PORT, scrape
from trikv import address as addresses
from trikv import config, wire
from trikv.core.proofs import Party, Secret, read_secret
from trikv.meta.link import MetaError, introduce, open_client
from trikv.meta.messages import NODE, TOOL, Greeting, write_greeting
from trikv.nursery.peerplan import peers_of
from trikv.options import SettingError
from trikv.tiers import tcpframes

SECRET = b"a secret of 16 bytes and more"
FUZZ_S = 2.0
GROWTH_BYTES_MAX = 64 << 20
STORY_S = 90.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def node(start: Start, tmp_path: Path) -> Iterator["Node"]:
    """A daemon that is a node of a cluster on this host alone, whose metaserver is away."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_bytes(SECRET)
    daemon = start_daemon(
        start, tmp_path, "--addr", f"127.0.0.1:{port}", "--metaserver-addr", "127.0.0.1:1",
        "--insecure", "--cluster-secret-file", str(secret), "--pool-size", "32mb",
        "--http-addr", ANY_PORT,
        TRIKV_SOCKET=str(tmp_path / "run" / "trikv.sock"),
    )  # fmt: skip
    yield Node(daemon, port)
    assert daemon.end() == 0
    assert "Traceback" not in daemon.log.read_text()


class Node:
    def __init__(self, daemon: RunningDaemon, port: int) -> None:
        self.daemon = daemon
        self.address = f"127.0.0.1:{port}"

    @property
    def data_port(self) -> int:
        (ready,) = [one for one in self.daemon.events() if one["event"] == "peers.ready"]
        return int(ready["data_port"])

    @contextlib.asynccontextmanager
    async def door(self) -> AsyncIterator[Any]:
        """What anybody meets."""
        stream, client = await open_client(addresses.parse(self.address))
        try:
            yield client.bootstrap().cast_as(wire.SCHEMA.Peer)
        finally:
            stream.close()
            client.close()

    @contextlib.asynccontextmanager
    async def session(self, address: str = "10.9.9.9:50055") -> AsyncIterator[Any]:
        """What a node with the secret has."""
        async with self.door() as door:
            yield (await introduce(door, NODE, address, read_secret(SECRET))).session

    async def origin(self) -> bytes:
        facts = await status(self.daemon.address)
        return bytes.fromhex(facts["namespaces"][0]["fingerprint"]) + bytes(4)


def run(story: Any) -> None:
    async def told() -> None:
        async with asyncio.timeout(STORY_S), capnp.kj_loop():
            IS_INSIDE.set(True)
            await story

    asyncio.run(told())


async def lend(session: Any, origin: bytes, hashes: bytes, **changes: Any) -> Any:
    loan = {"origin": origin, "hashBytes": 32, "hashes": hashes, "seconds": 5.0} | changes
    return (await session.lend(loan)).reply


def request_of(token: bytes, pieces: list[tuple[int, int]], number: int = 0) -> bytes:
    return tcpframes.pack_request(number, token, np.array(pieces, np.int64).reshape(-1, 2))


def answer(port: int, request: bytes, size: int) -> tuple[tcpframes.Status | None, bytes]:
    """What a data stream answers; None: it hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(request)
        head = b""
        while len(head) < tcpframes.REPLY_BYTES:
            part = sock.recv(tcpframes.REPLY_BYTES - len(head))
            if not part:
                return None, b""
            head += part
        code = struct.unpack("<4sIIQI", head)[2]
        body = b""
        while code == 0 and len(body) < size and (part := sock.recv(size - len(body))):
            body += part
        return tcpframes.Status(code), body


def test_without_the_secret_nothing_can_be_read(node: Node) -> None:
    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
        for secret in (None, Secret(b"another secret of 16 bytes")):
            async with node.door() as door:
                with pytest.raises(MetaError):
                    await introduce(door, NODE, "10.9.9.9:50055", secret)
        async with node.door() as door:
            reply = (await door.prove(proof=bytes(32))).reply
            assert reply.error.code == "conflict"  # hello comes first
            greeting = Greeting(Party(NODE, "10.9.9.9:50055", bytes(32)), "a test")
            request = door.hello_request()
            write_greeting(request.greeting, greeting)
            assert (await request.send()).reply.ok.needsProof
            reply = (await door.prove(proof=bytes(32))).reply
            assert reply.error.code == "forbidden"
        async with node.door() as door:
            kv = door.cast_as(wire.SCHEMA.Kv)  # nor is it a way to be an engine
            for call in (kv.status(), kv.hello({"protocol": 1, "software": "x"})):
                with pytest.raises(capnp.KjException):
                    await call
        async with node.door() as door:
            with pytest.raises(MetaError):  # a tool with the secret is no node
                await introduce(door, TOOL, "", read_secret(SECRET))
        for token in (bytes(16), os.urandom(16)):
            told = await asyncio.to_thread(
                answer, node.data_port, request_of(token, [(0, PAGE)]), PAGE
            )
            assert told == (tcpframes.Status.UNKNOWN, b"")
        facts = await status(node.daemon.address)
        assert facts["cluster"]["grantCount"] == 0

    run(story())


def test_a_grant_opens_its_own_blocks_until_it_is_over(node: Node) -> None:
    async def read(token: bytes, offset: int, size: int = PAGE) -> Any:
        request = request_of(token, [(offset, size)])
        return await asyncio.to_thread(answer, node.data_port, request, size)

    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
        origin = await node.origin()
        async with node.session() as session, node.session() as other:
            ok = (await lend(session, origin, prompt("a")[: 32 * 4] + prompt("b", 1))).ok
            offsets = np.frombuffer(ok.offsets, "<i8")
            assert list(ok.pageBytes) == [PAGE]
            assert (offsets[:4] >= 0).all()
            assert offsets[4] == -1
            token, grant = bytes(ok.token), ok.grant
            wanted = content("a", 0, BLOCKS, PAGE)
            for at in range(4):
                told = await read(token, int(offsets[at]))
                assert told == (tcpframes.Status.OK, wanted[at].tobytes())
            outside = int(offsets[:4].max()) + PAGE
            assert (await read(token, outside))[0] is tcpframes.Status.OUTSIDE
            assert (await read(token, int(offsets[0]), PAGE * 8))[0] is tcpframes.Status.OUTSIDE
            theirs = (await other.release(grant=grant)).reply.ok
            assert not theirs.wasValid  # of somebody else's grant
            assert (await read(token, int(offsets[0])))[0] is tcpframes.Status.OK
            ours = (await session.release(grant=grant, wantsSums=True)).reply.ok
            assert ours.wasValid
            assert len(ours.sums) == 8 * 4
            assert not (await session.release(grant=grant)).reply.ok.wasValid
            assert (await read(token, int(offsets[0])))[0] is tcpframes.Status.UNKNOWN
            short = (await lend(session, origin, prompt("a"), seconds=0.2)).ok
            await wait_for(
                node.daemon.address, lambda facts: facts["cluster"]["grantCount"] == 0, 30
            )
            assert (await read(bytes(short.token), 0))[0] is tcpframes.Status.UNKNOWN
            assert not (await session.release(grant=short.grant)).reply.ok.wasValid
            left = bytes((await lend(session, origin, prompt("a"))).ok.token)
        await wait_for(node.daemon.address, lambda facts: facts["cluster"]["grantCount"] == 0)
        assert (await read(left, int(offsets[0])))[0] is tcpframes.Status.UNKNOWN

    run(story())


def test_status_and_metrics_show_nodes_and_metaservers(node: Node) -> None:
    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
        async with node.session() as session:
            assert (await lend(session, await node.origin(), prompt("a"))).ok.grant
            lines = await asyncio.to_thread(shown, node.daemon)
            page = await asyncio.to_thread(scrape, node.daemon)
        (mine,) = [line for line in lines if line.startswith("node ")]
        size = BLOCKS * PAGE // 2**20
        assert mine == f"node      {node.address}, tcp, 0 fetches, 1 grants on {size}.0 MiB"
        assert any(line.startswith("meta      127.0.0.1:1, ") for line in lines)
        wanted = f"peer      10.9.9.9:50055, 0 B in, {size}.0 MiB out, borrows"
        assert wanted in lines
        assert page["trikv_peer_grants", ()] == 1
        assert page["trikv_peer_granted_bytes", ()] == BLOCKS * PAGE
        lent = page["trikv_peer_lent_bytes_total", (("peer", "10.9.9.9:50055"),)]
        assert lent == BLOCKS * PAGE
        assert page["trikv_meta_joined", (("meta", "127.0.0.1:1"),)] == 0
        calls = (("method", "lend"), ("outcome", "ok"))
        assert page["trikv_peer_rpc_total", calls] == 1

    run(story())


def test_a_reset_is_shared_with_nobody(node: Node) -> None:
    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
            origin = await node.origin()
            async with node.session() as session:
                assert (await lend(session, origin, prompt("a"))).ok.grant
                await engine.session.reset()
                assert (await lend(session, origin, prompt("a"))).ok.grant == 0
                await save(engine, "a")
                assert (await lend(session, origin, prompt("a"))).ok.grant == 0
                assert await load(engine, "a") == BLOCKS

    run(story())


def test_random_calls_of_somebody_with_the_secret_do_no_harm(node: Node) -> None:
    chance = random.Random(11)

    async def call(session: Any, origin: bytes, grants: list[int]) -> None:
        kind = chance.randrange(4)
        if kind == 0:
            hashes = prompt("a") if chance.random() < 0.5 else os.urandom(32 * 3)
            seconds = chance.choice([0.1, 1.0, 1e30, float("inf"), float("nan"), -1.0])
            broken = chance.choice([b"", os.urandom(20), origin[:-1], bytes(1 << 16)])
            where = origin if chance.random() < 0.7 else broken
            width = chance.choice([32, 16, 0, 255])
            changes = {"seconds": seconds, "hashBytes": width, "wantsSums": chance.random() < 0.5}
            reply = await lend(session, where, hashes[: chance.randrange(2, 1 << 12)], **changes)
            if reply.which() == "ok" and reply.ok.grant:
                grants.append(reply.ok.grant)
        elif kind == 1:
            known = grants.pop() if grants and chance.random() < 0.5 else 0
            grant = known or chance.getrandbits(64)
            await session.release(grant=grant, wantsSums=chance.random() < 0.5)
        elif kind == 2:
            reply = (await session.connect(offer=os.urandom(chance.randrange(1 << 12)))).reply
            assert reply.which() == "error"
        else:
            token, place = os.urandom(16), chance.getrandbits(62)
            with contextlib.suppress(OSError):
                request = request_of(token, [(place, PAGE)])
                told, _ = await asyncio.to_thread(answer, node.data_port, request, PAGE)
                assert told is not tcpframes.Status.OK

    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
            origin = await node.origin()
            before = resident_bytes(node)
            until_s = time.monotonic() + FUZZ_S
            while time.monotonic() < until_s:
                async with node.session() as session:
                    grants: list[int] = []
                    for _ in range(50):
                        await call(session, origin, grants)
            await wait_for(
                node.daemon.address, lambda facts: facts["cluster"]["grantCount"] == 0, 60
            )
            assert resident_bytes(node) - before < GROWTH_BYTES_MAX
            assert await load(engine, "a") == BLOCKS

    run(story())


def test_broken_frames_do_no_harm(node: Node) -> None:
    chance = random.Random(12)
    host, _, port = node.address.rpartition(":")

    def noise(target: int) -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, target), 10) as sock:
            size = chance.randrange(1, 4_000)
            words = struct.pack("<II", chance.choice([0, 1, 511, 2**32 - 1]), size)
            true = request_of(os.urandom(16), [(0, PAGE)])
            broken = bytearray(true)
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
            sock.sendall(chance.choice([os.urandom(size), words + bytes(size), bytes(broken)]))

    async def story() -> None:
        async with attached(node.daemon.address, **engine_options()) as engine:
            await save(engine, "a")
            before = resident_bytes(node)
            data_port = node.data_port
            until_s = time.monotonic() + FUZZ_S
            while time.monotonic() < until_s:
                await asyncio.to_thread(noise, chance.choice([int(port), data_port]))
            assert resident_bytes(node) - before < GROWTH_BYTES_MAX
            assert await load(engine, "a") == BLOCKS
            async with node.session() as session:
                assert (await lend(session, await node.origin(), prompt("a"))).ok.grant

    run(story())


def resident_bytes(node: Node) -> int:
    text = Path(f"/proc/{node.daemon.process.pid}/statm").read_text()
    return int(text.split()[1]) * 4096


META = ("--metaserver-addr", "10.0.0.9:50056")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (META, "--metaserver-addr: needs --addr host:port"),
        ((*META, "--addr", "unix:/tmp/x.sock"), "--metaserver-addr: needs --addr host:port"),
        ((*META, "--addr", "0.0.0.0:50055"), "--addr 0.0.0.0:50055: other hosts cannot dial it"),
        ((*META, "--addr", "10.0.0.1:0"), "--addr 10.0.0.1:0: other hosts cannot dial it"),
        ((*META, "--addr", "127.0.0.1:50055"), "--addr 127.0.0.1:50055: other hosts cannot reach"),
        ((*META, "--addr", "10.0.0.1:50055"), "--addr 10.0.0.1:50055: other machines can reach it"),
        ((*META, "--addr", "10.0.0.1:1", "--cluster-secret-file", "/no"), "--cluster-secret-file"),
        (("--metaserver-addr", "unix:/x", "--addr", "1.2.3.4:5", "--insecure"), "--metaserver-ad"),
        ((*META, "--addr", "1.2.3.4:5", "--insecure", "--nics", "mlx5_77"), "--nics: there is no"),
        (("--insecure",), "--insecure: needs --metaserver-addr"),
        (("--cluster-secret-file", "/x"), "--cluster-secret-file: needs --metaserver-addr"),
    ],
)
def test_what_would_be_no_node_or_an_open_one_is_refused(
    arguments: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SettingError) as refused:
        peers_of(config.load(arguments, {}))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(said)


def test_a_node_that_is_refused_ends_with_one_line(tmp_path: Path) -> None:
    ended = try_to_start(tmp_path, "--addr", "10.0.0.1:50055", *META)
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    assert line.startswith("trikv-daemon: --addr 10.0.0.1:50055: other machines can reach it")


def try_to_start(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = daemon_command("--pool-size", "4mb", "--http-addr", "off", *arguments)
    environ = os.environ | {"TRIKV_SOCKET": f"{folder}/s"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environ
    )


def test_a_data_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = try_to_start(
            tmp_path, "--addr", f"127.0.0.1:{free_port()}", "--metaserver-addr", "127.0.0.1:1",
            "--insecure", "--peer-data-port", str(taken.getsockname()[1]),
        )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith("trikv-daemon: --peer-data-port: 127")
