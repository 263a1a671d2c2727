"""The choice of one plan from rows of a profile. Standard library only: a serving runtime imports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvprofile.layers import PlanKey, plan_key
from kvprofile.limits import LossLimit, Rule

Row = TypeVar("Row", bound=Mapping[str, Any])

REFERENCE_ARMS = frozenset({"sender_alone", "no_context"})
"""Measured to compare with; no way to serve a request."""


def complete(row: Mapping[str, Any]) -> bool:
    """Returns whether every planned sample of the row was scored."""
    return bool(row["n_planned"] > 0 and row["n_scored"] == row["n_planned"])


def saves(row: Mapping[str, Any]) -> bool:
    """Returns whether the row is of a plan that serves requests and does not recompute everything."""
    return (
        row["strategy"] not in REFERENCE_ARMS
        and row["strategy"] != "full_prefill"
        and bool(row["recompute_fraction"] < 1)
    )


def can_serve(row: Mapping[str, Any]) -> bool:
    """Returns whether the row is of a plan that saves something and was scored on every sample."""
    return saves(row) and complete(row)


def cheapest(rows: Iterable[Row], limit: LossLimit, rule: Rule = "point") -> Row | None:
    """Returns the plan with the least recompute whose loss is within the limit, None if there is none.

    Ties go to the better quality, then to the earlier start. Plans that recompute every layer save nothing and are
    never chosen, nor are the arms to compare with and plans with samples that were not scored.

    Args:
        rows: Rows of `profile.parquet` of one task, dataset and metric.
        limit: The loss to accept.
        rule: Which loss: as measured, or a bound of it.
    """
    return min((row for row in rows if can_serve(row) and limit.allows(row, rule)), key=by_cost, default=None)


def cheapest_everywhere(blocks: Sequence[Sequence[Row]], limit: LossLimit, rule: Rule = "point") -> list[Row] | None:
    """Returns one plan's row of each block, the cheapest that is within the limit in all of them; None if there is none."""
    allowed = [{plan_key(r): r for r in rows if can_serve(r) and limit.allows(r, rule)} for rows in blocks]

    def cost(key: PlanKey) -> tuple[float, float, int]:
        costs = [by_cost(block[key]) for block in allowed]
        return costs[0][0], sum(quality for _, quality, _ in costs), costs[0][2]

    shared = set.intersection(*map(set, allowed)) if allowed else set()
    best = min(shared, key=cost, default=None)
    return None if best is None else [block[best] for block in allowed]


def beaten_by(row: Mapping[str, Any]) -> list[str]:
    """Returns the arms to compare with that score at least as well as a plan: one that beats neither is worthless."""
    others = {"no_context": row["floor_quality"], "sender_alone": row["sender_quality"]}
    if row["quality"] is None or row["strategy"] in (*REFERENCE_ARMS, "full_prefill"):
        return []
    return [arm for arm, quality in others.items() if quality is not None and quality >= row["quality"]]


def by_cost(row: Mapping[str, Any]) -> tuple[float, float, int]:
    """Returns what puts plans in the order in which they are preferred: recompute, quality, start."""
    start = -1 if row["start_layer"] is None else row["start_layer"]
    return row["recompute_fraction"], -row["quality"], start
