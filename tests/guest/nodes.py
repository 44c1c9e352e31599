"""Runs in a guest: two whole daemons and a metaserver that share blocks over Soft-RoCE.

    python -m tests.guest.nodes ibverbs pyverbs

Both are nodes with the real flags, each with another binding. Each line is a check; the last one
says how many hold. Every story ends with right bytes and with nothing lent, pinned or on its way.
"""

import asyncio
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import capnp

from tests.conftest import die_with_parent
from tests.guest import cables
from tests.integration import hosts
from tests.integration.daemons import (
    IS_INSIDE,
    RunningDaemon,
    attached,
    status,
    wait_for,
)
from tests.integration.disks import BLOCKS, PAGE, engine_options, load, save
from tests.integration.hosts import META_PORT, PORT, joined, nothing_left
from trikv.meta import serve as meta_serve
from trikv.nursery import serve

PROMPT_BYTES = BLOCKS * PAGE
PATIENCE_S = hosts.PATIENCE_S = 300.0
"""A guest whose processor is emulated takes its time."""
FILLERS = 9
"""Prompts that take a pool whole."""
RESTARTED = "b"
BEFORE = """
import os, trio
os.environ["TRIKV_SOCKET"] = {socket!r}
from trikv.core import pauses
from trikv.nursery import neighbours, owning
from trikv.tiers import rdma, verbs
verbs.BINDINGS = ({binding!r},)
neighbours.LOAN_S, neighbours.PAUSE_S_MAX = 30.0, 0.5
neighbours.CALL_S = neighbours.DIAL_S = 30.0
rdma.PIECE_BYTES, rdma.CHAIN_MAX = 64 << 10, 1
rdma.RdmaTransport.__init__.__kwdefaults__["pause_s"] = pauses.PAUSE_S_MAX = 1.0

ended = rdma.Lane.ended
async def gated(self):
    while os.path.exists({gate!r}):
        await trio.sleep(0.02)
    return await ended(self)
rdma.Lane.ended = gated

lend = owning.Owner.lend
async def brief(self, *args, ttl_s, **kwargs):
    is_lie = os.path.exists({lie!r})
    ttl_s = 6.0 if is_lie or os.path.exists({short!r}) else ttl_s
    lent = await lend(self, *args, ttl_s=ttl_s, **kwargs)
    return lent and (*lent[:2], lent[2] + 60 * is_lie)
owning.Owner.lend = brief
"""
"""Small pieces, so that a prompt is many reads.

While the file `gate` is there a reader that waits for reads stays as it is: in mid-transfer. While
`short` is there loans take 6 s; while `lie` is there too, and readers are told of a minute more.
"""


