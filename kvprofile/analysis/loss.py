"""Upper bounds of the loss of plans, by a bootstrap that resamples samples, paired with full prefill."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_PLANS_AT_ONCE = 128


class UpperBounds(NamedTuple):
    """One-sided upper bounds per plan; NaN where there is none."""

    loss_rel: Floats
    loss_points: Floats


def paired_bootstrap_upper(
    values: Floats, baseline: Floats, *, confidence: float, resamples: int, seed: int
) -> UpperBounds:
    """Returns one-sided percentile upper bounds of the loss of every plan.

    Every resample draws the same samples for all plans. Relative loss is `1 - mean(plan) / mean(baseline)`, loss in
    points is `100 (mean(baseline) - mean(plan))`; a plan is compared on the samples where both values exist. A
    resample without a relative loss (baseline 0) counts as the worst, so that a bound is never understated; a bound
    that falls on such a resample is NaN, and so are bounds from fewer than two samples.

    Args:
        values: Scores, plans × samples, NaN where missing.
        baseline: Scores of full prefill, one per sample, NaN where missing.
        confidence: Share of the resamples below the bound, such as 0.95.
        resamples: How many resamples are drawn.
        seed: Seed of the draws.
    """
    plans, samples = values.shape
    bounds = UpperBounds(np.full(plans, np.nan), np.full(plans, np.nan))
    if samples < 2:
        return bounds
    draws = multiplicities(samples, resamples, seed)
    for first in range(0, plans, _PLANS_AT_ONCE):
        block = slice(first, first + _PLANS_AT_ONCE)
        paired = ~np.isnan(values[block]) & ~np.isnan(baseline)
        base = np.where(paired, baseline, 0.0)
        base_sum = base @ draws
        difference = base_sum - np.where(paired, values[block], 0.0) @ draws
        count = paired.astype(np.float64) @ draws
        enough = paired.sum(axis=1) >= 2
        has_base = enough & (base.sum(axis=1) != 0)
        bounds.loss_rel[block] = _bound(difference, base_sum, has_base, confidence)
        bounds.loss_points[block] = _bound(100 * difference, count, enough, confidence)
    return bounds


def multiplicities(samples: int, resamples: int, seed: int) -> Floats:
    """Returns how often each resample draws each sample, samples × resamples."""
    drawn = np.random.default_rng(seed).integers(samples, size=(resamples, samples))
    cells = drawn + samples * np.arange(resamples)[:, None]
    counts = np.bincount(cells.ravel(), minlength=samples * resamples).reshape(resamples, samples)
    return np.ascontiguousarray(counts.T, dtype=np.float64)


def _bound(numerator: Floats, denominator: Floats, defined: NDArray[np.bool_], confidence: float) -> Floats:
    worst = np.full_like(numerator, np.inf)
    ratio = np.divide(numerator, denominator, out=worst, where=denominator != 0)
    # The next higher order statistic: linear interpolation would give NaN beside an infinite one.
    bound = np.quantile(ratio, confidence, axis=1, method="higher")
    return np.where(defined & np.isfinite(bound), bound, np.nan)
