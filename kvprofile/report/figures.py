"""Figures of a profile: drawn once by matplotlib, for files and for the HTML report, whose colours follow its theme."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvprofile.analysis.choice import saves
from kvprofile.report.frontier import Block, Row, plan_text
from kvprofile.report.terminal import number, percent
from kvprofile.report.text import harmless
from kvprofile.scoring import BUILT_IN

_WIDTH, _HEIGHT = 5.2, 3.6
"""Inches: small, so that texts can be read on a phone."""

SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvprofile",
    "font.size": 9,
    "text.parse_math": False,  # names from files may hold dollar signs
    "axes.spines.top": False,
    "axes.spines.right": False,
}


class Palette(NamedTuple):
    """Colours of a figure."""

    ink: str
    line: str
    soft: str
    accent: str
    warn: str


LIGHT = Palette(ink="#1b1f24", line="#c9ced6", soft="#8b95a3", accent="#0b62a4", warn="#b3470f")
STAND_INS = Palette(ink="#010201", line="#010202", soft="#010203", accent="#010204", warn="#010205")
"""Colours that stand in for the theme's variables of the same name."""


class Point(NamedTuple):
    """What can be pointed at, in data coordinates."""

    x: float
    y: float
    text: str


class Drawing(NamedTuple):
    """One figure.

    Attributes:
        name: For files and ids.
        title: In words.
        figure: The figure.
        axes: Those the points lie in.
        points: For tooltips.
    """

    name: str
    title: str
    figure: Figure
    axes: Axes
    points: list[Point]


def svg(drawing: Drawing, prefix: str) -> str:
    """Returns a figure as SVG without the XML header, colours as CSS variables, `prefix` before every id in it."""
    text = _rendered(drawing, "svg").decode()
    for mark in ('id="', "url(#", 'href="#'):
        text = text.replace(mark, f"{mark}{prefix}-")
    for name, colour in zip(Palette._fields, STAND_INS, strict=True):
        text = text.replace(colour, f"var(--{name})")
    return text[text.index("<svg") :]


def file_bytes(drawing: Drawing, kind: str) -> bytes:
    """Returns a figure as the bytes of a `png` or `svg` file."""
    return _rendered(drawing, kind)


def place(drawing: Drawing) -> dict[str, list[float]]:
    """Returns where the axes lie in the figure (shares, from the left top) and what they span, for tooltips."""
    box = drawing.axes.get_position()
    (left, bottom), (right, top) = _scaled(
        drawing.axes, list(zip(drawing.axes.get_xlim(), drawing.axes.get_ylim(), strict=True))
    )
    return {"box": [box.x0, 1 - box.y1, box.width, box.height], "x": [left, right], "y": [bottom, top]}


def tips(drawing: Drawing) -> list[Point]:
    """Returns the points in what `place` says the axes span: a logarithmic axis spans logarithms."""
    places = _scaled(drawing.axes, [(point.x, point.y) for point in drawing.points])
    return [Point(x, y, point.text) for (x, y), point in zip(places, drawing.points, strict=True)]


def _scaled(axes: Axes, places: Sequence[tuple[float, float]]) -> list[list[float]]:
    scaled: list[list[float]] = axes.transScale.transform(np.array(places, dtype=float).reshape(-1, 2)).tolist()
    return scaled


