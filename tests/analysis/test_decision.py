from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kvprofile.analysis.decision import Decision, Resampling, chosen_samples, decide
from kvprofile.analysis.profile_table import build_profile_rows, set_certified
from kvprofile.analysis.scores import FULL_PREFILL, Scores, all_scores
from kvprofile.limits import Rule, parse_loss
from kvprofile.store.schema import MEASUREMENTS
from tests.profile_factory import cost, measurements, plans

QA = ("qa", "hotpotqa")
RESAMPLING = Resampling(0.95, 500, 0)


def block(samples: int, metric: str = "f1") -> tuple[list[dict[str, Any]], Scores]:
    table = pa.Table.from_pylist(measurements(samples=samples, sources=[QA]), schema=MEASUREMENTS)
    costs = [cost(plan, 6, (1, 2, 3), [QA]) for plan in plans(6, (1, 2, 3))]
    rows = build_profile_rows(table, costs, n_planned={QA: samples}, **RESAMPLING._asdict())
    scores = next(one for one in all_scores(table) if one.metric == metric)
    return [row for row in rows.to_pylist() if row["metric"] == metric], scores


def decided(samples: int, limit: str, rule: Rule, split: float | None = None) -> Decision:
    rows, scores = block(samples)
    return decide(rows, parse_loss(limit), rule, scores, RESAMPLING, split)


def layers(row: dict[str, Any] | None) -> tuple[int, int] | None:
    return None if row is None else (row["start_layer"], row["stop_layer"])


def test_few_samples_are_enough_to_measure_and_not_to_bound() -> None:
    measured = decided(12, "5%", "point")
    assert layers(measured.selected) == (2, 4)
    assert [layers(row) for row, _ in measured.needed] == [(2, 4)]
    bounded = decided(12, "5%", "bound")
    assert bounded.selected is None
    assert layers(bounded.measured) == (2, 4)
    (row, count), *_ = bounded.needed
    assert layers(row) == (2, 4)
    assert 50 < count < 200
    assert layers(decided(300, "5%", "bound").selected) == (2, 4)


def test_a_certificate_covers_all_plans_that_could_be_chosen() -> None:
    assert decided(100, "5%", "certified").selected is None
    sure = decided(1000, "5%", "certified")
    assert layers(sure.selected) == (2, 4)
    assert sure.tested == 21, "20 groups that save something, and full reuse"
    assert sure.selected is not None
    assert sure.selected["loss_rel_upper"] < sure.selected["loss_rel_certified"] <= 0.05
    assert sure.needed == ()


def test_a_split_judges_on_other_samples_than_it_chose_on() -> None:
    rows, scores = block(600)
    chooses = chosen_samples(600, 0.5, RESAMPLING.seed)
    own = next(i for i, row in enumerate(rows) if layers(row) == (2, 4))
    decision = decide(rows, parse_loss("5%"), "certified", scores, RESAMPLING, 0.5)
    assert layers(decision.selected) == (2, 4)
    assert (decision.tested, decision.selection_samples) == (1, 300)
    assert rows[own]["n_scored"] == 300
    assert rows[own]["baseline_quality"] == pytest.approx(scores.baseline[~chooses].mean())


def test_a_split_stops_at_the_first_plan_that_fails() -> None:
    """Nothing cheaper is looked at, though it would pass by itself: the order was fixed on other samples."""
    rows, scores = block(600)
    chooses = chosen_samples(600, 0.5, RESAMPLING.seed)
    dear, cheap = (
        (row["strategy"], row["start_layer"], row["stop_layer"], None)
        for row in rows
        if layers(row) in ((1, 4), (2, 4))
    )
    dear, cheap = sorted((dear, cheap), key=lambda key: key[1] or 0)
    assert dear[1:3] == (1, 4)
    scores.value[scores.plans[dear]] = np.where(chooses, 1.0, 0.0)  # the best plan of those that choose
    decision = decide(rows, parse_loss("5%"), "bound", scores, RESAMPLING, 0.5)
    assert decision.selected is None


@pytest.mark.parametrize(("samples", "share", "expected"), [(10, 0.5, 5), (10, 0.01, 1), (10, 0.99, 9), (2, 0.9, 1)])
def test_both_parts_of_a_split_have_samples(samples: int, share: float, expected: int) -> None:
    chosen = chosen_samples(samples, share, 0)
    assert chosen.sum() == expected
    assert (chosen == chosen_samples(samples, share, 0)).all()


def test_points_and_bounds_do_without_measurements() -> None:
    rows, _ = block(300)
    assert layers(decide(rows, parse_loss("5%"), "bound", None, RESAMPLING).selected) == (2, 4)


def test_a_certificate_does_not_depend_on_what_samples_are_called() -> None:
    """Easy samples first would let a bet win before the hard ones come: the bound would be the measured 20 points."""
    _, scores = block(200)
    full, plan = np.ones(200), np.ones(200)
    plan[160:] = 0.0
    plans = {FULL_PREFILL: 0, ("x", None, None, None): 1}
    sorted_by_ease = dataclasses.replace(scores, value=np.vstack([full, plan]), plans=plans)
    row: dict[str, Any] = {"strategy": "x", "start_layer": None, "stop_layer": None, "params": None}
    set_certified([row], sorted_by_ease, 0.95, seed=0)
    assert row["loss_points_certified"] > 23
