"""Hit rate against capacity as a picture; the only module that knows matplotlib.

Decided here: how the picture looks: a panel a trace, a line a policy and way to share, the ceiling
as a dashed line.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]


def draw(rows: Sequence[Row], path: str) -> None:
    """Write a PNG or SVG file, by the ending of `path`; other endings as matplotlib knows them."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(5.5 * len(traces), 4.2), layout="constrained")
    panels = figure.subplots(1, len(traces), squeeze=False)[0]
    for panel, trace in zip(panels, traces, strict=True):
        mine = [row for row in rows if row["trace"] == trace]
        for name in dict.fromkeys(map(_name, mine)):
            line = sorted((r["capacity_share"], r["hit_rate"]) for r in mine if _name(r) == name)
            panel.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        panel.axhline(mine[0]["ceiling"], linestyle="--", color="black", label="ceiling")
        panel.set(title=trace, xscale="log", ylim=(0, 1))
        panel.set(xlabel="capacity / distinct blocks", ylabel="hit rate")
        panel.legend(fontsize="small")
    figure.savefig(path)


def _name(row: Row) -> str:
    parts = [row["policy"]]
    if row["engines"] > 1:
        parts.append("shared" if row["pools"] == 1 else f"{row['pools']} pools")
    if row["ranks"] > 1:
        parts.append(f"{row['ranks']} copies")
    if row["ssd_blocks"]:
        parts.append(f"disk {row['ssd_blocks']} blocks")
    return ", ".join(parts)
