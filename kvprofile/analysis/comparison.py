"""What moved between two profiles of a pair: plans on the frontier, and paired differences where samples coincide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvprofile.analysis.loss import resampling_weights
from kvprofile.analysis.scores import Scores
from kvprofile.layers import PlanKey


class Moved(NamedTuple):
    """One plan in both profiles.

    Attributes:
        plan: The plan.
        before: Mean score in the first, over all its samples.
        after: Mean score in the second.
        shared_samples: Samples of equal id and context that both scored.
        difference_points: Second less first over those, in points; None if there are none.
        lower: Of the difference, one-sided; None if there are fewer than two shared samples.
        upper: Likewise.
    """

    plan: PlanKey
    before: float | None
    after: float | None
    shared_samples: int
    difference_points: float | None
    lower: float | None
    upper: float | None


def moved(
    before: Scores,
    after: Scores,
    plans: list[PlanKey],
    contexts: tuple[Mapping[str, str], Mapping[str, str]],
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> list[Moved]:
    """Returns how the scores of plans moved.

    Args:
        before: Scores of the first profile.
        after: Of the second, same task and metric.
        plans: Which plans.
        contexts: For each profile, `context_sha256` by sample id; samples coincide if id and context do.
        confidence: Of each bound by itself, by a Bayesian bootstrap over the shared samples.
        resamples: How many.
        seed: Seed of the draws.
    """
    places = [{sample: i for i, sample in enumerate(one.samples)} for one in (before, after)]
    shared = [s for s in before.samples if s in places[1] and contexts[0].get(s) == contexts[1].get(s)]
    columns = [[place[s] for s in shared] for place in places]
    found = []
    for plan in plans:
        values = [one.of(plan, one.value) for one in (before, after)]
        first, second = (value[chosen] for value, chosen in zip(values, columns, strict=True))
        difference = (second - first)[~np.isnan(second - first)]
        bounds: tuple[float | None, float | None] = (None, None)
        if len(difference) > 1:
            weights = resampling_weights(len(difference), resamples, seed)
            means = 100 * difference @ weights / weights.sum(axis=0)
            bounds = float(np.quantile(means, 1 - confidence)), float(np.quantile(means, confidence))
        means_of = [float(np.nanmean(v)) if not np.isnan(v).all() else None for v in values]
        mean = 100 * float(difference.mean()) if len(difference) else None
        found.append(Moved(plan, means_of[0], means_of[1], len(difference), mean, *bounds))
    return found
