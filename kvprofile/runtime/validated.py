"""Whether a plan held on data that the profile never saw. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvprofile.layers import plan_key
from kvprofile.limits import LossLimit

Row = Mapping[str, Any]

VALIDATIONS = "validations/"
"""How names of files with validations begin."""


def why_not_validated(row: Row, limit: LossLimit, validations: Sequence[Row]) -> str | None:
    """Returns why a plan does not count as validated, None if it does.

    It does if on all fresh data of its task, by its metric and the newest validation there, its loss was within the limit and no
    promise was broken, and on some of them a promise was kept.

    Args:
        row: The plan's row in the profile.
        limit: The loss to accept, whatever a validation promised.
        validations: As `store.reader.Profile.validations`, oldest first.
    """
    newest = newest_by_dataset(row, validations)
    for dataset, (_, plan) in newest.items():
        if not limit.allows(_losses(plan)):
            return f"lost more than {limit} in the validation on {dataset}"
        if plan["held"] is False:
            return f"broke its promise in the validation on {dataset}"
    return None if any(plan["held"] for _, plan in newest.values()) else "not validated"


def newest_by_dataset(row: Row, validations: Sequence[Row]) -> dict[str, tuple[Row, Row]]:
    """Returns the newest validation of a row's plan on each fresh data set, and what it says of the plan."""
    newest: dict[str, tuple[Row, Row]] = {}
    for one in validations:
        if (one["task"], one["metric"]) == (row["task"], row["metric"]):
            for plan in one["plans"]:
                if plan_key(plan) == plan_key(row):
                    newest[one["dataset"]] = one, plan
    return newest


def _losses(plan: Row) -> dict[str, float | None]:
    """Returns both losses on the fresh data, named as in a profile; a validation tells only one of them."""
    quality, full = as_float(plan["quality"]), as_float(plan["baseline_quality"])
    if quality is None or full is None:
        return {"loss_rel": None, "loss_points": None}
    return {"loss_rel": 1 - quality / full if full > 0 else None, "loss_points": 100 * (full - quality)}


def as_float(number: float | None) -> float | None:
    """Returns a number of a file as a float, None for None and for an integer that no float holds."""
    try:
        return None if number is None else float(number)
    except OverflowError:
        return None