class Nodes:
    """Both nodes, `a` and `b`, and the metaserver."""

    def __init__(self, folder: Path, bindings: list[str]) -> None:
        self.folder = folder
        self.bindings = dict(zip("ab", bindings, strict=True))
        self.gate, self.again = folder / "gate", folder / "again"
        self.short, self.lie = folder / "short", folder / "lie"
        self.secret = ("--cluster-secret-file", str(folder / "secret"))
        (folder / "secret").write_text("a secret of this test's cluster\n")
        self.meta = f"{cables.META_HOST}:{META_PORT}"
        flags = [*("--addr", self.meta, "--http-addr", "off", "--memory", "8mb"), *self.secret]
        forked(meta_serve.main, flags, folder / "meta.log")
        self.daemons = {side: self._fork(side, side) for side in "ab"}
        self.spare = self._fork(RESTARTED, "spare", until=self.again)
        for side in "ab":
            self._wait_ready(side)

    def _fork(self, side: str, name: str, until: Path | None = None) -> RunningDaemon:
        folder, binding = self.folder / name, self.bindings[side]
        socket, log = folder / "trikv.sock", folder / "log"
        folder.mkdir()
        nics = ",".join(cables.nic_of(side, rail) for rail in range(cables.RAILS))
        flags = [
            *("--addr", f"{cables.host_of(side)}:{PORT}", "--metaserver-addr", self.meta),
            *("--nics", nics, "--pool-size", "16mb", "--slab-size", "1mb", "--http-addr", "off"),
            *("--heartbeat-seconds", str(PATIENCE_S), *self.secret),
        ]
        before = BEFORE.format(
            binding=binding,
            socket=str(socket),
            gate=str(self.gate),
            short=str(self.short),
            lie=str(self.lie),
        )
        child = forked(serve.main, flags, log, before, until)
        return RunningDaemon(child, socket, log)  # type: ignore[arg-type]

    def _wait_ready(self, side: str) -> None:
        log, until_s = self[side].log, time.monotonic() + PATIENCE_S
        while not (log.exists() and '"daemon.ready"' in log.read_text()):
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def start_again(self) -> None:
        """A node at the address of one that has died."""
        self.daemons[RESTARTED] = self.spare
        self.again.touch()
        self._wait_ready(RESTARTED)

    def __getitem__(self, side: str) -> RunningDaemon:
        return self.daemons[side]

    async def save(self, side: str, *names: object) -> None:
        async with attached(self[side].address, **engine_options()) as engine:
            for name in names:
                await save(engine, name)

    async def load(self, side: str, name: object) -> int:
        """Load a prompt; all bytes that come are compared. Returns how many blocks."""
        async with attached(self[side].address, **engine_options()) as engine:
            return await load(engine, name)

    async def hit(self, side: str, name: object) -> None:
        """Ask again and again, as engines do, until all of a prompt is hit."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.load(side, name) < BLOCKS:  # noqa: ASYNC110  # another process
                await asyncio.sleep(0.2)

    async def moved(self, side: str) -> tuple[int, int]:
        """Bytes that came to a node by RDMA and by TCP."""
        peers = (await status(self[side].address))["cluster"]["peers"]
        return sum(one["rdmaBytes"] for one in peers), sum(one["tcpBytes"] for one in peers)

    async def joined(self) -> None:
        """Wait until the metaserver knows what the nodes hold."""
        await joined(*self.daemons.values())

    async def nothing_left(self, *sides: str) -> None:
        await nothing_left(*(self[side] for side in sides))

    async def in_mid_transfer(self, reader: str, owner: str, name: object) -> asyncio.Task[int]:
        """A load whose first reads have ended, while the reader does not know it yet."""
        self.gate.touch()
        before = cables.packets(owner)
        loading = asyncio.create_task(self.load(reader, name))
        await wait_for(self[owner].address, is_lending, PATIENCE_S)
        async with asyncio.timeout(PATIENCE_S):
            while cables.packets(owner) == before:  # noqa: ASYNC110  # the kernel tells nobody
                await asyncio.sleep(0.02)
        return loading


class Forked:
    """A child, as far as it is like a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, _seconds: float) -> int:
        _, code = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(code)


def forked(
    main: Callable[[], None],
    flags: list[str],
    log: Path,
    before: str = "",
    until: Path | None = None,
) -> Forked:
    """Run a program's entry point in a child that dies with us, once a file is there.

    Children have imported all of it already: to do that takes this machine ten seconds.
    """
    if pid := os.fork():
        return Forked(pid)
    code = 1
    try:
        die_with_parent()
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        while until is not None and not until.exists():
            time.sleep(0.05)
        sys.argv = [main.__module__, *flags]
        exec(before, {})
        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001  # told, and the process ends
        traceback.print_exc()
    os._exit(code)


def is_lending(facts: dict[str, Any]) -> bool:
    return bool(facts["cluster"]["grantCount"])


def is_returned(facts: dict[str, Any]) -> bool:
    return not facts["cluster"]["grantCount"]


