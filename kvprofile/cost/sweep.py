"""FLOPs of measuring all groups of one sample, as the engine shares them."""

from __future__ import annotations

from collections.abc import Sequence

from kvprofile.cost.prefill import ModelShape, prefill_flops
from kvprofile.layers import LayerRange, furthest_stops


def start_flops(shape: ModelShape, tokens: int, groups: Sequence[LayerRange]) -> float:
    """Returns the FLOPs of one context pass from every start to the furthest stop of its groups."""
    return sum(prefill_flops(shape, tokens, LayerRange(*edges)) for edges in furthest_stops(groups).items())


def suffix_flops(shape: ModelShape, tokens: int, suffix: int, groups: Sequence[LayerRange]) -> float:
    """Returns the FLOPs of running `suffix` tokens behind a context of `tokens` for all groups and full reuse, as a tree."""
    return sum(
        behind_flops(shape, tokens, suffix, LayerRange(layer, layer + 1)) * tree_nodes(groups, layer)
        for layer in range(shape.layers)
    )


def layer_tokens(groups: Sequence[LayerRange], layers: int, context: int, new: int) -> int:
    """Returns how many layers are run on how many tokens, for passes from every start and `new` tokens behind, as a tree.

    The receiver's own prefill, which serves the groups from layer 0, is not counted.
    """
    passes = context * sum(stop - start for start, stop in furthest_stops(groups).items() if start > 0)
    return passes + new * sum(tree_nodes(groups, layer) for layer in range(layers))


def tree_nodes(groups: Sequence[LayerRange], layer: int) -> int:
    """Returns the rows that all groups and full reuse have at a layer.

    The reusing row, one row for every start at or before the layer that still runs, and one for every group that has ended.
    """
    running = {g.start for g in groups if g.start <= layer < g.stop}
    return 1 + len(running) + sum(g.stop <= layer for g in groups)


def behind_flops(shape: ModelShape, tokens: int, new: int, layers: LayerRange) -> float:
    """Returns the FLOPs of running `new` tokens behind `tokens` cached ones through some layers."""
    return prefill_flops(shape, tokens + new, layers) - prefill_flops(shape, tokens, layers)
