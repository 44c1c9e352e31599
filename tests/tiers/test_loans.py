"""One node fetches from another one's pool: what is believed, and what is left behind."""

import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import structlog
import trio

from tests.tiers.loans import (
    COUNT,
    ORIGIN,
    PAGE,
    SPACE,
    OwnerSide,
    ReaderSide,
    gone,
    owning,
    reading,
    words,
)
from tests.tiers.peers import MARK
from trikv.core.errors import ForbiddenError
from trikv.core.lending import Loan
from trikv.core.lifting import Lift
from trikv.core.words import PeerId, Words
from trikv.nursery import neighbours
from trikv.nursery.neighbours import Neighbour
from trikv.nursery.peerlink import PeerBusyError, PeerRefusedError
from trikv.tiers.peer import Fetch, Outcome, PeerLostError


@pytest.fixture
async def owner_side() -> AsyncIterator[OwnerSide]:
    async with owning() as side:
        yield side


@pytest.fixture
async def reader_side(
    owner_side: OwnerSide, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ReaderSide]:
    async with reading(owner_side, monkeypatch) as side:
        yield side


async def test_blocks_come_whole_and_the_owner_is_free(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    part = reader_side.wanted()
    result = await reader_side.bring(part)
    assert result.arrived.all()
    assert reader_side.hits() == COUNT
    assert reader_side.is_right(part, owner_side)
    assert owner_side.calls == ["release with sums"]
    assert owner_side.pins == 0


async def test_bytes_with_another_sum_are_misses(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    def change() -> None:
        owner_side.content(2)[100] ^= 1

    owner_side.before_fetch = change
    result = await reader_side.bring(reader_side.wanted())
    assert result.arrived.tolist() == [True, True, False, True]
    assert reader_side.hits() == 2
    assert reader_side.node.wrong_blocks == 1


async def test_what_was_read_under_a_grant_that_is_over_is_not_believed(
    owner_side: OwnerSide, reader_side: ReaderSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Neighbour._fetch

    async def late(self: Neighbour, *rest: Any) -> Any:
        came = await fetch(self, *rest)
        assert came.all()
        owner_side.owner.leave(owner_side.peer)  # its connection is lost
        await gone(owner_side)
        return came

    monkeypatch.setattr(Neighbour, "_fetch", late)
    result = await reader_side.bring(reader_side.wanted())
    assert not result.arrived.any()
    assert reader_side.hits() == 0
    assert reader_side.cache.pages.used_bytes == 0


async def test_a_connection_that_died_unseen_is_dialled_again(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    part = reader_side.wanted()
    await reader_side.bring(part)
    reader_side.cache.retire_space(SPACE)
    while reader_side.cache.drop_retired():
        pass
    owner_side.fails.append(PeerLostError("the connection is closed"))
    again = await reader_side.bring(reader_side.wanted("s"))
    assert again.arrived.all()
    assert owner_side.dialled == 2


async def test_a_node_that_fails_is_left_alone_for_a_while(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    owner_side.fails += [PeerLostError("gone")] * 2
    assert not (await reader_side.bring(reader_side.wanted())).arrived.any()
    assert owner_side.dialled == 1  # with a connection that is fresh nothing is tried twice
    assert reader_side.node.state == "gone"
    assert not (await reader_side.bring(reader_side.wanted("s"))).arrived.any()
    assert owner_side.dialled == 1
    reader_side.node._paused_until_s = -math.inf
    owner_side.fails.clear()
    assert (await reader_side.bring(reader_side.wanted("t"))).arrived.all()
    assert reader_side.node.state == "serving"


async def test_a_refusal_keeps_the_connection(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    owner_side.fails.append(PeerRefusedError("as much is lent as may be"))
    assert not (await reader_side.bring(reader_side.wanted())).arrived.any()
    reader_side.node._paused_until_s = -math.inf
    assert (await reader_side.bring(reader_side.wanted("s"))).arrived.all()
    assert owner_side.dialled == 1


async def test_an_owner_that_has_lent_too_much_is_asked_again(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    owner_side.fails += [PeerBusyError("ask again")] * 3
    assert (await reader_side.bring(reader_side.wanted())).arrived.all()
    assert owner_side.dialled == 1


async def test_sums_are_made_of_what_has_come_alone(
    owner_side: OwnerSide, reader_side: ReaderSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short a page that has not come cannot even be looked at: SIGBUS."""
    whole, sums_of, summed = neighbours.Ways.fetch, neighbours.sums_of, []

    async def fetch(self: neighbours.Ways, one: Fetch) -> None:
        await whole(self, one)
        one.outcome[1:3] = Outcome.FAILED

    def count(pool: Any, offsets: np.ndarray, lengths: tuple[int, ...]) -> np.ndarray:
        summed.append(offsets.shape[1])
        return sums_of(pool, offsets, lengths)

    monkeypatch.setattr(neighbours.Ways, "fetch", fetch)
    monkeypatch.setattr(neighbours, "sums_of", count)
    result = await reader_side.bring(reader_side.wanted())
    assert result.arrived.tolist() == [True, False, False, True]
    assert summed == [2]


async def test_what_cannot_be_fenced_is_kept_from_all_others(
    owner_side: OwnerSide, reader_side: ReaderSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fetch(_self: object, one: Fetch) -> None:
        await trio.lowlevel.checkpoint()
        one.outcome[:] = [Outcome.ARRIVED, Outcome.UNFENCED, Outcome.FAILED, Outcome.ARRIVED]

    monkeypatch.setattr(neighbours.Ways, "fetch", fetch)
    part = reader_side.wanted()
    result = await reader_side.bring(part)
    assert result.unfenced.tolist() == [False, True, False, False]
    assert reader_side.remote.unfenced_bytes == PAGE
    assert reader_side.cache.pages.used_bytes >= PAGE  # for ever
    assert reader_side.cache.filling_bytes == 0
    del owner_side


async def test_a_cancelled_fetch_writes_nothing_more_and_frees_its_pages(
    owner_side: OwnerSide, reader_side: ReaderSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def forever(_self: object, _one: Fetch) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(neighbours.Ways, "fetch", forever)
    with trio.move_on_after(0.2):
        await reader_side.bring(reader_side.wanted())
    assert reader_side.cache.pages.used_bytes == 0
    assert (reader_side.memory.memory == MARK).all()
    owner_side.owner.leave(owner_side.peer)
    await gone(owner_side)


async def test_an_expired_grant_is_unpinned_after_its_streams_have_ended(
    owner_side: OwnerSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, order = owner_side.owner, []
    withdraw = owner._tcp.withdraw

    async def slow(token: bytes) -> None:
        await withdraw(token)
        await trio.sleep(0.3)
        order.append(("cut", owner_side.pins))

    monkeypatch.setattr(owner._tcp, "withdraw", slow)
    lent = await owner.lend(owner_side.peer, ORIGIN, words(), ttl_s=0.1, wants_sums=False)
    assert lent is not None
    assert owner_side.pins == COUNT
    await gone(owner_side)
    assert order == [("cut", COUNT)]
    told, _ = await owner.release(owner_side.peer, lent[0].grant.id, wants_sums=True)
    assert not told


async def test_a_release_that_is_not_valid_has_no_sums(owner_side: OwnerSide) -> None:
    """A reader takes an answer with the one and not the other for nonsense, and hangs up."""
    owner, peer = owner_side.owner, owner_side.peer
    lent = await owner.lend(peer, ORIGIN, words(), ttl_s=30.0, wants_sums=True)
    assert lent is not None
    owner.lending._shared.retire_space(SPACE)
    was_valid, sums = await owner.release(peer, lent[0].grant.id, wants_sums=True)
    assert (was_valid, len(sums)) == (False, 0)


async def test_an_owner_is_not_blamed_for_pages_that_did_not_come(
    reader_side: ReaderSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = neighbours.Ways.fetch

    async def cut_off(self: Any, one: Any) -> None:
        await fetch(self, one)
        one.outcome[1:3] = Outcome.FAILED

    monkeypatch.setattr(neighbours.Ways, "fetch", cut_off)
    with structlog.testing.capture_logs() as logs:
        result = await reader_side.bring(reader_side.wanted())
    assert result.arrived.tolist() == [at not in {1, 2} for at in range(COUNT)]
    assert [one for one in logs if one["log_level"] == "error"] == []


class Disks:
    """What reads for loans, as its owner sees it."""

    def __init__(self) -> None:
        self.began = trio.Event()
        self.may_end = trio.Event()
        self.lifts: list[Lift] = []
        self.told: list[tuple[str, Lift]] = []

    async def lift(self, _peer: PeerId, _origin: bytes, wanted: Words, _ttl_s: float) -> Lift:
        self.began.set()
        await self.may_end.wait()
        rows = np.arange(len(wanted), dtype=np.int32)
        self.lifts.append(Lift(rows, rows.astype(np.uint32), (), PAGE))
        return self.lifts[-1]

    def lent(self, lift: Lift, loan: Loan) -> None:
        self.told.append((f"lent {len(loan.positions)}", lift))

    def end(self, lift: Lift) -> None:
        self.told.append(("ended", lift))


async def test_what_was_read_for_a_loan_is_held_until_it_is_released(
    owner_side: OwnerSide, reader_side: ReaderSide
) -> None:
    disks = owner_side.owner.lifter = Disks()
    disks.may_end.set()
    result = await reader_side.bring(reader_side.wanted())
    assert result.arrived.all()
    (lift,) = disks.lifts
    assert disks.told == [(f"lent {COUNT}", lift), ("ended", lift)]
    await gone(owner_side)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_what_was_read_for_a_loan_that_ends_otherwise_is_let_go_of(
    owner_side: OwnerSide, *, is_lost: bool
) -> None:
    disks = owner_side.owner.lifter = Disks()
    disks.may_end.set()
    ttl_s = 30.0 if is_lost else 0.1
    await owner_side.owner.lend(owner_side.peer, ORIGIN, words(), ttl_s=ttl_s, wants_sums=False)
    if is_lost:
        owner_side.owner.leave(owner_side.peer)
    await gone(owner_side)
    assert [what for what, _ in disks.told] == [f"lent {COUNT}", "ended"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_peer_that_leaves_or_finds_nothing_after_the_disks_holds_nothing(
    owner_side: OwnerSide, *, leaves: bool
) -> None:
    owner, disks = owner_side.owner, Disks()
    owner.lifter = disks
    origin = ORIGIN if leaves else b"x" * 20
    ends = pytest.raises(ForbiddenError) if leaves else contextlib.nullcontext()

    async def lend() -> None:
        with ends:
            call = owner.lend(owner_side.peer, origin, words(), ttl_s=9.0, wants_sums=False)
            assert await call is None

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lend)
        await disks.began.wait()
        if leaves:
            owner.leave(owner_side.peer)
        disks.may_end.set()
    assert [what for what, _ in disks.told] == ["ended"]
    assert owner_side.pins == owner.lending.grants.count == 0
