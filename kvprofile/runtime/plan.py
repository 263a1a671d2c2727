"""What a runtime is told to do with a context. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvprofile.runtime.fingerprint import Pair


class ChosenPlan(NamedTuple):
    """A plan to serve with: reuse the sender's K/V except of layers `start_layer … stop_layer - 1`, half-open as in the tables.

    Attributes:
        strategy: Family of the plan.
        start_layer: First layer to recompute, None where the plan has no layer range.
        stop_layer: Layer behind the last one to recompute, None where the plan has no layer range.
        params: Canonical JSON of the strategy's parameters, None where it has none.
        recompute_fraction: Share of the layers to recompute.
        quality: Mean score of the plan.
        loss_rel: Measured relative loss against full prefill, None if full prefill scores 0.
        loss_rel_upper: Its upper bound, by the profile's confidence.
        loss_points: Measured loss against full prefill, in points.
        loss_points_upper: Its upper bound.
        n_scored: Samples behind these numbers.
        task: Task it was measured on.
        dataset: Data it was measured on.
        metric: Metric of `quality`.
        pair: The models it was measured on; `cache_key` needs them.
    """

    strategy: str
    start_layer: int | None
    stop_layer: int | None
    params: str | None
    recompute_fraction: float
    quality: float
    loss_rel: float | None
    loss_rel_upper: float | None
    loss_points: float | None
    loss_points_upper: float | None
    n_scored: int
    task: str
    dataset: str
    metric: str
    pair: Pair

    @classmethod
    def of(cls, row: Mapping[str, Any], pair: Pair) -> ChosenPlan:
        """Returns the plan of a row of a profile."""
        return cls(**{name: row[name] for name in cls._fields[:-1]}, pair=pair)
