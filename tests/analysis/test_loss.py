from __future__ import annotations

import math

import numpy as np
import pytest

from kvprofile.analysis.loss import multiplicities, paired_bootstrap_upper

BASE = np.array([0.9, 0.4, 0.0, 0.7, 1.0])
PLANS = np.array([[0.8, 0.4, 0.1, 0.2, 1.0], BASE, [0.5, np.nan, 0.0, 0.7, 0.9]])


def upper(values: np.ndarray, baseline: np.ndarray, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    return paired_bootstrap_upper(values, baseline, confidence=0.9, resamples=300, seed=seed)


def test_equals_a_plain_loop() -> None:
    draws = np.random.default_rng(3).integers(5, size=(300, 5))
    bounds = upper(PLANS, BASE)
    for p, plan in enumerate(PLANS):
        rel, points = [], []
        for draw in draws:
            pairs = [(plan[i], BASE[i]) for i in draw if not math.isnan(plan[i])]
            if not pairs:
                rel.append(math.inf)
                points.append(math.inf)
                continue
            value, base = (sum(pair[k] for pair in pairs) / len(pairs) for k in (0, 1))
            rel.append(1 - value / base if base else math.inf)
            points.append(100 * (base - value))
        at = math.ceil(0.9 * 299)
        assert bounds.loss_rel[p] == pytest.approx(sorted(rel)[at])
        assert bounds.loss_points[p] == pytest.approx(sorted(points)[at])


def test_draws_have_as_many_samples_as_there_are_and_repeat() -> None:
    draws = multiplicities(7, 50, seed=1)
    assert (draws.sum(axis=0) == 7).all()
    assert draws.max() > 1
    assert (draws == multiplicities(7, 50, seed=1)).all()
    assert (draws != multiplicities(7, 50, seed=2)).any()


def test_more_confidence_gives_no_lower_bound() -> None:
    bounds = [
        paired_bootstrap_upper(PLANS[:1], BASE, confidence=c, resamples=500, seed=0).loss_points[0]
        for c in (0.5, 0.8, 0.95, 0.99)
    ]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]


def test_baseline_zero_has_points_but_no_relative_loss() -> None:
    bounds = upper(np.array([[0.0, 0.1, 0.2]]), np.zeros(3))
    assert np.isnan(bounds.loss_rel[0])
    assert bounds.loss_points[0] <= 0


def test_resamples_without_a_baseline_count_as_the_worst() -> None:
    values, baseline = np.array([[1.0, 0.0]]), np.array([1.0, 0.0])
    assert np.isnan(upper(values, baseline).loss_rel[0])  # a quarter of the draws takes only the second sample


@pytest.mark.parametrize("values", [[[0.5]], [[0.5, np.nan, np.nan]]])
def test_fewer_than_two_pairs_have_no_bound(values: list[list[float]]) -> None:
    array = np.array(values)
    bounds = upper(array, np.ones(array.shape[1]))
    assert np.isnan(bounds.loss_rel[0])
    assert np.isnan(bounds.loss_points[0])


def test_blocks_of_plans_do_not_move_the_bounds() -> None:
    values = np.random.default_rng(0).random((300, 5))
    together = upper(values, BASE)
    alone = upper(values[[299]], BASE)
    assert together.loss_rel[299] == pytest.approx(alone.loss_rel[0])
