"""Upper bounds of the loss that hold for any distribution and any number of samples, by betting.

Whoever doubts that the loss is below a limit loses money on every sample that shows it to be: a bet that is fair at the
limit multiplies its stake by more than 1 / (1 − confidence) with probability below 1 − confidence (Waudby-Smith and Ramdas,
"Estimating means of bounded random variables by betting", 2023, with their predictable plug-in stakes). Needs scores between 0
and 1, and samples that are drawn independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvprofile.analysis.loss import Bounds, Floats
from kvprofile.limits import LossLimit

_MOST_STAKED = 0.75
"""Of the wealth at any one sample, so that none ruins the bet; 0.5 and 0.9 give wider bounds where few samples lose all."""

_STEPS = 40
_LARGEST_GAIN = 10.0
"""Relative losses are looked for from minus this on."""


def certified_bounds(values: Floats, baseline: Floats, *, confidence: float) -> Bounds:
    """Returns an upper bound of the loss of every plan; NaN where there is none, as in `loss_bounds`.

    Args:
        values: Scores between 0 and 1, plans × samples, NaN where missing. Their order decides the stakes and where a bet may
            stop, so it may depend on nothing that goes with the scores, such as sorted ids.
        baseline: Scores of full prefill, one per sample, NaN where missing.
        confidence: Of each bound by itself; for the best of many plans, correct it for their number.
    """
    bounds = [_of_plan(value, baseline, confidence) for value in values]
    return Bounds(np.array([rel for rel, _ in bounds]), np.array([points for _, points in bounds]))


def certifies(value: Floats, baseline: Floats, limit: LossLimit, confidence: float) -> bool:
    """Returns whether one plan's scores, none missing, prove that its loss is within the limit."""
    worst, stakes = 1 - limit.share, _stakes(baseline - value, confidence)
    excess = worst * baseline - value if limit.unit == "%" else baseline - value - limit.share
    return worst <= 0 or _wins(excess, worst, stakes, confidence)


def _of_plan(value: Floats, baseline: Floats, confidence: float) -> tuple[float, float]:
    paired = ~np.isnan(value) & ~np.isnan(baseline)
    value, full = value[paired], baseline[paired]
    if not paired.any():
        return np.nan, np.nan
    loss, stakes = full - value, _stakes(full - value, confidence)
    points = 100 * _smallest(float(loss.mean()), lambda m: _wins(loss - m, 1 - m, stakes, confidence))
    if full.sum() <= 0:
        return np.nan, points
    rel = _smallest(
        max(-_LARGEST_GAIN, 1 - float(value.sum() / full.sum())),
        lambda r: _wins((1 - r) * full - value, 1 - r, stakes, confidence),
    )
    return rel, points


def _stakes(loss: Floats, confidence: float) -> Floats:
    """Returns the stake on each sample, from the spread of those before it (a prior of 1/4 stands for the first)."""
    samples = len(loss)
    number = np.arange(1, samples + 1)
    mean = np.cumsum(loss) / (number + 1)
    variance = (0.25 + np.cumsum((loss - mean) ** 2)) / (number + 1)
    before: Floats = np.concatenate([[0.25], variance[:-1]])
    stakes: Floats = np.sqrt(2 * np.log(1 / (1 - confidence)) / (samples * before))
    return stakes


def _wins(excess: Floats, worst: float, stakes: Floats, confidence: float) -> bool:
    """Returns whether betting that the mean of `excess`, at most `worst` each, is below 0 ever gains enough to say so."""
    stakes = np.minimum(stakes, _MOST_STAKED / worst)
    return bool(np.cumsum(np.log1p(-stakes * excess)).max() >= np.log(1 / (1 - confidence)))


def _smallest(lowest: float, wins: Callable[[float], bool]) -> float:
    """Returns the smallest limit between `lowest` and 1 at which the bet wins; it then wins at every larger one, too."""
    highest = 1.0
    if lowest >= highest:
        return highest
    for _ in range(_STEPS):
        middle = (lowest + highest) / 2
        lowest, highest = (lowest, middle) if wins(middle) else (middle, highest)
    return highest
