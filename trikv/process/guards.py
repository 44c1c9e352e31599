"""Around each method of a servant: how it becomes what pycapnp calls, and what a bug in it does.

Decided here: an error that is no refusal ends the daemon with the story, and when a call counts as
ended. This file does not know the methods.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import capnp

from trikv.core.counters import BROKEN
from trikv.core.errors import KvError
from trikv.streams import Answered, Later


class End(Protocol):
    """Ends a call that waits; called once."""

    def __call__(self, write: Callable[..., None], *args: Any) -> None:
        """Write the answer by `write(*args)`, unless nobody waits for it any more."""
        ...


def fatal(method: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
    """A method that waits."""
    name = _name(method)

    @functools.wraps(method)
    async def guarded(servant: Any, context: Any) -> None:
        try:
            await method(servant, context)
            servant.connection.count(name)
        except Exception as error:
            _note(servant, name, error)
            raise

    return guarded


def at_once(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], Answered]:
    """A method that waits for nothing: no task is made for it."""
    name = _name(method)

    @functools.wraps(method)
    def guarded(servant: Any, context: Any) -> Answered:
        _guard(servant, name, method, servant, context)
        return Answered()

    return guarded


def later(method: Callable[[Any, Any, End], None]) -> Callable[[Any, Any], Later]:
    """A method that waits, but in no task: what it has begun ends it, in a plain call."""
    name = _name(method)

    @functools.wraps(method)
    def guarded(servant: Any, context: Any) -> Later:
        call = Later()

        def end(write: Callable[..., None], *args: Any) -> None:
            if call.done():  # cancelled
                return
            try:
                _guard(servant, name, write, *args)
            except Exception as error:  # noqa: BLE001  # noted; pycapnp tells the caller
                call.end(error)
            else:
                call.end()

        try:
            method(servant, context, end)
        except Exception as error:
            servant.connection.guest.fail(error)
            raise
        return call

    return guarded


def _guard(servant: Any, name: str, work: Callable[..., None], *args: Any) -> None:
    try:
        work(*args)
        servant.connection.count(name)
    except Exception as error:
        _note(servant, name, error)
        raise


def _note(servant: Any, name: str, error: Exception) -> None:
    """A refusal or a broken connection is counted; anything else ends the daemon."""
    if isinstance(error, KvError | capnp.KjException):
        servant.connection.calls.note(name, getattr(error, "code", BROKEN))
    else:
        servant.connection.guest.fail(error)


def _name(method: Callable[..., Any]) -> str:
    """As the schema calls it; a method may be in two parts."""
    name = method.__name__.removesuffix("_context").lstrip("_")
    return name.removesuffix("_at_once").removesuffix("_late")
