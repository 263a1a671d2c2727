"""The figure of time to first token against bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.ticker import FuncFormatter, NullFormatter

from kvprofile.analysis.choice import saves
from kvprofile.cost.layer_times import LayerTimes
from kvprofile.cost.timeline import Mode
from kvprofile.layers import plan_key
from kvprofile.report.cost import Wire, WireCost, median_tokens, wire_costs
from kvprofile.report.figures import SETTINGS, STAND_INS, Drawing, Palette, Point, canvas
from kvprofile.report.frontier import Block, plan_text
from kvprofile.units import bandwidth_text, duration_text

_BETWEEN_DECADES = 16
_POINT_EVERY = 4
_MODE: Mode = "overlapped"
_SPAN = (-1.0, 3.0)
"""Decades of Gbit/s where no plan breaks even."""
_FARTHEST = (-4.0, 5.0)


@matplotlib.rc_context(SETTINGS)
def wire_drawing(block: Block, times: LayerTimes, palette: Palette = STAND_INS) -> Drawing | None:
    """Draws the time to first token of full prefill, full reuse and the frontier's plans over bandwidths, overlapped.

    Args:
        block: One task, dataset and metric.
        times: Of the profile.
        palette: The colours.

    Returns:
        None if layers were not timed at the block's median context.
    """
    tokens = median_tokens(block)
    if not times.lengths[0] <= tokens <= times.lengths[-1]:
        return None
    even = [cost.break_even[_MODE] for cost in wire_costs(block, times, tokens, Wire(()), (_MODE,)) if cost.break_even]
    gbps = _grid(value for value in even if value)
    costs = [cost for cost in wire_costs(block, times, tokens, Wire(gbps), (_MODE,)) if cost.first_token_ms]
    figure, axes = canvas(palette)
    (full,) = [_curve(cost)[0] for cost in costs if cost.row["strategy"] == "full_prefill"] or [0.0]
    top = 1.1 * max(1.6 * full, *(_curve(cost)[-1] for cost in costs))
    points: list[Point] = []
    named: set[str] = set()
    for cost in costs:
        style = _style(cost, block, palette)
        label = style.pop("label")
        axes.plot(gbps, _curve(cost), label=None if label in named else label, **style)
        named.add(label)
        points += _points(cost, gbps, top)
        if (at := cost.break_even and cost.break_even[_MODE]) and saves(cost.row):
            axes.plot([at], [full], marker="o", markersize=4, color=style["color"], linestyle="none")
            points.append(Point(at, full, f"{plan_text(cost.row)}: before full_prefill above {bandwidth_text(at)}"))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(gbps[0], gbps[-1])
    axes.set_ylim(0, top)
    axes.tick_params(which="minor", color=palette.line)
    axes.set_xlabel("bandwidth, Gbit/s (dots: break-even)")
    axes.set_ylabel("time to first token, ms")
    figure.legend(fontsize=7, frameon=False, loc="outside upper center", ncols=4, labelcolor=palette.ink)
    title = f"Time to first token over bandwidth, contexts of {tokens} tokens"
    return Drawing("wire", title, figure, axes, points)


def _grid(even: Iterable[float]) -> tuple[float, ...]:
    """Returns bandwidths from a decade before the first break-even to two behind the last."""
    places = sorted(math.log10(value) for value in even)
    low, high = (math.floor(places[0]) - 1.0, math.ceil(places[-1]) + 2.0) if places else _SPAN
    low, high = max(low, _FARTHEST[0]), min(high, _FARTHEST[1])
    low = min(low, high - 2)
    steps = round(_BETWEEN_DECADES * (high - low))
    return tuple(10 ** (low + (high - low) * i / steps) for i in range(steps + 1))


def _curve(cost: WireCost) -> tuple[float, ...]:
    assert cost.first_token_ms is not None
    return cost.first_token_ms[_MODE]


def _style(cost: WireCost, block: Block, palette: Palette) -> dict[str, Any]:
    row = cost.row
    if row["strategy"] == "full_prefill":
        return {"color": palette.ink, "linestyle": "--", "linewidth": 1.0, "label": "full_prefill"}
    if block.selected is not None and plan_key(row) == plan_key(block.selected):
        return {"color": palette.warn, "linewidth": 2.0, "zorder": 3, "label": "selected"}
    if row["strategy"] == "full_reuse":
        return {"color": palette.soft, "linewidth": 1.4, "label": "full_reuse"}
    return {"color": palette.accent, "linewidth": 0.9, "alpha": 0.7, "label": "frontier"}


def _points(cost: WireCost, gbps: Sequence[float], top: float) -> list[Point]:
    every = list(zip(gbps, _curve(cost), strict=True))[::_POINT_EVERY]
    name = plan_text(cost.row)
    return [
        Point(x, y, f"{name} at {bandwidth_text(x)}: first token after {duration_text(y)}")
        for x, y in every
        if y <= top
    ]
