"""Blocks on their way from other nodes: searches, fetches, and who is told.

Decided here: how many of each are under way, and that every row that was claimed is ended, whatever
becomes of its fetch. This file does not know how bytes move.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import structlog
import trio

from trikv.core.remote import FetchPart, Remote, Search, Source
from trikv.core.words import Words
from trikv.meta.messages import Located
from trikv.nursery.borrowing import Local, Moved, Result
from trikv.nursery.neighbours import Neighbour, neighbour
from trikv.tiers.peer import PeerLostError

log = structlog.get_logger()

SEARCHERS: Final = 32
LOCATE_S: Final = 1.0
SEARCH_S: Final = 0.005
"""What a search is expected to take."""
NEIGHBOURS_MAX: Final = 1_024
FORGET_S: Final = 600.0
Tell = Callable[[], object]


class Index(Protocol):
    """Who knows where blocks are."""

    async def locate(self, origin: bytes, words: Words) -> list[Located]:
        """Where to fetch the leading blocks; a hint."""


class Fetching:
    """All fetches of one daemon.

    At the bound: `SEARCHERS` searches at once, others wait; with `NEIGHBOURS_MAX` nodes nothing is
    fetched from a further one.

    Attributes:
        tell: called when something has come, or will not.
        parts: under way.
    """

    def __init__(self, remote: Remote, index: Index, local: Local) -> None:
        self.tell: Tell = lambda: None
        self.parts = 0
        self.neighbours: OrderedDict[str, Neighbour] = OrderedDict()
        self._remote = remote
        self._index = index
        self._local = local
        self._bell = trio.Event()
        self._searching = 0
        self._forgotten = Moved()  # of nodes that were
        self._seats = trio.Semaphore(SEARCHERS)

    def ring(self) -> None:
        """A query may have begun a search."""
        if self._remote.begun:
            self._bell.set()

    def seconds(self) -> float:
        """An estimate of how long what is under way takes."""
        busy = [one.seconds for one in self.neighbours.values() if not one.is_idle]
        return max(busy, default=0.0) + (SEARCH_S if self._searching or self._remote.begun else 0.0)

    def moved_bytes(self, way: str) -> int:
        """What came by a way since the start."""
        now = sum(one.moved.by_way.get(way, 0) for one in self.neighbours.values())
        return now + self._forgotten.by_way.get(way, 0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Search and fetch until cancelled; then all that is under way has ended.

        Cancellation: nothing is written any more when this has returned.
        """
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forget)
                task_status.started()
                while True:
                    await self._bell.wait()
                    self._bell = trio.Event()
                    while self._remote.begun:
                        await self._seats.acquire()
                        self._searching += 1
                        nursery.start_soon(self._search, self._remote.begun.popleft(), nursery)
        finally:
            while self._remote.begun:
                self._remote.found(self._remote.begun.popleft(), [])
            with trio.CancelScope(shield=True):
                for one in self.neighbours.values():
                    await one.aclose()

    async def _forget(self) -> None:
        """Hang up on nodes that have not been asked for long."""
        while True:
            await trio.sleep(FORGET_S / 10)
            now_s = trio.current_time()
            for address, one in list(self.neighbours.items()):
                if one.is_idle and now_s > one.used_s + FORGET_S:
                    del self.neighbours[address]
                    for way, size in one.moved.by_way.items():
                        self._forgotten.note(way, size)
                    await one.aclose()

    async def _search(self, search: Search, nursery: trio.Nursery) -> None:
        plan: list[Located] = []
        try:
            if search.is_wanted:
                with trio.move_on_after(LOCATE_S):
                    plan = await self._index.locate(search.origin, search.words[search.first :])
        finally:
            sources = [Source(one.address, one.first, one.count) for one in plan]
            for part in self._remote.found(search, sources):
                self.parts += 1
                nursery.start_soon(self._fetch, part)
            self._searching -= 1
            self._seats.release()
            self.tell()

    async def _fetch(self, part: FetchPart) -> None:
        count = len(part.rows)
        result = Result(np.zeros(count, np.bool_), np.zeros(count, np.bool_))
        try:
            await self._neighbour(part.address).bring(part, result)
        except PeerLostError as error:
            log.warning("peer.refused", addr=part.address, reason=str(error))
        finally:
            self.parts -= 1
            self._remote.end(part, result.arrived & ~result.unfenced, result.unfenced)
            self.tell()

    def _neighbour(self, address: str) -> Neighbour:
        found = self.neighbours.get(address)
        if found is None:
            if len(self.neighbours) >= NEIGHBOURS_MAX:
                raise PeerLostError("too many nodes are dealt with")
            found = neighbour(address, self._local)
            self.neighbours[address] = found
        self.neighbours.move_to_end(address)
        return found
