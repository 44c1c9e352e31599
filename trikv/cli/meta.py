"""`trikv meta status`: what a metaserver knows, for a person (80 columns) or a program.

Decided here: what a person sees first. This file does not know how the facts are made.
"""

import argparse
import asyncio
import json
import os
from typing import Any

import capnp

from trikv.address import Address
from trikv.cli.status import DaemonUnreachableError
from trikv.cli.texts import cut, size, span
from trikv.core.proofs import Secret
from trikv.meta.link import Link, MetaError, dial
from trikv.meta.messages import TOOL
from trikv.meta.settings import PORT, load_secret, read_tcp

Facts = dict[str, Any]


def add_meta_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `trikv meta`."""
    commands = parser.add_subparsers(dest="meta_command", required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="nodes, entries, counters")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    status.add_argument(
        "--addr",
        default=os.environ.get("TRIKV_META_ADDR") or f"127.0.0.1:{PORT}",
        help=f"host:port of the metaserver; default: TRIKV_META_ADDR, 127.0.0.1:{PORT}",
    )
    status.add_argument(
        "--cluster-secret-file",
        default=os.environ.get("TRIKV_META_CLUSTER_SECRET_FILE") or None,
        metavar="FILE",
        help="the cluster's secret; default: TRIKV_META_CLUSTER_SECRET_FILE, none",
    )
    status.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="give up after [5]"
    )


def show_meta(given: argparse.Namespace) -> None:
    """Ask and print.

    Raises:
        DaemonUnreachableError: no answer, or it was refused.
        SettingError: an argument cannot be used.
    """
    place = read_tcp(given.addr, "--addr")
    secret = load_secret(given.cluster_secret_file)
    facts = asyncio.run(_fetch(place, secret, given.timeout))
    print(json.dumps(facts, indent=2) if given.json else "\n".join(render(facts)))


async def _fetch(place: Address, secret: Secret | None, timeout_s: float) -> Facts:
    link: Link | None = None
    async with capnp.kj_loop():
        try:
            async with asyncio.timeout(timeout_s):
                link = await dial(place, TOOL, "", secret)
                facts = await link.status()
        except TimeoutError:
            reason = f"no answer within {timeout_s:g} s"
            raise DaemonUnreachableError(f"no metaserver: {place}: {reason}") from None
        except MetaError as error:
            raise DaemonUnreachableError(f"no metaserver: {place}: {error}") from None
        finally:
            if link is not None:
                link.close()
    facts["addr"] = str(place)
    facts["counters"] = {row["name"]: row["value"] for row in facts["counters"]}
    return facts


def render(facts: Facts) -> list[str]:
    """The lines of the table."""
    counts = facts["counters"]
    entries, capacity = facts["entryCount"], facts["capacity"]
    asked = counts["trikv_meta_locate_blocks_total"]
    found = counts["trikv_meta_locate_found_blocks_total"]
    rate = f"{found / asked:.1%} of blocks found" if asked else "nothing asked yet"
    lines = [
        f"{facts['software']} at {facts['addr']}, {facts['state']}, "
        f"up {span(facts['uptimeSeconds'])}",
        "",
        f"entries   {entries} of {capacity} ({entries / capacity:.0%}), "
        f"{size(facts['memoryBytes'])} when full",
        f"locates   {counts['trikv_meta_locate_total']}, {rate}",
        f"declined  {counts['trikv_meta_declined_blocks_total']} blocks for lack of room, "
        f"{counts['trikv_meta_crowded_blocks_total']} with 8 owners already",
    ]
    if facts["isOpen"]:
        lines.append("secret    none: whoever reaches it may read and write")
    if facts["http"]:
        lines.append(f"metrics   {facts['http']}/metrics")
    lines += ["", f"{'node':<38}{'blocks':>12}{'lent':>8}{'declined':>11}  state"]
    for row in sorted(facts["nodes"], key=lambda row: str(row["address"])):
        state = "complete" if row["isComplete"] else "announcing"
        lines.append(
            f"{cut(row['address'], 37):<38}{row['heldCount']:>12}{row['lentBlocks']:>8}"
            f"{row['declinedCount']:>11}  {state}"
        )
    return lines
