"""What the settings say about other hosts.

Decided here: which address makes a node, and without what none starts.
"""

from dataclasses import dataclass
from typing import Final

from trikv.address import Address
from trikv.config import Settings
from trikv.core.proofs import Secret
from trikv.meta.settings import load_secret, read_tcp
from trikv.options import SettingError
from trikv.tiers.nics import NicFacts, list_nics

AUTO: Final = "auto"
OFF: Final = "off"
VERIFY: Final = {"off": 0, "sample": 16, "always": 1}


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """One node of a cluster.

    Attributes:
        address: by which others reach it.
        metas: the metaservers.
        nics: for RDMA, in the order of rails.
        must_have_nics: they were named, so none may be missing.
        verify_every: of so many loans over RDMA one has its sums compared; 0: none.
        ssd_fraction: of the pool, for blocks that are read from disks for others.
    """

    address: Address
    metas: tuple[Address, ...]
    secret: Secret | None
    data_port: int
    nics: tuple[NicFacts, ...]
    must_have_nics: bool
    verify_every: int = 0
    ssd_fraction: float = 0.0


def peers_of(settings: Settings) -> PeerPlan | None:
    """What the settings say about other hosts; None: nothing.

    Raises:
        SettingError: they contradict each other, or would let strangers read.
    """
    if not settings.metaserver_addr:
        for name in ("cluster_secret_file", "insecure", "peer_data_port"):
            if getattr(settings, name):
                raise SettingError(f"--{name.replace('_', '-')}: needs --metaserver-addr")
        return None
    if settings.addr is None or settings.addr.startswith(("/", "unix:")):
        raise SettingError(
            "--metaserver-addr: needs --addr host:port, by which other hosts reach this one"
        )
    address = read_tcp(settings.addr, "--addr")
    if address.is_wildcard or address.port == 0:
        raise SettingError(f"--addr {address}: other hosts cannot dial it: name this host and port")
    if address.is_loopback and not settings.insecure:
        raise SettingError(
            f"--addr {address}: other hosts cannot reach it: name a routable address "
            "(--insecure allows it, for trials on one host)"
        )
    secret = load_secret(settings.cluster_secret_file)
    if secret is None and not settings.insecure:
        raise SettingError(
            f"--addr {address}: other machines can reach it: give --cluster-secret-file, "
            "or --insecure where the network is yours alone"
        )
    metas = tuple(read_tcp(one, "--metaserver-addr") for one in settings.metaserver_addr)
    names = () if settings.nics in {(AUTO,), (OFF,)} else settings.nics
    try:
        nics = [] if settings.nics == (OFF,) else list_nics(names=names)
    except ValueError as error:
        raise SettingError(f"--nics: {error}") from None
    return PeerPlan(
        address,
        metas,
        secret,
        settings.peer_data_port,
        tuple(nics),
        bool(names),
        VERIFY[settings.verify_peer],
        settings.peer_ssd_fraction,
    )


def engines_addr(settings: Settings) -> str | None:
    """Where engines are served: as told, but for nodes, whose `--addr` is for other hosts."""
    return None if settings.metaserver_addr else settings.addr
