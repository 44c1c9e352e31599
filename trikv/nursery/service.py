"""What a daemon does for its callers, one method a call of the schema.

Decided here: which calls are answered at once and which wait for a copy, and what a session may
ask. Knows neither capnp nor asyncio: tests and simulations call it under `trio.run`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import trio
from numpy.typing import NDArray

from trikv.core.calls import Answer, Declare, Load, Named, Query, Register, Save, Saved
from trikv.core.errors import BadRequestError, ForbiddenError, KvError
from trikv.core.layout import GroupLayout, Place
from trikv.core.words import InstanceName, Offsets, RequestId
from trikv.nursery.ahead import announce
from trikv.nursery.copying import Copying, Job, Memory
from trikv.nursery.sessions import Session, Sessions
from trikv.nursery.store import Store, layouts_of
from trikv.nursery.tiers import Tiers
from trikv.tiers.copies import Copy, Process

DIGEST_CALLS = 1  # at most some 5 ms, mostly below 1
DIGEST_BUSY_S = 0.01
DIGEST_IDLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Service:
    """The daemon's calls."""

    store: Store
    sessions: Sessions
    saving: Copying
    loading: Copying
    memory: Memory
    tiers: Tiers | None = None

    def hello(self, process: Process | None, software: str) -> Session:
        """Begin a session; see `Sessions.open`."""
        return self.sessions.open(process, software)

    async def declare(self, session: Session, call: Declare) -> Named:
        """A scheduler says what its engine is; waits for the end of a session it replaces."""
        self._speak_for(session, call.instance)
        await self.sessions.supersede(session, call.instance, None)
        self.sessions.use(session)
        named = self.store.declare(session.id, call)
        session.instance = call.instance
        return named

    async def register(self, session: Session, call: Register) -> Named:
        """A rank says where its blocks lie; waits for the end of a session it replaces."""
        self._speak_for(session, call.instance)
        if session.process is None:
            raise ForbiddenError("process memory can be registered over the unix socket only")
        await self.sessions.supersede(session, call.instance, call.rank)
        self.sessions.use(session)
        _check_first(session, call)
        groups = layouts_of(call)  # before a copier sees a number of it
        attachment = await self.memory.attach(
            call, lambda reason: self.sessions.close(session, reason)
        )
        try:
            self.sessions.use(session)
            _check_first(session, call)  # two calls of a session may have waited side by side
            if attachment is not None:
                for at, group in enumerate(groups):
                    group.place = Place(attachment.number, at, attachment.bank)
            named = self.store.register(session.id, call, groups)
        except KvError:
            if attachment is not None:
                self.memory.detach(attachment)
            raise
        if attachment is not None:
            session.attachments[call.rank] = attachment
            named = replace(named, writers=(attachment.writer,))
        session.instance = call.instance
        session.fences[call.rank] = (call.fence_address, call.fence_count)
        return named

    def query(self, session: Session, call: Query) -> Answer:
        """Answered at once; what lies below the pool begins to come up."""
        self.sessions.use(session)
        hit = self.store.query(session.instance, call)
        coming_s = 0.0
        if self.tiers is not None:
            self.tiers.queried(session.instance, call.request)
            coming_s = self.tiers.seconds() if hit.coming else 0.0
        lease = hit.lease
        if lease is None:
            return Answer(0, 0, 0.0, hit.coming, coming_s)
        lease_s = lease.deadline_s - self.store.now_s()
        return Answer(hit.count, lease.id, lease_s, hit.coming, coming_s)

    async def query_late(self, session: Session, call: Query) -> Answer:
        """As `query`, once what is coming is there, or waiting pays no more."""
        self.sessions.use(session)
        assert self.tiers is not None
        await self.tiers.wait(session.instance, call)
        return self.query(session, call)

    def save(self, session: Session, call: Save, answer: Callable[[Saved], None]) -> None:
        """Begin to copy blocks out of an engine.

        Args:
            session: whose.
            call: what.
            answer: called once, maybe at once, when no byte of the blocks will be read any more;
                also when the daemon ends.

        Raises:
            KvError: refused, nothing is begun and nothing will be answered.
        """
        self.sessions.use(session)
        self.saving.check_room(session)
        fence = self._fence(session, call)
        _check_event(session, call)
        self.store.engines.check_altered(session.instance, call.altered)
        mapped = session.attachments.get(call.rank)
        if mapped is not None:
            self.memory.expect(mapped, into_engine=False)
        plan, layout = self.store.prepare_save(session.id, session.instance, call)
        if len(plan.entries) == 0:
            self.store.complete_save(plan, np.empty(0, np.bool_), layout)
            answer(Saved(0, plan.present_count, plan.refused_count))
            return

        def tell(copied: NDArray[np.bool_]) -> None:
            saved = int(np.count_nonzero(copied))
            if self.tiers is not None:
                self.tiers.spilling.ring()
            lost = len(plan.entries) - saved
            answer(Saved(saved, plan.present_count, plan.refused_count + lost))

        self._start(
            self.saving,
            session,
            (layout, call.blocks[plan.positions], plan.offsets, call.event),
            lambda copied: self.store.complete_save(plan, copied, layout),
            fence=fence,
            signal=(call.signal, call.value, False),
        ).then(tell)

    def load(
        self, session: Session, call: Load, answer: Callable[[NDArray[np.int32]], None]
    ) -> None:
        """Begin to copy leased blocks into an engine.

        Args:
            session: whose.
            call: what.
            answer: called once, maybe at once, with the positions of blocks that did not arrive,
                when no byte will be written any more; also when the daemon ends.

        Raises:
            KvError: refused, nothing is begun and nothing will be answered.
        """
        self.sessions.use(session)
        self.loading.check_room(session)
        _check_event(session, call)
        plan, layout = self.store.prepare_load(session.id, session.instance, call)
        self._start(
            self.loading,
            session,
            (layout, call.blocks, plan.offsets, call.event),
            lambda copied: self.store.complete_load(plan, copied, layout),
            stop_s=self.store.now_s() + call.budget_s if call.budget_s else None,
            signal=(call.signal, call.value, call.is_ordered),
            lease=call.lease,
        ).then(lambda copied: answer(missing_of(copied)))

    def expect_load(self, session: Session, call: Query, answer: Answer) -> None:
        """What a query found will be loaded in a moment, most likely: copiers may get ready."""
        announce(self.store, self.sessions, self.memory, session.instance, call, answer)

    def release(self, session: Session, requests: list[RequestId]) -> None:
        """These requests have ended."""
        self.sessions.use(session)
        self.store.release(session.instance, requests)
        if self.tiers is not None:
            self.tiers.released(session.instance, requests)

    def heartbeat(self, session: Session) -> None:
        """The session is alive."""
        self.sessions.use(session)

    async def reset(self, session: Session, altered: str) -> int:
        """Forget every block of the instance's namespace, on disks durably; see `Store.reset`.

        Raises:
            KvError: refused, or not durable; nobody sees the blocks any more all the same.
        """
        self.sessions.use(session)
        dropped = self.store.reset(session.instance, altered)
        if self.tiers is not None:
            await self.tiers.void()
        return dropped

    def _speak_for(self, session: Session, instance: InstanceName) -> None:
        self.sessions.use(session)
        if session.instance not in {None, instance}:
            raise BadRequestError(f"this session speaks for {session.instance!r}")

    @staticmethod
    def _fence(session: Session, call: Save) -> tuple[int, int] | None:
        address, count = session.fences.get(call.rank, (0, 0))
        if count == 0:
            return None
        if call.fence >= count:
            raise BadRequestError(f"fence {call.fence} of {count}")
        return address + 8 * call.fence, call.generation

    def _start(
        self,
        copying: Copying,
        session: Session,
        what: tuple[GroupLayout, NDArray[np.int32], Offsets, int],
        complete: Callable[[NDArray[np.bool_]], None],
        *,
        fence: tuple[int, int] | None = None,
        stop_s: float | None = None,
        signal: tuple[int, int, bool] = (0, 0, False),
        lease: int = 0,
    ) -> Job:
        assert session.process is not None
        layout, blocks, offsets, event = what
        into_engine = copying is self.loading
        copy = Copy(session.process, layout, blocks, offsets, into_engine, event, *signal, lease)
        job = Job(session, copy, complete, fence, stop_s)
        copying.start(job)
        return job


