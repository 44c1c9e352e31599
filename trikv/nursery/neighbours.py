"""One other node as a reader sees it: its connection, the ways to its pool, and one loan's life.

Decided here: when a node is dialled, how long it is left alone after a failure, and that bytes are
believed only when the owner has answered that the grant was valid all the time, and over TCP when
their sums are right too. This file does not know who wants the blocks.
"""

import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import structlog
import trio
from numpy.typing import NDArray

from trikv import address as addresses
from trikv.address import Address
from trikv.core.remote import FetchPart
from trikv.nursery.borrowing import Counted, Local, Moved, Result
from trikv.nursery.owning import sums_of
from trikv.nursery.peerlink import Borrowed, PeerBusyError, PeerLink, PeerRefusedError, dial_peer
from trikv.process.outward import on_asyncio
from trikv.tiers.peer import Fetch, Outcome, PeerLostError, Transport, Ways
from trikv.tiers.rdma import RdmaTransport
from trikv.tiers.tcp import TcpTransport

log = structlog.get_logger()

T = TypeVar("T")
DIAL_S: Final = 5.0
CALL_S: Final = 5.0
LOAN_S: Final = 10.0
"""For which blocks are asked; what has not come by then, less `MARGIN_S`, is a miss."""
MARGIN_S: Final = 1.0
LOANS: Final = 4
"""Under way at once from one node."""
PAUSE_S_MIN: Final = 0.5
PAUSE_S_MAX: Final = 30.0
BUSY_S: Final = 0.02
"""After which an owner that has lent as much as it may is asked again."""
RATE: Final = 1e9
"""Bytes a second that are expected of a node of which nothing is known."""
RATE_SHARE: Final = 0.25


