"""The choice of one plan from rows of a profile. Standard library only: a serving runtime imports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kvprofile.limits import LossLimit

Row = TypeVar("Row", bound=Mapping[str, Any])

REFERENCE_ARMS = frozenset({"sender_alone", "no_context"})
"""Measured to compare with; no way to serve a request."""


def complete(row: Mapping[str, Any]) -> bool:
    """Returns whether every planned sample of the row was scored."""
    return bool(row["n_planned"] > 0 and row["n_scored"] == row["n_planned"])


def cheapest(rows: Iterable[Row], limit: LossLimit) -> Row | None:
    """Returns the plan with the least recompute whose measured loss is within the limit, None if there is none.

    Ties go to the better quality, then to the earlier start. Plans that recompute every layer save nothing and are
    never chosen, nor are the arms to compare with and plans with samples that were not scored.

    Args:
        rows: Rows of `profile.parquet` of one task, dataset and metric.
        limit: The loss to accept.
    """
    eligible = (
        row
        for row in rows
        if row["strategy"] not in REFERENCE_ARMS
        and row["strategy"] != "full_prefill"
        and row["recompute_fraction"] < 1
        and complete(row)
        and limit.allows(row)
    )
    return min(eligible, key=_cost, default=None)


def _cost(row: Mapping[str, Any]) -> tuple[float, float, int]:
    start = -1 if row["start_layer"] is None else row["start_layer"]
    return row["recompute_fraction"], -row["quality"], start
