from __future__ import annotations

import numpy as np
import pytest

from kvprofile.analysis.certificate import certifies
from kvprofile.analysis.loss import loss_bounds
from kvprofile.analysis.samples_needed import samples_needed
from kvprofile.limits import LossLimit, parse_loss

FULL = np.tile([1.0, 0.0, 0.6, 0.8], 10)
PLAN = FULL - np.tile([0.1, 0.0, -0.1, 0.05], 10)


def holds(times: int, limit: LossLimit, rule: str) -> bool:
    full, plan = np.tile(FULL, times), np.tile(PLAN, times)
    if rule == "certified":
        return certifies(plan, full, limit, 0.95)
    rel, points = loss_bounds(plan[None], full, confidence=0.95, resamples=4000, seed=1)
    return bool((rel if limit.unit == "%" else points / 100)[0] <= limit.share)


@pytest.mark.parametrize("rule", ["bound", "certified"])
@pytest.mark.parametrize("text", ["5%", "3pt"])
def test_so_many_samples_do_and_half_of_them_do_not(rule: str, text: str) -> None:
    limit = parse_loss(text)
    count = samples_needed(PLAN, FULL, limit, rule, confidence=0.95)  # type: ignore[arg-type]
    assert count is not None
    assert count > len(FULL)
    assert holds(round(1.3 * count / len(FULL)) + 1, limit, rule)
    assert not holds(max(1, round(0.5 * count / len(FULL))), limit, rule)


def test_no_number_of_samples_helps_a_plan_that_loses_more() -> None:
    assert samples_needed(0.8 * FULL, FULL, parse_loss("10%"), "bound", confidence=0.95) is None
    assert samples_needed(PLAN, 0 * FULL, parse_loss("10%"), "bound", confidence=0.95) is None
    assert samples_needed(FULL[:0], FULL[:0], parse_loss("1pt"), "bound", confidence=0.95) is None


def test_a_narrow_margin_needs_more_than_can_be_looked_for() -> None:
    rng = np.random.default_rng(0)
    full = (rng.random(50) < 0.5) * 1.0
    plan = rng.permutation(full) - 1e-6
    assert samples_needed(plan, full, LossLimit(1.1e-4, "pt"), "certified", confidence=0.95) is None
