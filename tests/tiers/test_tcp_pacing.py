"""Which congestion control the owner's ends of data streams have; a real kernel's."""

import socket
from pathlib import Path

import pytest

from tests.tiers.peers import MIB, fetch_of, rows
from tests.tiers.test_tcp import rig
from trikv.tiers import tcp, tcpowner
from trikv.tiers.peer import Outcome


def name_of(sock: socket.socket) -> bytes:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0")[0]


def usual_and_others() -> tuple[bytes, list[bytes]]:
    """The host's congestion control, and what else a process without rights may choose."""
    with socket.socket() as one:
        usual = name_of(one)
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    names = path.read_text().encode().split()
    return usual, [name for name in names if name not in {usual, b"bbr"}]


async def names_of_streams(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Of the owner's ends, once a fetch has come."""
    found: set[bytes] = set()

    def note(sock: socket.socket) -> None:
        found.add(name_of(sock))
        tcp.tick(sock)

    monkeypatch.setattr(tcpowner, "tick", note)
    async with rig(MIB) as world:
        runs = rows(world.pool, (0, 0, MIB))
        await world.transport.fetch(fetch := fetch_of(runs, world.lend(runs)))
        assert fetch.outcome.tolist() == [Outcome.ARRIVED]
    return found


async def test_streams_are_not_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, others = usual_and_others()
    if not others:
        pytest.skip("the host allows one congestion control only")
    monkeypatch.setattr(tcpowner, "PACED", usual)
    monkeypatch.setattr(tcpowner, "UNPACED", (b"none-such", others[0]))
    assert await names_of_streams(monkeypatch) == {others[0]}
    monkeypatch.setattr(tcpowner, "UNPACED", (b"none-such",))  # then as the host has it
    assert await names_of_streams(monkeypatch) == {usual}


async def test_a_host_that_does_not_pace_keeps_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, others = usual_and_others()
    if not others:
        pytest.skip("the host allows one congestion control only")
    monkeypatch.setattr(tcpowner, "PACED", b"none-such")
    monkeypatch.setattr(tcpowner, "UNPACED", (others[0],))
    assert await names_of_streams(monkeypatch) == {usual}
