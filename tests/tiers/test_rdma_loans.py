"""One node reads another one's blocks by RDMA, on the double of libibverbs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from tests.tiers.double import SLAB_BYTES, Double
from tests.tiers.loans import COUNT, ORIGIN, PAGE, gone, owning, reading, words
from tests.tiers.peers import Memory, condition
from trikv.tiers import verbs
from trikv.tiers.nics import list_nics
from trikv.tiers.rails import Rails, open_rails


def opener(sysfs: Path) -> Any:
    async def rails(memory: Memory) -> Rails:
        return await open_rails(
            verbs.load("ibverbs"),
            list_nics(sysfs),
            address=memory.address,
            size=len(memory.memory),
            slab_bytes=SLAB_BYTES,
        )

    return rails


async def test_blocks_come_by_rdma_and_are_believed_by_the_release(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rails = opener(sysfs)
    requests = double.get("requests")
    async with owning(rails) as owner, reading(owner, monkeypatch, rails) as reader:
        part = reader.wanted()
        result = await reader.bring(part)
        assert result.arrived.all()
        assert reader.is_right(part, owner)
        assert reader.hits() == COUNT
        assert reader.node.way == "rdma"
        assert reader.node.moved.by_way == {"rdma": COUNT * PAGE}
        assert owner.calls == ["release"]
        assert owner.pins == 0
        assert double.get("requests") > requests


async def test_sums_are_compared_when_that_is_wanted(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change() -> None:
        owner.content(1)[7] ^= 1

    rails = opener(sysfs)
    async with owning(rails) as owner, reading(owner, monkeypatch, rails, verifies=True) as reader:
        owner.before_fetch = change
        result = await reader.bring(reader.wanted())
        assert result.arrived.tolist() == [True, False, True, True]
        assert owner.calls == ["release with sums"]
        assert reader.node.way == "rdma"


async def test_what_rdma_cannot_bring_comes_by_tcp_and_is_compared(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rails = opener(sysfs)
    async with owning(rails) as owner, reading(owner, monkeypatch, rails) as reader:
        owner.joins, requests = False, double.get("requests")
        part = reader.wanted()
        result = await reader.bring(part)
        assert result.arrived.all()
        assert reader.is_right(part, owner)
        assert owner.calls == ["release with sums"]
        assert double.get("requests") == requests
        assert reader.node.way == "tcp"
        assert reader.node.moved.by_way == {"tcp": COUNT * PAGE}


async def test_a_grant_that_ends_destroys_queue_pairs_before_its_pages_are_let_go(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is late: its reads wait in the NIC while the grant's time is over."""
    rails = opener(sysfs)
    async with owning(rails) as owner, reading(owner, monkeypatch, rails) as reader:
        first = reader.wanted()
        assert (await reader.bring(first)).arrived.all()  # queue pairs are joined
        pairs = double.get("pairs")
        for number in range(2):
            double.set(number, mute=1)
        part_of = reader.cache
        part_of.retire_space(first.landing.space)
        while part_of.drop_retired():
            pass
        posts = double.get("posts")
        order: list[tuple[int, int]] = []
        unpin = owner.owner.lending.fenced

        def fenced(fence: Any) -> None:
            order.append((double.get("pairs"), owner.pins))
            unpin(fence)

        monkeypatch.setattr(owner.owner.lending, "fenced", fenced)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.bring, reader.wanted("s"))
            await condition(lambda: double.get("posts") > posts)
            owner.owner.leave(owner.peer)
            await gone(owner)
            for number in range(2):
                double.set(number, mute=0)
        assert order[0][1] == COUNT  # pinned still
        assert order[0][0] < pairs  # and nobody can read any more
        assert reader.hits() == 0
        assert reader.cache.pages.used_bytes == 0


async def test_a_nic_that_does_not_destroy_keeps_pages_pinned(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rails = opener(sysfs)
    async with owning(rails) as owner, reading(owner, monkeypatch, rails) as reader:
        assert (await reader.bring(reader.wanted())).arrived.all()
        lent = await owner.owner.lend(owner.peer, ORIGIN, words(), ttl_s=30, wants_sums=False)
        assert lent is not None
        double.set(0, destroy_fails=1)
        owner.owner.leave(owner.peer)
        await trio.sleep(0.5)
        assert owner.pins == COUNT
        double.set(0, destroy_fails=0)
        await gone(owner)
        assert np.count_nonzero(owner.cache.blocks.pins) == 0
