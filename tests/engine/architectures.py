"""Tiny random models of many architectures, float32, built from configs; no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvprofile.engine.decoder import Decoder

LAYERS = 4
VOCABULARY = 97
CONTEXT = torch.randint(3, VOCABULARY, (23,), generator=torch.Generator().manual_seed(2)).tolist()
SUFFIX = (5, 9, 30, 41, 7)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON, num_key_value_heads=2),
    "qwen3": lambda: transformers.Qwen3Config(**_GROUPED),
    "mistral_window": lambda: transformers.MistralConfig(**_GROUPED, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(**_GROUPED, sliding_window=6, query_pre_attn_scalar=8),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GROUPED,
        sliding_window=6,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
    "phi3": lambda: transformers.Phi3Config(**_COMMON, num_key_value_heads=2),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_COMMON),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        multi_query=True,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "falcon_alibi": lambda: transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_COMMON, num_key_value_heads=2),
    "mixtral": lambda: transformers.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, num_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_COMMON,
        **_EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256, rotary_dim=4
    ),
    "bloom": lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=LAYERS, n_head=4),
    "mpt": lambda: transformers.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=LAYERS, n_heads=4, max_seq_len=256
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ),
}


def tiny_model(architecture: str, seed: int) -> PreTrainedModel:
    """Returns a random model whose layers differ enough that a splice of the wrong one shows."""
    torch.manual_seed(seed)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture](), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                weight.normal_(0, 0.25)
    return model.eval()


def tiny_decoder(architecture: str = "llama", seed: int = 0) -> Decoder:
    return Decoder(tiny_model(architecture, seed))
