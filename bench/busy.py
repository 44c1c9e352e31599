"""A process that keeps a GPU busy with matrix products, as an engine in the midst of its work does.

Decided here: how its speed is read. It never pauses, because a GPU that has rested is faster for a
while than one that has not: a speed with copies is compared with those just before and just after.
"""

import contextlib
import ctypes
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING

import torch

from bench import daemons

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

SIZE = 8192
AHEAD = 8
WARM_S = 2.0
"""Until the GPU's clocks have settled."""


@dataclass(frozen=True, slots=True)
class Load:
    """The computing process."""

    done: "Synchronized[int]"  # products
    child: SpawnProcess

    def rate(self, seconds: float) -> float:
        """TFLOP/s of the coming seconds."""
        begin, begin_s = self._edge()
        time.sleep(seconds)
        end, end_s = self._edge()
        return (end - begin) * 2 * SIZE**3 / (end_s - begin_s) / 1e12

    def _edge(self) -> tuple[int, float]:
        """The count and the time at which it changes."""
        first = self.done.value
        while (now := self.done.value) == first:
            if not self.child.is_alive():
                raise RuntimeError("the computing process has ended")
            time.sleep(20e-6)
        return now, time.perf_counter()


def compute(done: "Synchronized[int]") -> None:
    """Multiply for ever, some products ahead."""
    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends: deque[torch.cuda.Event] = deque()
    while True:
        _ = a @ b
        ends.append(torch.cuda.Event())
        ends[-1].record()
        if len(ends) > AHEAD:
            ends.popleft().synchronize()
            done.value += 1


@contextlib.contextmanager
def computing() -> Iterator[Load]:
    """Run one."""
    done = multiprocessing.get_context("spawn").Value(ctypes.c_long)
    with daemons.spawned(compute, done) as child:
        while not done.value and child.is_alive():
            time.sleep(0.01)
        time.sleep(WARM_S)
        yield Load(done, child)
