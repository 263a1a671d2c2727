"""Bisection chooses exactly what the plain search chooses."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from kvprofile.analysis.choice import cheapest
from kvprofile.limits import BOUND_METHOD, LossLimit, Rule
from kvprofile.runtime import ChosenPlan, RuntimeProfile
from tests.profile_factory import header

STRATEGIES = ("layer_group", "layer_group", "layer_group", "full_reuse", "full_prefill", "sender_alone", "layer_set")


def random_rows(draw: random.Random, plans: int, layers: int = 6) -> list[dict[str, Any]]:
    """Rows with many ties: few distinct losses and qualities, some null, some not scored on every sample."""

    def loss() -> float | None:
        return draw.choice([None, -0.01, 0.0, 0.01, 0.02, 0.02, 0.1, 1 - 0.72 / 0.80, draw.random()])

    rows = []
    for place in range(plans):
        strategy = draw.choice(STRATEGIES)
        start = draw.randrange(layers) if strategy == "layer_group" else None
        rows.append(
            {
                "strategy": strategy,
                "start_layer": start,
                "stop_layer": None if start is None else draw.randrange(start, layers) + 1,
                "params": f'{{"n":{place}}}' if strategy == "layer_set" else None,
                "total_layers": layers,
                "recompute_fraction": draw.choice([0.0, 1 / 6, 1 / 3, 0.5, 1.0]),
                "quality": draw.choice([0.5, 0.7, 0.7, draw.random()]),
                "n_planned": 4,
                "n_scored": draw.choice([4, 4, 4, 3, 0]),
                "task": draw.choice(["qa", "code"]),
                "dataset": "data",
                "metric": draw.choice(["f1", "exact_match"]),
                **{name: loss() for name in ("loss_rel", "loss_rel_upper")},
                **{name: (None if (held := loss()) is None else 100 * held) for name in _POINTS},
            }
        )
    return rows


_POINTS = ("loss_points", "loss_points_upper")


def limits(rows: list[dict[str, Any]], draw: random.Random) -> list[LossLimit]:
    """The losses of the rows themselves, their neighbours, and others."""
    shares = [row["loss_rel"] for row in rows if row["loss_rel"] is not None]
    shares += [row["loss_rel_upper"] for row in rows if row["loss_rel_upper"] is not None]
    around = [near for share in shares for near in (share, math.nextafter(share, 2), share - 1e-6)]
    values = [max(0.0, 100 * share) for share in (*around, 0.0, 0.1, 1.0, *(draw.random() for _ in range(5)))]
    return [LossLimit(value, unit) for value in values for unit in ("%", "pt")]


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_cheapest_plan_at_every_limit(seed: int) -> None:
    draw = random.Random(seed)
    rows = random_rows(draw, draw.choice([1, 5, 20, 60]))
    profile = RuntimeProfile(Path("x"), header(bounds=BOUND_METHOD), rows)
    compared = found = 0
    for task, metric in {(row["task"], row["metric"]) for row in rows}:
        own = [row for row in rows if (row["task"], row["metric"]) == (task, metric)]
        for limit in limits(own, draw):
            rules: tuple[Rule, ...] = ("point", "bound")
            for rule in rules:
                row = cheapest(own, limit, rule)
                expected = None if row is None else ChosenPlan.of(row, profile.pair)
                assert profile.choose(limit, task, metric, "data", rule) == expected
                compared, found = compared + 1, found + (row is not None)
    assert compared > 20
    assert found > 0 or len(rows) < 20


def test_a_loss_that_is_no_number_is_within_nothing() -> None:
    rows = random_rows(random.Random(0), 60)
    for row in rows:
        row.update(loss_rel=math.nan, loss_points=math.nan)
    profile = RuntimeProfile(Path("x"), header(), rows)
    assert profile.choose("100%", "qa", "f1") is None
    assert profile.choose("100pt", "qa", "f1") is None


def test_rows_that_change_later_change_nothing() -> None:
    rows = random_rows(random.Random(3), 60)
    profile = RuntimeProfile(Path("x"), json.loads(json.dumps(header())), rows)
    before = profile.choose("100%", "qa", "f1")
    assert before is not None
    for row in rows:
        row["quality"] = 0.0
    rows.clear()
    assert profile.choose("100%", "qa", "f1") == before
    assert any(row["quality"] for row in profile.rows)
