"""FLOPs of measuring all groups of one sample, as the engine shares them."""

from __future__ import annotations

from collections.abc import Sequence

from kvprofile.cost.prefill import ModelShape, prefill_flops
from kvprofile.layers import LayerRange


def start_flops(shape: ModelShape, tokens: int, groups: Sequence[LayerRange]) -> float:
    """Returns the FLOPs of one context pass from every start to the last layer."""
    return sum(prefill_flops(shape, tokens, LayerRange(s, shape.layers)) for s in {g.start for g in groups})


def suffix_flops(shape: ModelShape, tokens: int, suffix: int, groups: Sequence[LayerRange]) -> float:
    """Returns the FLOPs of running `suffix` tokens behind a context of `tokens` for all groups and full reuse, as a tree.

    At layer `l` the tree holds the reusing row, one row for every start at or before `l` that still runs, and one for every
    group that has ended.
    """
    flops = 0.0
    for layer in range(shape.layers):
        running = {g.start for g in groups if g.start <= layer < g.stop}
        ended = sum(g.stop <= layer for g in groups)
        flops += behind_flops(shape, tokens, suffix, LayerRange(layer, layer + 1)) * (1 + len(running) + ended)
    return flops


def behind_flops(shape: ModelShape, tokens: int, new: int, layers: LayerRange) -> float:
    """Returns the FLOPs of running `new` tokens behind `tokens` cached ones through some layers."""
    return prefill_flops(shape, tokens + new, layers) - prefill_flops(shape, tokens, layers)
