"""Light nodes in a process of their own: `python -m tests.meta.light_nodes PORT COUNT METAS`.

Node number n is reached at 127.0.0.1:PORT+n and holds `keys(PORT + n, 1000)`. A line is printed
when all metaservers know everything; ends by a signal.
"""

import sys

import trio

from tests.meta.metas import A, LightNode, hosted, keys, until
from trikv.process.logs import set_up_logging


def main() -> None:
    set_up_logging("warning", "json")
    port, count, metas = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")

    async def run() -> None:
        nodes = [LightNode(f"127.0.0.1:{port + at}", metas) for at in range(count)]
        async with trio.open_nursery() as nursery:
            for at, node in enumerate(nodes):
                node.held[A] = [keys(port + at, 1000)]
                await nursery.start(node.run)
            await until(lambda: all(node.is_announced for node in nodes))
            print("announced", flush=True)  # noqa: T201
            await trio.sleep_forever()

    hosted(run)


if __name__ == "__main__":
    main()
