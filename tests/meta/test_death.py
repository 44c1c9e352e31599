"""Nodes in processes of their own that are killed, freeze, or come all at once."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import trio

from tests.conftest import Start
from tests.meta.callers import TWO
from tests.meta.metas import (
    ROOT,
    A,
    LightNode,
    RunningMeta,
    finds,
    in_cluster,
    keys,
    start_meta,
    until,
)


def spawn_nodes(start: Start, port: int, count: int, *metas: RunningMeta) -> subprocess.Popen[str]:
    addresses_of = ",".join(meta.address for meta in metas)
    command = [sys.executable, "-m", "tests.meta.light_nodes", str(port), str(count), addresses_of]
    child = start(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert child.stdout is not None
    assert child.stdout.readline() == "announced\n"
    return child


def test_a_killed_node_is_forgotten_and_its_successor_served_at_once(
    start: Start, tmp_path: Path
) -> None:
    meta = start_meta(start, tmp_path)
    child = spawn_nodes(start, 20_000, 1, meta)
    address, words = "127.0.0.1:20000", keys(20_000, 1000)

    @in_cluster
    async def watch() -> None:
        two = LightNode(TWO, [meta.address])
        async with trio.open_nursery() as nursery:
            await nursery.start(two.run)
            await finds(two, A, words, [address] * 1000)
            child.kill()
            began_s = time.monotonic()
            await finds(two, A, words, [])
            print(f"a killed node was forgotten after {time.monotonic() - began_s:.2f} s")  # noqa: T201
            nursery.cancel_scope.cancel()

    watch()
    assert [event["addr"] for event in meta.events("node.lost")] == [address]
    first = spawn_nodes(start, 20_000, 1, meta)
    first.kill()
    spawn_nodes(start, 20_000, 1, meta)  # the same address, while the old epoch still counts
    assert meta.end() == 0


def test_a_frozen_node_is_forgotten_and_comes_back(start: Start, tmp_path: Path) -> None:
    meta = start_meta(start, tmp_path, "--node-seconds", "2")
    child = spawn_nodes(start, 20_100, 1, meta)
    address, words = "127.0.0.1:20100", keys(20_100, 1000)

    @in_cluster
    async def watch() -> None:
        two = LightNode(TWO, [meta.address])
        async with trio.open_nursery() as nursery:
            await nursery.start(two.run)
            await finds(two, A, words, [address] * 1000)
            child.send_signal(signal.SIGSTOP)
            await finds(two, A, words, [])
            child.send_signal(signal.SIGCONT)
            await finds(two, A, words, [address] * 1000)
            nursery.cancel_scope.cancel()

    watch()


def test_a_frozen_metaserver_blames_nobody(start: Start, tmp_path: Path) -> None:
    meta = start_meta(start, tmp_path, "--node-seconds", "2")
    spawn_nodes(start, 20_200, 1, meta)
    meta.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # more than the silence that it grants
    meta.process.send_signal(signal.SIGCONT)

    @in_cluster
    async def watch() -> None:
        two = LightNode(TWO, [meta.address])
        async with trio.open_nursery() as nursery:
            await nursery.start(two.run)
            await finds(two, A, keys(20_200, 1000), ["127.0.0.1:20200"] * 1000)
            nursery.cancel_scope.cancel()

    watch()
    assert not meta.events("node.lost")


def test_a_hundred_nodes_at_once(start: Start, tmp_path: Path) -> None:
    metas = [start_meta(start, tmp_path) for _ in range(2)]
    began_s = time.monotonic()
    children = [
        start(
            [
                sys.executable,
                "-m",
                "tests.meta.light_nodes",
                str(21_000 + 50 * at),
                "50",
                ",".join(meta.address for meta in metas),
            ],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for at in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "announced\n"
    print(f"100 nodes announced after {time.monotonic() - began_s:.2f} s")  # noqa: T201

    @in_cluster
    async def watch() -> None:
        two = LightNode(TWO, [meta.address for meta in metas])
        async with trio.open_nursery() as nursery:
            await nursery.start(two.run)
            await until(lambda: two.is_announced)
            for at in range(100):
                words = keys(21_000 + at, 1000)
                assert await two.owners(A, words) == [f"127.0.0.1:{21_000 + at}"] * 1000
            children[0].kill()
            await finds(two, A, keys(21_000, 10), [])
            await finds(two, A, keys(21_099, 10), ["127.0.0.1:21099"] * 10)
            nursery.cancel_scope.cancel()

    watch()
    for meta in metas:
        assert len(meta.events("node.announced")) == 101
        assert meta.end() == 0
