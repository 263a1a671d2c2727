"""Checks that the engine is exact on the real pair. Nothing is measured before they pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvprofile.engine.cache import ContextKV, empty_cache, prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Answer, Question, Readers, answer_plans
from kvprofile.engine.reference import capture, greedy, partial_prefill
from kvprofile.errors import GateFailed
from kvprofile.layers import LayerRange, Plan, describe
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
        raise GateFailed("the receiver's logits are not finite; check its weights and dtype")
    if not all(part.isfinite().all() for kv in caches.sender_capture.kv for part in kv):
        raise GateFailed("the sender's keys and values are not finite; check its weights and dtype")
    _require(
        plain, injected, tolerance, "the receiver's own cache, injected, does not give the logits of plain decoding"
    )

    own = capture(receiver, token_ids)
    for start in range(min(2, layers.stop)):
        group = LayerRange(start, layers.stop)
        recomputed = f"recomputing {describe(group, layers.stop)} from the receiver's own hidden states"
        for index, (ours, whole) in enumerate(
            zip(partial_prefill(receiver, own, group), caches.receiver_kv, strict=True)
        ):
            otherwise = f"{recomputed} does not give its full prefill at layer {index}"
            _require(ours.keys, whole.keys, tolerance, otherwise)
            _require(ours.values, whole.values, tolerance, otherwise)

    third = max(1, layers.stop // 3)
    groups = [(0, third), (third, third + 1), (third, layers.stop)]
    contexts = {Plan("full_reuse"): caches.sender_capture.kv} | {
        Plan("layer_group", group): partial_prefill(receiver, caches.sender_capture, group)
        for group in (LayerRange(start, stop) for start, stop in groups if start < stop <= layers.stop)
    }
    for answer in answer_plans(readers, caches, question, list(contexts), load_all()):
        _require_reference(receiver, contexts[answer.plan], question, answer)


def _require_reference(receiver: Decoder, context: ContextKV, question: Question, answer: Answer) -> None:
    """In float32 the sweep's tokens are the reference executor's; in half precision they may part at a near tie."""
    ours, alone = answer.token_ids, greedy(receiver, context, *question)
    if ours is None or ours == alone:  # what a plan cannot answer is its own error row
        return
    at = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), min(len(ours), len(alone)))
    logits = receiver.logits(torch.tensor([[*question.suffix, *alone[:at]]]), prefilled_cache(context), keep=1)[0, -1]
    near = 0.0 if receiver.model.dtype == torch.float32 else _TOLERANCE[receiver.model.dtype] * logits.abs().max()
    if at in (len(ours), len(alone)) or not logits[alone[at]] - logits[ours[at]] <= near:
        group = f" {describe(answer.plan.range, len(receiver.layers))}" if answer.plan.range else ""
        raise GateFailed(
            f"{answer.plan.strategy}{group} gives other tokens in the sweep than one plan at a time, from answer token "
            f"{at + 1} on; this architecture or attention kernel is not supported"
        )


def _require(one: torch.Tensor, other: torch.Tensor, tolerance: float, otherwise: str) -> None:
    difference = (one.float() - other.float()).abs().max().item()
    scale = other.float().abs().max().item()
    if not difference <= tolerance * scale:
        raise GateFailed(
            f"{otherwise} (off by {difference:.3g} of {scale:.3g}); this architecture or attention kernel is not supported"
        )
