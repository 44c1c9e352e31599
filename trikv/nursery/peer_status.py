"""What a daemon says about other hosts, in `status`.

Decided here: which nodes are shown: those that something is fetched from or lent to, busiest first.
Changes nothing.
"""

from typing import Any, Final

from trikv.nursery.peering import Peering

PEERS_SHOWN: Final = 64


def write_cluster(cluster: Any, peering: Peering) -> None:
    """Fill in `ClusterStatus`."""
    owner, fetching = peering.owner, peering.fetching
    cluster.address = str(peering.plan.address)
    cluster.grantCount = owner.lending.grants.count
    cluster.grantedBytes = owner.lending.grants.bytes
    cluster.fetchCount = fetching.parts
    cluster.isOpen = peering.plan.secret is None
    cluster.railCount = owner.rail_count
    cluster.unfencedBytes = peering.remote.unfenced_bytes
    cluster.liftedBytes = peering.lifting.bytes
    cluster.liftedLentBytes = peering.lifting.lent_bytes_total
    metas = peering.client.facts()
    for row, meta in zip(cluster.init("metas", len(metas)), metas, strict=True):
        row.address, row.state, row.nodeCount = meta.address, meta.state, meta.node_count
        row.waitingBlocks, row.announcedCount = meta.waiting_blocks, meta.announced_total
    names = addresses(peering)
    for row, name in zip(cluster.init("peers", len(names)), names, strict=True):
        row.address = name
        row.lentBytes = owner.lent_bytes.get(name, 0)
        row.grantCount = owner.grants_of(name)
        row.state = "borrows"
        one = fetching.neighbours.get(name)
        if one is not None:
            row.state, row.way = one.state, one.way
            row.fetchedBytes, row.fetchedBlocks = one.fetched_bytes, one.fetched_blocks
            row.failedBlocks = one.failed_blocks
            row.rdmaBytes = one.moved.by_way.get("rdma", 0)
            row.tcpBytes = one.moved.by_way.get("tcp", 0)


def addresses(peering: Peering) -> list[str]:
    """Nodes that something was fetched from or lent to, most bytes first."""
    lent, found = peering.owner.lent_bytes, peering.fetching.neighbours
    moved = dict(lent)
    for name, one in found.items():
        moved[name] = moved.get(name, 0) + one.fetched_bytes
    return sorted(moved, key=lambda name: (-moved[name], name))[:PEERS_SHOWN]
