"""Calls whose answers come by a callback, for tests that wait for them."""

from collections.abc import Callable
from typing import TypeVar

import trio

from trikv.core.errors import KvError

T = TypeVar("T")


async def answer_of(begin: Callable[[Callable[[T | KvError], None]], None]) -> T:
    """What `begin` passes on to the function it is given, once; waits for it as a caller does.

    Raises:
        KvError: that was it.
    """
    told = trio.Event()
    answers: list[T | KvError] = []

    def answer(value: T | KvError) -> None:
        answers.append(value)
        told.set()

    begin(answer)
    with trio.CancelScope(shield=True):
        await told.wait()
    (one,) = answers
    if isinstance(one, KvError):
        raise one
    return one
