"""Words by which an idle engine sees that a load is over, sooner than by the daemon's answer.

Decided here: which word a load gets that no forward waits for, and that it is believed. The GPU
writes it behind the load's last byte, and only if all blocks have come; the answer takes most of a
millisecond more, and after a failure it alone says what is missing. This file does not know how
words are read, or what a load is good for.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent import futures
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from trikv.connector.jobs import SIGNAL_COUNT

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence
    from concurrent.futures import Future

    from trikv.connector.jobs import LoadJob
    from trikv.connector.layers import Words

_Key: TypeAlias = tuple[str, int]
"""Request and lease of a load."""
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

    def mark(self, job: LoadJob) -> LoadJob:
        """The load of an engine that computes nothing else with a word, while one is free.

        No two loads have the same value: a late write of a load that was given up shows none of
        the next one's.
        """
        if self._words is None or not job.is_alone or not self._free:
            return job
        self._value = self._value % VALUE_MAX + 1
        return replace(job, signal=self._free[0], value=self._value)

    def follow(self, marked: LoadJob, outcome: Future[tuple[int, ...]]) -> None:
        """What `mark` returned was sent; its word is free again once there is an answer."""
        if marked.signal:
            number = self._free.popleft()
            self._awaited[_key(marked)] = (number, marked.value)
            outcome.add_done_callback(lambda _: self._free.append(number))

    def wait(self, outcomes: Sequence[Future[tuple[int, ...]]], limit_s: float) -> None:
        """Until some load has come or been answered, or for so long; at once if there is none."""
        if not self._awaited:
            futures.wait(outcomes, limit_s if outcomes else 0, futures.FIRST_COMPLETED)
            return
        until_s = time.perf_counter() + limit_s
        while not (self._look() or any(one.done() for one in outcomes)):
            if time.perf_counter() >= until_s or self._words is None:
                break
            time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Whether some load has come that was not forgotten yet."""
        assert self._words is not None
        try:
            seen = self._words.read()
        except Exception:  # noqa: BLE001  # whatever it is: answers come all the same
            self._log.exception("TriKV: words cannot be read; the ends of loads are seen later")
            self._words = None
            self._awaited.clear()
            return bool(self._come)
        for key, (number, value) in self._awaited.items():
            if seen[number - 1] == value:
                self._come.add(key)
        return bool(self._come)

    def has(self, job: LoadJob) -> bool:
        """Whether this load was seen to have come."""
        return _key(job) in self._come

    def forget(self, job: LoadJob) -> None:
        """This load is over."""
        self._awaited.pop(_key(job), None)
        self._come.discard(_key(job))


def _key(job: LoadJob) -> _Key:
    return job.request, job.lease
