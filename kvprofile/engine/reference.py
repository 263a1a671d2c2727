"""The reference executor: one plan at a time, short and obviously right. Every faster path must give the same token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from kvprofile.engine.cache import ContextKV, prefilled_cache
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.ending import Ending
from kvprofile.layers import LayerRange

__all__ = ["Capture", "answer_ids", "capture", "greedy", "mixed_capture", "partial_prefill"]


@dataclass(frozen=True)
class Capture:
    """Everything one prefill of a context leaves.

    Attributes:
        token_ids: The context, S ids.
        kv: K/V per layer.
        entering: Hidden states entering each layer, `(1, S, E)` each: the E cache of every layer.
    """

    token_ids: tuple[int, ...]
    kv: ContextKV
    entering: tuple[torch.Tensor, ...]


def capture(model: Decoder, token_ids: Sequence[int]) -> Capture:
    """Prefills a context and keeps K/V and hidden states of every layer."""
    kv, entering = model.prefill(token_ids)
    return Capture(tuple(token_ids), kv, tuple(entering))


def partial_prefill(receiver: Decoder, sender: Capture, group: LayerRange) -> ContextKV:
    """Returns the mixed cache of one plan (arXiv 2411.02820): the group's K/V from the receiver, all others the sender's.

    The receiver takes the sender's hidden states entering layer `group.start` and runs the context through the group's layers
    with its own weights. For `group.start == 0` it embeds the tokens itself.
    """
    entering = sender.entering[group.start] if group.start > 0 else None
    recomputed = receiver.recompute(sender.token_ids, group, entering)
    reused = receiver.own_devices(sender.kv)
    return (*reused[: group.start], *recomputed, *reused[group.stop :])


def mixed_capture(receiver: Decoder, sender: Capture, group: LayerRange) -> Capture:
    """Returns what a receiver holds after `partial_prefill`, for a next receiver to read as a sender's.

    The K/V are the mixed cache. Of the hidden states, the receiver's own are those entering the layers behind `group.start` up to
    `group.stop`, which is the output of its last layer; all others are still the sender's, as none was computed anew. For
    `group.start == 0`, the embeddings are the receiver's too.
    """
    entering = sender.entering[group.start] if group.start > 0 else None
    recomputed, states = receiver.recompute_with_states(sender.token_ids, group, entering)
    reused = receiver.own_devices(sender.kv)
    return Capture(
        sender.token_ids,
        (*reused[: group.start], *recomputed, *reused[group.stop :]),
        (*sender.entering[: group.start], *states, *sender.entering[group.start + len(states) :]),
    )


@torch.inference_mode()
def greedy(
    reader: Decoder, context: ContextKV, suffix: Sequence[int], max_new_tokens: int, ending: Ending
) -> tuple[int, ...]:
    """Returns the greedy answer of one reader behind one context; the id that ends it, if one does, is the last.

    All layers run with the reader's weights; question and answer attend to the given context cache.
    """
    return tuple(answer_ids(reader, prefilled_cache(context), suffix, max_new_tokens, ending))


@torch.inference_mode()
def answer_ids(
    reader: Decoder, cache: Cache, suffix: Sequence[int], max_new_tokens: int, ending: Ending
) -> Iterator[int]:
    """Yields a greedy answer id by id, behind what the cache holds; the first one costs the pass over the suffix."""
    new, answer = torch.tensor([list(suffix)]), []
    for _ in range(max_new_tokens):
        answer.append(int(reader.logits(new, cache, keep=1)[0, -1].argmax()))
        yield answer[-1]
        if ending.reached(answer):
            return
        new = torch.tensor([answer[-1:]])
