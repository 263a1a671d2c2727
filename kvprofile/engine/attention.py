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

_KERNELS: dict[str, Any] = {
    "cpu": getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None),
    "cuda": getattr(torch.ops.aten, "_scaled_dot_product_flash_attention", None),
}
"""PyTorch's kernels that also return the log-sum-exp; the public `scaled_dot_product_attention` keeps it to itself."""

_NO_EFFECT = {"dropout", "is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "return_dict"}
"""Arguments that change nothing here: inference has no dropout; the mask holds the causal order and any window."""


class _Reading(NamedTuple):
    """What a pass reads, and the kernel that the model itself would attend with."""

    cache: RowsCache
    own_kernel: str


_reading: ContextVar[_Reading] = ContextVar("_reading")


class NotShareable(Exception):
    """A model asks something of its attention that `_attention` does not honour."""


@contextmanager
def sharing(config: PreTrainedConfig, cache: RowsCache) -> Iterator[None]:
    """Within it, a model with this config attends to the contexts of `cache` where they lie."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    before = config._attn_implementation
    token = _reading.set(_Reading(cache, before))
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _reading.reset(token)


class _Part(NamedTuple):
    """Attention over one segment.

    Attributes:
        output: `(…, D)` float32.
        lse: `(…)` float32, log of the sum of the exponentials of the scores.
    """

    output: torch.Tensor
    lse: torch.Tensor


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
    cache, own_kernel = _reading.get()
    if softcap is not None and own_kernel == "sdpa":
        raise NotShareable("a soft cap that the model's own kernel does not honour")
    layer = getattr(module, "layer_idx", None)
    if layer is None or attention_mask is None or attention_mask.dtype != torch.bool:
        raise NotShareable("attention without a layer number or a mask of booleans")
    rows, heads, tokens, width = query.shape
    groups = key.shape[1]
    query = query.reshape(rows, groups, heads // groups, tokens, width)
    scale = width**-0.5 if scaling is None else scaling
    context_mask, own_mask = cache.masks(attention_mask, key.shape[-2])
    segments = [_attend_apart(query, KV(key, value), own_mask, scale, softcap)]
    sources = [(_expanded(module, kv, key), at) for kv, at in cache.sources(layer)]
    if sources[0][0].keys.shape[-2]:
        parts = [_attend_together(query[at], kv, context_mask, scale, softcap) for kv, at in sources]
        segments.append(_Part(*map(torch.cat, zip(*parts, strict=True))))
    output = _merge(segments, None if s_aux is None else s_aux.float().view(groups, heads // groups, 1))
    return output.to(value.dtype).flatten(1, 2).transpose(1, 2), None


def _expanded(module: Any, kv: KV, own: torch.Tensor) -> KV:
    """Returns a context as attention reads it; latent attention caches it compressed."""
    if (kv.keys.shape[1], kv.keys.shape[3]) == (own.shape[1], own.shape[3]):
        return kv
    if not hasattr(module, "expand_kv"):
        raise NotShareable("attention to keys of another shape than is cached")
    return KV(*module.expand_kv(*kv))


def _attend_together(
    query: torch.Tensor, kv: KV, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> _Part:
    """All rows `(B, G, R, T, D)` over one context `(1, G, S, D)`."""
    rows, groups, repeats, tokens, _ = query.shape
    shape = groups, rows, repeats, tokens
    stacked = query.transpose(0, 1).reshape(1, groups, rows * repeats * tokens, -1)
    if mask is None and softcap is None and (fused := _fused(stacked, kv)):
        output, lse = fused(stacked, *kv, scale=scale)[:2]
        return _Part(output.view(*shape, -1).transpose(0, 1).float(), lse.view(shape).transpose(0, 1))
    keys, values = kv.keys[0].float().transpose(-1, -2), kv.values[0].float()
    parts = []
    step = max(1, _SCORES // (groups * repeats * tokens * keys.shape[-1]))
    for part in torch.split(stacked[0].view(*shape, -1), step, dim=1):
        scores = part.flatten(1, 3).float() @ keys
        weights, total, lse = _weights(scores.view(*part.shape[:-1], -1), mask, scale, softcap)
        output = weights.flatten(1, 3) @ values
        parts.append(_Part(output.view(*part.shape[:-1], -1) / total, lse))
    return _Part(*(torch.cat(each, dim=1).transpose(0, 1) for each in zip(*parts, strict=True)))


def _attend_apart(query: torch.Tensor, kv: KV, mask: torch.Tensor | None, scale: float, softcap: float | None) -> _Part:
    """Every row `(B, G, R, T, D)` over its own tokens `(B, G, n, D)`."""
    step = max(1, _SCORES // (query[0, ..., 0].numel() * kv.keys.shape[-2]))
    parts = []
    for part, keys, values in zip(*(torch.split(whole, step) for whole in (query, *kv)), strict=True):
        scores = part.flatten(2, 3).float() @ keys.float().transpose(-1, -2)
        weights, total, lse = _weights(scores.view(*part.shape[:-1], -1), mask, scale, softcap)
        output = weights.flatten(2, 3) @ values.float()
        parts.append(_Part(output.view(*part.shape[:-1], -1) / total, lse))
    return _Part(*map(torch.cat, zip(*parts, strict=True)))


def _fused(query: torch.Tensor, kv: KV) -> Any:
    """Returns the device's kernel if it computes this, else None."""
    width = query.shape[-1]
    if width != kv.values.shape[-1]:
        return None
    if query.device.type == "cuda":
        fits = query.dtype != torch.float32 and width % 8 == 0 and width <= 256
        if not fits or torch.cuda.get_device_capability(query.device) < (8, 0):
            return None
    return _KERNELS.get(query.device.type)


def _weights(
    scores: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns exponentials of `(…, T, n)` scaled scores, a divisor for their sum, and the scores' log-sum-exp.

    Where a window hides everything, the exponentials are 0 and the log-sum-exp is -inf.
    """
    scores = scores.mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return weights, total.clamp_min(torch.finfo(torch.float32).tiny), (total.log() + top).squeeze(-1)


def _merge(segments: Sequence[_Part], sinks: torch.Tensor | None) -> torch.Tensor:
    """Returns attention over all segments; `(G, R, 1)` sinks are one more segment, which gives nothing."""
    lse = [segment.lse for segment in segments]
    if sinks is not None:
        lse.append(sinks.expand_as(lse[0]))
    shares = torch.stack(lse).softmax(dim=0).unsqueeze(-1)
    return sum((segment.output * share for segment, share in zip(segments, shares, strict=False)), torch.zeros(()))


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The mask of Transformers' `sdpa`, always made (never left out for a kernel's causal flag)."""
    mask: torch.Tensor = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask
