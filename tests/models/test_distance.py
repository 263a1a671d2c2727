from __future__ import annotations

import copy

import pytest
import torch

from kvprofile.models.distance import layer_distances
from tests.engine.architectures import CONFIGS, LAYERS, tiny_model

_FUSED = {"gpt_neox", "falcon", "falcon_alibi", "bloom", "deepseek_v3"}
_PROJECTIONS = ("k_proj", "v_proj", "qkv", "query_key_value", "c_attn", "kv_a_proj", "kv_b_proj")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_has_its_projections_found(name: str) -> None:
    one, other = tiny_model(name, 0), tiny_model(name, 1)
    assert [(d.key, d.value) for d in layer_distances(one, one)] == [(0, 0)] * LAYERS
    distances = layer_distances(one, other)
    # Two independent random matrices of equal size are √2 apart.
    assert all(d.key == pytest.approx(2**0.5, abs=0.2) for d in distances)
    assert all(d.value == pytest.approx(2**0.5, abs=0.2) for d in distances)
    assert all((d.note is not None) == (name in _FUSED) for d in distances)
    assert all((d.key == d.value) == (name in _FUSED) for d in distances)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_keys_and_values_are_told_apart_in_the_right_layer(name: str) -> None:
    receiver = tiny_model(name, 0)
    sender = copy.deepcopy(receiver)
    with torch.no_grad():
        if name == "llama":
            sender.model.layers[2].self_attn.v_proj.weight.mul_(1.5)
        elif name == "gpt2":
            sender.transformer.h[2].attn.c_attn.weight[:, 64:].mul_(1.5)
        else:
            sender.model.layers[2].self_attn.qkv_proj.weight[-16:].mul_(1.5)
    found = layer_distances(sender, receiver)
    assert [d.key for d in found] == [0] * LAYERS
    assert [d.value for d in found] == pytest.approx([0, 0, 0.5, 0][:LAYERS])


def test_quantised_weights_are_not_compared() -> None:
    model = tiny_model("llama", 0)
    projection = model.model.layers[0].self_attn.k_proj
    projection.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    first, second, *_ = layer_distances(model, model)
    assert (first.key, first.note) == (None, "quantised weights")
    assert second.key == 0
