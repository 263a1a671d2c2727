"""Attention for rows that share contexts, without a copy of any context.

All rows that read one context are stacked into the query dimension of one product; a row's own tokens are a second segment, and
the two are merged by their log-sum-exp (Hydragen, arXiv 2402.05099). Registered through Transformers' `AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvprofile.engine.cache import KV, RowsCache

_NAME = "kvprofile_rows"
_SCORES = 1 << 22
"""Attention scores held at a time."""

_NO_EFFECT = {"dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict"}
"""Arguments that change nothing here: inference has no dropout; the mask holds the causal order and any window."""

_cache: ContextVar[RowsCache] = ContextVar("_cache")


class NotShareable(Exception):
    """A model asks something of its attention that `_attention` does not honour."""


@contextmanager
def sharing(config: PreTrainedConfig, cache: RowsCache) -> Iterator[None]:
    """Within it, a model with this config attends to the contexts of `cache` where they lie."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    before = config._attn_implementation
    token = _cache.set(cache)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _cache.reset(token)


class _Part(NamedTuple):
    """Attention over one segment, not yet divided by `total`; a sink is a segment of its own that gives nothing.

    Attributes:
        output: `(…, D)` float32.
        top: `(…, 1)`, the largest score.
        total: `(…, 1)`, sum of the exponentials of the scores less `top`.
    """

    output: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attends to contexts and own tokens.

    Args:
        module: The model's attention module; `layer_idx` says which layer of the cache it reads.
        query: `(B, H, T, D)`.
        key: `(B, G, n, D)`: the rows' own tokens, of which the last T are new.
        value: `(B, G, n, Dv)`.
        attention_mask: `(1 or B, 1, T, S + n)` bool, the same for all rows.
        scaling: Factor of the scores; 1/√D if None.
        softcap: Scores are squeezed to ± this.
        s_aux: `(H,)` attention sinks: a further logit of each head that takes weight and gives nothing.
        others: Whatever else the model passes.

    Returns:
        `(B, T, H, Dv)` of the query's dtype, and None in place of weights.

    Raises:
        NotShareable: If `others` holds something that might matter, or there is no such mask or layer number.
    """
    given = {name for name, passed in others.items() if passed is not None and passed is not False}
    if unknown := sorted(given - _NO_EFFECT):
        raise NotShareable(f"attention with {', '.join(unknown)}")
    layer = getattr(module, "layer_idx", None)
    if layer is None or attention_mask is None or attention_mask.dtype != torch.bool:
        raise NotShareable("attention without a layer number or a mask of booleans")
    cache = _cache.get()
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    query = query.reshape(rows, groups, heads // groups, tokens, width) * (width**-0.5 if scaling is None else scaling)
    own_tokens = key.shape[-2]
    context_mask, own_mask = cache.masks(attention_mask, own_tokens)
    sinks = None if s_aux is None else s_aux.float().view(1, groups, heads // groups, 1, 1)

    output = value.new_empty(rows, groups, heads // groups, tokens, value.shape[-1])
    for kv, index in cache.sources(layer):
        keys, values = _expanded(module, kv, key)
        step = max(1, _SCORES // (heads * tokens * (keys.shape[-2] + own_tokens)))
        for part in torch.split(index, step):
            q = query[part]
            parts = [_attend_apart(q, KV(key[part], value[part]), own_mask, softcap)]
            if keys.shape[-2]:
                parts.append(_attend_together(q, KV(keys, values), context_mask, softcap))
            output[part] = _merge(parts, sinks).to(output.dtype)
    return output.flatten(1, 2).transpose(1, 2), None


def _expanded(module: Any, kv: KV, own: torch.Tensor) -> KV:
    """Returns a context as attention reads it; latent attention caches it compressed."""
    if (kv.keys.shape[1], kv.keys.shape[3]) == (own.shape[1], own.shape[3]):
        return kv
    if not hasattr(module, "expand_kv"):
        raise NotShareable("attention to keys of another shape than is cached")
    return KV(*module.expand_kv(*kv))


def _attend_together(query: torch.Tensor, kv: KV, mask: torch.Tensor | None, softcap: float | None) -> _Part:
    """All rows `(B, G, R, T, D)` over one context `(1, G, S, D)`."""
    rows, groups, repeats, tokens, _ = query.shape
    stacked = query.transpose(0, 1).reshape(groups, rows * repeats * tokens, -1)
    scores = (stacked @ kv.keys[0].transpose(-1, -2)).view(groups, rows, repeats, tokens, -1)
    weights, top, total = _weights(scores, mask, softcap)
    output = weights.view(groups, rows * repeats * tokens, -1).to(kv.values.dtype) @ kv.values[0]
    shaped = output.float().view(groups, rows, repeats, tokens, -1)
    return _Part(shaped.transpose(0, 1), top.transpose(0, 1), total.transpose(0, 1))


def _attend_apart(query: torch.Tensor, kv: KV, mask: torch.Tensor | None, softcap: float | None) -> _Part:
    """Every row `(B, G, R, T, D)` over its own tokens `(B, G, n, D)`."""
    rows, groups, repeats, tokens, _ = query.shape
    scores = query.flatten(2, 3) @ kv.keys.transpose(-1, -2)
    weights, top, total = _weights(scores.view(rows, groups, repeats, tokens, -1), mask, softcap)
    output = weights.flatten(2, 3).to(kv.values.dtype) @ kv.values
    return _Part(output.float().view(rows, groups, repeats, tokens, -1), top, total)


def _weights(
    scores: torch.Tensor, mask: torch.Tensor | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns exponentials of `(…, T, n)` scores less their largest, that largest, and their sum."""
    scores = scores.float()
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)  # where a window hides all of it
    weights = scores.sub_(top).exp_()
    return weights, top, weights.sum(dim=-1, keepdim=True)


def _merge(parts: Sequence[_Part], sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is not None:
        first = parts[0]
        parts = [
            *parts,
            _Part(torch.zeros_like(first.output), sinks.expand_as(first.top), torch.ones_like(first.total)),
        ]
    top = torch.stack([part.top for part in parts]).amax(dim=0)
    shares = [(part.top - top).exp() for part in parts]
    total = torch.stack([part.total * share for part, share in zip(parts, shares, strict=True)]).sum(dim=0)
    return torch.stack([part.output * share for part, share in zip(parts, shares, strict=True)]).sum(dim=0) / total


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The mask of Transformers' `sdpa`, always made (never left out for a kernel's causal flag)."""
    mask: torch.Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask
