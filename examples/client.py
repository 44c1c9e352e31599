"""A complete engine in some 100 lines: talks to a trikv-daemon with pycapnp and the schema alone.

    python examples/client.py [unix:/path | host:port]

Registers a buffer of this process as an engine's KV cache, saves four blocks, overwrites them, asks
for them, loads them back and compares. Over TCP (no process memory) it only prints the status.
"""

import asyncio
import ctypes
import os
import sys
from pathlib import Path

import capnp

capnp.remove_import_hook()
SCHEMA = capnp.load(
    str(Path(__file__).resolve().parent.parent / "schema" / "kv.capnp"),
    imports=[str(Path(capnp.__file__).parent.parent)],
)
BLOCKS, BLOCK_BYTES, LAYERS = 8, 4096, 2
LAYER_BYTES = BLOCKS * BLOCK_BYTES
HASHES = b"".join(bytes([number]) * 32 for number in range(1, 5))
PROGRAM = "examples/client.py"
ENGINE = f"example-{os.getpid()}"


def ok(reply: capnp.lib.capnp._DynamicStructReader) -> capnp.lib.capnp._DynamicStructReader:
    """The good half of a reply; expected errors are values, not exceptions."""
    if reply.which() == "error":
        sys.exit(f"{reply.error.code}: {reply.error.message}")
    return reply.ok


def ids(*numbers: int) -> bytes:
    """Block ids as the wire wants them."""
    return b"".join(number.to_bytes(4, "little") for number in numbers)


async def connect(address: str) -> capnp.AsyncIoStream:
    """Open the transport."""
    if address.startswith("unix:"):
        return await capnp.AsyncIoStream.create_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await capnp.AsyncIoStream.create_connection(host, int(port))


async def attach(
    kv: capnp.lib.capnp._DynamicCapabilityClient, buffer: ctypes.Array[ctypes.c_char]
) -> capnp.lib.capnp._DynamicCapabilityClient:
    """Say hello, register `buffer` as the memory of the only rank, declare the engine."""
    hello = ok((await kv.hello({"protocol": SCHEMA.protocolVersion, "software": PROGRAM})).reply)
    beat = f"heartbeat {hello.heartbeatSeconds:g} s"
    print(f"daemon    {hello.software}, protocol {hello.protocol}, {beat}")

    # Two layers, each an array of blocks: a block has one piece in each.
    pieces = [
        {"memory": 0, "offset": layer * LAYER_BYTES, "stride": BLOCK_BYTES, "bytes": BLOCK_BYTES}
        for layer in range(LAYERS)
    ]
    memory = {"process": {"address": ctypes.addressof(buffer), "bytes": len(buffer)}}
    group = {"blockCount": BLOCKS, "pieces": pieces, "layout": "bytes"}
    rank = {"instance": ENGINE, "rank": 0, "memories": [memory], "groups": [group]}
    ok((await hello.session.register(rank)).reply)
    fields = [{"name": "label", "value": "example"}, {"name": "engine", "value": PROGRAM}]
    engine = {"name": ENGINE, "rankCount": 1, "fields": fields}
    declared = ok((await hello.session.declare(engine)).reply)
    print(f"namespace {declared.namespace}")
    return hello.session


async def round_trip(kv: capnp.lib.capnp._DynamicCapabilityClient) -> None:
    """Save, lose, query, load, compare."""
    # As in a real engine, what a block holds depends on its hash alone: run this twice, and the
    # second run finds the blocks of the first.
    buffer = ctypes.create_string_buffer(LAYERS * LAYER_BYTES)
    buffer[:] = bytes(number % 251 for number in range(len(buffer)))
    session = await attach(kv, buffer)
    before = buffer.raw
    save = {
        "rank": 0,
        "request": "r1",
        "hashBytes": 32,
        "hashes": HASHES,
        "blocks": ids(0, 1, 2, 3),
    }
    saved = ok((await session.save(save)).reply)
    print(f"save      {saved.savedCount} blocks copied, {saved.presentCount} were there")

    ctypes.memset(buffer, 0, len(buffer))
    query = {"request": "r2", "hashBytes": 32, "hashes": HASHES}
    found = ok((await session.query(query)).reply)
    lease_s = f"{found.leaseSeconds:.0f} s"
    print(f"query     {found.hitCount} of 4 blocks, lease {found.lease} for {lease_s}")

    load = {
        "rank": 0,
        "lease": found.lease,
        "first": 0,
        "blocks": ids(4, 5, 6, 7),
        "budgetSeconds": 5,
    }
    loaded = ok((await session.load(load)).reply)
    await session.release(["r1", "r2"])
    after = buffer.raw
    same = all(
        after[layer * LAYER_BYTES + 4 * BLOCK_BYTES : (layer + 1) * LAYER_BYTES]
        == before[layer * LAYER_BYTES : layer * LAYER_BYTES + 4 * BLOCK_BYTES]
        for layer in range(LAYERS)
    )
    arrived = 4 - len(loaded.failed) // 4  # one int32 a block that failed
    print(f"load      {arrived} of 4 blocks, bytes {'equal' if same else 'DIFFER'}")
    if not same:
        sys.exit(1)


async def main(address: str) -> None:
    """Connect, do the round trip, show the pool."""
    async with capnp.kj_loop():
        stream = await connect(address)
        client = capnp.TwoPartyClient(stream)
        try:
            kv = client.bootstrap().cast_as(SCHEMA.Kv)
            if address.startswith("unix:"):
                await round_trip(kv)
            pool = (await kv.status()).status.pool
            used = f"{pool.usedBytes} of {pool.capacityBytes} bytes used"
            print(f"pool      {pool.blockCount} blocks, {used}")
        finally:  # an open connection must not be left to the garbage collector
            stream.close()
            client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "unix:/run/trikv/trikv.sock"))
