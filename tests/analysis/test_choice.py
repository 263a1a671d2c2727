from __future__ import annotations

from typing import Any

import pytest

from kvprofile.analysis.choice import cheapest
from kvprofile.limits import parse_loss


def row(strategy: str = "layer_group", start: int | None = 0, **changes: Any) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "start_layer": start,
        "recompute_fraction": 0.5,
        "quality": 0.8,
        "loss_rel": 0.01,
        "loss_points": 0.8,
        "n_planned": 5,
        "n_scored": 5,
        **changes,
    }


def test_least_recompute_then_quality_then_start() -> None:
    late, early = row(start=3), row(start=1)
    worse, dearer = row(start=0, quality=0.7), row(recompute_fraction=0.6, quality=1.0)
    assert cheapest([dearer, worse, late, early], parse_loss("1%")) is early


@pytest.mark.parametrize(
    "never",
    [
        row("full_prefill", None, recompute_fraction=1.0),
        row("full_prefill", None, recompute_fraction=0.0),
        row("sender_alone", None, recompute_fraction=0.0),
        row("no_context", None, recompute_fraction=0.0),
        row(recompute_fraction=1.0),
        row(n_scored=4),
        row(n_planned=0, n_scored=0),
        row(loss_rel=None),
        row(loss_rel=float("nan")),
        row(loss_rel=0.0101),
    ],
)
def test_never_chosen(never: dict[str, Any]) -> None:
    assert cheapest([never], parse_loss("1%")) is None


def test_full_reuse_is_chosen_when_it_is_good_enough() -> None:
    reuse = row("full_reuse", None, recompute_fraction=0.0)
    assert cheapest([row(), reuse], parse_loss("1pt")) is reuse
