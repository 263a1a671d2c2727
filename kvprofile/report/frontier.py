"""The frontier of a profile and the plan within a loss, per task and dataset, as rows; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvprofile.analysis.choice import REFERENCE_ARMS, cheapest, complete
from kvprofile.errors import BadInput, did_you_mean
from kvprofile.layers import LayerRange, describe, groups, on_grid
from kvprofile.limits import LossLimit
from kvprofile.store.reader import Profile

Row = dict[str, Any]

_RESAMPLES = 10_000


class Block(NamedTuple):
    """The answer for one task, dataset and metric.

    Attributes:
        task: Value of the `task` column.
        dataset: Value of the `dataset` column.
        metric: Value of the `metric` column.
        confidence: Of the one-sided upper bounds.
        granularity: The grid that was asked for, None for all groups of the profile.
        arms: Row of each of the four arms that was measured.
        frontier: Rows of the frontier, by recompute.
        limit: The loss to accept, None if none was given.
        selected: The cheapest row within the limit.
        grids: What each coarser grid alone would have selected.
        unscored: Plans that could serve a request but lack the score of a sample.
    """

    task: str
    dataset: str
    metric: str
    confidence: float
    granularity: int | None
    arms: dict[str, Row]
    frontier: list[Row]
    limit: LossLimit | None
    selected: Row | None
    grids: dict[int, Row | None]
    unscored: int


def frontier_blocks(
    profile: Profile,
    *,
    limit: LossLimit | None = None,
    metric: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    granularity: int | None = None,
    confidence: float | None = None,
) -> list[Block]:
    """Returns one block per task and dataset; the metric is the task's first if none is named.

    Args:
        profile: The profile.
        limit: The loss to accept.
        metric: Only this metric.
        task: Only this task.
        dataset: Only this dataset.
        granularity: Only groups that a sweep at this granularity alone has.
        confidence: Of the bounds; one that differs from the profile's makes them anew from the measurements.

    Raises:
        BadInput: If the profile does not have what is asked for.
    """
    rows: list[Row] = profile.rows.to_pylist()
    for name, wanted in (("task", task), ("dataset", dataset), ("metric", metric)):
        rows = _only(rows, name, wanted)
    if granularity is not None:
        rows = _on_grid(rows, granularity, whole=profile.header.get("search") == "adaptive")
    made_at = float(profile.header["confidence"])
    if confidence is not None and confidence != made_at:
        _bound_anew(rows, profile, confidence)
    first_metric = {(r["task"], r["dataset"]): r["metric"] for r in reversed(rows)}
    return [
        _block(
            [r for r in rows if (r["task"], r["dataset"], r["metric"]) == (*source, name)],
            limit,
            granularity,
            made_at if confidence is None else confidence,
        )
        for source, name in sorted(first_metric.items())
    ]


def plan_text(row: Row) -> str:
    """Returns the plan as people read it, such as `layers 8–18 (11 of 30)` or `full_reuse`."""
    start, stop = row["start_layer"], row["stop_layer"]
    words = [] if row["strategy"] == "layer_group" else [str(row["strategy"])]
    if start is not None and stop is not None:
        words.append(describe(LayerRange(start, stop), row["total_layers"]))
    if row["params"] is not None:
        words.append(str(row["params"]))
    return " ".join(words)


def saved(cost: float | None, full: float | None) -> float | None:
    """Returns the share of full prefill's cost that a plan saves, None where either is not known."""
    return None if cost is None or not full else 1 - cost / full


def plan_document(row: Row) -> Row:
    """Returns what `--json` and `--format csv` say of one plan."""
    same = (
        *("strategy", "start_layer", "stop_layer", "params", "recomputed_layers", "total_layers"),
        *("recompute_fraction", "quality", "loss_rel", "loss_rel_upper", "loss_points", "loss_points_upper"),
        *("kv_bytes_per_token", "e_bytes_per_token", "n_scored", "n_planned"),
    )
    return {
        "plan": plan_text(row),
        **{name: row[name] for name in same},
        "modelled_prefill_saved": saved(row["prefill_flops"], row["full_prefill_flops"]),
        "measured_prefill_saved": saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]),
    }


