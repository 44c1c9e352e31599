"""Words by which an idle engine sees that a copy is over, sooner than by the daemon's answer.

Decided here: which word a copy gets that no forward waits for, and that it is believed. The GPU
writes it behind the copy's last byte, and only if all blocks have been moved; the answer takes most
of a millisecond more, and after a failure it alone says what is missing. This file does not know
how words are read, or what a copy is good for.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent import futures
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from trikv.connector.jobs import SIGNAL_COUNT, LoadJob, SaveJob

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence
    from concurrent.futures import Future

    from trikv.connector.layers import Words

_Key: TypeAlias = tuple[str, int]
_Job = TypeVar("_Job", LoadJob, SaveJob)
VALUE_MAX: Final = 2**31 - 1
LOOK_S: Final = 20e-6
"""Between two looks at words; the client's thread runs meanwhile."""


class Arrivals:
    """One rank's; all methods run on the worker's main thread."""

    def __init__(self, words: Words | None, log: logging.Logger) -> None:
        """Take charge of the words behind those that forwards wait for; None: there are none."""
        self._words = words
        self._log = log
        self._free = deque(range(SIGNAL_COUNT + 1, 2 * SIGNAL_COUNT + 1))
        self._value = 0
        self._awaited: dict[_Key, tuple[int, int]] = {}  # word and value
        self._come: set[_Key] = set()

    def mark(self, job: _Job) -> _Job:
        """The copy of an engine that computes nothing else with a word, while one is free.

        No two copies have the same value: a late write of a copy that was given up shows none of
        the next one's.
        """
        if self._words is None or not job.is_alone or not self._free:
            return job
        self._value = self._value % VALUE_MAX + 1
        return replace(job, signal=self._free[0], value=self._value)

    def follow(self, marked: LoadJob | SaveJob, outcome: Future[Any]) -> None:
        """What `mark` returned was sent; its word is free again once there is an answer."""
        if marked.signal:
            number = self._free.popleft()
            self._awaited[marked.key] = (number, marked.value)
            outcome.add_done_callback(lambda _: self._free.append(number))

    def wait(self, outcomes: Sequence[Future[Any]], limit_s: float) -> None:
        """Until some copy is over or answered, or for so long; at once if there is none."""
        if not self._awaited:
            futures.wait(outcomes, limit_s if outcomes else 0, futures.FIRST_COMPLETED)
            return
        until_s = time.perf_counter() + limit_s
        while not (self._look() or any(one.done() for one in outcomes)):
            if time.perf_counter() >= until_s or self._words is None:
                break
            time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Whether some copy is over that was not forgotten yet."""
        assert self._words is not None
        try:
            seen = self._words.read()
        except Exception:  # noqa: BLE001  # whatever it is: answers come all the same
            self._log.exception("TriKV: words cannot be read; the ends of copies are seen later")
            self._words = None
            self._awaited.clear()
            return bool(self._come)
        for key, (number, value) in self._awaited.items():
            if seen[number - 1] == value:
                self._come.add(key)
        return bool(self._come)

    def has(self, job: LoadJob | SaveJob) -> bool:
        """Whether this copy was seen to be over."""
        return job.key in self._come

    def forget(self, job: LoadJob | SaveJob) -> None:
        """This copy is over."""
        self._awaited.pop(job.key, None)
        self._come.discard(job.key)