@dataclass(slots=True, eq=False)
class _Joined:
    """A connection and the ways that go with it."""

    link: PeerLink
    ways: Ways
    tcp: Counted
    is_fast: bool
    users: int = 0
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Neighbour:
    """One other node.

    Bounds: `LOANS` loans at once; who waits for one longer than `LOAN_S` gets nothing.

    Attributes:
        state: for people: serving, or why it is left alone.
    """

    address: Address
    local: Local
    state: str = "not dialled"
    fetched_bytes: int = 0
    fetched_blocks: int = 0
    failed_blocks: int = 0
    wrong_blocks: int = 0
    waiting_bytes: int = 0
    used_s: float = 0.0
    rate: float = RATE
    moved: Moved = field(default_factory=Moved)
    _joined: _Joined | None = None
    _dialing: trio.Lock = field(default_factory=trio.Lock)
    _seats: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(LOANS))
    _paused_until_s: float = -math.inf
    _pause_s: float = PAUSE_S_MIN
    _loans: int = 0

    @property
    def way(self) -> str:
        """By which bytes came last, or will be asked for first; empty while it is not connected."""
        if self._joined is None:
            return ""
        return self.moved.last or self._joined.ways.transports[0].name

    @property
    def is_idle(self) -> bool:
        """Nothing is under way."""
        return self.waiting_bytes == 0

    @property
    def seconds(self) -> float:
        """An estimate of how long what is under way takes."""
        return self.waiting_bytes / self.rate

    async def bring(self, part: FetchPart, result: Result) -> None:
        """Fetch blocks; `result` is right whenever this ends, also by a cancellation.

        A node that cannot be reached, has not got them or is late makes them fail; raises nothing.
        """
        self.waiting_bytes += part.bytes
        self.used_s = trio.current_time()
        try:
            with trio.fail_after(LOAN_S):
                await self._seats.acquire()
            try:
                with trio.fail_after(LOAN_S + CALL_S):
                    await self._bring(part, result)
            finally:
                self._seats.release()
        except trio.TooSlowError:
            self._pause("it is too slow")
        except PeerLostError as error:
            self._explain(str(error))
        finally:
            self.waiting_bytes -= part.bytes
            came = int(result.arrived.sum())
            self.fetched_blocks += came
            self.failed_blocks += len(result.arrived) - came
            self.fetched_bytes += came * sum(part.landing.lengths)

    async def aclose(self) -> None:
        """Hang up; nothing is under way."""
        if self._joined is not None:
            await self._drop(self._joined)

    async def _bring(self, part: FetchPart, result: Result) -> None:
        """Borrow, fetch, and give back.

        Raises:
            PeerLostError: nothing can be had, or believed.
        """
        if trio.current_time() < self._paused_until_s:
            return
        self._loans += 1
        joined, lent, began_s = await self._borrow_in_turn(part)
        try:
            if lent.grant:  # else the hint was wrong
                await self._read(joined, part, result, lent, began_s)
        except PeerRefusedError:
            raise
        except PeerLostError:
            joined.is_over = True
            raise
        finally:
            await self._part(joined)

    async def _borrow_in_turn(self, part: FetchPart) -> tuple[_Joined, Borrowed, float]:
        """As `_borrow`; an owner that has lent as much as it may is asked again for a while.

        Returns:
            Also, when the call that lent the blocks was begun.
        """
        until_s = trio.current_time() + LOAN_S
        while True:
            began_s = trio.current_time()
            try:
                joined, lent = await self._borrow(part)
            except PeerBusyError:
                if trio.current_time() >= until_s:
                    raise
                await trio.sleep(BUSY_S)
            else:
                return joined, lent, began_s

    async def _borrow(self, part: FetchPart) -> tuple[_Joined, Borrowed]:
        """Have blocks lent; a connection that has died since its last use is dialled again once.

        Returns:
            The connection, to be given to `_part`, and what was lent over it.

        Raises:
            PeerLostError: nothing is.
        """
        while True:
            was_there = self._joined is not None
            joined = await self._join()
            joined.users += 1
            checks = not joined.is_fast or self._verifies()
            lend = joined.link.lend(part.origin, part.words, seconds=LOAN_S, wants_sums=checks)
            try:
                lent = _fitting(await _within(lend), part)
            except BaseException as error:
                is_lost = isinstance(error, PeerLostError)
                is_lost &= not isinstance(error, PeerRefusedError)
                joined.is_over |= is_lost
                await self._part(joined)
                if is_lost and was_there:
                    continue  # with one that is fresh
                raise
            return joined, lent

    def _verifies(self) -> bool:
        every = self.local.verify_every
        return every > 0 and self._loans % every == 0

    async def _part(self, joined: _Joined) -> None:
        """One user less; the last one of a connection that is over hangs up."""
        joined.users -= 1
        if joined.is_over and joined.users == 0:
            with trio.CancelScope(shield=True):
                await self._drop(joined)

    async def _read(
        self, joined: _Joined, part: FetchPart, result: Result, lent: Borrowed, began_s: float
    ) -> None:
        """Fetch what was lent, and believe it once the owner says so."""
        if lent.grant == 0:  # the hint was wrong
            return
        rows = np.flatnonzero(lent.offsets[0] >= 0)
        deadline_s = began_s + max(lent.seconds - MARGIN_S, lent.seconds / 2)
        slow_before = joined.tcp.count
        came = await self._fetch(joined.ways, part, result, lent, rows, deadline_s)
        is_late = trio.current_time() >= deadline_s
        checks = joined.tcp.count != slow_before or self._verifies()
        release = joined.link.release(lent.grant, len(rows), wants_sums=checks)
        was_valid, sums = await _within(release)
        is_right = came.copy()
        if was_valid and checks:  # of what has come: other pages may not even have memory
            is_right[came] = await self._are_right(part, rows[came], sums[came])
        wrong = int((came & ~is_right).sum())
        if was_valid and wrong:
            self.wrong_blocks += wrong
            log.error("peer.wrong", addr=str(self.address), blocks=wrong)
        if was_valid:
            result.arrived[rows] = is_right
        took_s = trio.current_time() - began_s
        self._note(int(result.arrived.sum()) * sum(part.landing.lengths), took_s, is_late=is_late)

    async def _fetch(
        self,
        ways: Ways,
        part: FetchPart,
        result: Result,
        lent: Borrowed,
        rows: NDArray[np.int64],
        deadline_s: float,
    ) -> NDArray[np.bool_]:
        """Move the bytes; returns which blocks are there on all ranks."""
        landing = part.landing
        near = landing.offsets[:, part.rows[rows]] + self.local.pool.address
        sizes = np.repeat(np.array(landing.lengths, np.int64), len(rows))
        runs = np.column_stack((lent.offsets[:, rows].ravel(), near.ravel(), sizes))
        fetch = Fetch(runs, deadline_s, lent.token)
        try:
            await ways.fetch(fetch)
        finally:
            outcome = fetch.outcome.reshape(len(landing.lengths), -1)
            result.unfenced[rows] |= (outcome == Outcome.UNFENCED).any(axis=0)
        came: NDArray[np.bool_] = (outcome == Outcome.ARRIVED).all(axis=0)
        return came

    async def _are_right(
        self, part: FetchPart, rows: NDArray[np.int64], sums: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Compare the sums of what is here with the owner's."""
        landing, local = part.landing, self.local
        found = await trio.to_thread.run_sync(
            sums_of,
            local.pool,
            landing.offsets[:, part.rows[rows]],
            landing.lengths,
            limiter=local.checking,
        )
        right: NDArray[np.bool_] = found == sums
        return right

    async def _join(self) -> _Joined:
        """The connection; dialled by whoever comes first, and the others wait.

        Raises:
            PeerLostError: there is none, now and for a while.
        """
        async with self._dialing:
            if self._joined is not None and not self._joined.is_over:
                return self._joined
            if trio.current_time() < self._paused_until_s:
                raise PeerLostError(self.state)
            local = self.local
            try:
                with trio.fail_after(DIAL_S):
                    link = await on_asyncio(dial_peer(self.address, local.address, local.secret))
            except trio.TooSlowError:
                raise PeerLostError("it does not answer") from None
            self._joined, self.state = self._ways(link), "serving"
            return self._joined

    def _ways(self, link: PeerLink) -> _Joined:
        local = self.local
        ways: list[Transport] = []
        rails = local.rails()
        if rails is not None and rails.rails and link.rail_count:

            async def dial(offer: bytes) -> bytes:
                return await _within(link.connect(offer))

            fast = RdmaTransport(rails, link.rail_count, dial, tell=self._rail_paused)
            ways.append(Counted(fast, self.moved))
        data = Address(host=self.address.host, port=link.data_port)
        tcp = Counted(TcpTransport(data, local.pool, limiter=local.receiving), self.moved)
        ways.append(tcp)
        return _Joined(link, Ways(ways), tcp, is_fast=len(ways) > 1)

    def _rail_paused(self, path: str, reason: str) -> None:
        log.warning("rail.paused", addr=str(self.address), path=path, reason=reason)

    async def _drop(self, joined: _Joined) -> None:
        if self._joined is joined:
            self._joined = None
        joined.link.close()
        await joined.ways.aclose()

    def _note(self, moved: int, took_s: float, *, is_late: bool) -> None:
        if moved:
            self.rate += RATE_SHARE * (moved / max(took_s, 1e-6) - self.rate)
        if is_late:
            self._pause("it is too slow")
        elif moved:
            self.state, self._pause_s = "serving", PAUSE_S_MIN
        else:
            self._pause("it lends, but no byte comes")

    def _explain(self, reason: str) -> None:
        if reason != self.state:
            log.warning("peer.failed", addr=str(self.address), reason=reason)
        self._pause(reason)

    def _pause(self, reason: str) -> None:
        now_s = trio.current_time()
        if now_s >= self._paused_until_s:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        self.state = reason


def _fitting(lent: Borrowed, part: FetchPart) -> Borrowed:
    if lent.grant and lent.page_bytes != part.landing.lengths:
        raise PeerRefusedError("its blocks have other sizes under the same name")
    return lent


def neighbour(text: str, local: Local) -> Neighbour:
    """The node at an address.

    Raises:
        PeerLostError: it is none that could be dialled.
    """
    try:
        address = addresses.parse(text)
    except ValueError as error:
        raise PeerLostError(str(error)) from None
    if address.is_unix or address.port == 0 or text == local.address:
        raise PeerLostError(f"{text!r} is no other node")
    return Neighbour(address, local)


async def _within(call: Coroutine[Any, Any, T]) -> T:
    try:
        with trio.fail_after(CALL_S):
            return await on_asyncio(call)
    except trio.TooSlowError:
        raise PeerLostError("it does not answer") from None
