"""Loss of each layer by itself, and of sets of layers against one group, from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvprofile.analysis.loss import difference_bounds
from kvprofile.analysis.scores import Scores
from kvprofile.layers import PlanKey, layer_in, plan_key, ranges_in

PERCENTILES = (5, 25, 50, 75, 95)
CRITICAL = 0.1
"""Relative loss above which a layer is critical (arXiv 2411.02820, section 3)."""


class LayerLoss(NamedTuple):
    """What taking one layer's K/V from the sender costs the receiver's own prefill.

    Attributes:
        layer: The layer, from 0.
        loss_rel: Of the mean score, None if full prefill scores 0.
        loss_points: Of the mean score.
        percentiles: Of the samples' losses in points, by percentile.
        mean_kl: From full prefill, in nats.
        critical: Whether the relative loss is above the threshold.
    """

    layer: int
    loss_rel: float | None
    loss_points: float | None
    percentiles: dict[int, float]
    mean_kl: float | None
    critical: bool


class SetAgainstGroup(NamedTuple):
    """The most sensitive layers as a set against one group of as many layers, on the same samples.

    Attributes:
        layers: How many are recomputed.
        set_params: The set's parameters.
        set_quality: Mean score.
        group: Start and stop of the group.
        group_quality: Mean score.
        difference_points: Of the means, set less group.
        lower: Of the difference, one-sided, reckoning with the unseen as bounds of a loss do.
        upper: Likewise.
        set_e_layers: Hidden states that the set needs shipped, in layers; one group needs at most one.
    """

    layers: int
    set_params: str
    set_quality: float
    group: tuple[int, int]
    group_quality: float
    difference_points: float
    lower: float
    upper: float
    set_e_layers: int


def layer_losses(scores: Scores, critical: float = CRITICAL) -> list[LayerLoss]:
    """Returns the loss of every layer that was measured, in order of the layers."""
    losses = []
    for layer, key in sorted(_layers(scores).items()):
        value, full = scores.of(key, scores.value), scores.baseline
        paired = ~np.isnan(value) & ~np.isnan(full)
        if not paired.any():
            losses.append(LayerLoss(layer, None, None, {}, None, critical=False))
            continue
        points = 100 * (full[paired] - value[paired])
        rel = 1 - float(value[paired].mean() / full[paired].mean()) if full[paired].mean() else None
        found = np.percentile(points, PERCENTILES)
        losses.append(
            LayerLoss(
                layer,
                rel,
                float(points.mean()),
                {p: float(x) for p, x in zip(PERCENTILES, found, strict=True)},
                _mean_kl(scores, key),
                critical=rel is not None and rel > critical,
            )
        )
    return losses


def most_sensitive(scores: Scores) -> list[int]:
    """Returns the layers from the most to the least sensitive: by mean KL, which varies less than a task score, then by loss."""
    losses = layer_losses(scores)
    return [one.layer for one in sorted(losses, key=lambda one: (-(one.mean_kl or 0.0), -(one.loss_points or 0.0)))]


def sets_against_groups(
    scores: Scores,
    profiled: Scores,
    frontier: Sequence[Mapping[str, Any]],
    *,
    confidence: float,
    resamples: int,
    seed: int,
) -> list[SetAgainstGroup]:
    """Returns each set beside the frontier's group of as many layers, paired by sample.

    The group is the best of its length on these samples, the set is not: that flatters the group.

    Args:
        scores: Of the sensitivity map.
        profiled: Of the profile, same task, dataset and metric.
        frontier: Rows of the frontier.
        confidence: Of each bound by itself.
        resamples: How many.
        seed: Of the draws.
    """
    groups = {row["recomputed_layers"]: row for row in frontier if row["start_layer"] is not None}
    found = []
    for key in scores.plans:
        if key[0] != "layer_set" or key[3] is None:
            continue
        ranges = ranges_in(key[3])
        row = groups.get(sum(one.length for one in ranges))
        if row is None:
            continue
        mine = dict(zip(scores.samples, scores.of(key, scores.value), strict=True))
        theirs = dict(zip(profiled.samples, profiled.of(plan_key(row), profiled.value), strict=True))
        pairs = np.array([(mine[s], theirs[s]) for s in mine if s in theirs]).reshape(-1, 2)
        pairs = pairs[~np.isnan(pairs).any(axis=1)]
        if len(pairs):
            one, other = (float(mean) for mean in pairs.mean(axis=0))
            bounds = difference_bounds(
                pairs[:, 0],
                pairs[:, 1],
                confidence=confidence,
                resamples=resamples,
                seed=seed,
                in_unit_range=scores.in_unit_range,
            )
            found.append(
                SetAgainstGroup(
                    row["recomputed_layers"],
                    key[3],
                    one,
                    (row["start_layer"], row["stop_layer"]),
                    other,
                    100 * (one - other),
                    *bounds,
                    set_e_layers=sum(group.start > 0 for group in ranges),
                )
            )
    return sorted(found)


def _layers(scores: Scores) -> dict[int, PlanKey]:
    return {layer_in(key[3]): key for key in scores.plans if key[0] == "single_layer_reuse"}


def _mean_kl(scores: Scores, key: PlanKey) -> float | None:
    kl = scores.of(key, scores.kl)
    return float(np.nanmean(kl)) if not np.isnan(kl).all() else None
