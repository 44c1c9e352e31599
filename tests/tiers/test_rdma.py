"""Fetches by RDMA on a double of libibverbs that is late, fails, and goes out of order.

Bytes are right or runs have failed, and nothing is written once a fetch is over.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.tiers.double import Double, ends, write_sysfs
from tests.tiers.peers import (
    MARK,
    MIB,
    PATIENCE_S,
    Memory,
    check,
    condition,
    fetch_of,
    is_untouched,
    rows,
    shuffled,
)
from trikv.core.chunks import Runs
from trikv.core.errors import OverloadedError
from trikv.core.pauses import Pauses
from trikv.core.rails import PAIRS_A_PATH, SEATS_MAX, PairFacts, Seat, pack_offer
from trikv.core.words import PeerId
from trikv.tiers import rdma
from trikv.tiers.peer import Fetch, Outcome, Ways

pytestmark = pytest.mark.usefixtures("small_regions")


LAYOUTS: list[Callable[[Memory], Runs]] = [
    lambda pool: rows(pool, (0, 0, 32 * MIB)),
    lambda pool: rows(pool, (5, 7, 1)),
    lambda pool: rows(pool, (MIB + 3, 9 * MIB + 1, 20 * MIB + 5)),
    lambda pool: shuffled(pool, count=500, size=64 << 10),
    lambda pool: shuffled(pool, count=16, size=2 * MIB),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("delay_us", "sync", "reorder"), [(0, 0, 0), (0, 1, 0), (3_000, 0, 1)])
async def test_runs_arrive(
    double: Double,
    sysfs: Path,
    layout: Callable[[Memory], Runs],
    delay_us: int,
    sync: int,
    reorder: int,
) -> None:
    for number in range(2):
        double.set(number, delay_us=delay_us, sync=sync, reorder=reorder)
    async with ends(sysfs) as both:
        runs = layout(both.pool)
        for _ in range(2):
            both.pool.memory[:] = MARK
            fetch = fetch_of(runs)
            await both.transport.fetch(fetch)
            check(fetch, both.source, both.pool)
            written = (both.pool.memory != MARK).sum()
            assert written == runs[:, 2].sum()
        assert len(both.dials) == 1
        assert double.get("remote_write") == 0  # nobody may write here from afar


@pytest.mark.parametrize(("near", "far"), [(2, 2), (1, 2), (2, 1), (4, 3)])
async def test_each_rail_of_both_ends_is_used(
    double: Double, tmp_path: Path, near: int, far: int
) -> None:
    double.set(0, devices=max(near, far))
    async with ends(write_sysfs(tmp_path, max(near, far)), near=near, far=far) as both:
        fetch = fetch_of(rows(both.pool, (0, 0, 32 * MIB)))
        await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool)
        paths = max(near, far)
        assert double.get("pairs") == 2 * paths * PAIRS_A_PATH
        used = [double.get("device_pairs", number) for number in range(paths)]
        assert all(used)
        assert len(both.transport._lanes) == paths * PAIRS_A_PATH


async def test_requests_are_large_and_posted_in_chains(double: Double, sysfs: Path) -> None:
    async with ends(sysfs, size=128 * MIB) as both:
        posts, requests = double.get("posts"), double.get("requests")
        pages = [(at, at, 64 << 10) for at in range(0, 128 * MIB, 64 << 10)]
        fetch = fetch_of(rows(both.pool, *pages))  # neighbours
        await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool)
        assert double.get("requests") - requests == 128
        assert double.get("posts") - posts == 128 / 16


async def test_a_read_waits_for_the_completion_channel(double: Double, sysfs: Path) -> None:
    """The loop runs while the NIC is busy, and wakes up when it has ended."""
    for number in range(2):
        double.set(number, mute=1)
    ticks = 0
    async with ends(sysfs) as both, trio.open_nursery() as nursery:
        fetch = fetch_of(rows(both.pool, (0, 0, 8 * MIB)))
        nursery.start_soon(both.transport.fetch, fetch)
        await condition(lambda: double.get("waiting", 0) and double.get("waiting", 1))
        for _ in range(20):
            await trio.lowlevel.checkpoint()
            ticks += 1
        assert is_untouched(fetch, both.pool)
        for number in range(2):
            double.set(number, mute=0)
        await condition(lambda: bool((fetch.outcome == Outcome.ARRIVED).all()))
        check(fetch, both.source, both.pool)


@pytest.mark.parametrize("status", [5, 10, 12])
async def test_a_rail_that_fails_is_paused_and_others_take_over(
    double: Double, sysfs: Path, status: int
) -> None:
    for number in range(2):
        double.set(number, delay_us=200)
    double.set(0, fail_in=1, fail_status=status)
    async with ends(sysfs) as both:
        fetch = fetch_of(shuffled(both.pool, count=400, size=64 << 10))
        await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool)
        paused = [both.transport._is_paused(path) for path in range(2)]
        assert paused == [True, False]
        before = {number: double.get("device_pairs", number) for number in range(2)}
        posts_on = double.get("waiting", 0)
        await both.transport.fetch(again := fetch_of(fetch.runs))
        check(again, both.source, both.pool)
        assert posts_on == 0
        assert {n: double.get("device_pairs", n) for n in range(2)} == before  # not dialled again
        both.transport._pauses = Pauses(2, 3_600)
        await both.transport.fetch(third := fetch_of(fetch.runs))
        check(third, both.source, both.pool)
        assert len(both.transport._lanes) == 2 * PAIRS_A_PATH


async def test_when_every_rail_fails_the_fetch_does(double: Double, sysfs: Path) -> None:
    for number in range(2):
        double.set(number, fail_in=-1, fail_status=12)
    async with ends(sysfs) as both:
        fetch = fetch_of(shuffled(both.pool, count=400, size=64 << 10))
        with trio.fail_after(PATIENCE_S):
            await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool, all_arrived=False)
        assert (fetch.outcome != Outcome.UNFENCED).all()
        assert (fetch.outcome == Outcome.FAILED).any()
        late = fetch_of(fetch.runs)
        await both.transport.fetch(late)  # all are paused: a miss at once
        assert (late.outcome == Outcome.FAILED).all()


async def test_what_one_way_cannot_bring_the_next_one_does(double: Double, sysfs: Path) -> None:
    for number in range(2):
        double.set(number, fail_in=-1, fail_status=12)

    class Copier:
        name = "copier"
        asked: Runs

        async def fetch(self, fetch: Fetch) -> None:
            await trio.lowlevel.checkpoint()
            self.asked = fetch.runs
            for far, near, size in fetch.runs.tolist():
                at = near - both.pool.address
                both.pool.memory[at : at + size] = both.source.memory[far : far + size]
            fetch.outcome[:] = Outcome.ARRIVED

        async def aclose(self) -> None:
            await trio.lowlevel.checkpoint()

    async with ends(sysfs) as both:
        other = Copier()
        fetch = fetch_of(shuffled(both.pool, count=16, size=2 * MIB))
        await Ways([both.transport, other]).fetch(fetch)
        check(fetch, both.source, both.pool)
        assert 0 < len(other.asked) <= 16


async def test_fetches_at_once_share_the_queue_pairs(double: Double, sysfs: Path) -> None:
    for number in range(2):
        double.set(number, delay_us=300)
    async with ends(sysfs) as both:
        runs = shuffled(both.pool, count=480, size=64 << 10)
        fetches = [fetch_of(runs[number::6]) for number in range(6)]
        async with trio.open_nursery() as nursery:
            for fetch in fetches:
                nursery.start_soon(both.transport.fetch, fetch)
            with trio.move_on_after(0.01):
                await both.transport.fetch(fetch_of(runs[:0]))
        for fetch in fetches:
            check(fetch, both.source, both.pool)
        assert len(both.dials) == 1
        assert double.get("pairs") == 2 * 2 * PAIRS_A_PATH


async def test_an_owner_that_restarts_is_dialled_again(double: Double, sysfs: Path) -> None:
    """Its old keys and queue pairs are nobody's: reads by them fail, new ones work."""
    async with ends(sysfs, pause_s=0) as both, ends(sysfs) as other:
        runs = rows(both.pool, (0, 0, 4 * MIB))
        await both.transport.fetch(fetch_of(runs))
        both.owner.close()
        both.owner = other.owner
        fetch = fetch_of(runs)
        await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool, all_arrived=False)
        both.pool.memory[:] = MARK
        await both.transport.fetch(again := fetch_of(runs))
        check(again, other.source, both.pool)
        await both.transport.aclose()
        other.owner.close()
        both.owner = other.owner


