"""What a servant's method becomes whose answer comes by a plain call: counted once, told once."""

import asyncio
from collections.abc import Callable
from typing import Any

import capnp
import pytest

from trikv.core.errors import OverloadedError
from trikv.process.guards import End, later
from trikv.streams import Later, Loop


class Servant:
    """A servant, and all of its connection that guards look at."""

    def __init__(self) -> None:
        self.connection = self.calls = self.guest = self
        self.counted: list[str] = []
        self.bugs: list[Exception] = []
        self.ends: list[End] = []

    def count(self, name: str) -> None:
        self.counted.append(name)

    def note(self, name: str, code: str) -> None:
        self.counted.append(f"{name}: {code}")

    def fail(self, error: Exception) -> None:
        self.bugs.append(error)

    @later
    def load_context(self, context: Any, end: End) -> None:
        if context is not None:
            raise context
        self.ends.append(end)


def on_loop(main: Callable[[Servant], Any]) -> Servant:
    async def run() -> Servant:
        servant = Servant()
        main(servant)
        return servant

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(run())


def fail(error: Exception) -> None:
    raise error


def test_an_answer_is_written_and_counted_once() -> None:
    written: list[int] = []

    def main(servant: Servant) -> None:
        call: Later = servant.load_context(None)
        assert not call.done()
        servant.ends[0](written.append, 3)
        assert call.result() is None

    assert on_loop(main).counted == ["load"]
    assert written == [3]


def test_nothing_is_written_for_who_has_given_up() -> None:
    written: list[int] = []

    def main(servant: Servant) -> None:
        call: Later = servant.load_context(None)
        call.cancel()
        servant.ends[0](written.append, 3)

    assert on_loop(main).counted == []
    assert not written


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (OverloadedError("full"), ["load: overloaded"]),
        (capnp.KjException("gone"), ["load: broken"]),
    ],
)
def test_what_cannot_be_written_is_told(error: Exception, counted: list[str]) -> None:
    def main(servant: Servant) -> None:
        call: Later = servant.load_context(None)
        servant.ends[0](fail, error)
        assert call.exception() is error
        assert error.__traceback__ is None, "it would hold the frames of its call"

    servant = on_loop(main)
    assert servant.counted == counted
    assert not servant.bugs


def test_a_bug_ends_the_daemon_wherever_it_shows() -> None:
    first, second = ZeroDivisionError("planted"), ZeroDivisionError("planted too")

    def main(servant: Servant) -> None:
        with pytest.raises(ZeroDivisionError):
            servant.load_context(first)
        call: Later = servant.load_context(None)
        servant.ends[0](fail, second)
        assert call.exception() is second

    servant = on_loop(main)
    assert servant.bugs == [first, second]
    assert servant.counted == []
