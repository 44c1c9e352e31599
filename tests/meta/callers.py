"""Callers that speak capnp themselves: what a daemon's client would never say."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import capnp

from tests.meta.metas import RunningMeta
from trikv import wire
from trikv.core.proofs import Party, Secret
from trikv.meta.messages import NODE, Greeting, write_greeting

SECRET = Secret(b"a secret of 16 bytes and more")
ONE, TWO = "10.0.0.1:50057", "10.0.0.2:50057"


@contextlib.asynccontextmanager
async def raw(meta: RunningMeta) -> AsyncIterator[Any]:
    """The bootstrap capability, without a word said."""
    host, _, port = meta.address.rpartition(":")
    stream = await capnp.AsyncIoStream.create_connection(host, int(port))
    client = capnp.TwoPartyClient(stream)
    try:
        yield client.bootstrap().cast_as(wire.SCHEMA.Meta)
    finally:
        stream.close()
        client.close()


def on_wire(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a coroutine of asyncio inside capnp's loop."""

    def wrapped(guarded: RunningMeta) -> None:
        async def main() -> None:
            async with asyncio.timeout(60), capnp.kj_loop():
                await test(guarded)

        asyncio.run(main())

    wrapped.__name__ = test.__name__
    return wrapped


def greeting(role: str = NODE, address: str = ONE, nonce: bytes = b"n" * 32) -> Greeting:
    return Greeting(Party(role, address, nonce), "a test")


async def greet(meta: Any, ours: Greeting) -> Any:
    request = meta.hello_request()
    write_greeting(request.greeting, ours)
    return (await request.send()).reply


async def is_closed(meta: Any, within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        try:
            await greet(meta, greeting())
        except capnp.KjException as error:
            return error.type == "DISCONNECTED"
        await asyncio.sleep(0.05)
    return False
