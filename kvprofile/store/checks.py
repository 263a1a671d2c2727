"""What no row of a profile and no validation can hold, whoever wrote the file. Needs the standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any

_ALWAYS = (
    *("strategy", "recomputed_layers", "total_layers", "recompute_fraction", "task", "dataset", "metric"),
    *("n_planned", "n_scored", "on_frontier"),
)
"""Columns of `profile.parquet` that are never null."""
_MOST_LAYERS = 2000


def row_problem(row: Mapping[str, Any]) -> str | None:
    """Returns what no row of a profile can hold, None if the row is sound."""
    if absent := [name for name in _ALWAYS if row[name] is None]:
        return f"no {absent[0]}"
    if broken := [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]:
        return f"a {broken[0]} that is no number"
    start, stop, layers = row["start_layer"], row["stop_layer"], row["total_layers"]
    if not 1 <= layers <= _MOST_LAYERS:
        return f"{layers} layers"
    if row["n_scored"] > 0 and (row["quality"] is None or row["baseline_quality"] is None):
        return "samples that were scored, and no quality"
    if (start is None) != (stop is None) or (start is not None and not 0 <= start < stop <= layers):
        return f"layers {start} to {stop} of {layers}"
    if not 0 <= row["n_scored"] <= row["n_planned"] or not 0 <= row["recompute_fraction"] <= 1:
        return "counts that cannot be"
    if row["granularity"] is not None and row["granularity"] < 1:
        return f"granularity {row['granularity']}"
    return None


_OF_VALIDATION: dict[str, type | UnionType] = {
    **dict.fromkeys(("task", "dataset", "metric", "created_at"), str),
    **dict.fromkeys(("samples", "overlap_left_out"), int),
    "max_loss": str | None,
    "confidence": float,
    "full_prefill_quality": float | int,
    "plans": list,
}
_OF_VALIDATED_PLAN: dict[str, type | UnionType] = {
    **dict.fromkeys(("plan", "strategy", "unit"), str),
    **dict.fromkeys(("start_layer", "stop_layer"), int | None),
    "params": str | None,
    "recompute_fraction": float | int,
    **dict.fromkeys(
        ("promised_at_most", "profiled_loss", "loss", "loss_lower", "loss_upper", "quality", "baseline_quality"),
        float | int | None,
    ),
    **dict.fromkeys(("held", "bounded", "beyond_chance"), bool | None),
}


def is_validation(value: Any) -> bool:
    """Returns whether a value from a file has the shape of what `kvprofile validate` writes."""

    def has(held: Any, shape: Mapping[str, type | UnionType]) -> bool:
        return isinstance(held, dict) and all(k in held and isinstance(held[k], kind) for k, kind in shape.items())

    return has(value, _OF_VALIDATION) and all(has(plan, _OF_VALIDATED_PLAN) for plan in value["plans"])
