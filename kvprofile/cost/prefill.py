"""FLOPs and bytes of running, storing and shipping a context, from a model's shape alone."""

from __future__ import annotations

from typing import NamedTuple

from kvprofile.layers import LayerRange


class ModelShape(NamedTuple):
    """What decides the cost of a prefill.

    Attributes:
        linear_parameters: Per layer, the weights each token is multiplied with (of experts, those a token visits).
        query_heads: H.
        key_width: Width of the keys attended to, per query head.
        value_width: Width of the values, per query head.
        cached_values: Numbers cached per token and layer, keys and values together.
        hidden_size: E.
        windows: Per layer, how many tokens a token sees, itself included; None for all before it.
        bytes_per_value: Of cached numbers and hidden states.
        widest: Largest width inside a layer, which is the MLP's as a rule.
        vocabulary: V.
    """

    linear_parameters: tuple[int, ...]
    query_heads: int
    key_width: int
    value_width: int
    cached_values: int
    hidden_size: int
    windows: tuple[int | None, ...]
    bytes_per_value: int
    widest: int
    vocabulary: int

    @property
    def layers(self) -> int:
        return len(self.linear_parameters)


def prefill_flops(shape: ModelShape, tokens: int, group: LayerRange) -> float:
    """Returns the FLOPs of running a context of `tokens` through the layers of `group`.

    Two per weight and token, and `2 · H · (key width + value width)` for every pair of a token and one it sees. Norms, rotary,
    softmax, embedding and output matrix are left out.
    """
    linear = 2.0 * tokens * sum(shape.linear_parameters[group.start : group.stop])
    per_pair = 2.0 * shape.query_heads * (shape.key_width + shape.value_width)
    return linear + per_pair * sum(seen_pairs(tokens, window) for window in shape.windows[group.start : group.stop])


def seen_pairs(tokens: int, window: int | None) -> int:
    """Returns how many (token, token it sees) pairs causal attention has."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def kv_bytes_per_token(shape: ModelShape, reused_layers: int) -> int:
    """Returns the bytes of keys and values to ship per context token: those of reused layers, none of recomputed ones."""
    return reused_layers * shape.cached_values * shape.bytes_per_value


def e_bytes_per_token(shape: ModelShape, group: LayerRange) -> int:
    """Returns the bytes of hidden states to ship per context token: one layer's, none if the group starts at layer 0."""
    return shape.hidden_size * shape.bytes_per_value if group.start > 0 else 0
