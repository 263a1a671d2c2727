"""Checks that the engine is exact on the real pair. Nothing is measured before they pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvprofile.engine.cache import ContextKV, empty_cache, prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import Question, Readers, answer_plans
from kvprofile.engine.reference import greedy, partial_prefill
from kvprofile.errors import GateFailed
from kvprofile.layers import LayerRange, Plan
from kvprofile.strategies import load_all

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference allowed between equal computations in another order, relative to the largest magnitude."""


def check_gates(readers: Readers, caches: ContextCaches, token_ids: Sequence[int], question: Question) -> None:
    """Runs every gate on one sample.

    Args:
        readers: The pair.
        caches: Of the sample.
        token_ids: The sample's context.
        question: The sample's suffix and limits.

    Raises:
        GateFailed: Naming the equality that does not hold.
    """
    receiver = readers.receiver
    tolerance = _TOLERANCE.get(receiver.model.dtype, 1e-3)
    layers = receiver.all_layers

    suffix = torch.tensor([list(question.suffix)])
    plain = receiver.logits(torch.tensor([[*token_ids, *question.suffix]]), empty_cache(), keep=1)
    injected = receiver.logits(suffix, prefilled_cache(caches.receiver_kv), keep=1)
    if not plain.isfinite().all():
        raise GateFailed("the receiver's logits are not finite on the first sample; check its weights and dtype")
    _require(
        plain, injected, tolerance, "the receiver's own cache, injected, does not give the logits of plain decoding"
    )

    for index, (ours, whole) in enumerate(zip(caches.mixed(layers), caches.receiver_kv, strict=True)):
        for one, other in zip(ours, whole, strict=True):
            _require(one, other, tolerance, f"recomputing all layers does not give full prefill at layer {index}")

    group = LayerRange(layers.stop // 3, max(layers.stop // 3 + 1, 2 * layers.stop // 3))
    mixed: ContextKV = partial_prefill(receiver, caches.sender_capture, group)
    alone = greedy(receiver, mixed, *question)
    plan = Plan("layer_group", group)
    (answer,) = answer_plans(readers, caches, question, [plan], load_all())
    if answer.token_ids != alone and receiver.model.dtype == torch.float32:
        raise GateFailed(
            f"layers {group.start}–{group.stop - 1} give other tokens in the sweep than one plan at a time"
        )


def _require(one: torch.Tensor, other: torch.Tensor, tolerance: float, otherwise: str) -> None:
    difference = (one.float() - other.float()).abs().max().item()
    scale = other.float().abs().max().item()
    if not difference <= tolerance * scale:
        raise GateFailed(
            f"{otherwise} (off by {difference:.3g} of {scale:.3g}); this architecture or attention kernel is not supported"
        )
