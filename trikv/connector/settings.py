"""What a user may write into `kv_connector_extra_config`.

Decided here: names, defaults and bounds. This file does not know vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "trikv."
TEXT_BYTES_MAX: Final = 1_024


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Read settings, in seconds."""

    address: str | None = None  # else the environment's, else the usual places
    tenant: str = ""  # engines of different tenants share nothing
    weights_epoch: str = ""  # change it when weights change under the same name
    query_s: float = 0.1  # how long a request may wait for a look-up
    load_wait_s: float = 2.0  # how long it may wait for blocks that come up from a disk
    save_s: float = 2.0  # how long an ended request's blocks may wait for a save
    hold_s: float = 0.0  # how long a forward may wait for its load; 0: never


def read_settings(extra: Mapping[str, Any] | None) -> ConnectorSettings:
    """Read and check.

    Raises:
        ValueError: one line that names the setting.
    """
    given = {
        key.removeprefix(PREFIX): value
        for key, value in (extra or {}).items()
        if str(key).startswith(PREFIX)
    }
    texts = {"address", "tenant", "weights_epoch"}
    known = texts | {"query_timeout_ms", "load_wait_ms", "save_timeout_ms", "hold_ms"}
    for name in given.keys() - known:
        raise ValueError(f"kv_connector_extra_config: {PREFIX}{name} is unknown")
    for name in given.keys() & texts:
        if not isinstance(given[name], str) or len(given[name].encode()) > TEXT_BYTES_MAX:
            raise ValueError(
                f"kv_connector_extra_config: {PREFIX}{name} must be a text of at most"
                f" {TEXT_BYTES_MAX} bytes"
            )
    return ConnectorSettings(
        address=given.get("address") or None,
        tenant=given.get("tenant", ""),
        weights_epoch=given.get("weights_epoch", ""),
        query_s=_seconds(given, "query_timeout_ms", 100, 60_000),
        load_wait_s=_seconds(given, "load_wait_ms", 2_000, 60_000),
        save_s=_seconds(given, "save_timeout_ms", 2_000, 60_000),
        hold_s=_seconds(given, "hold_ms", 0, 10_000),
    )


def _seconds(given: Mapping[str, Any], name: str, default: int, most: int) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(
            f"kv_connector_extra_config: {PREFIX}{name} must be a number from 0 to {most}"
        )
    return value / 1000