async def shares(nodes: Nodes, reader: str, owner: str) -> None:
    """What one node saves the other one hits, over RDMA alone."""
    await nodes.save(owner, f"from {owner}")
    await nodes.joined()
    binding, before = nodes.bindings[reader], cables.packets(owner)
    begin_s = time.monotonic()
    count = await nodes.load(reader, f"from {owner}")
    took_s = time.monotonic() - begin_s
    say(f"{reader} hits what {owner} saved, by {binding}: {took_s:.2f} s", count == BLOCKS)
    say("all bytes by RDMA", await nodes.moved(reader) == (PROMPT_BYTES, 0))
    sent = cables.packets(owner) - before
    say(f"the owner's NICs have sent {sent} packets", sent * 4096 >= PROMPT_BYTES)
    (peer,) = (await status(nodes[reader].address))["cluster"]["peers"]
    facts = peer["state"], peer["way"], peer["fetchedBlocks"]
    say("status says so", facts == ("serving", "rdma", BLOCKS))
    await nodes.nothing_left("a", "b")


async def unplugged(nodes: Nodes, reader: str, owner: str) -> None:
    """A rail that fails in mid-transfer: the other one, then TCP, then a miss, then all again."""
    names = [f"rails {reader} {at}" for at in range(5)]
    await nodes.save(owner, *names)
    await nodes.joined()
    rdma, tcp = await nodes.moved(reader)
    loading = await nodes.in_mid_transfer(reader, owner, names[0])
    cables.plug(0, "down")
    nodes.gate.unlink()
    begin_s = time.monotonic()
    say("one rail down in mid-transfer: a hit all the same", await loading == BLOCKS)
    now = await nodes.moved(reader)
    say("by the other rail", now == (rdma + PROMPT_BYTES, tcp))
    print(f"     {time.monotonic() - begin_s:.1f} s", flush=True)

    rdma, tcp = now
    loading = await nodes.in_mid_transfer(reader, owner, names[1])
    cables.plug(1, "down")
    nodes.gate.unlink()
    say("both rails down: a hit", await loading == BLOCKS)
    now = await nodes.moved(reader)
    say("the rest by TCP", now[0] < rdma + PROMPT_BYTES and sum(now) == rdma + tcp + PROMPT_BYTES)
    rdma, tcp = now
    say("then a hit", await nodes.load(reader, names[2]) == BLOCKS)
    say("by TCP alone", await nodes.moved(reader) == (rdma, tcp + PROMPT_BYTES))

    cables.plug(cables.TALK, "down")
    say("all cables unplugged: a miss", await nodes.load(reader, names[3]) == 0)
    for cable in (*range(cables.RAILS), cables.TALK):
        cables.plug(cable, "up")
    await nodes.hit(reader, names[3])
    say("plugged in again: a hit", True)  # noqa: FBT003
    await asyncio.sleep(1.5)  # as long as a rail is left alone
    rdma, _ = await nodes.moved(reader)
    await nodes.hit(reader, names[4])
    now, _ = await nodes.moved(reader)
    say("by RDMA", now == rdma + PROMPT_BYTES)
    await nodes.nothing_left("a", "b")


async def expired(nodes: Nodes, reader: str, owner: str, *, reads_too: bool) -> None:
    """A loan ends while its reader believes that it has more time, and reads on."""
    await nodes.save(owner, name := f"lent by {owner}")
    await nodes.joined()
    nodes.lie.touch()
    loading = await nodes.in_mid_transfer(reader, owner, name)
    await wait_for(nodes[owner].address, is_returned, PATIENCE_S)
    nodes.lie.unlink()
    if not reads_too:  # else it has queue pairs of its own
        say("pages are let go of after the queue pairs", cables.queue_pairs(owner) == 0)
    await nodes.save(owner, *(f"{owner} over it {at}" for at in range(FILLERS)))
    nodes.gate.unlink()
    say("a loan that expired in mid-transfer: a miss", await loading < BLOCKS)
    await nodes.nothing_left("a", "b")
    await refilled(nodes, reader, "expired")


