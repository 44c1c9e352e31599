"""Calls whose answers come by a callback, for tests that wait for them."""

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def answer_of(begin: Callable[[Callable[[T], None]], None]) -> T:
    """What `begin` passes on to the function it is given, once; waits for it as a caller does."""
    told = trio.Event()
    answers: list[T] = []

    def answer(value: T) -> None:
        answers.append(value)
        told.set()

    begin(answer)
    with trio.CancelScope(shield=True):
        await told.wait()
    (one,) = answers
    return one