def block_document(block: Block) -> Row:
    """Returns what `--json` says of one block."""
    return {
        "task": block.task,
        "dataset": block.dataset,
        "metric": block.metric,
        "confidence": block.confidence,
        "granularity": block.granularity,
        "max_loss": None if block.limit is None else f"{block.limit.value:g}{block.limit.unit}",
        "quality": {arm: row["quality"] for arm, row in block.arms.items()},
        "frontier": [plan_document(row) for row in block.frontier],
        "selected": plan_document(block.selected) if block.selected else None,
        "selected_by_granularity": {str(u): plan_document(row) if row else None for u, row in block.grids.items()},
    }


def groups_on(rows: Sequence[Row], unit: int) -> set[LayerRange]:
    """Returns the layer groups among the rows that lie on the grid of `unit`-layer units."""
    return {LayerRange(r["start_layer"], r["stop_layer"]) for r in rows if _is_group(r) and _lies_on(r, unit)}


def grids(rows: Sequence[Row]) -> list[int]:
    """Returns the granularities that the profile's rows were swept at, finest first."""
    return sorted({r["granularity"] for r in rows if r["granularity"] is not None})


def _block(rows: list[Row], limit: LossLimit | None, granularity: int | None, confidence: float) -> Block:
    from kvprofile.analysis.profile_table import mark_frontier

    mark_frontier(rows)
    first = rows[0]
    everything = {(r["start_layer"], r["stop_layer"]) for r in rows if _is_group(r)}
    measured = [r for r in rows if complete(r)]
    coarser = [
        u
        for u in grids(rows)
        if granularity is None and groups_on(measured, u) == groups_on(rows, u) and groups_on(rows, u) < everything
    ]
    return Block(
        first["task"],
        first["dataset"],
        first["metric"],
        confidence,
        granularity,
        arms={r["strategy"]: r for r in rows if not _is_group(r) and r["params"] is None},
        frontier=sorted((r for r in rows if r["on_frontier"]), key=lambda r: float(r["recompute_fraction"])),
        limit=limit,
        selected=cheapest(rows, limit) if limit else None,
        grids={u: cheapest([r for r in rows if not _is_group(r) or _lies_on(r, u)], limit) for u in coarser}
        if limit
        else {},
        unscored=sum(r["strategy"] not in REFERENCE_ARMS and not complete(r) for r in rows),
    )


def _is_group(row: Row) -> bool:
    return row["start_layer"] is not None


def _lies_on(row: Row, unit: int) -> bool:
    return on_grid(LayerRange(row["start_layer"], row["stop_layer"]), row["total_layers"], unit)


def _only(rows: list[Row], column: str, wanted: str | None) -> list[Row]:
    if wanted is None:
        return rows
    known = list(dict.fromkeys(str(r[column]) for r in rows))
    if wanted not in known:
        raise BadInput(
            f'the profile has no {column} "{wanted}"{did_you_mean(wanted, known)}; it has {", ".join(known)}'
        )
    return [r for r in rows if r[column] == wanted]


def _on_grid(rows: list[Row], unit: int, whole: bool) -> list[Row]:
    layers = rows[0]["total_layers"]
    needed, there = groups(layers, unit), groups_on([r for r in rows if complete(r) or not whole], unit)
    if len(there) < len(needed):
        raise BadInput(
            f"the profile has {len(there)} of the {len(needed)} groups of granularity {unit}; "
            f"sweep again with --granularity {unit}"
        )
    return [r for r in rows if not _is_group(r) or _lies_on(r, unit)]


def _bound_anew(rows: list[Row], profile: Profile, confidence: float) -> None:
    from kvprofile.analysis.profile_table import set_bounds

    if not 0 < confidence < 1:
        raise BadInput(f"--confidence {confidence} is not between 0 and 1; give one such as 0.95")
    resamples, seed = int(profile.header.get("resamples", _RESAMPLES)), int(profile.header["seed"])
    set_bounds(rows, profile.measurements(), confidence=confidence, resamples=resamples, seed=seed)
