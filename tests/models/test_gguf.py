from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch

from kvprofile.errors import BadInput
from kvprofile.models.fingerprint import weights_sha256
from kvprofile.models.loading import load_model
from tests.tiny import tiny_tokenizer
from tests.tiny_models import CPU, VOCABULARY, tiny_config, tiny_model

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, seed: int = 0) -> None:
    config = tiny_config()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    tokenizer = tiny_tokenizer()
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"unused{i}" for i in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, tensor in tiny_model(seed=seed).state_dict().items():
        stem = name.removesuffix(".weight")
        if stem not in _OUTER:
            _, _, layer, inner = stem.split(".", 3)
            stem = f"blk.{layer}.{_NAMES[inner]}"
        else:
            stem = _OUTER[stem]
        writer.add_tensor(f"{stem}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_file_is_loaded_as_an_ordinary_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(tmp_path / "tiny.gguf"), CPU)
    value = loaded.model.model.layers[2].self_attn.v_proj.weight
    torch.testing.assert_close(value, tiny_model().model.layers[2].self_attn.v_proj.weight)
    assert not hasattr(loaded.model.config, "quantization_config")
    assert loaded.tokenizer("the")["input_ids"]
    loaded.model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_fingerprint_is_of_its_tensors(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_gguf(tmp_path / f"{name}.gguf", seed)
    first, second, other = (weights_sha256(tmp_path, f"{name}.gguf") for name in "abc")
    assert first == second != other


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(BadInput, match=r'"m"'):
        load_model(str(tmp_path / "m.gguf"), CPU)
