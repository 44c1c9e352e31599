"""How many processors this process may use: by its affinity, and by quotas of control groups.

Decided here: nothing. This file does not know what for.
"""

import os
from collections.abc import Iterator
from pathlib import Path

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def count(own: Path = OWN, root: Path = ROOT) -> float:
    """Processors, or a part of one; control groups of version 2."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas(own, root)])


def _quotas(own: Path, root: Path) -> Iterator[float]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    inside = next((line[len("0::") :] for line in lines if line.startswith("0::")), "/")
    folder = root / inside.lstrip("/")
    for one in (folder, *folder.parents):
        if one.is_relative_to(root):
            try:
                quota, period = (one / "cpu.max").read_text().split()
                if quota != "max":
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                continue