async def test_an_owner_that_cannot_be_reached_is_a_miss(double: Double, sysfs: Path) -> None:
    async with ends(sysfs) as both:
        both.is_lost = True
        fetch = fetch_of(rows(both.pool, (0, 0, MIB)))
        await both.transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert double.get("pairs") == 0
        both.is_lost = False
        await both.transport.fetch(again := fetch_of(fetch.runs))  # paused: not asked again yet
        assert again.outcome.tolist() == [Outcome.FAILED]
        assert len(both.dials) == 1


ANSWERS: list[Callable[[bytes], bytes]] = [
    lambda answer: b"",
    lambda answer: answer[:-1],
    lambda answer: bytes(len(answer)),
    lambda answer: answer + answer,
]


@pytest.mark.parametrize("lie", ANSWERS)
async def test_an_answer_that_cannot_be_is_a_miss(
    double: Double, sysfs: Path, lie: Callable[[bytes], bytes]
) -> None:
    async with ends(sysfs) as both:

        async def dial(offer: bytes) -> bytes:
            await trio.lowlevel.checkpoint()
            return lie(both.owner.connect(both.peer, offer))

        transport = rdma.RdmaTransport(both.near, 2, dial)
        fetch = fetch_of(rows(both.pool, (0, 0, MIB)))
        await transport.fetch(fetch)
        assert fetch.outcome.tolist() == [Outcome.FAILED]
        assert double.get("pairs") == 2 * PAIRS_A_PATH  # the owner's, until its fence