@matplotlib.rc_context(SETTINGS)
def frontier_drawing(block: Block, validations: Sequence[Mapping[str, Any]], palette: Palette = STAND_INS) -> Drawing:
    """Draws recompute against quality: all plans, the frontier with its intervals, the selected plan and fresh data.

    Args:
        block: One task, dataset and metric.
        validations: Of this task and metric; their losses are laid off from this profile's full prefill.
        palette: The colours.
    """
    figure, axes = canvas(palette)
    plans = [r for r in block.rows if r["quality"] is not None and saves(r)]
    axes.scatter(*_xy(plans), s=7, color=palette.soft, alpha=0.6, linewidths=0, label="plans")
    full = block.arms.get("full_prefill")
    for arm, style in (("full_prefill", "--"), ("no_context", ":"), ("sender_alone", "-.")):
        row = block.arms.get(arm)
        if row is not None and row["quality"] is not None:
            axes.axhline(row["quality"], color=palette.soft, linestyle=style, linewidth=1, label=arm)
    front = [row for row in block.frontier if saves(row) and row["quality"] is not None]
    xs, ys = _xy(front)
    bars = np.array([_reach(row) for row in front]).reshape(-1, 2).T
    axes.errorbar(
        xs,
        ys,
        yerr=bars,
        color=palette.accent,
        marker="o",
        markersize=4,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
        label="frontier",
    )
    if block.selected is not None and block.selected["quality"] is not None:
        axes.plot(
            *_xy([block.selected]), marker="*", markersize=13, color=palette.warn, linestyle="none", label="selected"
        )
    fresh = _validated(validations, full)
    if fresh:
        axes.plot(
            [p.x for p in fresh],
            [p.y for p in fresh],
            marker="s",
            markersize=6,
            markerfacecolor="none",
            markeredgecolor=palette.warn,
            linestyle="none",
            label="fresh loss, laid off from full_prefill",
        )
    axes.set_xlabel("layers recomputed, %")
    axes.set_ylabel(harmless(block.metric))
    axes.set_xlim(-3, 103)
    figure.legend(fontsize=7, frameon=False, loc="outside upper center", ncols=3, labelcolor=palette.ink)
    points = [Point(100 * row["recompute_fraction"], row["quality"], hover(row)) for row in plans]
    return Drawing("frontier", "Recompute against quality", figure, axes, [*points, *fresh])


@matplotlib.rc_context(SETTINGS)
def groups_drawing(block: Block, palette: Palette = STAND_INS) -> Drawing | None:
    """Draws every group by start and stop, the colour its loss; None if there are no groups."""
    rows = [r for r in block.rows if r["start_layer"] is not None and r["loss_points"] is not None]
    if not rows:
        return None
    layers = rows[0]["total_layers"]
    cells = np.full((layers, layers), np.nan)
    for row in rows:
        cells[row["stop_layer"] - 1, row["start_layer"]] = row["loss_points"]
    figure, axes = canvas(palette)
    reach = max(1.0, float(np.nanmax(np.abs(cells))))
    mesh = axes.pcolormesh(np.ma.masked_invalid(cells), cmap="PuOr_r", vmin=-reach, vmax=reach, rasterized=layers > 40)
    bar = figure.colorbar(mesh, ax=axes, label="loss, points")
    for part in (bar.ax.yaxis.label, *bar.ax.get_yticklabels()):
        part.set_color(palette.ink)
    bar.ax.tick_params(color=palette.ink)
    bar.outline.set_edgecolor(palette.line)
    chosen = block.selected
    if chosen is not None and chosen["start_layer"] is not None:
        axes.plot(chosen["start_layer"] + 0.5, chosen["stop_layer"] - 0.5, marker="*", markersize=11, color=palette.ink)
    axes.set_xlabel("first layer recomputed")
    axes.set_ylabel("last layer recomputed")
    points = [Point(row["start_layer"] + 0.5, row["stop_layer"] - 0.5, hover(row)) for row in rows]
    return Drawing("groups", "Loss of every group of layers", figure, axes, points)


