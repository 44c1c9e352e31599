"""Control groups above this process: where their limits stand.

Decided here: how they are found, of version 2 and 1. This file does not know what they limit.
"""

from collections.abc import Iterator
from pathlib import Path

OWN = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")


def folders(controller: str, own: Path = OWN, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Of this process's group and of those above it, with the version; none on other systems.

    Args:
        controller: as version 1 names it.
        own: this process's groups, as the kernel lists them.
        root: where they are mounted.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            top, version = root, 2
        elif controller in controllers.split(","):
            top, version = root / controller, 1
        else:
            continue
        folder = top / inside.lstrip("/")
        for level in (folder, *folder.parents):
            yield level, version
            if level == top:
                break
