"""`trikv status`: fetches a daemon's facts and shows them to a person (80 columns) or a program.

Decided here: what a person sees first. This file does not know how the facts are made.
"""

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any

import capnp

from trikv import wire
from trikv.address import Address
from trikv.cli.ceiling import render_ceiling
from trikv.cli.cluster import render_cluster
from trikv.cli.texts import WIDTH, cut, end_of, indented, size, span

Facts = dict[str, Any]
MORE_BYTES = 200 << 30  # a point of the curve that is always there


class DaemonUnreachableError(Exception):
    """No daemon answered; the message is one line."""


def fetch_status(places: Sequence[Address], *, timeout_s: float) -> Facts:
    """Ask the first daemon that can be reached.

    Raises:
        DaemonUnreachableError: none of the places answered in time.
    """
    return asyncio.run(_fetch_first(places, timeout_s))


async def _fetch_first(places: Sequence[Address], timeout_s: float) -> Facts:
    async with capnp.kj_loop():
        reasons = []
        for place in places:
            try:
                async with asyncio.timeout(timeout_s):
                    facts = await _fetch(place)
            except TimeoutError:
                reasons.append(f"{place}: no answer within {timeout_s:g} s")
            except OSError as error:
                reasons.append(f"{place}: {error.strerror or error}")
            except capnp.KjException as error:
                reasons.append(f"{place}: {error.description.splitlines()[0]}")
            else:
                facts["addr"] = str(place)
                return facts
    raise DaemonUnreachableError("no daemon: " + "; ".join(reasons))


async def _fetch(place: Address) -> Facts:
    sock = socket.socket(place.family)
    sock.setblocking(False)  # noqa: FBT003  # takes no keyword
    try:
        await asyncio.get_running_loop().sock_connect(sock, place.target)
    except BaseException:
        sock.close()
        raise
    if place.is_unix:
        stream = await capnp.AsyncIoStream.create_unix_connection(sock=sock)
    else:
        stream = await capnp.AsyncIoStream.create_connection(sock=sock)
    client = capnp.TwoPartyClient(stream)
    try:
        reply = await client.bootstrap().cast_as(wire.SCHEMA.Kv).status()
        facts: Facts = reply.status.to_dict()
    finally:
        stream.close()
        client.close()
    facts["counters"] = {row["name"]: row["value"] for row in facts["counters"]}
    for namespace in facts["namespaces"]:
        namespace["fields"] = {row["name"]: row["value"] for row in namespace["fields"]}
    return facts


def print_json(facts: Facts) -> None:
    """Everything, as one JSON object."""
    print(json.dumps(facts, indent=2))


def print_table(facts: Facts) -> None:
    """What an operator looks at, in 80 columns."""
    print("\n".join(render(facts)))


def render(facts: Facts) -> list[str]:
    """The lines of the table."""
    pool, up = facts["pool"], span(facts["uptimeSeconds"])
    used, capacity = pool["usedBytes"], pool["capacityBytes"]
    free, each = f"{pool['slabFreeCount']} of {pool['slabCount']} free", size(pool["slabBytes"])
    lines = [
        f"{facts['software']} at {facts['addr']}, {facts['state']}, up {up}",
        "",
        f"pool      {size(used)} of {size(capacity)} used ({used / capacity:.0%}), "
        f"{pool['blockCount']} blocks, {pool['fillingCount']} filling, {pool['backing']}",
        *indented(pool.get("notice", "")),  # a daemon of an earlier version has none
        f"leases    {pool['leaseCount']} hold {size(pool['pinnedBytes'])}",
        f"slabs     {free}, {each} each",
        *_traffic(facts["counters"]),
        *_disks(facts.get("disks", [])),  # likewise
        *render_cluster(facts.get("cluster", {})),  # likewise
        *([f"metrics   {facts['http']}/metrics"] if facts["http"] else []),
        *render_ceiling(facts["windows"]),
        *_insight(facts),
    ]
    lines += ["", f"{'namespace':<10}{'blocks':>9}{'size':>11}{'engines':>9}  label"]
    for row in facts["namespaces"]:
        room, label = size(row["bytes"]), cut(row["label"], 39)
        lines.append(
            f"{row['fingerprint'][:8]:<10}{row['blockCount']:>9}{room:>11}"
            f"{row['engineCount']:>9}  {label}"
        )
    lines += _tenants(facts["tenants"])
    lines += ["", f"{'engine':<32}{'namespace':<11}{'ranks':<7}{'pages':<6}state"]
    for row in facts["engines"]:
        ranks = f"{row['ranksRegistered']}/{row['rankCount']}"
        pages = "+".join(map(str, row.get("pageCounts", [])))  # an earlier version's has none
        name, state = cut(row["name"], 31), cut(row["state"], 24)
        lines.append(f"{name:<32}{row['namespace'][:8]:<11}{ranks:<7}{pages:<6}{state}")
    return lines + _gpus(facts["copiers"])


