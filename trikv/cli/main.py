"""Entry point of `trikv`: reads the command line and runs one command.

Decided here: names of commands and exit codes: 0 done, 1 no daemon or refused, 2 wrong usage.
"""

import argparse
import os
import sys

from trikv import __version__, address
from trikv.cli.meta import add_meta_arguments, show_meta
from trikv.cli.replay import add_arguments, replay
from trikv.cli.status import DaemonUnreachableError, fetch_status, print_json, print_table
from trikv.cli.traces import TraceError
from trikv.options import SettingError


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(
        prog="trikv",
        description="Asks a running trikv-daemon, and replays traces without one.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trikv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="pool, namespaces, engines, counters")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    status.add_argument(
        "--addr",
        help="unix:/path or host:port; default: TRIKV_SOCKET, TRIKV_HOST and TRIKV_PORT, "
        "/run/trikv/trikv.sock, the user's runtime directory, 127.0.0.1:50055",
    )
    status.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="give up after [5]"
    )
    add_arguments(commands.add_parser("replay", help="hit rates of traces, without a daemon"))
    add_meta_arguments(commands.add_parser("meta", help="asks a metaserver"))
    given = parser.parse_args()
    if given.command == "meta":
        try:
            show_meta(given)
        except DaemonUnreachableError as error:
            sys.exit(f"trikv: {error}")
        except SettingError as error:
            parser.error(str(error))
        return
    if given.command == "replay":
        try:
            replay(given)
        except TraceError as error:
            sys.exit(f"trikv: {error}")
        return
    _show_status(parser, given)


def _show_status(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    try:
        places = address.search(os.environ, given.addr)
    except ValueError as error:
        parser.error(str(error))
    try:
        facts = fetch_status(places, timeout_s=given.timeout)
    except DaemonUnreachableError as error:
        sys.exit(f"trikv: {error}")
    if given.json:
        print_json(facts)
    else:
        print_table(facts)


if __name__ == "__main__":
    main()
