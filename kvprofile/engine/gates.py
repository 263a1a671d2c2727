"""Checks that the engine is exact on the real pair. Nothing is measured before they pass."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvprofile.engine.budget import MemoryBudget
from kvprofile.engine.cache import ContextKV, empty_cache, prefilled_cache
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.executor import Answer, Question, Readers, answer_plans
from kvprofile.engine.reference import Capture, capture, greedy, mixed_capture, partial_prefill
from kvprofile.errors import GateFailed
from kvprofile.layers import LayerRange, Plan, describe
from kvprofile.strategies import load_all

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference allowed between equal computations in another order, relative to the largest magnitude."""

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")
"""What configs call it."""

_COMPARED_IN_HALF = 16
"""Groups compared with the reference executor in half precision, where some may part."""


class Numerics(NamedTuple):
    """How far rounding moves logits and answers on this pair.

    Attributes:
        noise: Largest difference of a logit between equal computations in another order: plain decoding and the receiver's own
            cache injected, and, of a plan that parts, its suffix read at once and token by token. 0 in float32.
        compared: Plans whose answers were compared with the reference executor's.
        parted: Those that gave other tokens, each from a near tie on: two logits no further apart than twice the noise. With
            experts, rounding may also route a token otherwise, and the two may be further apart.
        largest_margin: How far apart they were at most, at the first difference; None if none parted.
    """

    noise: float
    compared: int
    parted: int
    largest_margin: float | None


def check_gates(
    readers: Readers,
    caches: ContextCaches,
    token_ids: Sequence[int],
    question: Question,
    budget: MemoryBudget | None = None,
) -> Numerics:
    """Runs every gate on one sample.

    In float32 the sweep's tokens must be the reference executor's; in half precision they may part at a near tie, and where a
    mixture of experts routes a token otherwise.

    Args:
        readers: The pair.
        caches: Of the sample.
        token_ids: The sample's context.
        question: The sample's suffix and limits.
        budget: What memory may be taken; all that is free if None.

    Raises:
        GateFailed: Naming the equality that does not hold.
    """
    receiver = readers.receiver
    tolerance = _TOLERANCE.get(receiver.model.dtype, 1e-3)
    layers = receiver.all_layers

    suffix, behind = torch.tensor([list(question.suffix)]), len(question.suffix)
    plain = receiver.logits(torch.tensor([[*token_ids, *question.suffix]]), empty_cache(), keep=behind)
    injected = receiver.logits(suffix, prefilled_cache(caches.receiver_kv), keep=behind)
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

    del own
    exact = receiver.model.dtype == torch.float32
    plans = _plans(layers.stop, 3 if exact else _COMPARED_IN_HALF)
    partings = {}
    for answer in answer_plans(readers, caches, question, plans, load_all(), budget=budget):
        ran = answer.plan.range
        context = partial_prefill(receiver, caches.sender_capture, ran) if ran else caches.sender_kv
        if parting := _parting(receiver, context, question, answer):
            partings[answer.plan] = parting
    rounding = torch.finfo(receiver.model.dtype).eps * plain.abs().max().item()
    noises = [(plain - injected).abs().max().item(), rounding, *(parting.noise for parting in partings.values())]
    noise = 0.0 if exact else max(noises)
    most = 2 * noise if exact or not _has_experts(receiver) else sys.float_info.max
    for plan, parting in partings.items():
        if not parting.margin <= most:
            where = f" {describe(plan.range, layers.stop)}" if plan.range else ""
            raise GateFailed(
                f"{plan.strategy}{where} gives other tokens in the sweep than one plan at a time (the two logits are "
                f"{parting.margin:.3g} apart, equal computations up to {noise:.3g}); this architecture or kernel is not supported"
            )
    margins = [parting.margin for parting in partings.values()]
    return Numerics(noise, len(plans), len(margins), max(margins, default=None))


def check_reader(
    reader: Decoder, token_ids: Sequence[int], suffix: Sequence[int], groups: Sequence[LayerRange]
) -> None:
    """Checks on one sample that a reader of its own cache has, and may pass on, what it has by itself.

    Args:
        reader: The model.
        token_ids: The context.
        suffix: What follows it.
        groups: The groups that it recomputes.

    Raises:
        GateFailed: Naming the equality that does not hold.
    """
    tolerance = _TOLERANCE.get(reader.model.dtype, 1e-3)
    own, name = capture(reader, token_ids), type(reader.model).__name__
    plain = reader.logits(torch.tensor([[*token_ids, *suffix]]), empty_cache(), keep=len(suffix))
    injected = reader.logits(torch.tensor([list(suffix)]), prefilled_cache(own.kv), keep=len(suffix))
    if not plain.isfinite().all():
        raise GateFailed(f"the logits of a {name} are not finite; check its weights and dtype")
    _require(
        plain, injected, tolerance, f"the own cache of a {name}, injected, does not give the logits of plain decoding"
    )
    for group in groups:
        mixed = mixed_capture(reader, own, group)
        recomputed = f"recomputing {describe(group, len(own.kv))} of a {name} from its own hidden states"
        for index, (ours, whole) in enumerate(zip(_by_layer(mixed), _by_layer(own), strict=True)):
            for one, other in zip(ours, whole, strict=True):
                _require(one, other, tolerance, f"{recomputed} does not give its full prefill at layer {index}")


def _by_layer(held: Capture) -> list[tuple[torch.Tensor, ...]]:
    return [(*kv, entering) for kv, entering in zip(held.kv, held.entering, strict=True)]


def _has_experts(model: Decoder) -> bool:
    """Whether rounding may send a token to another expert, which moves its logits by far more than rounding does."""
    config = model.model.config.get_text_config(decoder=True)
    return any(getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)


def _plans(layers: int, count: int) -> list[Plan]:
    """Returns full reuse and about `count` groups, spread over starts and lengths, by start."""
    starts = sorted({i * layers // count for i in range(count)})
    stops = [min(layers, 2 * start + 1) for start in starts]
    return [Plan("full_reuse"), *(Plan("layer_group", LayerRange(*edges)) for edges in zip(starts, stops, strict=True))]


class _Parting(NamedTuple):
    """Where an answer leaves the reference executor's: how far apart this finds the two tokens, and its own noise there."""

    margin: float
    noise: float


def _parting(receiver: Decoder, context: ContextKV, question: Question, answer: Answer) -> _Parting | None:
    """Returns None if there is no difference."""
    ours, alone = answer.token_ids, greedy(receiver, context, *question)
    if ours is None or ours == alone:  # what a plan cannot answer is its own error row
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b), None)
    if at is None:  # one is longer
        return _Parting(math.inf, 0.0)
    given = [*question.suffix, *alone[:at]]
    logits = receiver.logits(torch.tensor([given]), prefilled_cache(context), keep=1)[0, -1]
    cache = prefilled_cache(context)
    for token in given:
        one_by_one = receiver.logits(torch.tensor([[token]]), cache, keep=1)[0, -1]
    return _Parting((logits[alone[at]] - logits[ours[at]]).abs().item(), (logits - one_by_one).abs().max().item())


def _require(one: torch.Tensor, other: torch.Tensor, tolerance: float, otherwise: str) -> None:
    difference = (one.float() - other.float()).abs().max().item()
    scale = other.float().abs().max().item()
    if not difference <= tolerance * scale:
        raise GateFailed(
            f"{otherwise} (off by {difference:.3g} of {scale:.3g}); this architecture or attention kernel is not supported"
        )
