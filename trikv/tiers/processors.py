"""How many processors this process may use: by its affinity, and by quotas of control groups.

Decided here: nothing. This file does not know what for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from trikv.tiers import groups


def count(own: Path = groups.OWN, root: Path = groups.ROOT) -> float:
    """Processors, or a part of one; control groups of version 2."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(own, root)])


def _quotas(own: Path, root: Path) -> Iterator[float]:
    for folder, version in groups.folders("cpu", own, root):
        if version == 2:  # noqa: PLR2004
            try:
                quota, period = (folder / "cpu.max").read_text().split()
                if quota != "max":
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                continue
