"""A Trio task that waits for asyncio: results, errors, and cancellation that waits for the end."""

import asyncio

import pytest
import trio

from tests.meta.metas import hosted, in_cluster
from trikv.process.outward import on_asyncio


async def napping(seconds: float, said: list[str]) -> str:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        said.append("cancelled")
        await asyncio.sleep(0.05)
        said.append("unwound")
        raise
    return "slept"


@in_cluster
async def test_what_is_returned_or_raised_comes_back() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    assert await on_asyncio(napping(0.01, [])) == "slept"
    with pytest.raises(KeyError):
        await on_asyncio(fail())
    results: list[str] = []

    async def one() -> None:
        results.append(await on_asyncio(napping(0.05, [])))

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(one)
    assert results == ["slept"] * 50
    assert trio.current_time() - began_s < 50 * 0.05, "side by side"


@in_cluster
async def test_a_cancelled_wait_ends_when_the_coroutine_has() -> None:
    said: list[str] = []
    with trio.move_on_after(0.05) as scope:
        await on_asyncio(napping(60, said))
    assert scope.cancelled_caught
    assert said == ["cancelled", "unwound"]


@in_cluster
async def test_what_was_returned_in_spite_of_it_is_not_lost() -> None:
    """A connection that has just been made has to be closed by somebody."""

    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            asyncio.current_task().uncancel()  # type: ignore[union-attr]
        return "made"

    with trio.move_on_after(0.05) as scope:
        assert await on_asyncio(stubborn()) == "made"
    assert not scope.cancelled_caught


def test_an_error_of_the_guest_ends_the_host() -> None:
    async def main() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        hosted(main)
