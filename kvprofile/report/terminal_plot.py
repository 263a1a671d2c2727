"""A small plot of a frontier in characters."""

from __future__ import annotations

from collections.abc import Sequence

from kvprofile.analysis.choice import saves
from kvprofile.report.frontier import Block, Row

_WIDTH, _HEIGHT = 61, 11
_MARKS = ("·", "o", "*")


def frontier_plot(block: Block) -> list[str]:
    """Returns lines: recompute from left to right, quality from the bottom up; `·` a plan, `o` on the frontier, `*` selected.

    The dashed line is full prefill. Nothing where fewer than two plans have a quality.
    """
    plans = [r for r in block.rows if r["quality"] is not None and (saves(r) or r["on_frontier"])]
    full = block.arms.get("full_prefill")
    level = full["quality"] if full else None
    qualities: list[float] = [row["quality"] for row in plans] + ([] if level is None else [level])
    if len(plans) < 2 or max(qualities) == min(qualities):
        return []
    lowest, highest = min(qualities), max(qualities)

    def line_of(quality: float) -> int:
        return round((highest - quality) / (highest - lowest) * (_HEIGHT - 1))

    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    if level is not None:
        canvas[line_of(level)] = ["-"] * _WIDTH
    selected = [block.selected] if block.selected else []
    layers: Sequence[Sequence[Row]] = (plans, block.frontier, selected)
    for mark, rows in zip(_MARKS, layers, strict=True):
        for row in (one for one in rows if one["quality"] is not None):
            canvas[line_of(row["quality"])][round(row["recompute_fraction"] * (_WIDTH - 1))] = mark
    edges = {0: f"{highest:.3f}", _HEIGHT - 1: f"{lowest:.3f}"}
    lines = [f"{edges.get(i, ''):>7} |{''.join(cells).rstrip()}" for i, cells in enumerate(canvas)]
    axis = f"{'':>7} +{'-' * _WIDTH}"
    scale = f"{'':>8}0%{'layers recomputed':^{_WIDTH - 6}}100%"
    return [*lines, axis, scale, f"{'':>8}· plan, o frontier, * selected, --- full_prefill"]
