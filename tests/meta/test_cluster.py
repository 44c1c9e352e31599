"""Nodes and real metaservers: what is told is found, and what is lost comes back."""

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.conftest import Start
from tests.meta.metas import (
    A,
    B,
    LightNode,
    RunningMeta,
    finds,
    in_cluster,
    keys,
    start_meta,
    until,
)
from trikv import address as addresses
from trikv.core.adverts import KEYS_MAX, Part
from trikv.meta.link import dial
from trikv.meta.messages import NODE
from trikv.process.outward import on_asyncio

ONE, TWO, THREE = "10.0.0.1:50057", "10.0.0.2:50057", "10.0.0.3:50057"


@pytest.fixture(autouse=True)
def _repairs_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trikv.meta.client.REPAIR_S_MIN", 0.3)


@pytest.fixture
def meta(start: Start, tmp_path: Path) -> RunningMeta:
    return start_meta(start, tmp_path)


@in_cluster
async def test_what_one_node_saves_others_find_and_evicted_blocks_they_do_not(
    meta: RunningMeta,
) -> None:
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    first, second = keys(1, 20_000), keys(2, 5)
    async with trio.open_nursery() as nursery:
        one.held[A] = [first]  # before the metaserver is known
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, first[:9_000], [ONE] * 9_000)
        await finds(two, A, np.concatenate([first[-3:], second]), [ONE] * 3)
        assert await two.owners(B, first[:10]) == []
        assert await one.owners(A, first[:10]) == [], "a node needs not be told of itself"
        one.save(A, second)
        two.save(B, second)
        await finds(two, A, second, [ONE] * 5)
        await finds(one, B, second, [TWO] * 5)
        one.evict(A, first[2:4])
        await finds(two, A, first[:10], [ONE] * 2)
        one.save(A, first[2:4])
        await finds(two, A, first[:10], [ONE] * 10)
        for node in (one, two):
            node.scope.cancel()
    assert [event["addr"] for event in meta.events("node.left")] in ([ONE, TWO], [TWO, ONE])
    assert not meta.events("node.lost")
    assert meta.end() == 0


@in_cluster
async def test_a_plan_takes_from_several_owners_and_names_their_epochs(meta: RunningMeta) -> None:
    one, two, three = (LightNode(address, [meta.address]) for address in (ONE, TWO, THREE))
    words = keys(1, 1_000)
    one.held[A], two.held[A] = [words[:600]], [words[600:]]
    async with trio.open_nursery() as nursery:
        for node in (one, two, three):
            await nursery.start(node.run)
        await finds(three, A, words, [ONE] * 600 + [TWO] * 400)
        plan = await three.plan(A, words)
        assert [(s.address, s.epoch, s.first, s.count) for s in plan] == [
            (ONE, one.epoch, 0, 600),
            (TWO, two.epoch, 600, 400),
        ]
        nursery.cancel_scope.cancel()


@in_cluster
async def test_a_killed_metaserver_knows_everything_again_soon(
    meta: RunningMeta, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However lately all was announced: a metaserver that has restarted is told at once.
    monkeypatch.setattr("trikv.meta.client.REPAIR_S_MIN", 1_000.0)
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    words = keys(1, 50_000)
    one.held[A] = [words]
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, words[-5:], [ONE] * 5)
        meta.end(signal.SIGKILL)
        await until(lambda: not one.client.lines[0].is_usable)
        assert await two.owners(A, words[:5]) == [], "a miss, not an error"
        one.save(A, keys(2, 5))  # while nobody listens
        again = start_meta(start, tmp_path, "--addr", meta.address)
        began_s = time.monotonic()
        await finds(two, A, keys(2, 5), [ONE] * 5)
        await finds(two, A, words[-5:], [ONE] * 5)
        print(f"index back after {time.monotonic() - began_s:.2f} s")  # noqa: T201
        nursery.cancel_scope.cancel()
    assert again.end() == 0


@in_cluster
async def test_losing_one_of_two_metaservers_loses_nothing(
    meta: RunningMeta, start: Start, tmp_path: Path
) -> None:
    other = start_meta(start, tmp_path)
    one, two = (LightNode(address, [meta.address, other.address]) for address in (ONE, TWO))
    one.held[A] = [keys(1, 100)]
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await until(lambda: one.is_announced and two.is_announced)
        for victim in (meta, other):
            victim.process.send_signal(signal.SIGSTOP)
            for _ in range(4):  # whoever's turn it is
                assert await two.owners(A, keys(1, 100)) == [ONE] * 100
            victim.process.send_signal(signal.SIGCONT)
            await until(lambda: all(line.is_usable for line in two.client.lines))
        meta.end(signal.SIGKILL)
        for _ in range(4):
            assert await two.owners(A, keys(1, 100)) == [ONE] * 100
        nursery.cancel_scope.cancel()


@in_cluster
async def test_split_answers_of_two_metaservers_are_joined(
    meta: RunningMeta, start: Start, tmp_path: Path
) -> None:
    other = start_meta(start, tmp_path)
    one, two = LightNode(ONE, [meta.address]), LightNode(TWO, [other.address])
    three = LightNode(THREE, [meta.address, other.address])
    one.held[A], two.held[A] = [keys(1, 10)], [keys(2, 10)]
    words = np.concatenate([keys(1, 10), keys(2, 10), keys(3, 1)])
    async with trio.open_nursery() as nursery:
        for node in (one, two, three):
            await nursery.start(node.run)
        await finds(three, A, words, [ONE] * 10 + [TWO] * 10)
        assert [one.first for one in await three.plan(A, words)] == [0, 10]
        nursery.cancel_scope.cancel()


