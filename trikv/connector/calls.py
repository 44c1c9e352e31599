"""The session's methods as typed calls: plain records in, futures of plain records out.

Decided here: which calls have a deadline. A load and a save have none: their answer says that
memory is no longer touched, and nothing but it does. This file does not know connections or vLLM.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trikv.connector.link import checked, read_nothing
from trikv.wire import REQUESTS_MAX, WAIT_S_MAX, ids_to_array

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from trikv.connector.client import Attached, Client
    from trikv.connector.jobs import LoadJob, SaveJob

ID_BYTES: Final = 4
CALL_S: Final = 2.0
SAVE_RETRY_S: Final = 1.0
RESET_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How many leading blocks can be loaded, and the promise on them."""

    hit_count: int
    lease: int  # 0: none
    lease_s: float
    coming_count: int = 0
    coming_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """What became of the blocks of one save."""

    saved_count: int
    present_count: int
    refused_count: int


class Calls:
    """What the connector's halves ask of a daemon."""

    def __init__(self, client: Client, rank: int = 0) -> None:
        self.client = client
        self._rank = rank

    @property
    def attached(self) -> Attached | None:
        """The daemon that has accepted us."""
        return self.client.attached

    @property
    def is_ready(self) -> bool:
        """True when a call would be sent."""
        return self.client.is_ready

    def query(
        self,
        request: str,
        hash_bytes: int,
        hashes: bytes,
        wait_s: float = 0.0,
        *,
        is_alone: bool = False,
    ) -> Future[Answer]:
        """Ask how much of a prompt is at hand; again renews the lease.

        Args:
            request: whose prompt.
            hash_bytes: of one hash.
            hashes: one blob, from the first block on.
            wait_s: how long the daemon may wait for blocks that are coming.
            is_alone: what is found will be loaded at once.
        """
        body: dict[str, Any] = {
            "request": request,
            "group": 0,
            "hashBytes": hash_bytes,
            "hashes": hashes,
        }
        if wait_s:
            body["waitSeconds"] = min(wait_s, WAIT_S_MAX)
        if is_alone:
            body["alone"] = True
        return self.client.call("query", {"query": body}, _read_answer, deadline_s=CALL_S + wait_s)

    def save(self, job: SaveJob, fence: int, generation: int, event: int) -> Future[Saved]:
        """Copy blocks out of this rank's memory, after the work before `event` (0: at once)."""
        body = {
            "rank": self._rank,
            "group": 0,
            "request": job.request,
            "first": job.first,
            "hashBytes": job.hash_bytes,
            "hashes": job.hashes,
            "blocks": job.blocks,
            "fence": fence,
            "generation": generation,
            "event": event,
        }
        if job.signal:
            body |= {"signal": job.signal, "value": job.value}
        if job.altered is not None:
            body["altered"] = job.altered
        return self.client.call(
            "save", {"save": body}, _read_saved, deadline_s=None, retry_s=SAVE_RETRY_S
        )

    def load(
        self, job: LoadJob, via: Attached, budget_s: float, event: int
    ) -> Future[tuple[int, ...]]:
        """Copy leased blocks into this rank's memory; the future holds positions that failed."""
        body = {
            "rank": self._rank,
            "lease": job.lease,
            "first": job.first,
            "blocks": job.blocks,
            "budgetSeconds": budget_s,
            "event": event,
        }
        if job.signal:
            body |= {"signal": job.signal, "value": job.value, "ordered": job.is_ordered}
        return self.client.call("load", {"load": body}, _read_failed, deadline_s=None, via=via)

    def release(self, requests: Sequence[str]) -> None:
        """Tell that requests have ended; nobody waits for the answer."""
        for at in range(0, len(requests), REQUESTS_MAX):
            part = list(requests[at : at + REQUESTS_MAX])
            self.client.call("release", {"requests": part}, read_nothing)

    def reset(self, altered: str) -> Future[int]:
        """Forget every block of our namespace, and leave it; the future holds how many."""
        params = {"altered": altered}
        return self.client.call("reset", params, _read_dropped, deadline_s=RESET_S)


def _read_answer(response: Any) -> Answer:  # noqa: ANN401
    ok = checked(response.reply)
    return Answer(
        int(ok.hitCount),
        int(ok.lease),
        float(ok.leaseSeconds),
        int(ok.comingCount),
        float(ok.comingSeconds),
    )


def _read_saved(response: Any) -> Saved:  # noqa: ANN401
    ok = checked(response.reply)
    return Saved(int(ok.savedCount), int(ok.presentCount), int(ok.refusedCount))


def _read_failed(response: Any) -> tuple[int, ...]:  # noqa: ANN401
    return tuple(ids_to_array(bytes(checked(response.reply).failed), "failed").tolist())


def _read_dropped(response: Any) -> int:  # noqa: ANN401
    return int(checked(response.reply).droppedCount)


def pack(blocks: Sequence[int]) -> bytes:
    """Engine block ids as the wire wants them; half the time that numpy takes for a list."""
    return struct.pack(f"<{len(blocks)}i", *blocks)


def count_real(blob: bytes) -> int:
    """How many ids stand before the first null block, which is never read."""
    is_real = np.frombuffer(blob, dtype="<i4") != 0
    return len(is_real) if is_real.all() else int(is_real.argmin())


def unpack(blob: bytes) -> list[int]:
    """The ids that `pack` took."""
    ids: list[int] = np.frombuffer(blob, dtype="<i4").tolist()
    return ids
