from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta

from benchmarks.coverage import CASES, coverage
from kvprofile.analysis.loss import gap_bounds, loss_bounds, resampling_weights

BASE = np.array([0.9, 0.4, 0.0, 0.7, 1.0])
PLANS = np.array([[0.8, 0.4, 0.1, 0.2, 1.0], BASE, [0.5, np.nan, 0.0, 0.7, 0.9]])


def bounds(values: np.ndarray, baseline: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    return loss_bounds(values, baseline, **{"confidence": 0.9, "resamples": 300, "seed": 3, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["upper", "lower"])
def test_equals_a_plain_loop(side: str) -> None:
    weights = resampling_weights(6, 300, seed=3)
    found = bounds(PLANS, BASE, side=side)
    unseen = (1.0, 0.0) if side == "upper" else (0.0, 1.0)
    for p, plan in enumerate(PLANS):
        rel, points = [], []
        for draw in weights.T:
            triples = [(w, b, v) for w, b, v in zip(draw, BASE, plan, strict=False) if not np.isnan(v)]
            triples.append((draw[5], *unseen))
            total, full, value = (sum(w * (1, b, v)[k] for w, b, v in triples) for k in range(3))
            rel.append(1 - value / full)
            points.append(100 * (full - value) / total)
        at = 270 if side == "upper" else 29
        assert found[0][p] == pytest.approx(sorted(rel)[at])
        assert found[1][p] == pytest.approx(sorted(points)[at])


@pytest.mark.parametrize("samples", [1, 5, 50])
def test_samples_that_lose_nothing_bound_what_so_few_can_exclude(samples: int) -> None:
    """Clopper and Pearson's bound for a loss that was never seen: 1 − 0.05^(1/n)."""
    ones = np.ones(samples)
    _, points = bounds(ones[None], ones, confidence=0.95, resamples=40_000)
    assert points[0] == pytest.approx(100 * (1 - 0.05 ** (1 / samples)), rel=0.03)


def test_yes_or_no_scores_have_the_exact_binomial_bound() -> None:
    full, plan = np.ones(50), np.arange(50) >= 3
    _, points = bounds(plan[None] * 1.0, full, confidence=0.95, resamples=40_000)
    assert points[0] == pytest.approx(100 * beta.ppf(0.95, 4, 47), rel=0.02)


def test_more_confidence_gives_no_lower_bound() -> None:
    found = [bounds(PLANS[:1], BASE, confidence=c)[1][0] for c in (0.6, 0.8, 0.95, 0.99)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_the_two_sides_enclose_the_measured_loss() -> None:
    measured = 100 * (BASE - PLANS[0]).mean()
    assert bounds(PLANS, BASE, side="lower")[1][0] < measured < bounds(PLANS, BASE)[1][0]


def test_baseline_zero_has_points_but_no_relative_loss() -> None:
    rel, points = bounds(np.array([[0.0, 0.1, 0.2]]), np.zeros(3))
    assert np.isnan(rel[0])
    assert points[0] > 0, "a sample may come on which full prefill scores"


@pytest.mark.parametrize("values", [np.full((2, 0), 0.0), np.full((2, 3), np.nan)])
def test_no_sample_no_bound(values: np.ndarray) -> None:
    found = bounds(values, np.ones(values.shape[1]))
    assert np.isnan(found).all()


def test_a_metric_without_a_range_takes_its_worst_score_for_the_unseen() -> None:
    values, baseline = np.array([[40.0, 70.0], [10.0, 20.0]]), np.array([50.0, 90.0])
    weights = resampling_weights(3, 300, seed=3)
    drawn = np.array([50.0, 90.0, 90.0]) @ weights - np.array([40.0, 70.0, 10.0]) @ weights
    points = bounds(values, baseline, in_unit_range=False)[1]
    assert points[0] == pytest.approx(np.sort(100 * drawn / weights.sum(axis=0))[270])


def test_blocks_of_plans_do_not_move_the_bounds() -> None:
    values = np.random.default_rng(0).random((300, 5))
    values[7, 2] = np.nan
    together, alone = bounds(values, BASE), bounds(values[[299]], BASE)
    assert together[0][299] == pytest.approx(alone[0][0])
    assert together[1][7] == pytest.approx(bounds(values[[7]], BASE)[1][0])


def gap(plan: np.ndarray, full: np.ndarray, floor: np.ndarray) -> tuple[float, float] | None:
    return gap_bounds(plan, full, floor, confidence=0.95, resamples=2000, seed=0)


def test_gap_bounds_reckon_with_the_unseen() -> None:
    full, floor = np.full(40, 0.8), np.full(40, 0.2)
    lower, upper = gap(np.full(40, 0.5), full, floor) or (0, 0)
    unseen = 0.05 ** (1 / 40)  # what 40 equal samples leave, as a share of their own weight
    assert lower == pytest.approx(0.5 - (1 / unseen - 1) / 0.6, rel=0.1)
    assert upper == pytest.approx(0.5 + (1 / unseen - 1) / 0.6, rel=0.1)
    wider = gap(np.tile([0.2, 0.8], 20), full, floor) or (0, 0)
    assert wider[0] < lower < 0.5 < upper < wider[1]
    one = gap(full[:1], full[:1], floor[:1])
    assert one is None or one[0] < 0, "one sample tells nothing"


def test_without_a_gap_there_are_no_bounds() -> None:
    full, unsure = np.full(40, 0.8), np.tile([0.0, 1.0], 20)
    assert gap(full, full, full) is None
    assert gap(full, full - 0.5, full) is None, "no context is better"
    assert gap(full, unsure, 1 - unsure - 0.01) is None, "the gap may be none"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("samples", [50, 200])
def test_coverage(case: str, samples: int) -> None:
    """The benchmark has 2000 repetitions and holds the bars; these are few enough for every change."""
    held = coverage(CASES[case], samples, repetitions=300, seed=7)
    assert min(share for name, share in held.items() if name.startswith("bound")) >= 0.93, held
    assert min(share for name, share in held.items() if name.startswith("certified")) >= 0.93, held
