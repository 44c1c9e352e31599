"""The families of `/metrics` about other hosts.

Decided here: names and labels, as in `metrics.py`; `peer` has the addresses of the few busiest
nodes, `meta` those that were set. Without metaservers all of them are empty.
"""

from typing import Final

from trikv.nursery.peer_status import addresses
from trikv.nursery.peering import Peering
from trikv.process.pages import Family, Rows

PEERS_SHOWN: Final = 16
PEER: Final = ("peer",)
META: Final = ("meta",)
WAY: Final = ("way",)
WAYS: Final = ("rdma", "tcp")

FAMILIES: Final = {
    "trikv_meta_joined": Family("1 while this node has joined the metaserver", META),
    "trikv_meta_nodes": Family("Nodes that the metaserver knows", META),
    "trikv_meta_waiting_blocks": Family("Changes that it has not been told", META),
    "trikv_meta_announced_total": Family("Times that everything was announced", META),
    "trikv_peer_fetched_bytes_total": Family("Bytes of blocks that came from the node", PEER),
    "trikv_peer_fetched_blocks_total": Family("These blocks", PEER),
    "trikv_peer_failed_blocks_total": Family("Blocks that were to come and did not", PEER),
    "trikv_peer_lent_bytes_total": Family("Bytes of blocks lent to the node", PEER),
    "trikv_peer_searches_total": Family("Requests whose blocks were looked for at other nodes"),
    "trikv_peer_found_blocks_total": Family("Blocks that somebody was said to have"),
    "trikv_peer_wrong_blocks_total": Family("Blocks that came with another sum"),
    "trikv_peer_moved_bytes_total": Family("Bytes that came from nodes, believed or not", WAY),
    "trikv_peer_fetches": Family("Fetches under way"),
    "trikv_peer_grants": Family("Promises to other nodes"),
    "trikv_peer_granted_bytes": Family("Pages that they pin"),
    "trikv_peer_grant_expired_total": Family("Promises that ended by their time"),
    "trikv_peer_unfenced_bytes": Family("Pool that a NIC may write at any time: never used again"),
    "trikv_peer_lifted_bytes": Family("Pool for blocks that are read from SSDs for others"),
    "trikv_peer_lifted_lent_bytes_total": Family("Bytes lent after they were read from SSDs"),
    "trikv_peer_lifted_lent_blocks_total": Family("These blocks"),
    "trikv_peer_lifted_refused_blocks_total": Family("Were on an SSD, and not read: no room"),
    "trikv_peer_lifted_late_blocks_total": Family("Were not read in time for the loan"),
    "trikv_peer_refused_total": Family("Connections and proofs of others that were refused"),
    "trikv_peer_rpc_total": Family("Calls of other nodes that have ended", ("method", "outcome")),
}


def rows(peering: Peering | None) -> dict[str, Rows]:
    """The rows of all families."""
    if peering is None:
        return {name: [] for name in FAMILIES}
    owner, fetching, remote = peering.owner, peering.fetching, peering.remote
    grants, counters, lifting = owner.lending.grants, owner.counters, peering.lifting
    refused = counters.connection_refused_total + counters.proof_refused_total
    wrong = sum(one.wrong_blocks for one in fetching.neighbours.values())
    return _by_name(peering) | {
        "trikv_peer_searches_total": [((), remote.searched_total)],
        "trikv_peer_found_blocks_total": [((), remote.found_blocks_total)],
        "trikv_peer_wrong_blocks_total": [((), wrong)],
        "trikv_peer_moved_bytes_total": [((way,), fetching.moved_bytes(way)) for way in WAYS],
        "trikv_peer_fetches": [((), fetching.parts)],
        "trikv_peer_grants": [((), grants.count)],
        "trikv_peer_granted_bytes": [((), grants.bytes)],
        "trikv_peer_grant_expired_total": [((), owner.lending.expired_grants_total)],
        "trikv_peer_unfenced_bytes": [((), remote.unfenced_bytes)],
        "trikv_peer_lifted_bytes": [((), lifting.bytes)],
        "trikv_peer_lifted_lent_bytes_total": [((), lifting.lent_bytes_total)],
        "trikv_peer_lifted_lent_blocks_total": [((), lifting.lent_blocks_total)],
        "trikv_peer_lifted_refused_blocks_total": [((), lifting.refused_blocks_total)],
        "trikv_peer_lifted_late_blocks_total": [((), lifting.late_blocks_total)],
        "trikv_peer_refused_total": [((), refused)],
        "trikv_peer_rpc_total": peering.calls.rows(),
    }


def _by_name(peering: Peering) -> dict[str, Rows]:
    metas = [((one.address,), one) for one in peering.client.facts()]
    names = addresses(peering)[:PEERS_SHOWN]
    found, lent = peering.fetching.neighbours, peering.owner.lent_bytes
    near = [((name,), found[name]) for name in names if name in found]
    return {
        "trikv_meta_joined": [(name, one.state == "joined") for name, one in metas],
        "trikv_meta_nodes": [(name, one.node_count) for name, one in metas],
        "trikv_meta_waiting_blocks": [(name, one.waiting_blocks) for name, one in metas],
        "trikv_meta_announced_total": [(name, one.announced_total) for name, one in metas],
        "trikv_peer_fetched_bytes_total": [(name, one.fetched_bytes) for name, one in near],
        "trikv_peer_fetched_blocks_total": [(name, one.fetched_blocks) for name, one in near],
        "trikv_peer_failed_blocks_total": [(name, one.failed_blocks) for name, one in near],
        "trikv_peer_lent_bytes_total": [((name,), lent[name]) for name in names if name in lent],
    }
