"""Hosts of a cluster: network namespaces on one switch, with a daemon or a metaserver in each."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Start
from tests.integration.daemons import RunningDaemon, start_daemon, wait_for
from tests.meta.metas import RunningMeta, start_meta

PORT = 50055
META_PORT = 50056
PATIENCE_S = 60.0
SECRET = "a secret of this test's cluster\n"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass
class Host:
    """One namespace with an address of its own."""

    space: str
    address: str
    folder: Path

    @property
    def within(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.space)

    def slow(self, rate: str = "8mbit") -> None:
        """From now on so much leaves this host and no more."""
        command = ["tc", "-n", self.space, "qdisc", "replace", "dev", "eth0", "root", "tbf"]
        command += ["rate", rate, "burst", "32kb", "latency", "400ms"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"tc cannot make a link slow here: {made.stderr.strip()}")

    def fast(self) -> None:
        """As fast as it was."""
        subprocess.run(["tc", "-n", self.space, "qdisc", "del", "dev", "eth0", "root"], check=True)

    def link(self, state: str) -> None:
        """Plug the cable in (`up`) or out (`down`)."""
        ip("-n", self.space, "link", "set", "eth0", state)


@dataclass
class Cluster:
    """All hosts of one test; made as they are asked for."""

    start: Start
    folder: Path
    name: str
    hosts: list[Host] = field(default_factory=list)
    metas: list[str] = field(default_factory=list)
    at: dict[int, Host] = field(default_factory=dict)  # by process

    @property
    def switch(self) -> str:
        return f"{self.name}-sw"

    @property
    def secret(self) -> Path:
        path = self.folder / "secret"
        path.write_text(SECRET)
        return path

    def host(self) -> Host:
        number = len(self.hosts) + 1
        host = Host(f"{self.name}-{number}", f"10.78.0.{number}", self.folder / f"host{number}")
        host.folder.mkdir()
        self.hosts.append(host)
        port = f"port{number}"
        ip("netns", "add", host.space)
        ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0",
           "netns", host.space)  # fmt: skip
        ip("-n", self.switch, "link", "set", port, "master", "br0", "up")
        ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
        ip("-n", host.space, "link", "set", "eth0", "up")
        ip("-n", host.space, "link", "set", "lo", "up")
        return host

    def meta(self, host: Host | None = None) -> RunningMeta:
        """Start a metaserver, at a host of its own or at one again; later daemons know it."""
        host = host or self.host()
        address = f"{host.address}:{META_PORT}"
        if address not in self.metas:
            self.metas.append(address)
        secret = ("--cluster-secret-file", str(self.secret))
        return start_meta(self.start, host.folder, "--addr", address, *secret, within=host.within)

    def daemon(self, *arguments: str, host: Host | None = None, **more: Any) -> RunningDaemon:
        """Start a daemon that knows all metaservers so far."""
        host = host or self.host()
        metas = [part for one in self.metas for part in ("--metaserver-addr", one)]
        made = start_daemon(
            self.start, host.folder, "--addr", f"{host.address}:{PORT}", *metas,
            "--cluster-secret-file", str(self.secret), *arguments, within=host.within,
            TRIKV_SOCKET=str(host.folder / "run" / "trikv.sock"), **more,
        )  # fmt: skip
        self.at[made.process.pid] = host
        return made

    def host_of(self, daemon: RunningDaemon) -> Host:
        return self.at[daemon.process.pid]


@contextlib.contextmanager
def cluster(start: Start, folder: Path) -> Iterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("only root makes network namespaces")
    made = Cluster(start, folder, f"tk{os.getpid()}")
    try:
        ip("netns", "add", made.switch)
        ip("-n", made.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", made.switch, "link", "set", "br0", "up")
        yield made
    finally:
        for space in (*(host.space for host in made.hosts), made.switch):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", space)


async def joined(*daemons: RunningDaemon) -> None:
    """Wait until all metaservers know all of these, and what they hold."""

    def is_known(facts: dict[str, Any]) -> bool:
        metas = facts["cluster"]["metas"]
        return all(
            one["state"] == "joined"
            and one["nodeCount"] >= len(daemons)
            and one["announcedCount"] > 0
            and one["waitingBlocks"] == 0
            for one in metas
        )

    for daemon in daemons:
        await wait_for(daemon.address, is_known, PATIENCE_S)


async def under_way(reader: RunningDaemon, owner: RunningDaemon) -> None:
    """Wait until the owner sends blocks to the reader."""
    await wait_for(owner.address, lambda facts: facts["cluster"]["grantCount"] > 0, PATIENCE_S)
    await wait_for(reader.address, lambda facts: facts["cluster"]["fetchCount"] > 0, PATIENCE_S)


async def nothing_left(*daemons: RunningDaemon) -> None:
    """Wait until nothing is lent, pinned, filling or under way."""

    def is_quiet(facts: dict[str, Any]) -> bool:
        cluster, pool = facts["cluster"], facts["pool"]
        return (
            cluster["grantCount"] == 0
            and cluster["grantedBytes"] == 0
            and cluster["fetchCount"] == 0
            and cluster["unfencedBytes"] == 0
            and pool["fillingCount"] == 0
        )

    for daemon in daemons:
        await wait_for(daemon.address, is_quiet, PATIENCE_S)
