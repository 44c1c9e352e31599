"""Around each hook that vLLM calls: what it answers when it fails.

Decided here: that an error in a hook costs the cache and never the engine, but for one.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from trikv.connector.layers import LoadLostError

P = ParamSpec("P")
R = TypeVar("R")


def guarded(neutral: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a hook answer `neutral()` instead of raising: an exception would end the engine."""

    def wrap(hook: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(hook)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except LoadLostError:
                raise  # the engine must not use what it has computed
            except Exception:  # noqa: BLE001  # logged once a hook, and the cache steps back
                connector: Any = args[0]
                connector.note_failure(hook.__name__)
                result: R = neutral()
                return result

        return call

    return wrap


def nothing() -> None:
    """What a hook answers that has nothing to say."""
