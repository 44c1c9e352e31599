"""What a worker tells the daemon of its memory.

Decided here: nothing; plain values of the message `Rank`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trikv.connector import cuda, layouts
    from trikv.connector.fences import Fences


def registration(instance: str, rank: int, fences: Fences) -> dict[str, Any]:
    """The `Rank` message, without its memory."""
    return {
        "instance": instance,
        "rank": rank,
        "fences": {"address": fences.address, "count": fences.count},
    }


def process_memory(plan: layouts.Plan, block_count: int) -> dict[str, Any]:
    """What of `Rank` says where blocks lie in this process's memory."""
    memories = [{"process": {"address": m.address, "bytes": m.size_bytes}} for m in plan.memories]
    places = [(number, 0) for number in range(len(memories))]
    return {"memories": memories, "groups": [_group(plan, block_count, places)]}


def gpu_memory(
    plan: layouts.Plan,
    block_count: int,
    exported: cuda.Export,
    events: cuda.StepEvents,
    words: cuda.SignalWords | None,
    sections: Sequence[int],
) -> dict[str, Any]:
    """What of `Rank` says where blocks and words lie in a GPU's memory."""
    allocations, signals = list(exported.allocations), {"count": 0}
    if words is not None:
        numbers = {one.handle: at for at, one in enumerate(allocations)}
        at = numbers.get(words.allocation.handle, len(allocations))
        if at == len(allocations):
            allocations.append(words.allocation)
        signals = {"memory": at, "offset": words.offset, "count": words.count}
    memories = [
        {
            "cudaIpc": {
                "handle": one.handle,
                "allocationBytes": one.size_bytes,
                "deviceUuid": exported.device,
            }
        }
        for one in allocations
    ]
    group = _group(plan, block_count, exported.places) | {"sections": list(sections)}
    return {
        "memories": memories,
        "groups": [group],
        "events": events.handles,
        "signals": signals,
    }


def _group(
    plan: layouts.Plan, block_count: int, places: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """The one group; `places` says where in what is registered each memory of the plan begins."""
    pieces = [
        {
            "memory": places[piece.memory][0],
            "offset": places[piece.memory][1] + piece.offset,
            "stride": piece.stride,
            "bytes": piece.size_bytes,
        }
        for piece in plan.pieces
    ]
    return {"blockCount": block_count, "pieces": pieces, "layout": plan.layout}
