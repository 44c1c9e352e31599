"""TCP between hosts: two network namespaces with a cable between them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import trio

from tests.conftest import Start
from tests.tiers.peers import MIB, check, fetch_of, landing_pool, owner_pool, shuffled
from trikv.address import Address
from trikv.tiers.tcp import TcpTransport

OWNER = """
import sys
import numpy as np, trio
from tests.tiers.peers import owner_pool
from trikv.address import Address
from trikv.tiers.tcpowner import TcpOwner
async def main():
    pool = owner_pool()
    owner = TcpOwner(pool, limiter=trio.CapacityLimiter(8))
    token = owner.lend(np.array([(0, len(pool.memory))], np.int64))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(owner.run, Address(host=sys.argv[1]))
        print(port, token.hex(), flush=True)
trio.run(main)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[tuple[str, str, str]]:
    """An interface here, and a namespace with the other end, and that end's address.

    Of the range for benchmarks between networks (RFC 2544), for each run another.
    """
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    near, space = f"tk{os.getpid()}", f"trikv-{os.getpid()}"
    net = f"198.{18 + os.getpid() % 2}.{os.getpid() // 2 % 250}"
    try:
        ip("netns", "add", space)
        ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", space)
        ip("addr", "add", f"{net}.1/24", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", space, "addr", "add", f"{net}.2/24", "dev", "far")
        ip("-n", space, "link", "set", "far", "up")
        yield near, space, f"{net}.2"
    finally:
        for words in (("link", "del", near), ("netns", "del", space)):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip(*words)


async def test_a_host_fetches_from_another_until_the_cable_is_cut(
    cable: tuple[str, str, str], start: Start
) -> None:
    near, space, host = cable
    command = ["ip", "netns", "exec", space, sys.executable, "-c", OWNER, host]
    owner = start(command, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    port, token = (await trio.to_thread.run_sync(owner.stdout.readline)).split()
    pool, source = landing_pool(), owner_pool()
    address = Address(host=host, port=int(port))
    transport = TcpTransport(address, pool, limiter=trio.CapacityLimiter(8))
    runs = shuffled(pool, count=32, size=MIB)
    fetch = fetch_of(runs, bytes.fromhex(token))
    await transport.fetch(fetch)
    check(fetch, source, pool)

    ip("link", "set", near, "down")
    cut = fetch_of(runs, bytes.fromhex(token), seconds=5)
    await transport.fetch(cut)
    check(cut, source, pool, all_arrived=False)
    assert not (cut.outcome == 1).any()

    ip("link", "set", near, "up")
    again = fetch_of(runs, bytes.fromhex(token))
    await transport.fetch(again)
    check(again, source, pool)
    await transport.aclose()
