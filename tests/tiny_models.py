"""Tiny random models, tokenizers and adapters saved to folders, as a user has them; no network."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvprofile.recipe import ModelOptions
from tests.tiny import tiny_tokenizer

VOCABULARY = 384
LAYERS = 3
CPU = ModelOptions(dtype="float32", device="cpu")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def tiny_config(**changes: Any) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**{**_SIZES, **changes})


def tiny_model(config: Any = None, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = config or tiny_config()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def save_model(folder: Path, seed: int = 0, tokenizer: Any = None, shard: str = "1GB", **changes: Any) -> Path:
    """Saves a tiny Llama with a tokenizer; `changes` go into its config."""
    tiny_model(tiny_config(**changes), seed).save_pretrained(folder, max_shard_size=shard)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def peft_model(base: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Wraps without the deprecations of Transformers that PEFT still runs into."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(base, config)


def save_adapter(folder: Path, seed: int = 1, base_seed: int = 0, alpha: int = 8, **changes: Any) -> Path:
    """Saves a LoRA adapter whose change is not zero, made for the base `save_model(seed=base_seed, **changes)`."""
    base = tiny_model(tiny_config(**changes), base_seed)
    torch.manual_seed(seed)
    wrapped = peft_model(base, LoraConfig(r=4, lora_alpha=alpha, target_modules=["k_proj", "v_proj", "up_proj"]))
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.2)
    wrapped.save_pretrained(folder)
    return folder
