"""What a config says of an architecture before any weight is read: whether the engine can splice it, and its heads."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from kvprofile.errors import BadInput

_RECURRENT_LAYERS = ("mamba", "linear", "recurrent", "conv", "rwkv", "ssm", "delta", "hybrid", "lightning", "lstm")
_RECURRENT_TYPES = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2", "zaya",
})  # fmt: skip
_RECURRENT_KEYS = ("mamba_", "ssm_", "linear_conv_", "linear_key_head")
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")


def refuse_unsupported(config: PretrainedConfig, name: str) -> None:
    """Raises BadInput for a model whose context is not held in one K and one V per layer and token.

    Decided generically where the config or the class says it (layer kinds, encoder–decoder flag, class mapping); the
    list of model types is only for those that do not.
    """
    model_type = str(getattr(config, "model_type", ""))
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(name, model_type, "an encoder–decoder: its context is no prefix of what is decoded")
    custom_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not custom_code:
        raise _refusal(name, model_type, "not a causal language model")
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise _refusal(name, model_type, "an encoder: its tokens attend to later ones, so no prefix can be cached")
    text = config.get_text_config(decoder=True)
    if found := _recurrent(text, {model_type, str(getattr(text, "model_type", ""))}):
        raise _refusal(
            name, model_type, f"recurrent or hybrid ({found}): a recurrent state cannot be spliced like keys and values"
        )


def key_value_heads(config: PretrainedConfig) -> int:
    """Returns the number of key-value heads of a text config, whatever it calls them."""
    heads = int(config.num_attention_heads)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if given := getattr(config, name, None):
            return int(given)
    return heads


def head_width(config: PretrainedConfig) -> int:
    """Returns the width of one head of a text config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _refusal(name: str, model_type: str, reason: str) -> BadInput:
    return BadInput(f'model "{name}" ({model_type}) is {reason}; use a decoder-only attention model')


def _recurrent(config: PretrainedConfig, model_types: Iterable[str]) -> str | None:
    """Returns what is recurrent about a text config, None if all its layers are attention."""
    known = _RECURRENT_TYPES.intersection(model_types)
    if known:
        return f"model type {min(known)}"
    for attribute in _LAYER_LISTS:
        kinds = getattr(config, attribute, None)
        if isinstance(kinds, (list, tuple)) and kinds:
            bad = sorted({str(k) for k in kinds if any(word in str(k).lower() for word in _RECURRENT_LAYERS)})
            # A list of kinds is the last word: Granite 4 has dense members whose configs still hold `mamba_` keys.
            return f"layers of kind {', '.join(bad)}" if bad else None
    if getattr(_model_class(config), "_is_stateful", False):
        return "a state besides keys and values"
    keys = sorted(k for k in config.to_dict() if k.startswith(_RECURRENT_KEYS))
    return f"config key {keys[0]}" if keys else None


def _model_class(config: PretrainedConfig) -> object:
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
