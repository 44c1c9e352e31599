"""An engine in a process of its own, for tests that kill, stop or fork it.

    python -m tests.integration.engine_process ADDRESS COMMAND

Prints one JSON line when attached. `idle`: waits, calling nothing. `beat`: heartbeats for ever.
`save`: saves 64 blocks of 1 MiB again and again under new names, printing nothing. `load`: saves
them once, and loads them again and again.
"""

import asyncio
import itertools
import json
import os
import sys

from tests.integration.daemons import attached, hashes, wire_ok


async def main(address: str, command: str) -> None:
    name = f"process-{os.getpid()}"
    async with attached(address, name=name, block_count=64, page_bytes=1 << 20) as engine:
        print(json.dumps({"pid": os.getpid(), "name": name}), flush=True)  # noqa: T201  # to the test
        for turn in itertools.count():
            if command == "save":
                blob = hashes(*(f"{name}/{turn}/{block}" for block in range(64)))
                await engine.save(blob, list(range(64)))
            elif command == "load":
                blob = hashes(*(f"{name}/{block}" for block in range(64)))
                if turn == 0:
                    await engine.save(blob, list(range(64)))
                found = wire_ok(await engine.query(blob))
                await engine.load(found.lease, list(range(found.hitCount)))
            else:
                await asyncio.sleep(0.2)
                if command == "beat":
                    await engine.session.heartbeat()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
