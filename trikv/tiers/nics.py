"""Which RDMA NICs this host has, from sysfs alone: no library is loaded to find that there is none.

Decided here: which port of a NIC is used, by which address, and in which order NICs are rails. The
order must be the same on all hosts of a fabric of rails: by name, numbers as numbers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trikv.core.rails import RAILS_MAX, Gid, choose_gid

SYSFS: Final = Path("/sys/class/infiniband")
ANY_NODE: Final = -1
DOWN: Final = ("down", "lowerlayerdown", "notpresent")
"""States of a network device that carries nothing; software devices are `unknown`."""


@dataclass(frozen=True, slots=True)
class NicFacts:
    """One NIC that can be used.

    Attributes:
        node: the NUMA node near it, or `ANY_NODE`.
        gid: by which its port is named.
    """

    name: str
    port: int
    node: int
    gid: Gid
    is_ib: bool


def list_nics(
    root: Path = SYSFS, *, names: Sequence[str] = (), gid_index: int | None = None
) -> list[NicFacts]:
    """The NICs to use as rails, at most `RAILS_MAX`; empty on a machine without any.

    Args:
        root: where the kernel lists them.
        names: which, in which order; empty: all that have a port that is up.
        gid_index: of each NIC's table, instead of the best one.

    Raises:
        ValueError: a NIC that was named cannot be used; one line says why.
    """
    if names:
        return [_facts(root / name, gid_index) for name in names]
    found = []
    for path in (
        sorted(root.iterdir(), key=lambda path: _natural(path.name)) if root.is_dir() else []
    ):
        try:
            found.append(_facts(path, gid_index))
        except ValueError:  # a port that is down, or has no address
            continue
    return found[:RAILS_MAX]


def _facts(path: Path, gid_index: int | None) -> NicFacts:
    if not path.is_dir():
        raise ValueError(f"there is no RDMA NIC {path.name!r}")
    reason = f"no port of RDMA NIC {path.name!r} is up"
    for port in sorted(path.glob("ports/*"), key=lambda port: _natural(port.name)):
        if not _read(port / "state").endswith("ACTIVE"):
            continue
        is_ib = _read(port / "link_layer") == "InfiniBand"
        gid = choose_gid(_gids(path, port), is_ib=is_ib, wanted=gid_index)
        if gid is None:
            reason = f"RDMA NIC {path.name!r} has no address of RoCE v2"
            continue
        node = _read(path / "device/numa_node")
        near = int(node) if node.lstrip("-").isdigit() else ANY_NODE
        return NicFacts(path.name, int(port.name), near, gid, is_ib)
    raise ValueError(reason)


def _gids(nic: Path, port: Path) -> list[Gid]:
    table = []
    for path in sorted(port.glob("gids/*"), key=lambda path: _natural(path.name)):
        try:
            gid = bytes.fromhex(_read(path).replace(":", ""))
        except ValueError:
            continue
        if any(gid):  # an entry that is set
            kind = _read(port / "gid_attrs/types" / path.name)
            device = _read(port / "gid_attrs/ndevs" / path.name)
            state = _read(nic.parent.parent / "net" / device / "operstate") if device else ""
            table.append(Gid(int(path.name), kind, gid, state not in DOWN))
    return table


def _read(path: Path) -> str:
    """A line of sysfs; empty where it says nothing (an entry that is not set is an error there)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
