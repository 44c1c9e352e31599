"""Two nodes on one kernel: veth cables between them with a Soft-RoCE NIC at each end.

Soft-RoCE lives in the first network namespace only, so both nodes do. Rules of routing send what
one node tells the other's addresses out of its own end of a cable and in at the far one, which the
kernel would else short-cut; so a cable that is unplugged carries nothing, of TCP and of RDMA.
"""

import subprocess
from pathlib import Path

RAILS = 2
TALK = 9
"""The cable for calls and TCP; those of rails are 0, 1, ..."""
META_HOST = "10.99.0.1"
TABLE, BEFORE_LOCAL, LOCAL = "100", "10", "20"


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def host_of(side: str, cable: int = TALK) -> str:
    return f"10.77.{cable}.{'ab'.index(side) + 1}"


def nic_of(side: str, rail: int) -> str:
    return f"rx{side}{rail}"


def lay() -> None:
    """Lay all cables."""
    run("ip", "addr", "add", f"{META_HOST}/32", "dev", "lo")
    rule = ("ip", "rule", "add", "pref")
    run(*rule, BEFORE_LOCAL, "iif", "lo", "to", "10.77.0.0/16", "lookup", TABLE)
    run(*rule, LOCAL, "lookup", "local")
    run("ip", "rule", "del", "pref", "0")
    run("ip", "route", "add", "blackhole", "10.77.0.0/16", "table", TABLE)
    for cable in (*range(RAILS), TALK):
        a, b = f"a{cable}", f"b{cable}"
        run("ip", "link", "add", a, "mtu", "9000", "type", "veth", "peer", "name", b, "mtu", "9000")
        for side in "ab":
            end, conf = f"{side}{cable}", Path(f"/proc/sys/net/ipv4/conf/{side}{cable}")
            (conf / "accept_local").write_text("1")
            (conf / "rp_filter").write_text("0")
            run("ip", "addr", "add", f"{host_of(side, cable)}/24", "dev", end)
        plug(cable, "up")
        for side in "ab" if cable != TALK else "":
            nic = nic_of(side, cable)
            run("rdma", "link", "add", nic, "type", "rxe", "netdev", f"{side}{cable}")


def plug(cable: int, state: str) -> None:
    """Plug both ends of a cable in (`up`) or out (`down`)."""
    for side in "ab":
        run("ip", "link", "set", f"{side}{cable}", state)
    for side, other in ("ab", "ba") if state == "up" else ():
        end, there = f"{side}{cable}", host_of(other, cable)
        here, mac = host_of(side, cable), Path(f"/sys/class/net/{other}{cable}/address")
        run("ip", "route", "replace", there, "dev", end, "src", here, "table", TABLE)
        run("ip", "neigh", "replace", there, "lladdr", mac.read_text().strip(), "dev", end)


def packets(side: str) -> int:
    """What all of a side's NICs have sent, as the kernel counts."""
    nics = [nic_of(side, rail) for rail in range(RAILS)]
    root = Path("/sys/class/infiniband")
    return sum(int((root / nic / "ports/1/hw_counters/sent_pkts").read_text()) for nic in nics)


def queue_pairs(side: str) -> int:
    """How many a side's NICs have for programs, as the kernel counts."""
    show = ("rdma", "resource", "show", "qp", "link")
    told = [run(*show, f"{nic_of(side, rail)}/1") for rail in range(RAILS)]
    return sum(text.count(" type RC ") for text in told)
