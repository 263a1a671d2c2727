"""The closed forms against PyTorch's own counter and against hand counts."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from kvprofile.cost.prefill import e_bytes_per_token, kv_bytes_per_token, prefill_flops, seen_pairs
from kvprofile.engine.shape import shape_of
from kvprofile.layers import LayerRange
from tests.engine.architectures import tiny_model

TOKENS = 12


def test_flops_are_what_pytorch_counts() -> None:
    """Its counter misses the fused kernel on CPUs, and eager attention computes all S² pairs: so each part is compared alone."""
    model = tiny_model("llama", 0)
    linear = counted(model)
    model.set_attn_implementation("eager")
    attention = counted(model) - linear
    shape = shape_of(model)
    assert attention % TOKENS**2 == 0
    ours = linear + attention // TOKENS**2 * seen_pairs(TOKENS, None)
    assert prefill_flops(shape, TOKENS, LayerRange(0, shape.layers)) == ours


def counted(model: PreTrainedModel) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.base_model(torch.arange(TOKENS)[None] + 3, use_cache=False)
    return counter.get_total_flops()


def test_flops_of_groups_add_up() -> None:
    shape = shape_of(tiny_model("gemma3", 0))
    parts = [prefill_flops(shape, TOKENS, LayerRange(i, i + 1)) for i in range(shape.layers)]
    assert sum(parts) == prefill_flops(shape, TOKENS, LayerRange(0, shape.layers))
    assert parts[0] < parts[1], "a layer with a window of 6 costs less than one without"


def test_experts_a_token_does_not_visit_cost_nothing() -> None:
    dense, sparse = (shape_of(tiny_model(name, 0)) for name in ("llama", "mixtral"))
    expert = 3 * 32 * 48
    router = 4 * 32
    assert sparse.linear_parameters[0] == dense.linear_parameters[0] + expert + router


def test_windows_limit_pairs() -> None:
    assert seen_pairs(10, None) == seen_pairs(10, 10) == 55
    assert seen_pairs(10, 3) == sum(min(token, 3) for token in range(1, 11))


def test_bytes_of_llama_3_1_8b() -> None:
    """methods: 10 000 tokens at 16 bit hold 1.31e9 bytes of KV, and one layer's hidden states 8.19e7."""
    shape = shape_of(tiny_model("llama", 0))._replace(
        linear_parameters=(1,) * 32, cached_values=2 * 8 * 128, hidden_size=4096, bytes_per_value=2
    )
    assert 10_000 * kv_bytes_per_token(shape, 32) == 1_310_720_000
    assert 10_000 * e_bytes_per_token(shape, LayerRange(3, 9)) == 81_920_000
    assert e_bytes_per_token(shape, LayerRange(0, 9)) == 0
