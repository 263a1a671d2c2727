"""How far apart the key and value projections of two models are, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from kvprofile.models.architecture import head_width, key_value_heads

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d+)\.(?:.*\.)?(\w*att\w*)\.(?:.*\.)?(\w+)$")
_OTHER_TOWERS = re.compile(r"(?:^|[._])(?:vision|visual|audio|speech|cross\w*)(?:$|[._])")
_KEYS = frozenset({"k_proj", "key", "key_proj", "wk"})
_VALUES = frozenset({"v_proj", "value", "value_proj", "wv"})
_IN_ROWS = frozenset({"qkv_proj", "Wqkv", "W_pack", "c_attn"})
"""Fused projections whose rows are all queries, then all keys, then all values."""
_INTERLEAVED = frozenset({"query_key_value", "qkv", "kv_proj"})
_LATENT = frozenset({"kv_a_proj_with_mqa", "kv_b_proj"})


class LayerDistance(NamedTuple):
    """Relative Frobenius distance of one layer's projections, `‖W_sender − W_receiver‖ / ‖W_receiver‖`.

    Attributes:
        key: None where there is nothing to compare; `note` says why.
        value: The same number as `key` where one weight makes both.
        note: None in the ordinary case.
    """

    layer: int
    key: float | None
    value: float | None
    note: str | None = None


class _Projections(NamedTuple):
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    note: str | None


def layer_distances(sender: PreTrainedModel, receiver: PreTrainedModel) -> list[LayerDistance]:
    """Returns the distances of all layers of two models of one architecture, by layer."""
    ours, theirs = _by_layer(sender), _by_layer(receiver)
    layers = int(_text_config(receiver).num_hidden_layers)
    return [_distance(layer, ours.get(layer, {}), theirs.get(layer, {}), receiver) for layer in range(layers)]


@torch.no_grad()
def _distance(
    layer: int, ours: dict[str, torch.nn.Module], theirs: dict[str, torch.nn.Module], receiver: PreTrainedModel
) -> LayerDistance:
    if not theirs:
        return LayerDistance(layer, None, None, "no key or value projection found")
    if ours.keys() != theirs.keys():
        return LayerDistance(layer, None, None, "the two models' projections have different names")
    if note := _unreadable([*ours.values(), *theirs.values()]):
        return LayerDistance(layer, None, None, note)
    config = _text_config(receiver)
    first, second = _projections(ours, config), _projections(theirs, config)
    key = _relative(first.keys, second.keys)
    return LayerDistance(
        layer, key, key if second.values is second.keys else _relative(first.values, second.values), second.note
    )


def _projections(modules: dict[str, torch.nn.Module], config: PretrainedConfig) -> _Projections:
    """Returns the weights that make keys and those that make values; the same list where they cannot be told apart."""
    weights = {name: _rows(module) for name, module in modules.items()}
    keys = [w for name, w in weights.items() if name in _KEYS]
    values = [w for name, w in weights.items() if name in _VALUES]
    if keys:
        return _Projections(keys, values or keys, None if values else "keys serve as values")
    name, fused = next(iter(weights.items()))
    heads, groups, width = int(config.num_attention_heads), key_value_heads(config), head_width(config)
    if name in _IN_ROWS and fused.shape[0] == (heads + 2 * groups) * width and _is_split_by_rows(modules[name], config):
        key_rows, value_rows = fused[heads * width :].chunk(2)
        return _Projections([key_rows], [value_rows], None)
    both = list(weights.values())
    latent = name in _LATENT
    return _Projections(both, both, "latent keys and values" if latent else "queries, keys and values in one weight")


def _is_split_by_rows(module: torch.nn.Module, config: PretrainedConfig) -> bool:
    # CodeGen cuts its rows for four TPU cores, and GPT-BigCode without multi-query interleaves heads as GPT-NeoX does.
    if getattr(config, "model_type", "") == "codegen":
        return False
    return not hasattr(config, "multi_query") or bool(config.multi_query) or type(module).__name__ == "Conv1D"


def _by_layer(model: PreTrainedModel) -> dict[int, dict[str, torch.nn.Module]]:
    known = _KEYS | _VALUES | _IN_ROWS | _INTERLEAVED | _LATENT
    found: dict[int, dict[str, torch.nn.Module]] = {}
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and match[3] in known and hasattr(module, "weight") and not _OTHER_TOWERS.search(name):
            found.setdefault(int(match[1]), {})[match[3]] = module
    return found


def _rows(module: torch.nn.Module) -> torch.Tensor:
    """Returns the weight as (outputs, inputs); GPT-2's `Conv1D` holds it transposed."""
    weight: torch.Tensor = module.get_parameter("weight")
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _unreadable(modules: Sequence[torch.nn.Module]) -> str | None:
    weights = [module.weight for module in modules]
    if any(not isinstance(w, torch.Tensor) or not w.is_floating_point() or w.element_size() < 2 for w in weights):
        return "quantised weights"
    return "weights are offloaded" if any(w.is_meta for w in weights if isinstance(w, torch.Tensor)) else None


def _relative(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float | None:
    if [w.shape for w in ours] != [w.shape for w in theirs]:
        return None
    pairs = [(a.to(b.device, torch.float32), b.float()) for a, b in zip(ours, theirs, strict=True)]
    change = sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs)
    size = sum(float(b.square().sum(dtype=torch.float64)) for _, b in pairs)
    return float((change / size) ** 0.5) if size else None


def _text_config(model: PreTrainedModel) -> PretrainedConfig:
    return model.config.get_text_config(decoder=True)
