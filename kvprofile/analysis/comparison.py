"""What moved between two profiles of a pair: plans on the frontier, and paired differences where samples coincide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvprofile.analysis.loss import difference_bounds
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
        lower: Of the difference, one-sided, reckoning with the unseen as bounds of a loss do.
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
        contexts: For each profile, what a sample was asked, by its id; samples coincide if id and that do.
        confidence: Of each bound by itself.
        resamples: How many.
        seed: Seed of the draws.
    """
    places = [{sample: i for i, sample in enumerate(one.samples)} for one in (before, after)]
    shared = [s for s in before.samples if s in places[1] and s in contexts[0] and contexts[0][s] == contexts[1].get(s)]
    columns = [[place[s] for s in shared] for place in places]
    found = []
    for plan in plans:
        values = [one.of(plan, one.value) for one in (before, after)]
        first, second = (value[chosen] for value, chosen in zip(values, columns, strict=True))
        known = ~np.isnan(second - first)
        means = [float(np.nanmean(v)) if not np.isnan(v).all() else None for v in values]
        if not known.any():
            found.append(Moved(plan, means[0], means[1], 0, None, None, None))
            continue
        bounds = difference_bounds(
            second[known],
            first[known],
            confidence=confidence,
            resamples=resamples,
            seed=seed,
            in_unit_range=before.in_unit_range,
        )
        difference = 100 * float((second - first)[known].mean())
        found.append(Moved(plan, means[0], means[1], int(known.sum()), difference, *bounds))
    return found