@in_cluster
async def test_metaservers_that_know_the_same_are_asked_once(
    meta: RunningMeta, start: Start, tmp_path: Path
) -> None:
    other = start_meta(start, tmp_path)
    one, two = (LightNode(address, [meta.address, other.address]) for address in (ONE, TWO))
    one.held[A] = [keys(1, 10)]
    asked: list[str] = []
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await until(lambda: one.is_announced and two.is_announced)

        def beats() -> set[int]:
            return {line.beat.nodes_digest for line in two.client.lines if line.beat}

        await until(lambda: len(beats()) == 1 and beats() != {0})
        for line in two.client.lines:

            async def ask(*args: Any, line: Any = line, before: Any = line.ask) -> Any:
                asked.append(str(line.address))
                return await before(*args)

            line.ask = ask  # type: ignore[method-assign]
        for _ in range(4):
            words = np.concatenate([keys(1, 10), keys(9, 10)])
            assert await two.owners(A, words) == [ONE] * 10
        assert len(asked) == 4
        assert set(asked) == {meta.address, other.address}, "in turn"
        nursery.cancel_scope.cancel()


@in_cluster
async def test_a_lost_portion_is_noticed_by_the_digest_and_repaired(
    start: Start, tmp_path: Path
) -> None:
    meta = start_meta(start, tmp_path, "--node-seconds", "1.5")
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    one.held[A] = [keys(1, 10)]
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, keys(1, 10), [ONE] * 10)
        await until(lambda: one.is_announced)
        link = one.client.lines[0].link
        assert link is not None
        real = link.announce

        async def lose(_parts: list[Part]) -> int:
            link.announce = real  # type: ignore[method-assign]
            return 0

        link.announce = lose  # type: ignore[method-assign]
        one.save(A, keys(2, 10))
        await finds(two, A, keys(2, 10), [ONE] * 10)
        await until(lambda: one.client.lines[0].announced_total == 2)
        nursery.cancel_scope.cancel()


@in_cluster
async def test_what_somebody_else_said_for_a_node_is_put_right(meta: RunningMeta) -> None:
    """A second connection under the same name, as after a half-open one: the digest tells."""
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    one.held[A] = [keys(1, 10)]
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, keys(1, 10), [ONE] * 10)
        other = await on_asyncio(dial(addresses.parse(meta.address), NODE, ONE, None))
        assert await on_asyncio(other.join(one.epoch, [])), "the same epoch goes on where it was"
        gone = Part(A, keys(1, 10)[3:], is_held=False)
        await on_asyncio(other.announce([gone]))
        other.close()
        await until(lambda: one.client.lines[0].announced_total == 2)
        await finds(two, A, keys(1, 10), [ONE] * 10)
        nursery.cancel_scope.cancel()


@in_cluster
async def test_a_lost_connection_costs_no_new_announcement(meta: RunningMeta) -> None:
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    one.held[A] = [keys(1, 10)]
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await finds(two, A, keys(1, 10), [ONE] * 10)
        await until(lambda: one.is_announced)
        line = one.client.lines[0]
        for number in range(3):
            link = line.link
            assert link is not None
            one.save(A, keys(10 + number, 10))  # perhaps in flight
            link.close()
            await until(lambda link=link: line.link not in (None, link))
            await finds(two, A, keys(10 + number, 10), [ONE] * 10)
            assert await two.owners(A, keys(1, 10)) == [ONE] * 10
        assert line.announced_total == 1
        nursery.cancel_scope.cancel()
    assert len(meta.events("node.joined")) == 5
    assert not meta.events("node.lost")


@in_cluster
async def test_more_nodes_than_may_announce_at_once_take_turns(
    start: Start, tmp_path: Path
) -> None:
    before = "from trikv.core import nodes\nnodes.ROUNDS_MAX = 2\n"
    meta = start_meta(start, tmp_path, before=before)
    nodes = [LightNode(f"10.0.1.{at}:1", [meta.address]) for at in range(12)]
    async with trio.open_nursery() as nursery:
        for at, node in enumerate(nodes):
            node.held[A] = [keys(at, 5_000)]
            await nursery.start(node.run)
        await until(lambda: all(node.is_announced for node in nodes))
        assert await nodes[0].owners(A, keys(11, 100)) == ["10.0.1.11:1"] * 100
        nursery.cancel_scope.cancel()
    assert len(meta.events("node.joined")) == 12, "who waits stays connected"


@in_cluster
async def test_a_node_that_tells_more_than_its_queue_holds_tells_everything_anew(
    meta: RunningMeta,
) -> None:
    one, two = (LightNode(address, [meta.address]) for address in (ONE, TWO))
    words = keys(1, 10_000)
    async with trio.open_nursery() as nursery:
        for node in (one, two):
            await nursery.start(node.run)
        await until(lambda: one.is_announced)
        one.held[A] = [words]
        for _ in range(KEYS_MAX // len(words) + 1):  # no checkpoint in between
            one.client.tell(Part(A, words, is_held=True))
        assert one.client.lines[0].adverts.is_lost
        await finds(two, A, words[-10:], [ONE] * 10)
        await until(lambda: one.client.lines[0].announced_total == 2)
        nursery.cancel_scope.cancel()
