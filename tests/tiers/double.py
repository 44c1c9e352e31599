"""Builds and loads the double of libibverbs in `tests/double`, and rigs of two ends on it."""

import ctypes
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tests.tiers.peers import MIB, Memory, landing_pool, owner_pool
from trikv.core.banks import Banks
from trikv.core.words import PeerId
from trikv.tiers import verbs
from trikv.tiers.nics import list_nics
from trikv.tiers.peer import PeerLostError
from trikv.tiers.rails import Rails, open_rails
from trikv.tiers.rdma import RdmaTransport
from trikv.tiers.rdmaowner import RdmaOwner

ROOT = Path(__file__).resolve().parents[2]
SLAB_BYTES = 2 * MIB
PEER = PeerId(1)
SETTINGS = ("delay_us", "fail_in", "fail_status", "reorder", "mute", "sync", "nocopy", "join_fails")


class Double:
    """The loaded library; `set` and `get` as in its source."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._library.fake_get.restype = ctypes.c_long
        self._library.fake_set.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_long)

    def set(self, number: int, **settings: int) -> None:
        for name, value in settings.items():
            self._library.fake_set(number, name.encode(), value)

    def get(self, what: str, number: int = 0) -> int:
        return int(self._library.fake_get(number, what.encode()))

    def reset(self) -> None:
        for number in range(8):
            self.set(number, **dict.fromkeys(SETTINGS, 0))
        self.set(0, devices=2, destroy_fails=0)

    @property
    def alive(self) -> dict[str, int]:
        return {what: self.get(what) for what in ("pairs", "regions", "cqs", "channels")}


def build(folder: Path) -> Path:
    """Compile it, with what the distribution must give; one clear line when it cannot be had."""
    subprocess.run([str(ROOT / "tools/packages.sh"), "double"], check=True)
    library = folder / "libibverbs.so.1"
    subprocess.run(
        [
            *("gcc", "-O2", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"),
            *("-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", "-o", str(library)),
            *(str(ROOT / "tests/double/fakeverbs.c"), "-lpthread"),
        ],
        check=True,
    )
    return library


def write_sysfs(root: Path, count: int, *, nodes: tuple[int, ...] = ()) -> Path:
    """What the kernel tells of the double's devices."""
    for number in range(count):
        nic = root / "infiniband" / f"fake{number}"
        port = nic / "ports/1"
        for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / name).mkdir(parents=True, exist_ok=True)
        (nic / "device").mkdir(exist_ok=True)
        node = nodes[number] if nodes else -1
        (nic / "device/numa_node").write_text(f"{node}\n")
        (port / "state").write_text("4: ACTIVE\n")
        (port / "link_layer").write_text("Ethernet\n")
        local = "fe80:0000:0000:0000:0000:0000:0000:0001"
        mapped = f"0000:0000:0000:0000:0000:ffff:0a00:{number:02x}01"
        for index, (kind, gid) in enumerate((("IB/RoCE v1", local), ("RoCE v2", mapped))):
            (port / "gids" / str(index)).write_text(f"{gid}\n")
            (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
    return root / "infiniband"


@dataclass(eq=False)
class Ends:
    """An owner and a reader, with one pool each, on the same devices."""

    source: Memory
    pool: Memory
    near: Rails
    far: Rails
    owner: RdmaOwner
    transport: RdmaTransport
    dials: list[int] = field(default_factory=list)
    is_lost: bool = False
    peer: PeerId = PEER


@asynccontextmanager
async def ends(
    root: Path,
    *,
    near: int | None = None,
    far: int | None = None,
    size: int = 32 * MIB,
    pause_s: float = 3_600,
    node: int = -1,
) -> AsyncIterator[Ends]:
    """Both ends, `near` and `far` saying how many of the devices each has."""
    nics = list_nics(root)
    open_nic = verbs.load("ibverbs")

    async def rails(pool: Memory, count: int | None) -> Rails:
        facts = {"address": pool.address, "size": len(pool.memory), "slab_bytes": SLAB_BYTES}
        return await open_rails(open_nic, nics[:count], **facts, banks=Banks(((0, node),), 0, 1))

    source, pool = owner_pool(size), landing_pool(size)
    far_rails, near_rails = await rails(source, far), await rails(pool, near)
    owner = RdmaOwner(far_rails)

    async def dial(offer: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        made.dials.append(len(offer))
        if made.is_lost:
            raise PeerLostError
        return made.owner.connect(made.peer, offer)

    transport = RdmaTransport(near_rails, len(far_rails.rails), dial, pause_s=pause_s)
    made = Ends(source, pool, near_rails, far_rails, owner, transport)
    try:
        yield made
    finally:
        await made.transport.aclose()
        made.owner.close()
        near_rails.close()
        far_rails.close()
