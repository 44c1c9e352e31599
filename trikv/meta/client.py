"""A daemon's way to its metaservers: announces to all of them, asks any.

Decided here: when everything is announced anew, how fast, which metaserver is asked, and what a
lost one costs: nothing, as long as another one is there, else every answer is a miss. Runs as Trio
tasks in the process that hosts capnp. This file does not know the cache: it is given what is held.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog
import trio

from trikv.address import Address
from trikv.core.adverts import PORTION_KEYS, Adverts, Part
from trikv.core.proofs import Secret
from trikv.core.words import Words
from trikv.meta.link import FORBIDDEN, OVERLOADED, Link, MetaError, dial
from trikv.meta.messages import LOCATE_MAX, NODE, Beat, Located
from trikv.process.outward import on_asyncio

log = structlog.get_logger()

DIAL_S: Final = 5.0
CALL_S: Final = 5.0
ASK_S: Final = 0.5
"""A metaserver that has not said by then where blocks are is not waited for."""
ASKS_MAX: Final = 6
LEAVE_S: Final = 1.0
BACKOFF_S_MIN: Final = 0.1
BACKOFF_S_MAX: Final = 1.0
ANNOUNCE_RATE: Final = 400_000
"""Blocks a second of a full announcement."""
TURN_S: Final = 0.5
"""After which a node asks again whether it may announce everything, when too many do."""
REPAIR_S_MIN: Final = 5.0
REPAIR_S_MAX: Final = 300.0
"""Between two full announcements to one metaserver that has not restarted."""

Snapshot = Callable[[], Iterable[Part]]
"""All that is held; each part is read when it is asked for."""


@dataclass(frozen=True, slots=True)
class Identity:
    """This node, as others see it.

    Attributes:
        address: host:port at which others reach it.
        epoch: grows with each start of the daemon.
        rails: networks that its NICs are on.
    """

    address: str
    epoch: int
    rails: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LineFacts:
    """How things stand with one metaserver, for people.

    Attributes:
        state: `joined`, or why not.
        waiting_blocks: changes that it has not been told.
        node_count: nodes that it knows, 0 while it is not joined.
    """

    address: str
    state: str
    waiting_blocks: int
    node_count: int
    announced_total: int


class Line:
    """All dealings with one metaserver."""

    def __init__(self, address: Address, client: "MetaClient") -> None:
        self.address = address
        self.adverts = Adverts()
        self.link: Link | None = None  # joined
        self.beat: Beat | None = None  # the last answer to a heartbeat on it
        self.state = "not reached yet"
        self.is_complete = False  # it knows everything but what waits
        self.announced_total = 0
        self._client = client
        self._said: set[str] = set()
        self._news = trio.Event()
        self._epoch = 0  # of the metaserver
        self._free_s = -1.0  # before this nothing is announced in full
        self._repair_s = REPAIR_S_MIN

    @property
    def is_usable(self) -> bool:
        """True when it can be asked."""
        return self.link is not None and self.beat is not None

    def offer(self, part: Part) -> None:
        """Something has changed."""
        self.adverts.offer(part)
        self._news.set()

    def announce_anew(self) -> None:
        """Everything is to be announced, as soon as that is due."""
        self.adverts.lose()
        self._news.set()

    async def run(self) -> None:
        """Hold a connection, again and again; until cancelled, and then leave."""
        backoff_s = BACKOFF_S_MIN
        while True:
            try:
                with trio.fail_after(DIAL_S):
                    link = await self._dial()
                try:
                    await self._hold(link)
                finally:
                    was_joined, self.link, self.beat = self.link is not None, None, None
                    self.is_complete = False
                    backoff_s = BACKOFF_S_MIN if was_joined else backoff_s
                    await self._hang_up(link, says_goodbye=was_joined)
            except (MetaError, trio.TooSlowError) as error:
                self._explain(error)
            await trio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)

    async def ask(self, origin: bytes, words: Words) -> list[Located]:
        """Where to fetch blocks, as this metaserver knows.

        Raises:
            MetaError, trio.TooSlowError: it does not answer.
        """
        if self.link is None:
            raise MetaError("lost", "not joined")
        with trio.fail_after(ASK_S):
            return await on_asyncio(self.link.locate(origin, words))

    async def _dial(self) -> Link:
        client = self._client
        own = client.identity.address
        return await on_asyncio(dial(self.address, NODE, own, client.secret))

    async def _hang_up(self, link: Link, *, says_goodbye: bool) -> None:
        """Close; when this node ends, the metaserver is told."""
        try:
            if says_goodbye and trio.current_effective_deadline() == -math.inf:
                with trio.move_on_after(LEAVE_S, shield=True):
                    await on_asyncio(link.leave())
        except MetaError:
            pass  # it hears of it by the connection's end
        finally:
            link.close()

    async def _hold(self, link: Link) -> None:
        """Join, and tell what is held until the connection is lost.

        Raises:
            MetaError, trio.TooSlowError: it is.
        """
        client = self._client
        with trio.fail_after(CALL_S):
            is_complete = await on_asyncio(
                link.join(client.identity.epoch, list(client.identity.rails))
            )
        if link.epoch != self._epoch:  # it has restarted, or is new to us
            self._epoch, self._free_s, self._repair_s = link.epoch, -1.0, REPAIR_S_MIN
            self.adverts.lose()
        elif not is_complete:
            self.adverts.lose()
        self.link, self.state, self.is_complete = link, "joined", not self.adverts.is_lost
        self._said.clear()
        log.info("meta.joined", addr=str(self.address), is_known=not self.adverts.is_lost)
        beat_s = link.silence_s / 3
        due_s = -1.0
        while True:
            self._news = trio.Event()
            now_s = trio.current_time()
            if now_s >= due_s:
                await self._beat(link)
                due_s = now_s + beat_s
            elif self.adverts.is_lost and now_s >= self._free_s:
                await self._announce_all(link)
            elif not self.adverts.is_lost and self.adverts.take():
                with trio.fail_after(CALL_S):
                    await on_asyncio(link.announce(self.adverts.take()))
                self.adverts.taken()
            else:
                free_s = max(self._free_s, now_s) if self.adverts.is_lost else due_s
                with trio.move_on_at(min(due_s, free_s)):
                    await self._news.wait()

    async def _beat(self, link: Link) -> None:
        """Show that we live, and see whether both sides still count the same."""
        with trio.fail_after(CALL_S):
            self.beat = beat = await on_asyncio(link.heartbeat(self._client.lent()))
        if self.adverts.is_lost:
            return
        if not self.adverts.agree(beat.digest):
            log.warning("meta.disagreed", addr=str(self.address))
            self.adverts.lose()
        elif 0 < beat.declined_count <= beat.free_count and trio.current_time() >= self._free_s:
            self.adverts.lose()  # there is room now for what was declined
        elif trio.current_time() >= self._free_s:
            self._repair_s = REPAIR_S_MIN

    async def _announce_all(self, link: Link) -> None:
        """Announce everything; changes meanwhile are told afterwards."""
        began_s = trio.current_time()
        try:
            with trio.fail_after(CALL_S):
                await on_asyncio(link.begin())
        except MetaError as error:
            if error.code != OVERLOADED:
                raise
            self._free_s = began_s + random.uniform(0.5, 1.0) * TURN_S  # others announce
            return
        self._free_s = began_s + self._repair_s
        self._repair_s = min(2 * self._repair_s, REPAIR_S_MAX)
        self.adverts.begin()
        self.is_complete = False
        count = declined = 0
        for part in self._client.snapshot():
            for at in range(0, len(part.words), PORTION_KEYS):
                portion = replace(part, words=part.words[at : at + PORTION_KEYS])
                with trio.fail_after(CALL_S):
                    declined += await on_asyncio(link.announce([portion]))
                count += len(portion.words)
                await trio.sleep_until(began_s + count / self._client.announce_rate)
        with trio.fail_after(CALL_S):
            await on_asyncio(link.finish())
        self.adverts.finish()
        self.is_complete = True
        self.announced_total += 1
        log.info(
            "meta.announced",
            addr=str(self.address),
            block_count=count,
            block_count_declined=declined,
            took_s=round(trio.current_time() - began_s, 3),
        )

    def _explain(self, error: Exception) -> None:
        """Say once why there is no connection, until there is one."""
        reason = str(error) if isinstance(error, MetaError) else "no answer in time"
        if reason not in self._said:
            self._said.add(reason)
            is_ours = isinstance(error, MetaError) and error.code == FORBIDDEN
            said = log.error if is_ours else log.warning
            said("meta.lost", addr=str(self.address), reason=reason)
        self.state = reason


@dataclass(slots=True)
class MetaClient:
    """This node's lines to all metaservers.

    At the bound: each line has a queue of its own (`Adverts`); one that cannot keep up is told
    everything anew, and holds up nobody.

    Attributes:
        snapshot: what is held; called once for each full announcement.
        lent: blocks that are being sent to others now.
    """

    identity: Identity
    metas: Sequence[Address]
    secret: Secret | None
    snapshot: Snapshot
    lent: Callable[[], int] = lambda: 0
    announce_rate: float = ANNOUNCE_RATE
    lines: list[Line] = field(default_factory=list)
    _turn: int = 0

    def tell(self, part: Part) -> None:
        """Blocks are held from now on, in memory or on a disk only, or no longer."""
        for line in self.lines:
            line.offer(part)

    def announce_anew(self) -> None:
        """More has changed than is worth telling one by one."""
        for line in self.lines:
            line.announce_anew()

    def knows_others(self) -> bool:
        """Whether some metaserver can be asked that knows another node."""
        return any(
            line.link is not None
            and line.beat is not None
            and line.beat.node_count > int(line.is_complete)
            for line in self.lines
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deal with all metaservers until cancelled; then say goodbye, `LEAVE_S` at most."""
        self.lines = [Line(address, self) for address in self.metas]
        task_status.started()
        async with trio.open_nursery() as nursery:
            for line in self.lines:
                nursery.start_soon(line.run)

    async def locate(self, origin: bytes, words: Words) -> list[Located]:
        """Where to fetch the leading blocks; empty when nobody knows, or nobody can be asked.

        The metaserver that knows most nodes is asked first. Where its answer ends, another one is
        asked for the rest only if it knows other nodes: usually all know the same. At the bound,
        after `ASKS_MAX` questions, what is covered so far is the answer.

        Args:
            origin: 20 bytes.
            words: uint64[n, 4] in prefix order; of more than `LOCATE_MAX` only these are asked for.

        Cancellation: the caller sets the deadline.
        """
        words = words[:LOCATE_MAX]
        plan: list[Located] = []
        covered = misses = 0
        groups = self._groups()
        for _ in range(ASKS_MAX):
            if covered == len(words) or misses >= len(groups):
                break
            group = groups.pop(0)
            try:
                found = await group[0].ask(origin, words[covered:])
            except (MetaError, trio.TooSlowError):
                group.pop(0).beat = None  # not asked again before its next heartbeat
                groups[:0] = [group] if group else []
                continue
            groups.append(group)
            plan += [replace(one, first=one.first + covered) for one in found]
            covered = sum(one.count for one in plan)
            misses = 1 if found else misses + 1  # where it ended, it has said all it knows
        return plan

    def facts(self) -> list[LineFacts]:
        """How things stand, a row a metaserver."""
        return [
            LineFacts(
                str(line.address),
                line.state,
                line.adverts.untold,
                line.beat.node_count if line.beat is not None else 0,
                line.announced_total,
            )
            for line in self.lines
        ]

    def _groups(self) -> list[list[Line]]:
        """Lines that can be asked: those together that know the same, in turn; most nodes first."""
        usable = [(line, line.beat) for line in self.lines if line.link and line.beat]
        self._turn += 1
        at = self._turn % max(1, len(usable))
        groups: dict[int, list[Line]] = {}
        for line, beat in sorted(
            usable[at:] + usable[:at], key=lambda one: one[1].node_count, reverse=True
        ):
            groups.setdefault(beat.nodes_digest, []).append(line)
        return list(groups.values())
