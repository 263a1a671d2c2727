"""What files of a profile may hold, whoever wrote them. Standard library only: a serving runtime imports it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_ALWAYS = (
    *("strategy", "recomputed_layers", "total_layers", "recompute_fraction", "task", "dataset", "metric"),
    *("n_planned", "n_scored", "on_frontier"),
)
"""Columns of `profile.parquet` that are never null."""
_MOST_LAYERS = 2000


def problem(row: Mapping[str, Any]) -> str | None:
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


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON document from a file that anybody may have written.

    Raises:
        ValueError: If it is none, holds NaN or infinity, or nests too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")