def missing_of(copied: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Positions of what has not arrived."""
    return (~copied).nonzero()[0].astype(np.int32)


def _check_first(session: Session, call: Register) -> None:
    """A rank whose memory is mapped has said where its blocks lie."""
    if call.rank in session.attachments:
        raise BadRequestError(f"rank {call.rank} is registered: open another session")


def _check_event(session: Session, call: Save | Load) -> None:
    attachment = session.attachments.get(call.rank)
    count = 0 if attachment is None else attachment.event_count
    if call.event > count:
        raise BadRequestError(f"event {call.event} of {count}")
    signal_count = 0 if attachment is None else attachment.signal_count
    if call.signal > signal_count:
        raise BadRequestError(f"signal {call.signal} of {signal_count}")


async def sweep(
    store: Store, *, every_s: float, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """End leases and half-filled blocks whose time is over; runs until cancelled."""
    task_status.started()
    while True:
        await trio.sleep(every_s)
        store.sweep()


async def digest(store: Store) -> None:
    """Work off what the miss-ratio curve and the shadow caches have not seen yet, bit by bit."""
    while store.insight is not None:
        has_more = store.insight.digest(DIGEST_CALLS, now_s=store.now_s())
        await trio.sleep(DIGEST_BUSY_S if has_more else DIGEST_IDLE_S)