@matplotlib.rc_context(SETTINGS)
def sensitivity_drawing(
    block: Mapping[str, Any], reverse: bool = False, palette: Palette = STAND_INS
) -> Drawing | None:
    """Draws the loss of each layer by itself, with quartiles over samples; None if nothing could be measured."""
    layers = [one for one in block["layers"] if one["loss_points"] is not None]
    if not layers:
        return None
    figure, axes = canvas(palette)
    for one in layers:
        colour = palette.warn if one["critical"] else palette.accent
        axes.bar(one["layer"], one["loss_points"], color=colour, width=0.7)
        axes.vlines(one["layer"], one["percentiles"][25], one["percentiles"][75], color=palette.ink, linewidth=1)
    axes.axhline(0, color=palette.ink, linewidth=0.8)
    axes.set_xlabel("layer taken from the sender, all others recomputed")
    axes.set_ylabel("loss, points (lines: quartiles)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    points = [Point(one["layer"], one["loss_points"], _layer_text(one)) for one in layers]
    if reverse:
        title = "The other direction: the sender reads a layer of the receiver's"
        return Drawing("sensitivity_reverse", title, figure, axes, points)
    return Drawing("sensitivity", "Sensitivity of each layer", figure, axes, points)


@matplotlib.rc_context(SETTINGS)
def differences_drawing(
    title: str, samples: Sequence[tuple[str, float]], palette: Palette = STAND_INS
) -> Drawing | None:
    """Draws a plan's score less full prefill's on every sample, in points, from the largest loss; None without samples."""
    if not samples:
        return None
    ordered = sorted(samples, key=lambda one: one[1])
    figure, axes = canvas(palette)
    values = np.array([value for _, value in ordered])
    axes.bar(
        np.arange(len(values)), values, color=[palette.warn if v < 0 else palette.accent for v in values], width=0.9
    )
    axes.axhline(0, color=palette.ink, linewidth=0.8)
    axes.axhline(
        float(values.mean()), color=palette.ink, linewidth=1, linestyle="--", label=f"mean {number(values.mean(), 1)}"
    )
    axes.legend(fontsize=7, frameon=False, loc="lower right", labelcolor=palette.ink)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("samples, from the largest loss to the largest gain")
    axes.set_ylabel("plan less full prefill, points")
    points = [Point(i, value, f"{name}: {number(value, 1)} points") for i, (name, value) in enumerate(ordered)]
    return Drawing("differences", title, figure, axes, points)


def hover(row: Row) -> str:
    """Returns what is said of a plan where it is pointed at."""
    parts = [
        plan_text(row),
        f"{row['metric']} {number(row['quality'], 3)}",
        f"loss {percent(row['loss_rel']) or 'unknown'} or {number(row['loss_points'], 1)} points"
        f" (at most {number(row['loss_points_upper'], 1) or 'unknown'})",
        f"{percent(row['recompute_fraction'], 0)} recomputed",
        f"{row['n_scored']} of {row['n_planned']} samples",
    ]
    return ", ".join(parts)


def _layer_text(one: Mapping[str, Any]) -> str:
    low, high = (number(one["percentiles"][p], 1) for p in (25, 75))
    loss, kl = number(one["loss_points"], 1), number(one["mean_kl"], 4) or "unknown"
    return f"layer {one['layer']}: loss {loss} points, quartiles {low} to {high}, KL {kl}"


def _validated(validations: Sequence[Mapping[str, Any]], full: Row | None) -> list[Point]:
    if full is None or full["quality"] is None:
        return []
    return [
        Point(
            100 * plan["recompute_fraction"],
            full["quality"] - (plan["baseline_quality"] - plan["quality"]),
            f"{plan['plan']} on {one['dataset']}: loss {number(100 * (plan['baseline_quality'] - plan['quality']), 1)} points",
        )
        for one in validations
        for plan in one["plans"]
        if plan["quality"] is not None and plan["baseline_quality"] is not None
    ]


def _reach(row: Row) -> tuple[float, float]:
    """Returns how far the bounds lie below and above a plan's quality; 0 where one is unknown."""
    loss, quality = row["loss_points"], row["quality"]
    upper, lower = row["loss_points_upper"], row.get("loss_points_lower")
    below = 0.0 if None in (upper, loss) else max(0.0, upper - loss) / 100
    above = 0.0 if None in (lower, loss) else max(0.0, loss - lower) / 100
    in_unit_range = row["metric"] in BUILT_IN
    return (min(below, quality), min(above, 1 - quality)) if in_unit_range else (below, above)


def _xy(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [100 * row["recompute_fraction"] for row in rows], [row["quality"] for row in rows]


def canvas(palette: Palette) -> tuple[Figure, Axes]:
    """Returns an empty figure with axes in a palette's colours."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    if palette is STAND_INS:  # the page's own background shows through
        figure.set_facecolor("none")
        axes.set_facecolor("none")
    axes.tick_params(colors=palette.ink)
    for spine in axes.spines.values():
        spine.set_color(palette.line)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(palette.ink)
    return figure, axes


@matplotlib.rc_context(SETTINGS)
def _rendered(drawing: Drawing, kind: str) -> bytes:
    target = io.BytesIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else None
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font"
        )  # of names; the page has fonts of its own
        drawing.figure.savefig(target, format=kind, dpi=160, metadata=nothing)
    return target.getvalue()
