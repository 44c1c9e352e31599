"""The file of quotas: read at the start, and again whenever it changes.

Decided here: how the file is written, and what a wrong one means: at the start the daemon refuses
it, later the old rules stay and a warning says why. This file does not know what quotas do.

    [default]
    share = 0.5
    [tenants.search]
    floor = 0.25
    share = 0.75
"""

import tomllib
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from trikv.core.tenants import Quota, Rules, Tenants
from trikv.options import SettingError

log = structlog.get_logger()

POLL_S: Final = 1.0
NAMES: Final = {"floor", "share"}
BYTES_MAX: Final = 1 << 20


def read_rules(path: str) -> Rules:
    """Read the file.

    Raises:
        SettingError: it cannot be read or says what makes no sense; one line.
    """
    try:
        text = Path(path).read_bytes()[:BYTES_MAX].decode()
        table = tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"--quota-file: {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"--quota-file: {path}: {error}") from None
    named = table.pop("tenants", {})
    default = _quota(path, "default", table.pop("default", {}))
    if table or not isinstance(named, dict):
        raise SettingError(f"--quota-file: {path}: expected [default] and [tenants.NAME] only")
    rules = {name: _quota(path, name, row) for name, row in named.items()}
    total = sum(one.floor for one in rules.values())
    if total > 1:
        raise SettingError(f"--quota-file: {path}: floors add up to {total:g} of the pool")
    return Rules(default, rules)


def _quota(path: str, name: str, row: Any) -> Quota:  # noqa: ANN401  # whatever TOML holds
    if not isinstance(row, dict) or row.keys() - NAMES:
        raise SettingError(f"--quota-file: {path}: {name}: expected floor and share")
    for key, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise SettingError(f"--quota-file: {path}: {name}: {key} must be from 0 to 1")
    quota = Quota(**row)
    if quota.floor > quota.share:
        raise SettingError(f"--quota-file: {path}: {name}: its floor is above its share")
    return quota


async def watch(path: str, tenants: Tenants) -> None:
    """Follow the file for ever."""
    seen = await _stamp(path)
    while True:
        await trio.sleep(POLL_S)
        now = await _stamp(path)
        if now == seen:
            continue
        seen = now
        try:
            rules = await trio.to_thread.run_sync(read_rules, path)
        except SettingError as error:
            log.warning("quotas.refused", reason=str(error))
        else:
            tenants.follow(rules)
            log.info("quotas.changed", tenant_count=len(rules.named))


async def _stamp(path: str) -> tuple[int, int] | None:
    try:
        facts = await trio.Path(path).stat()
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_size
