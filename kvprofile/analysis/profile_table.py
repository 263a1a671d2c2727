"""Rows of `profile.parquet` from measurements and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kvprofile.analysis.certificate import certified_bounds
from kvprofile.analysis.choice import REFERENCE_ARMS, complete
from kvprofile.analysis.frontier import frontier
from kvprofile.analysis.loss import SMALLEST_GAP, Bounds, Floats, Side, gap_bounds, loss_bounds
from kvprofile.analysis.scores import FULL_PREFILL, Scores, all_scores
from kvprofile.layers import Plan, PlanKey, plan_key
from kvprofile.store.schema import PROFILE

Source = tuple[str, str]
"""Task and dataset."""

_FLOOR = ("no_context", None, None, None)
_SENDER = ("sender_alone", None, None, None)


class PlanCost(NamedTuple):
    """A plan and what it costs; dictionaries by task and dataset.

    Attributes:
        plan: The plan.
        granularity: Largest unit whose grid has the plan, None where it has no layer range.
        recomputed_layers: Layers that the receiver runs over the context.
        total_layers: Layers of the receiver.
        prefill_flops: Modelled cost of the plan over the context, in FLOPs.
        full_prefill_flops: The same of full prefill.
        kv_bytes_per_token: Keys and values to ship, in bytes per context token.
        e_bytes_per_token: Hidden states to ship, in bytes per context token.
        measured_prefill_ms: Median measured time, None where not measured.
        measured_full_prefill_ms: The same of full prefill.
        context_tokens_median: Median length of the contexts, in tokens.
    """

    plan: Plan
    granularity: int | None
    recomputed_layers: int
    total_layers: int
    prefill_flops: Mapping[Source, float]
    full_prefill_flops: Mapping[Source, float]
    kv_bytes_per_token: int
    e_bytes_per_token: int
    measured_prefill_ms: Mapping[Source, float | None]
    measured_full_prefill_ms: Mapping[Source, float | None]
    context_tokens_median: Mapping[Source, int]


def build_profile_rows(
    measurements: pa.Table,
    plans: Sequence[PlanCost],
    *,
    n_planned: Mapping[Source, int],
    confidence: float,
    resamples: int,
    seed: int,
) -> pa.Table:
    """Returns the profile table: every plan of every task, dataset and metric that the measurements name.

    A plan is compared with full prefill on the samples where both were scored. Null means not measured, never zero.
    Among equal plans the frontier takes the first, so `plans` should name the simplest ways first.
    """
    rows: list[dict[str, Any]] = []
    for scores in all_scores(measurements):
        source = (scores.task, scores.dataset)
        bounds = _bounds(scores, [cost.plan.key for cost in plans], confidence, resamples, seed)
        block = [
            {
                **_cost_columns(cost, source),
                "task": scores.task,
                "dataset": scores.dataset,
                "metric": scores.metric,
                "n_planned": n_planned[source],
                **_quality_columns(scores, cost.plan.key),
                "loss_rel_upper": _or_none(bounds.loss_rel[i]),
                "loss_points_upper": _or_none(bounds.loss_points[i]),
            }
            for i, cost in enumerate(plans)
        ]
        mark_frontier(block)
        rows += block
    return pa.Table.from_pylist(rows, schema=PROFILE)


def rescore(rows: Sequence[dict[str, Any]], scores: Scores, *, confidence: float, resamples: int, seed: int) -> None:
    """Sets quality, losses and bounds of rows of one task, dataset and metric anew, from all samples of `scores`."""
    for row in rows:
        row.update(_quality_columns(scores, plan_key(row)), n_planned=len(scores.samples))
    set_bounds(rows, scores, confidence=confidence, resamples=resamples, seed=seed)


def set_bounds(rows: Sequence[dict[str, Any]], scores: Scores, *, confidence: float, resamples: int, seed: int) -> None:
    """Sets the upper bounds of rows of one task, dataset and metric anew."""
    bounds = _bounds(scores, [plan_key(row) for row in rows], confidence, resamples, seed)
    for row, rel, points in zip(rows, *bounds, strict=True):
        row["loss_rel_upper"], row["loss_points_upper"] = _or_none(rel), _or_none(points)


def set_intervals(
    rows: Sequence[dict[str, Any]], scores: Scores, *, confidence: float, resamples: int, seed: int
) -> None:
    """Adds one-sided lower bounds of the losses, and bounds of the gap recovered on both sides, to rows; None where unknown."""
    lower = lower_bounds(rows, scores, confidence=confidence, resamples=resamples, seed=seed)
    floor = scores.of(_FLOOR, scores.value)
    for row, rel, points in zip(rows, *lower, strict=True):
        row["loss_rel_lower"], row["loss_points_lower"] = _or_none(rel), _or_none(points)
        value = scores.of(plan_key(row), scores.value)
        unit = scores.in_unit_range
        bounds = (
            gap_bounds(value, scores.baseline, floor, confidence=confidence, resamples=resamples, seed=seed)
            if unit
            else None
        )
        row["gap_recovered_lower"], row["gap_recovered_upper"] = bounds or (None, None)


def lower_bounds(
    rows: Sequence[dict[str, Any]], scores: Scores, *, confidence: float, resamples: int, seed: int
) -> Bounds:
    """Returns one-sided lower bounds of the losses of rows of one task, dataset and metric; NaN where there is none."""
    return _bounds(scores, [plan_key(row) for row in rows], confidence, resamples, seed, side="lower")


def set_certified(rows: Sequence[dict[str, Any]], scores: Scores, confidence: float, seed: int) -> None:
    """Adds `loss_rel_certified` and `loss_points_certified` to rows, None where the metric may leave 0 to 1.

    The samples are shuffled: their ids may go with their scores, and the order of a bet may not.
    """
    order = np.random.default_rng(seed).permutation(len(scores.samples))
    values = _values(scores, [plan_key(row) for row in rows])[:, order]
    known = scores.in_unit_range and len(rows) > 0
    none = [None] * len(rows)
    bounds = certified_bounds(values, scores.baseline[order], confidence=confidence) if known else (none, none)
    for row, rel, points in zip(rows, *bounds, strict=True):
        row["loss_rel_certified"], row["loss_points_certified"] = _or_none(rel), _or_none(points)


def mark_frontier(rows: Sequence[dict[str, Any]]) -> None:
    """Sets `on_frontier` of rows of one task, dataset and metric, among complete plans that can serve a request."""
    candidate = [r["strategy"] not in REFERENCE_ARMS and complete(r) for r in rows]
    quality = [r["quality"] if c and r["quality"] is not None else np.nan for r, c in zip(rows, candidate, strict=True)]
    recompute = np.array([r["recompute_fraction"] for r in rows], dtype=np.float64)
    for row, on_frontier in zip(rows, frontier(recompute, np.array(quality, dtype=np.float64)), strict=True):
        row["on_frontier"] = bool(on_frontier)


def _bounds(
    scores: Scores, keys: Sequence[PlanKey], confidence: float, resamples: int, seed: int, side: Side = "upper"
) -> Bounds:
    bounds = loss_bounds(
        _values(scores, keys),
        scores.baseline,
        confidence=confidence,
        resamples=resamples,
        seed=seed,
        side=side,
        in_unit_range=scores.in_unit_range,
    )
    own = np.array(
        [key == FULL_PREFILL for key in keys], dtype=bool
    )  # loses nothing against itself, on no sample that may come
    return Bounds(*(np.where(own & ~np.isnan(bound), 0.0, bound) for bound in bounds))


def _values(scores: Scores, keys: Sequence[PlanKey]) -> Floats:
    return np.array([scores.of(key, scores.value) for key in keys]).reshape(len(keys), len(scores.samples))


def _cost_columns(cost: PlanCost, source: Source) -> dict[str, Any]:
    strategy, start, stop, params = cost.plan.key
    return {
        "strategy": strategy,
        "start_layer": start,
        "stop_layer": stop,
        "params": params,
        "granularity": cost.granularity,
        "recomputed_layers": cost.recomputed_layers,
        "total_layers": cost.total_layers,
        "recompute_fraction": cost.recomputed_layers / cost.total_layers,
        "context_tokens_median": cost.context_tokens_median[source],
        "prefill_flops": cost.prefill_flops[source],
        "full_prefill_flops": cost.full_prefill_flops[source],
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "e_bytes_per_token": cost.e_bytes_per_token,
        "measured_prefill_ms": cost.measured_prefill_ms.get(source),
        "measured_full_prefill_ms": cost.measured_full_prefill_ms.get(source),
    }


def _quality_columns(scores: Scores, key: PlanKey) -> dict[str, Any]:
    value, baseline = scores.of(key, scores.value), scores.baseline
    paired = ~np.isnan(value) & ~np.isnan(baseline)
    quality, full = _mean(value[paired]), _mean(baseline[paired])
    points = None if quality is None or full is None else 100 * (full - quality)
    return {
        "n_scored": int(paired.sum()),
        "quality": quality,
        "baseline_quality": full,
        "floor_quality": _mean(scores.of(_FLOOR, scores.value)[paired]),
        "sender_quality": _mean(scores.of(_SENDER, scores.value)[paired]),
        "loss_rel": 1 - quality / full if quality is not None and full is not None and full > 1e-300 else None,
        "loss_points": points,
        "gap_recovered": _gap_recovered(value, baseline, scores.of(_FLOOR, scores.value)),
        "mean_kl": _mean(scores.of(key, scores.kl)),
        "top1_agreement": _mean(scores.of(key, scores.top1_agreement)),
        "exact_match_rate": _mean(scores.of(key, scores.same_output)),
    }


def _gap_recovered(value: Floats, baseline: Floats, floor: Floats) -> float | None:
    known = ~np.isnan(value) & ~np.isnan(baseline) & ~np.isnan(floor)
    if not known.any():
        return None
    quality, full, bottom = (float(scores[known].mean()) for scores in (value, baseline, floor))
    return None if abs(full - bottom) <= SMALLEST_GAP else (quality - bottom) / (full - bottom)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _or_none(value: np.float64 | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
