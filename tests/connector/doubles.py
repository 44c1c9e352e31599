"""Stands in for a client: futures that the test answers, and an attachment whose daemon can die."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trikv.connector.jobs import LoadJob, SaveJob

if TYPE_CHECKING:
    from trikv.connector.calls import Answer, Saved


class Watch:
    dead = False

    def is_dead(self) -> bool:
        return self.dead


@dataclass(eq=False)
class Attachment:
    number: int = 1
    epoch: int = 7
    watch: Watch = field(default_factory=Watch)


class FakeCalls:
    """Futures that the test answers."""

    def __init__(self) -> None:
        self.attached: Any = Attachment()
        self.is_ready = True
        self.client = SimpleNamespace(start=lambda _: None)
        self.queries: list[tuple[str, bytes, Future[Answer]]] = []
        self.loads: dict[str, tuple[LoadJob, Future[tuple[int, ...]]]] = {}
        self.saves: dict[int, tuple[SaveJob, int, int, Future[Saved]]] = {}
        self.released: list[str] = []
        self.waits: list[float] = []  # how long each query lets the daemon wait
        self.alone: list[bool] = []  # whether what each query finds is loaded at once
        self.resets: list[Future[int]] = []
        self.altered: list[str] = []  # the text of each of them

    def query(
        self,
        request: str,
        _size: int,
        hashes: bytes,
        wait_s: float = 0.0,
        *,
        is_alone: bool = False,
    ) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self.waits.append(wait_s)
        self.alone.append(is_alone)
        self.queries.append((request, hashes, future))
        return future

    def load(
        self, job: LoadJob, _via: Any, _budget_s: float, _event: int
    ) -> "Future[tuple[int, ...]]":
        future: Future[tuple[int, ...]] = Future()
        self.loads[job.request] = (job, future)
        return future

    def save(self, job: SaveJob, fence: int, generation: int, _event: int) -> "Future[Saved]":
        future: Future[Saved] = Future()
        self.saves[job.number] = (job, fence, generation, future)
        return future

    def reset(self, altered: str) -> "Future[int]":
        future: Future[int] = Future()
        self.altered.append(altered)
        self.resets.append(future)
        return future

    def release(self, requests: list[str]) -> None:
        self.released += requests
