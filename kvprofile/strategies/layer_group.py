"""The receiver recomputes one contiguous group of layers from the sender's hidden states, reuses the rest (arXiv 2411.02820)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.layers import LayerRange, Plan, grid_union
from kvprofile.strategies import Reading

if TYPE_CHECKING:
    from kvprofile.engine.contexts import ContextCaches

version = 1


def plans(layers: int, granularity: Sequence[int]) -> list[Plan]:
    return [Plan("layer_group", group) for group in grid_union(layers, granularity)]


def read(caches: ContextCaches, plan: Plan) -> Reading:
    return Reading(caches.mixed(_group(plan)))


def recomputed_layers(plan: Plan, layers: int) -> int:
    return _group(plan).length


def _group(plan: Plan) -> LayerRange:
    if plan.range is None:
        raise ValueError("a layer_group plan has a layer range")
    return plan.range
