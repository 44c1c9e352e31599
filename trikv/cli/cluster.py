"""The part of `trikv status` about other hosts.

Decided here: which lines a person sees; at most `PEERS_SHOWN` nodes, those with most bytes.
"""

from typing import Any, Final

from trikv.cli.texts import WIDTH, cut, size

Facts = dict[str, Any]
PEERS_SHOWN: Final = 8


def render_cluster(cluster: Facts) -> list[str]:
    """The lines; none for a daemon without metaservers."""
    if not cluster.get("address"):
        return []
    ways = f"{cluster['railCount']} NICs" if cluster["railCount"] else "tcp"
    door = ", without a secret" if cluster["isOpen"] else ""
    unfenced = cluster["unfencedBytes"]
    lost = f", {size(unfenced)} lost to NICs" if unfenced else ""
    peers = cluster.get("peers", [])
    lines = [
        f"node      {cluster['address']}, {ways}{door}, {cluster['fetchCount']} fetches, "
        f"{cluster['grantCount']} grants on {size(cluster['grantedBytes'])}{lost}"
    ]
    if cluster.get("liftedLentBytes"):  # of daemons before it was added there is none
        lines.append(f"          {size(cluster['liftedLentBytes'])} lent from SSDs")
    for row in cluster.get("metas", []):
        waiting = f", {row['waitingBlocks']} blocks to tell" if row["waitingBlocks"] else ""
        known = f", {row['nodeCount']} nodes" if row["nodeCount"] else ""
        lines.append(f"meta      {row['address']}, {row['state']}{known}{waiting}")
    for row in peers[:PEERS_SHOWN]:
        came, went = size(row["fetchedBytes"]), size(row["lentBytes"])
        failed = f", {row['failedBlocks']} blocks failed" if row["failedBlocks"] else ""
        way = f" by {row['way']}" if row.get("way") else ""  # of whom nothing was fetched
        lines.append(
            f"peer      {row['address']}, {came} in, {went} out{failed}, {row['state']}{way}"
        )
    more = len(peers) - PEERS_SHOWN
    if more > 0:
        lines.append(f"          and {more} more")
    return [cut(line, WIDTH) for line in lines]
