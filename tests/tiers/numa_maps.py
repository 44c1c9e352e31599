"""What the kernel says of a range of memory: which node it is to come from, and where it lies."""

import re
from pathlib import Path


def policies(address: int, size: int) -> list[tuple[int, str]]:
    """What the kernel says of a range: offset and policy of each mapping in it."""
    found = []
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        at, policy = line.split()[:2]
        if address <= int(at, 16) < address + size:
            found.append((int(at, 16) - address, policy))
    return found


def pages_by_node(address: int, size: int) -> dict[int, int]:
    """Pages of a range, by the node that they are on."""
    counts: dict[int, int] = {}
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if address <= int(line.split()[0], 16) < address + size:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                counts[int(node)] = counts.get(int(node), 0) + int(count)
    return counts
