"""Reads a model's shape, for the cost formulas."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from kvprofile.cost.prefill import ModelShape
from kvprofile.engine.decoder import find_layers
from kvprofile.models.architecture import head_width, key_value_heads


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Returns the shape of a causal language model; its weights are not read, so it may lie on the meta device."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    width = head_width(config)
    rank = getattr(config, "kv_lora_rank", None)
    if rank:  # latent attention caches one compressed vector and the rotary part of the keys
        key_width, value_width = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        cached = rank + config.qk_rope_head_dim
    else:
        key_width = value_width = width
        cached = 2 * key_value_heads(config) * width
    layers = find_layers(model)
    return ModelShape(
        linear_parameters=tuple(_linear_parameters(layer, config) for layer in layers),
        query_heads=heads,
        key_width=key_width,
        value_width=value_width,
        cached_values=cached,
        hidden_size=config.hidden_size,
        windows=_windows(config, len(layers)),
        bytes_per_value=torch.empty((), dtype=model.dtype).element_size(),
        widest=max(_widest(layer) for layer in layers),
        vocabulary=config.vocab_size,
    )


def _linear_parameters(layer: nn.Module, config: object) -> int:
    """Returns the weights a token meets in one layer.

    Modules with `in_features` are counted by it, since quantised weights are packed; experts are held as one 3-d weight each
    and a token visits a few of them.
    """
    visited = getattr(config, "num_experts_per_tok", None) or 1
    count = 0
    for module in layer.modules():
        widths = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if isinstance(widths[0], int) and isinstance(widths[1], int):
            count += widths[0] * widths[1]
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() == 2:
                count += weight.numel()
            elif weight.dim() == 3:
                count += weight[0].numel() * min(visited, weight.shape[0])
    return count


def _widest(layer: nn.Module) -> int:
    """Returns the largest width of anything a layer computes for one token."""
    widths = [0]
    for module in layer.modules():
        own = [getattr(module, "in_features", 0), getattr(module, "out_features", 0)]
        if not any(own):
            own = [width for weight in module.parameters(recurse=False) for width in weight.shape[-2:]]
        widths += own
    return max(widths)


def _windows(config: object, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    if kinds is None:
        return (int(window),) * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
