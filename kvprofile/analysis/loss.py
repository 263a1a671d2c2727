"""How far a measured loss can be trusted: one-sided bounds, paired with full prefill by sample.

A percentile bootstrap only knows losses it has seen, and promises too much where a plan nearly always loses nothing and
rarely everything. Here every resample also gives some weight to a sample that was never met and is the worst there can
be (Gaffke's bound; Learned-Miller and Thomas, arXiv 1905.06208). Its coverage is simulated in `benchmarks/coverage.py`, not
proved; `analysis.certificate` has a bound that is.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Side = Literal["upper", "lower"]

SMALLEST_GAP = 1e-3
"""Full prefill less floor, below which no share of the gap is told (arXiv 2609.10266)."""

_PLANS_AT_ONCE = 128
_TINIEST = 1e-300
"""A sum of scores that can be divided by."""


class Bounds(NamedTuple):
    """One-sided bounds per plan; NaN where there is none."""

    loss_rel: Floats
    loss_points: Floats


class Unseen(NamedTuple):
    """The scores of full prefill and of the plan on a sample that was not met."""

    baseline: float
    value: float


WORST, BEST = Unseen(1.0, 0.0), Unseen(0.0, 1.0)
"""Of a metric between 0 and 1."""


def loss_bounds(
    values: Floats,
    baseline: Floats,
    *,
    confidence: float,
    resamples: int,
    seed: int,
    side: Side = "upper",
    in_unit_range: bool = True,
) -> Bounds:
    """Returns one-sided bounds of the loss of every plan.

    Relative loss is `1 - mean(plan) / mean(baseline)`, loss in points `100 (mean(baseline) - mean(plan))`; a plan is compared
    on the samples where both values exist. All plans meet the same resamples. There is no bound without a sample, and none of
    the relative loss where full prefill's mean is 0 or less. One sample, or samples that are all alike, bound the loss by what
    so few samples can exclude.

    Args:
        values: Scores, plans × samples, NaN where missing.
        baseline: Scores of full prefill, one per sample, NaN where missing.
        confidence: Of each bound by itself, such as 0.95.
        resamples: How many.
        seed: Seed of the draws.
        side: Which side of the loss is bounded.
        in_unit_range: Whether the metric cannot leave 0 to 1; else the unseen sample is as bad as the worst scores observed.
    """
    plans, samples = values.shape
    bounds = Bounds(np.full(plans, np.nan), np.full(plans, np.nan))
    if samples == 0 or np.isnan(values).all() or np.isnan(baseline).all():
        return bounds
    lowest, highest = (WORST, BEST) if in_unit_range else _extremes(values, baseline)
    unseen, level = (lowest, confidence) if side == "upper" else (highest, 1 - confidence)
    weights = resampling_weights(samples + 1, resamples, seed)
    seen, extra = weights[:-1], weights[-1]
    for first in range(0, plans, _PLANS_AT_ONCE):
        block = slice(first, first + _PLANS_AT_ONCE)
        paired = ~np.isnan(values[block]) & ~np.isnan(baseline)
        common = paired[:1] if (paired == paired[0]).all() else paired  # one line for all plans where it can be
        base = np.where(common, baseline, 0.0)
        base_sum = base @ seen + unseen.baseline * extra
        difference = base_sum - np.where(paired, values[block], 0.0) @ seen - unseen.value * extra
        total = common.astype(np.float64) @ seen + extra
        rel = np.divide(difference, base_sum, out=np.full_like(difference, np.inf), where=base_sum > _TINIEST)
        bounds.loss_rel[block] = np.where(base.sum(axis=1) > _TINIEST, _quantile(rel, level), np.nan)
        bounds.loss_points[block] = np.where(common.any(axis=1), 100 * _quantile(difference / total, level), np.nan)
    return bounds


def difference_bounds(
    values: Floats, others: Floats, *, confidence: float, resamples: int, seed: int, in_unit_range: bool = True
) -> tuple[float, float]:
    """Returns one-sided lower and upper bounds of 100 (mean(values) − mean(others)), paired, from `loss_bounds`."""
    sides: tuple[Side, Side] = ("upper", "lower")
    lower, upper = (
        -loss_bounds(
            values[None],
            others,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
            side=side,
            in_unit_range=in_unit_range,
        ).loss_points[0]
        for side in sides
    )
    return float(lower), float(upper)


def gap_bounds(
    value: Floats, baseline: Floats, floor: Floats, *, confidence: float, resamples: int, seed: int
) -> tuple[float, float] | None:
    """Returns one-sided lower and upper bounds of (plan − floor) / (full prefill − floor) of one plan, scores between 0 and 1.

    Resamples reckon with an unseen sample as in `loss_bounds`: one on which the plan alone fails, or alone answers. None where
    full prefill is ahead of the floor by at most `SMALLEST_GAP`, in the samples or in one of a thousand resamples.
    """
    known = ~np.isnan(value) & ~np.isnan(baseline) & ~np.isnan(floor)
    if not known.any() or baseline[known].mean() - floor[known].mean() <= SMALLEST_GAP:
        return None
    weights = resampling_weights(int(known.sum()) + 1, resamples, seed)
    seen, extra = weights[:-1], weights[-1]
    ahead, gap = (scores[known] @ seen - floor[known] @ seen for scores in (value, baseline))
    usable = gap > SMALLEST_GAP * weights.sum(axis=0)
    if np.mean(usable) < 1 - 1e-3:
        return None
    lower, upper = (((ahead + sign * extra) / gap)[usable] for sign in (-1, 1))
    return float(np.quantile(lower, 1 - confidence)), float(np.quantile(upper, confidence))


def resampling_weights(samples: int, resamples: int, seed: int) -> Floats:
    """Returns the weights of samples in each resample, samples × resamples: exponential, so Dirichlet over their sum."""
    return np.random.default_rng(seed).exponential(size=(samples, resamples))


def _extremes(values: Floats, baseline: Floats) -> tuple[Unseen, Unseen]:
    return Unseen(float(np.nanmax(baseline)), float(np.nanmin(values))), Unseen(
        float(np.nanmin(baseline)), float(np.nanmax(values))
    )


def _quantile(resampled: Floats, level: float) -> Floats:
    """Returns the order statistic on the safe side of a quantile, per line; reorders the lines."""
    place = level * (resampled.shape[1] - 1)
    rank = math.ceil(place) if level > 0.5 else math.floor(place)
    resampled.partition(rank, axis=1)
    return resampled[:, rank]
