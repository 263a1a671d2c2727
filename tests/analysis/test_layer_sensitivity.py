from __future__ import annotations

import json

import numpy as np
import pytest

from kvprofile.analysis.scores import Scores
from kvprofile.analysis.sensitivity import layer_losses, most_sensitive, sets_against_groups
from kvprofile.layers import Plan, PlanKey
from kvprofile.strategies.layer_set import plan_of as set_of
from kvprofile.strategies.single_layer_reuse import plan_of as reuse_of

FULL = np.array([1.0, 0.8, 0.0, 0.6])


def scores(values: dict[Plan, list[float]], kl: dict[Plan, float] | None = None) -> Scores:
    plans: dict[PlanKey, int] = {plan.key: i for i, plan in enumerate(values)}
    value = np.array(list(values.values()))
    kls = np.full(value.shape, np.nan)
    for plan, mean in (kl or {}).items():
        kls[plans[plan.key]] = mean
    nothing = np.full(value.shape, np.nan)
    samples = tuple(f"s{i}" for i in range(value.shape[1]))
    return Scores("qa", "d", "f1", samples, plans, value, kls, nothing, nothing)


def test_losses_percentiles_and_critical_layers() -> None:
    held = scores({Plan("full_prefill"): [*FULL], reuse_of(0): [*FULL], reuse_of(1): [0.5, 0.8, 0.1, 0.6]})
    first, second = layer_losses(held)
    assert (first.layer, first.loss_points, first.critical) == (0, 0.0, False)
    assert second.loss_rel == pytest.approx(1 - 2.0 / 2.4)
    assert second.loss_points == pytest.approx(10.0)
    assert second.percentiles[50] == pytest.approx(0.0)
    assert second.percentiles[95] == pytest.approx(np.percentile([50, 0, -10, 0], 95))
    assert second.critical
    assert not layer_losses(held, critical=0.2)[1].critical


def test_full_prefill_at_zero_has_points_only() -> None:
    held = scores({Plan("full_prefill"): [0.0, 0.0], reuse_of(0): [0.0, 0.1]})
    (only,) = layer_losses(held)
    assert (only.loss_rel, only.critical) == (None, False)
    assert only.loss_points == pytest.approx(-5.0)


def test_layers_are_ranked_by_kl_then_by_loss() -> None:
    values = {
        Plan("full_prefill"): [1.0, 1.0],
        reuse_of(0): [1.0, 0.9],
        reuse_of(1): [0.1, 0.1],
        reuse_of(2): [1.0, 1.0],
    }
    assert most_sensitive(scores(values, {reuse_of(0): 0.5, reuse_of(1): 0.1, reuse_of(2): 0.9})) == [2, 0, 1]
    assert most_sensitive(scores(values)) == [1, 0, 2]


def test_sets_are_paired_with_the_group_of_as_many_layers() -> None:
    one, other = set_of([0, 3]), set_of([1])
    held = scores({Plan("full_prefill"): [*FULL], one: [0.5, 0.5, 0.5, np.nan], other: [0.0, 0.0, 0.0, 0.0]})
    group = {"strategy": "layer_group", "start_layer": 1, "stop_layer": 3, "params": None, "recomputed_layers": 2}
    profiled = scores({Plan("full_prefill"): [*FULL]})
    profiled.plans[("layer_group", 1, 3, None)] = 1
    object.__setattr__(profiled, "value", np.vstack([FULL, [0.2, 0.5, 0.5, 0.5]]))
    (found,) = sets_against_groups(held, profiled, [group], confidence=0.95, resamples=200, seed=0)
    assert found.difference_points == pytest.approx(10.0), "three samples have both"
    assert found.lower < 0 < found.difference_points < found.upper
    assert (found.layers, found.group, found.set_e_layers) == (2, (1, 3), 1), "layer 0 needs no hidden states"
    assert json.loads(found.set_params) == {"ranges": [[0, 1], [3, 4]]}
