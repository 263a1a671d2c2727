"""The closed form of a whole sample's work against the tree that the engine builds."""

from __future__ import annotations

import pytest
import torch

from kvprofile.cost.prefill import ModelShape, prefill_flops
from kvprofile.cost.sweep import behind_flops, layer_tokens, start_flops, suffix_flops
from kvprofile.engine.cache import KV
from kvprofile.engine.tree import fan_out
from kvprofile.layers import LayerRange, grid_union

SHAPE = ModelShape((100, 110, 120, 130, 140), 4, 8, 8, 32, 32, (None, 6, None, None, None), 4, 64, 97)


@pytest.mark.parametrize("units", [(1,), (2,), (1, 3), (2, 3)])
def test_suffixes_cost_what_the_nodes_of_the_tree_cost(units: tuple[int, ...]) -> None:
    groups = grid_union(SHAPE.layers, units)
    sender = [KV(torch.empty(0), torch.empty(0)) for _ in range(SHAPE.layers)]
    own = {start: [KV(torch.empty(0), torch.empty(0)) for _ in range(SHAPE.layers)] for start in range(SHAPE.layers)}
    rows = [
        tuple(own[g.start][layer] if g.start <= layer < g.stop else sender[layer] for layer in range(SHAPE.layers))
        for g in groups
    ]
    nodes = [len(contexts) for contexts in fan_out([tuple(sender), *rows]).contexts]
    expected = sum(n * behind_flops(SHAPE, 20, 5, LayerRange(at, at + 1)) for at, n in enumerate(nodes))
    assert suffix_flops(SHAPE, 20, 5, groups) == expected


def test_every_start_is_paid_once() -> None:
    passes = [prefill_flops(SHAPE, 20, LayerRange(start, 5)) for start in range(5)]
    assert start_flops(SHAPE, 20, grid_union(5, (1,))) == sum(passes)
    assert start_flops(SHAPE, 20, grid_union(5, (2,))) == passes[0] + passes[2] + passes[4]


def test_a_pass_goes_no_further_than_its_groups() -> None:
    groups = [LayerRange(1, 2), LayerRange(1, 4), LayerRange(3, 4), LayerRange(0, 5)]
    passes = [LayerRange(0, 5), LayerRange(1, 4), LayerRange(3, 4)]
    assert start_flops(SHAPE, 20, groups) == sum(prefill_flops(SHAPE, 20, group) for group in passes)
    assert layer_tokens(groups, 5, 20, 0) == 20 * (3 + 1)  # from layer 0 on it is the receiver's own prefill
