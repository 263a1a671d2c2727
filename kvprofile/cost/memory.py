"""Memory of answering plans, in closed form. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvprofile.cost.prefill import ModelShape, kv_bytes_per_token
from kvprofile.layers import LayerRange, furthest_stops

_LOGIT = 4
"""Bytes of a logit: they are float32 whatever the model computes in."""


class Lengths(NamedTuple):
    """Tokens of one sample: of its context, its suffix, the limit on its answer, and full prefill's answer."""

    context: int
    suffix: int
    answer_limit: int
    draft: int


def plan_bytes(shape: ModelShape, lengths: Lengths) -> int:
    """Returns what one plan holds beside its context while it is answered: K/V of its own tokens in all layers.

    Plans with a common past share some of it.
    """
    return (lengths.suffix + lengths.answer_limit) * kv_bytes_per_token(shape, shape.layers)


def verifying_bytes(shape: ModelShape, lengths: Lengths, rows: int) -> int:
    """Returns what reading suffix and draft in `rows` rows takes for the time of the pass, over what the plans hold."""
    reading = pass_bytes(shape, rows * max(lengths.suffix - 1, lengths.draft))
    draft = logits_bytes(shape, lengths.draft)
    return max(reading, rows * draft) + 3 * draft  # log-probabilities of the draft, of a row, and their divergence


def block_bytes(shape: ModelShape, lengths: Lengths, rows: int, plans: int) -> int:
    """Returns what a block takes for some time: a pass over the context or over suffix and draft, or plans that regroup.

    Plans that go on have the logits of their next tokens; meanwhile others wait in what the verifying pass left, which as a
    tree is a third of all groups' own tokens.

    Args:
        shape: The receiver's.
        lengths: The sample's.
        rows: Of a verifying pass.
        plans: Of the block.
    """
    regrouping = plans * plan_bytes(shape, lengths) // 3 + logits_bytes(shape, plans)
    return max(verifying_bytes(shape, lengths, min(rows, plans)), pass_bytes(shape, lengths.context), regrouping)


def sample_bytes(shape: ModelShape, lengths: Lengths) -> int:
    """Returns what a sample holds for all its plans: both models' K/V, the sender's hidden states."""
    hidden = shape.layers * shape.hidden_size * shape.bytes_per_value
    return lengths.context * (2 * kv_bytes_per_token(shape, shape.layers) + hidden)


def starts_bytes(shape: ModelShape, lengths: Lengths, groups: Sequence[LayerRange]) -> int:
    """Returns the K/V that the receiver leaves from every start to its groups' furthest stop, beside its own prefill."""
    passes = [stop - start for start, stop in furthest_stops(groups).items() if start > 0]
    return lengths.context * sum(kv_bytes_per_token(shape, layers) for layers in passes)


def pass_bytes(shape: ModelShape, tokens: int) -> int:
    """Returns the activations of `tokens` tokens inside one layer: the wider of MLP and attention, and two hidden states."""
    heads = shape.query_heads * max(shape.key_width, shape.value_width)
    mlp = 3 * shape.widest * shape.bytes_per_value
    attention = 3 * heads * shape.bytes_per_value + 4 * heads * _LOGIT
    return tokens * (max(mlp, attention) + 2 * shape.hidden_size * shape.bytes_per_value)


def logits_bytes(shape: ModelShape, tokens: int) -> int:
    """Returns the logits of `tokens` tokens, with the model's own copy where it computes in half precision."""
    return tokens * shape.vocabulary * (_LOGIT + (shape.bytes_per_value if shape.bytes_per_value < _LOGIT else 0))
