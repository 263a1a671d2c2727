"""About how many samples it would take to show that a loss is within a limit, if further ones look like those at hand."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from kvprofile.analysis.certificate import certifies
from kvprofile.analysis.loss import WORST, Floats
from kvprofile.limits import LossLimit

MOST = 1_000_000
"""More are not looked for."""

FEWEST = 10
"""Fewer samples say too little about what further ones would look like."""

_RESAMPLES = 2000


def samples_needed(
    value: Floats,
    baseline: Floats,
    limit: LossLimit,
    rule: Literal["bound", "certified"],
    *,
    confidence: float,
    seed: int = 0,
) -> int | None:
    """Returns the number of samples, one plan's scores and full prefill's repeated, at which the rule holds.

    Rounded up to two digits; rare losses that these samples do not show make it more. None if the measured loss itself is not
    within the limit, or `MOST` would not do.
    """
    paired = ~np.isnan(value) & ~np.isnan(baseline)
    plan, full = value[paired], baseline[paired]
    # What is above 0 on average when the loss is above the limit.
    excess = (1 - limit.share) * full - plan if limit.unit == "%" else full - plan - limit.share
    if len(excess) < FEWEST or excess.mean() >= 0 or (limit.unit == "%" and full.sum() == 0):
        return None

    def holds(times: float) -> bool:
        if rule == "bound":
            unseen = (1 - limit.share) * WORST.baseline - WORST.value
            rng = np.random.default_rng(seed)
            weights = rng.gamma(times, size=(len(excess), _RESAMPLES))
            resampled = excess @ weights + unseen * rng.exponential(size=_RESAMPLES)
            return bool(np.quantile(resampled, confidence) <= 0)
        order = np.random.default_rng(seed).permutation(math.ceil(times * len(excess))) % len(excess)
        return certifies(plan[order], full[order], limit, confidence)

    lowest, highest = 1 / len(excess), MOST / len(excess)
    if not holds(highest):
        return None
    while highest / lowest > 1.01:
        middle = math.sqrt(lowest * highest)
        lowest, highest = (lowest, middle) if holds(middle) else (middle, highest)
    count = highest * len(excess)
    unit: int = 10 ** max(0, math.floor(math.log10(count)) - 1)
    return math.ceil(count / unit) * unit