async def test_an_owner_bounds_its_peers_and_their_queue_pairs(
    double: Double, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trikv.tiers.rdmaowner.PEERS_MAX", 2)
    async with ends(sysfs) as both:
        owner = type(both.owner)(both.far, peers_max=2)
        end = PairFacts(200, 1, 0, bytes(10) + b"\xff\xff\x0a\x00\x00\x01", 5, 16)
        offers = [pack_offer([Seat(n, n % 2, end)]) for n in (0, 1, SEATS_MAX - 1)]
        for offer, peer in itertools.product(offers + offers, (PeerId(1), PeerId(2))):
            owner.connect(peer, offer)
        assert double.get("pairs") == 2 * 3
        with pytest.raises(OverloadedError):
            owner.connect(PeerId(3), offers[0])
        with pytest.raises(ValueError, match="the other host sent"):
            owner.connect(PeerId(1), b"noise")
        owner.fence(PeerId(1))
        owner.connect(PeerId(3), offers[0])
        owner.close()
        assert double.get("pairs") == 0


async def test_near_nics_go_first(double: Double, tmp_path: Path) -> None:
    for number in range(2):
        double.set(number, mute=1)
    root = write_sysfs(tmp_path, 2, nodes=(0, 1))
    async with ends(root, node=1) as both, trio.open_nursery() as nursery:
        fetch = fetch_of(rows(both.pool, (0, 0, 2 * MIB)))
        nursery.start_soon(both.transport.fetch, fetch)
        await condition(lambda: double.get("waiting", 0) + double.get("waiting", 1) == 2)
        assert [double.get("waiting", number) for number in range(2)] == [0, 2]
        for number in range(2):
            double.set(number, mute=0)


async def test_a_nic_that_cannot_be_opened_is_left_out(double: Double, sysfs: Path) -> None:
    double.set(0, devices=1)
    async with ends(sysfs) as both:
        assert len(both.near.rails) == 1
        (why,) = both.near.refused
        assert why.startswith("NIC fake1 cannot be opened")
        fetch = fetch_of(rows(both.pool, (0, 0, 4 * MIB)))
        await both.transport.fetch(fetch)
        check(fetch, both.source, both.pool)
