from __future__ import annotations

import numpy as np
import pytest

from kvprofile.analysis.certificate import certified_bounds, certifies
from kvprofile.limits import parse_loss

RNG = np.random.default_rng(0)
FULL = RNG.beta(2, 2, 60)
PLAN = FULL * RNG.choice([1.0, 1.0, 0.6], 60)


def wealth(excess: np.ndarray, worst: float, loss: np.ndarray, confidence: float) -> float:
    """The largest wealth on the way, by a plain loop."""
    owned = largest = 1.0
    seen: list[float] = []
    spread = 0.25
    for x, one in zip(excess, loss, strict=True):
        variance = spread / (len(seen) + 1)
        stake = min(np.sqrt(2 * np.log(1 / (1 - confidence)) / (len(loss) * variance)), 0.75 / worst)
        owned *= 1 - stake * x
        largest = max(largest, owned)
        seen.append(one)
        spread += (one - sum(seen) / (len(seen) + 1)) ** 2
    return largest


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_bound_is_where_the_bet_wins(confidence: float) -> None:
    rel, points = certified_bounds(PLAN[None], FULL, confidence=confidence)
    needed = 1 / (1 - confidence)
    for nudge, wins in ((1e-6, True), (-1e-6, False)):
        limit = points[0] / 100 + nudge
        assert (wealth(FULL - PLAN - limit, 1 - limit, FULL - PLAN, confidence) >= needed) == wins
        limit = rel[0] + nudge
        assert (wealth((1 - limit) * FULL - PLAN, 1 - limit, FULL - PLAN, confidence) >= needed) == wins


@pytest.mark.parametrize(
    ("text", "expected"), [("30%", True), ("5%", False), ("20pt", True), ("2pt", False), ("100%", True)]
)
def test_certifies_agrees_with_the_bound(text: str, expected: bool) -> None:
    limit = parse_loss(text)
    rel, points = certified_bounds(PLAN[None], FULL, confidence=0.95)
    bound = rel[0] if limit.unit == "%" else points[0] / 100
    assert certifies(PLAN, FULL, limit, 0.95) is expected is bool(bound <= limit.share)


def test_nothing_lost_is_certified_as_far_as_the_samples_reach() -> None:
    ones = np.ones((1, 200))
    _, points = certified_bounds(ones, ones[0], confidence=0.95)
    assert 100 * (1 - 0.05 ** (1 / 200)) <= points[0] < 3
    assert certified_bounds(ones[:, :10], ones[0, :10], confidence=0.95).loss_points[0] > points[0]


def test_what_has_no_bound() -> None:
    rel, points = certified_bounds(np.array([[0.0, 0.0], [np.nan, np.nan]]), np.zeros(2), confidence=0.95)
    assert np.isnan(rel).all()
    assert not np.isnan(points[0])
    assert np.isnan(points[1])
