"""What no row of a profile and no validation can hold, whoever wrote the file. Needs the standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any

LARGEST = 1e300
"""No number of a profile is beyond it: what is computed of two of them stays a double."""

_ALWAYS = (
    *("strategy", "recomputed_layers", "total_layers", "recompute_fraction", "task", "dataset", "metric"),
    *("n_planned", "n_scored", "on_frontier"),
)
"""Columns of `profile.parquet` that are never null."""
_NEVER_NEGATIVE = (
    *("context_tokens_median", "prefill_flops", "full_prefill_flops", "kv_bytes_per_token", "e_bytes_per_token"),
    *("measured_prefill_ms", "measured_full_prefill_ms"),
)
_MOST_LAYERS = 2000
_MOST_SAMPLES = 2**31 - 1
_TOLERANCE = 1e-9


def row_problem(row: Mapping[str, Any]) -> str | None:
    """Returns what no row of a profile can hold, None if the row is sound."""
    if absent := [name for name in _ALWAYS if row[name] is None]:
        return f"no {absent[0]}"
    if broken := [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]:
        return f"a {broken[0]} that is no number"
    if below := [name for name in _NEVER_NEGATIVE if row[name] is not None and row[name] < 0]:
        return f"{below[0]} {row[below[0]]}"
    if row["n_scored"] > 0 and (row["quality"] is None or row["baseline_quality"] is None):
        return "samples that were scored, and no quality"
    if not 0 <= row["n_scored"] <= row["n_planned"] or not 0 <= row["recompute_fraction"] <= 1:
        return "counts that cannot be"
    if row["granularity"] is not None and row["granularity"] < 1:
        return f"granularity {row['granularity']}"
    return _layer_problem(row)


def _layer_problem(row: Mapping[str, Any]) -> str | None:
    start, stop, layers, recomputed = (
        row[name] for name in ("start_layer", "stop_layer", "total_layers", "recomputed_layers")
    )
    if not 1 <= layers <= _MOST_LAYERS:
        return f"{layers} layers"
    if (start is None) != (stop is None) or (start is not None and not 0 <= start < stop <= layers):
        return f"layers {start} to {stop} of {layers}"
    if row["strategy"] == "layer_group" and start is None:
        return "a layer_group of no layers"
    own = {"full_prefill": layers, "full_reuse": 0, "layer_group": stop - start if start is not None else None}
    if not 0 <= recomputed <= layers or own.get(row["strategy"], recomputed) != recomputed:
        return f"{recomputed} of {layers} layers recomputed by {row['strategy'][:40]}"
    if abs(row["recompute_fraction"] - recomputed / layers) > _TOLERANCE:
        return f"recompute_fraction {row['recompute_fraction']} for {recomputed} of {layers} layers"
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
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("samples", "overlap_left_out"), (0, _MOST_SAMPLES)),
    **dict.fromkeys(("confidence", "recompute_fraction"), (0, 1)),
    **dict.fromkeys(("start_layer", "stop_layer"), (0, _MOST_LAYERS)),
}
"""Of numbers in a validation; all others are within `LARGEST`."""


def is_validation(value: Any) -> bool:
    """Returns whether a value from a file has the shape of what `kvprofile validate` writes, and numbers that can be."""

    def has(held: Any, shape: Mapping[str, type | UnionType]) -> bool:
        return isinstance(held, dict) and all(
            name in held and isinstance(held[name], kind) and _can_be(name, held[name], kind)
            for name, kind in shape.items()
        )

    return has(value, _OF_VALIDATION) and all(has(plan, _OF_VALIDATED_PLAN) for plan in value["plans"])


def _can_be(name: str, value: Any, kind: type | UnionType) -> bool:
    if isinstance(value, bool):
        return kind == bool | None
    least, most = _RANGES.get(name, (-LARGEST, LARGEST))
    return not isinstance(value, int | float) or least <= value <= most
