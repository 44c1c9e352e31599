"""Sessions: who is alive, and what happens when somebody no longer is.

Decided here: when a session ends (dropped, disconnected, silent, process dead, superseded) and the
order of its end: no new calls, copies drained, memory forgotten, leases ended. This file does not
know capnp.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import structlog
import trio

from trikv.core.banks import ANY_BANK
from trikv.core.errors import ConflictError, NotReadyError, OverloadedError, ShuttingDownError
from trikv.core.words import InstanceName, SessionId
from trikv.nursery.store import Store
from trikv.tiers.copies import Process

log = structlog.get_logger()

SWEEP_S = 0.25
SUPERSEDE_S = 10.0


@dataclass(frozen=True, slots=True)
class Attachment:
    """A rank's memory that somebody maps for us.

    Attributes:
        number: unique in this daemon.
        event_count: how many events the rank has registered.
        writer: pid of the process that copies.
        bank: of the pool, near the memory.
        signal_count: how many words it has registered.
    """

    number: int
    event_count: int
    writer: int
    bank: int = ANY_BANK
    signal_count: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One engine process's (or tool's) session.

    Attributes:
        process: the caller's, on a unix socket; None over TCP: it cannot register process memory.
        attachments: by rank; unmapped at the session's end, when its copies have ended.
        copies: copies queued or running for it.
        is_closing: set once; copies stop at their next step, new calls are refused.
    """

    id: SessionId
    process: Process | None
    software: str
    last_s: float
    instance: InstanceName | None = None
    fences: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank: address, count
    attachments: dict[int, Attachment] = field(default_factory=dict)
    copies: int = 0
    is_closing: bool = False
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(slots=True)
class Sessions:
    """All open sessions.

    Attributes:
        sessions_max: at the bound `open` refuses as overloaded.
        silence_s: how long a session may say nothing.
        detach: unmaps a rank's memory.
    """

    store: Store
    sessions_max: int
    silence_s: float
    detach: Callable[[Attachment], None]
    open_sessions: dict[SessionId, Session] = field(default_factory=dict)
    is_shutting_down: bool = False
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def open(self, process: Process | None, software: str) -> Session:
        """Begin a session.

        Ownership: `process` belongs to the session from here on and is closed with it.

        Raises:
            OverloadedError, ShuttingDownError: refused; `process` stays the caller's.
        """
        if self.is_shutting_down:
            raise ShuttingDownError("the daemon is ending")
        if len(self.open_sessions) >= self.sessions_max:
            raise OverloadedError(f"{self.sessions_max} sessions are open: raise --max-engines")
        session = Session(SessionId(next(self._numbers)), process, software, trio.current_time())
        self.open_sessions[session.id] = session
        self.store.cache.counters.session_opened_total += 1
        return session

    def use(self, session: Session) -> None:
        """A call of this session arrived.

        Raises:
            ShuttingDownError: the session or the daemon is ending.
        """
        if self.is_shutting_down:
            raise ShuttingDownError("the daemon is ending")
        if session.is_closing:
            raise ShuttingDownError("this session has ended: say hello again")
        session.last_s = trio.current_time()

    def close(self, session: Session, cause: str) -> None:
        """Begin a session's end, at once without copies. Closing twice is fine."""
        if session.is_closing:
            return
        session.is_closing = True
        if session.instance is not None:
            log.info("session.closed", session=session.id, instance=session.instance, cause=cause)
            self.store.cache.counters.session_lost_total += cause != "released"
        if session.copies == 0:
            self._finish(session)

    def copy_ended(self, session: Session) -> None:
        """One copy less; the last one carries out the end of a closing session."""
        session.copies -= 1
        if session.is_closing and session.copies == 0:
            self._finish(session)

    def _finish(self, session: Session) -> None:
        del self.open_sessions[session.id]
        self.store.session_lost(session.id)
        for attachment in session.attachments.values():
            self.detach(attachment)
        session.attachments.clear()
        if session.process is not None:
            session.process.close()
        session.ended.set()

    async def supersede(self, session: Session, instance: InstanceName, rank: int | None) -> None:
        """Wait for the end of an earlier session that this one replaces.

        An engine process that reconnects finds its old session still open when the daemon has not
        seen the end of the old connection yet: one process has one say, so the old session is
        closed, and its copies have ended when this returns.

        Raises:
            ConflictError: the holder is another live process.
            NotReadyError: its copies have not ended within `SUPERSEDE_S` seconds.
        """
        known = self.store.engines.by_name.get(instance)
        if known is None:
            return
        facts = known.ranks.get(rank) if rank is not None else None
        holder_id = (
            facts.session if facts is not None else known.declared_by if rank is None else None
        )
        holder = self.open_sessions.get(holder_id) if holder_id is not None else None
        if holder is None or holder is session:
            return
        same = (
            holder.process is not None
            and session.process is not None
            and holder.process.pid == session.process.pid
        )
        dead = holder.process is not None and not holder.process.is_alive()
        if not (holder.is_closing or same or dead):
            what = "declared" if rank is None else f"rank {rank} registered"
            raise ConflictError(
                f"instance {instance!r} has its {what} by another live process: "
                "set another engine_id"
            )
        self.close(holder, "superseded")
        with trio.move_on_after(SUPERSEDE_S):
            await holder.ended.wait()
            return
        raise NotReadyError(f"copies of the earlier session of {instance!r} have not ended yet")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch over silence and death; runs until cancelled."""
        task_status.started()
        while True:
            due_s = trio.current_time() + SWEEP_S
            await trio.sleep_until(due_s)
            now_s = trio.current_time()
            late_s = now_s - due_s
            if late_s > SWEEP_S:  # this process was stopped: nobody else was silent meanwhile
                for session in self.open_sessions.values():
                    session.last_s += late_s
            for session in list(self.open_sessions.values()):
                if session.process is not None and not session.process.is_alive():
                    self.close(session, "process ended")
                elif now_s - session.last_s > self.silence_s:
                    self.close(session, "silent")
