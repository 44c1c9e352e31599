"""Around each method of a servant: how it becomes what pycapnp calls, and what a bug in it does.

Decided here: an error that is no refusal ends the daemon with the story, and when a call counts as
ended. This file does not know the methods.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import capnp

from trikv.core.counters import BROKEN
from trikv.core.errors import KvError
from trikv.streams import Answered


def fatal(method: Callable[[Any, Any], Awaitable[None]]) -> Callable[[Any, Any], Awaitable[None]]:
    """A method that waits."""
    name = _name(method)

    @functools.wraps(method)
    async def guarded(servant: Any, context: Any) -> None:
        try:
            await method(servant, context)
            servant.connection.count(name)
        except (KvError, capnp.KjException) as error:
            servant.connection.calls.note(name, getattr(error, "code", BROKEN))
            raise
        except Exception as error:
            servant.connection.guest.fail(error)
            raise

    return guarded


def at_once(method: Callable[[Any, Any], None]) -> Callable[[Any, Any], Answered]:
    """A method that waits for nothing: no task is made for it."""
    name = _name(method)

    @functools.wraps(method)
    def guarded(servant: Any, context: Any) -> Answered:
        try:
            method(servant, context)
            servant.connection.count(name)
        except (KvError, capnp.KjException) as error:
            servant.connection.calls.note(name, getattr(error, "code", BROKEN))
            raise
        except Exception as error:
            servant.connection.guest.fail(error)
            raise
        return Answered()

    return guarded


def _name(method: Callable[[Any, Any], Any]) -> str:
    """As the schema calls it; a method may be in two parts."""
    name = method.__name__.removesuffix("_context").lstrip("_")
    return name.removesuffix("_at_once").removesuffix("_late")