async def frozen(nodes: Nodes, reader: str, owner: str) -> None:
    """A reader that was frozen wakes up after its loan: it posts nothing, and believes nothing."""
    await nodes.save(owner, "to the frozen")
    await nodes.joined()
    nodes.short.touch()
    loading = await nodes.in_mid_transfer(reader, owner, "to the frozen")
    nodes.short.unlink()
    nodes[reader].process.send_signal(signal.SIGSTOP)
    try:
        await wait_for(nodes[owner].address, is_returned, PATIENCE_S)
        await nodes.save(owner, *(f"{owner} meanwhile {at}" for at in range(FILLERS)))
        nodes.gate.unlink()
        before = cables.packets(owner)
    finally:
        nodes[reader].process.send_signal(signal.SIGCONT)
    say("a reader frozen in mid-transfer: a miss", await loading < BLOCKS)
    say("that reads nothing afterwards", cables.packets(owner) == before)
    await nodes.nothing_left("a", "b")
    await refilled(nodes, reader, "frozen")


async def refilled(nodes: Nodes, side: str, why: str) -> None:
    """Use each page of a pool for another prompt: nothing writes there any more."""
    names = [f"{side} after {why} {at}" for at in range(FILLERS)]
    await nodes.save(side, *names)
    await asyncio.sleep(0.5)
    found = [await nodes.load(side, name) for name in names[-4:]]
    say(f"its pages were not written later ({why})", found == [BLOCKS] * 4)


async def killed(nodes: Nodes, reader: str, owner: str) -> None:
    """The owner dies in mid-transfer, and is back at the same address."""
    await nodes.save(owner, "the last")
    await nodes.joined()
    loading = await nodes.in_mid_transfer(reader, owner, "the last")
    nodes[owner].end(signal.SIGKILL)
    nodes.gate.unlink()
    begin_s = time.monotonic()
    count = await loading
    say(f"an owner killed: a miss, {time.monotonic() - begin_s:.1f} s later", count < BLOCKS)
    await nodes.nothing_left(reader)
    await refilled(nodes, reader, "killed")
    nodes.start_again()
    await nodes.save(owner, "the next")
    await nodes.joined()
    rdma, _ = await nodes.moved(reader)
    await nodes.hit(reader, "the next")
    now, _ = await nodes.moved(reader)
    say("the owner is back, and so are hits by RDMA", now == rdma + PROMPT_BYTES)
    await nodes.nothing_left("a", "b")


async def stories(nodes: Nodes) -> None:
    await told("shares", shares(nodes, "b", "a"))
    await told("expired", expired(nodes, "b", "a", reads_too=False))
    await told("shares", shares(nodes, "a", "b"))
    await told("expired", expired(nodes, "a", "b", reads_too=True))
    await told("unplugged", unplugged(nodes, "b", "a"))
    await told("frozen", frozen(nodes, "b", "a"))
    await told("killed", killed(nodes, "a", RESTARTED))


async def told(name: str, story: Awaitable[None]) -> None:
    begin_s = time.monotonic()
    await story
    print(f"     {name} took {time.monotonic() - begin_s:.1f} s", flush=True)


def say(what: str, is_so: bool) -> None:  # noqa: FBT001
    print(f"{'ok  ' if is_so else 'FAIL'} {what}", flush=True)
    failed.extend([] if is_so else [what])


failed: list[str] = []


def main(bindings: list[str]) -> None:
    begin_s = time.monotonic()
    cables.lay()
    nodes = Nodes(folder := Path(tempfile.mkdtemp()), bindings)
    print(f"     two nodes and a metaserver: {time.monotonic() - begin_s:.1f} s", flush=True)

    async def all_of_them() -> None:
        async with capnp.kj_loop():
            IS_INSIDE.set(True)
            await stories(nodes)

    try:
        asyncio.run(all_of_them())
        for side in "ab":
            log = nodes[side].log
            say(f"{side} ends well", nodes[side].end() == 0 and "Traceback" not in log.read_text())
            say("and leaves no queue pair", cables.queue_pairs(side) == 0)
    except BaseException:
        for log in sorted((*folder.glob("*.log"), *folder.glob("*/log"))):
            print(log, "\n".join(log.read_text().splitlines()[-200:]), sep="\n", flush=True)
        raise
    print("all checks hold" if not failed else f"failed: {failed}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    os.environ.setdefault("HOME", "/tmp")
    main(sys.argv[1:])
