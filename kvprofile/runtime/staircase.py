"""The cheapest plan within any limit, found by bisection. Standard library only."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvprofile.analysis.choice import by_cost, can_serve
from kvprofile.limits import LossLimit, Rule
from kvprofile.runtime.fingerprint import Pair
from kvprofile.runtime.plan import ChosenPlan


class Staircase(NamedTuple):
    """Plans of one task, dataset and metric, each the cheapest within its own loss and up to that of the next.

    Attributes:
        losses: What each loses, in the unit of limits, least first; a plan that loses less costs more.
        plans: The plans.
    """

    losses: tuple[float, ...]
    plans: tuple[ChosenPlan, ...]

    def within(self, limit: LossLimit) -> ChosenPlan | None:
        """Returns what `analysis.choice.cheapest` returns of the rows that this was built from."""
        place = bisect_right(self.losses, limit.most)
        return self.plans[place - 1] if place else None


def staircase(rows: Iterable[Mapping[str, Any]], limit: LossLimit, rule: Rule, pair: Pair) -> Staircase:
    """Returns the staircase of rows of one task, dataset and metric; of the limit, only the unit counts."""
    column = limit.column(rule)
    steps: list[tuple[float, ChosenPlan]] = []
    for row in sorted(filter(can_serve, rows), key=by_cost):
        loss = math.nan if row[column] is None else limit.measure(row[column])
        if loss < (steps[-1][0] if steps else math.inf):
            steps.append((loss, ChosenPlan.of(row, pair)))
    return Staircase(tuple(loss for loss, _ in reversed(steps)), tuple(plan for _, plan in reversed(steps)))
