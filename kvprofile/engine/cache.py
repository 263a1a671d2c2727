"""Keys and values per layer, and the one place that touches Transformers' cache objects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvprofile.errors import GateFailed


class KV(NamedTuple):
    """What one layer caches for one context.

    Attributes:
        keys: `(1, G, S, D)`, after rotary. Latent attention (DeepSeek) caches its compressed pair here and below.
        values: `(1, G, S, D)`; the width may differ from the keys'.
    """

    keys: torch.Tensor
    values: torch.Tensor


ContextKV = tuple[KV, ...]
"""One `KV` per layer, from layer 0 on."""


class _PrefilledLayer(DynamicLayer):  # type: ignore[misc]
    """A layer whose rows start with the K/V of their contexts, in a buffer with room for the tokens that follow."""

    def __init__(self, rows: Sequence[KV], room: int) -> None:
        super().__init__()
        self._buffers = [self._allocate(parts, room) for parts in zip(*rows, strict=True)]
        self.dtype, self.device = self._buffers[0].dtype, self._buffers[0].device
        self._length = rows[0].keys.shape[-2]
        self.is_initialized = True
        self._show()

    @staticmethod
    def _allocate(parts: Sequence[torch.Tensor], room: int) -> torch.Tensor:
        _, heads, tokens, width = parts[0].shape
        buffer = parts[0].new_empty((len(parts), heads, tokens + room, width))
        for row, part in enumerate(parts):
            buffer[row, :, :tokens] = part[0]
        return buffer

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._length] for buffer in self._buffers)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens behind the old ones; returns all keys and values as views."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start : self._length] = new
        self._show()
        return self.keys, self.values

    def select(self, rows: Sequence[int], length: int) -> _PrefilledLayer:
        """Returns a copy of some rows with their first `length` tokens and the same room behind."""
        chosen = copy.copy(self)
        index = torch.tensor(rows, device=self.device)
        chosen._buffers = [buffer[index] for buffer in self._buffers]
        chosen._length = length
        chosen._show()
        return chosen


def empty_cache() -> Cache:
    """Returns a cache that holds every token of every layer.

    NOTE: made without the model's config on purpose. With it, Transformers drops what a sliding window no longer sees, and the
    layers' caches then differ in length; the window itself is applied by the attention mask either way.
    """
    return DynamicCache()


def prefilled_cache(contexts: Sequence[ContextKV], room: int) -> Cache:
    """Returns a cache of B rows, each starting with one context; all contexts have the same S.

    Args:
        contexts: One `ContextKV` per row.
        room: Tokens that will be added at most.
    """
    cache = DynamicCache()
    cache.layers = [_PrefilledLayer(rows, room) for rows in zip(*contexts, strict=True)]
    return cache


def select_rows(cache: Cache, rows: Sequence[int], length: int) -> Cache:
    """Returns a copy of some rows of a cache made by `prefilled_cache`, cut to their first `length` tokens."""
    chosen = DynamicCache()
    chosen.layers = [layer.select(rows, length) for layer in cache.layers]
    return chosen


def read_cache(cache: Cache, layers: range, tokens: int) -> ContextKV:
    """Returns what a prefill left in `layers`.

    Raises:
        GateFailed: If a layer holds anything but the keys and values of all `tokens`.
    """
    held = []
    for index in layers:
        layer = cache.layers[index] if index < len(cache.layers) else None
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4 or keys.shape[-2] != tokens:
            raise GateFailed(
                f"layer {index} does not cache keys and values of its own for every token (recurrent, hybrid or shared "
                "state); kvprofile needs a decoder whose layers all do"
            )
        held.append(KV(keys, values))
    return tuple(held)