def _gpus(copiers: list[Facts]) -> list[str]:
    """A line for each GPU that engines have registered."""
    if not copiers:
        return []
    lines = ["", f"{'GPU':<10}{'copier':<9}{'ended':>5}  name"]
    for row in copiers:
        pid = row["pid"] or "none"
        lines.append(f"{row['deviceUuid'][:8]:<10}{pid:<9}{row['endedCount']:>5}  {row['name']}")
    return lines


def _disks(disks: list[Facts]) -> list[str]:
    """Two lines for each disk; one that is off says why in one."""
    lines = []
    for row in disks:
        if row["state"].startswith("off"):
            lines.append(cut(f"ssd       {row['state']} ({row['path']})", WIDTH))
            continue
        used, capacity = row["usedBytes"], row["capacityBytes"]
        state, _, notice = row["state"].partition(": ")
        state = "" if state == "serving" else f", {state}"
        lines.append(
            f"ssd       {size(used)} of {size(capacity)} used ({used / capacity:.0%}), "
            f"{row['blockCount']} blocks{state}, {row['ring']}"
        )
        wrong = f", {row['wrongCount']} blocks wrong" if row["wrongCount"] else ""
        moved = f"{size(row['writtenBytes'])} written, {size(row['readBytes'])} read{wrong}"
        lines.append(f"          {moved} {end_of(row['path'], WIDTH - 11 - len(moved))}")
        lines += [cut(f"          {notice}", WIDTH)] if notice else []
    return lines


def _traffic(counters: dict[str, int]) -> list[str]:
    asked = counters["trikv_query_blocks_total"]
    hits = counters["trikv_query_hit_blocks_total"]
    rate = f"{hits / asked:.1%} of blocks asked for" if asked else "nothing asked yet"
    loaded, saved = (size(counters[f"trikv_{what}_bytes_total"]) for what in ("load", "save"))
    return [
        f"queries   {counters['trikv_query_total']}, hit rate {rate}",
        f"loads     {counters['trikv_load_blocks_total']} blocks ({loaded}), "
        f"{counters['trikv_load_failed_blocks_total']} failed",
        f"saves     {counters['trikv_save_blocks_total']} blocks ({saved}), "
        f"{counters['trikv_save_present_blocks_total']} were there, "
        f"{counters['trikv_save_refused_blocks_total']} refused",
        f"evicted   {counters['trikv_evicted_blocks_total']} blocks",
    ]


def _tenants(rows: list[Facts]) -> list[str]:
    """Who has how much, with quotas."""
    if not rows:
        return []
    lines = ["", f"{'tenant':<38}{'used':>12}{'floor':>12}{'share':>12}"]
    for row in rows:
        used, floor, share = (size(row[f"{what}Bytes"]) for what in ("used", "floor", "share"))
        name = cut(row["name"] or "(no name)", 37)
        lines.append(f"{name:<38}{used:>12}{floor:>12}{share:>12}")
        if row.get("ssdUsedBytes"):  # a daemon of an earlier version says nothing of disks
            sizes = (size(row[f"ssd{what}Bytes"]) for what in ("Used", "Floor", "Share"))
            lines.append(f"{'  on SSD':<38}" + "".join(f"{one:>12}" for one in sizes))
    return lines


def _insight(facts: Facts) -> list[str]:
    """What other sizes and orders of eviction would give."""
    pool_bytes = facts["pool"]["capacityBytes"]
    points = {row["capacityBytes"]: row["hitRate"] for row in facts["curve"]}
    if pool_bytes not in points:
        return []
    now = points[pool_bytes]
    shown = [f"{size / pool_bytes:g}x {points[size]:.1%}" for size in sorted(points)]
    more = points.get(pool_bytes + MORE_BYTES)
    lines = ["", "sizes     estimated hit rate by size of the pool, of the last hours:"]
    lines += ["          " + ", ".join(shown[at : at + 4]) for at in range(0, len(shown), 4)]
    if more is not None:
        lines.append(f"          +200 GiB would give {100 * (more - now):+.1f} %")
    if facts["shadows"]:
        told = {row["policy"]: row["hitRate"] for row in facts["shadows"]}
        shown = [f"{name.removesuffix('-lru')} {rate:.1%}" for name, rate in told.items()]
        lines.append("orders    " + ", ".join(shown))
    return lines
