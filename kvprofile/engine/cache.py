"""Keys and values per layer, and the one place that touches Transformers' cache objects."""

from __future__ import annotations

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


class _RowsLayer(DynamicLayer):  # type: ignore[misc]
    """One layer for B rows: contexts stay where they are and may be shared; every row's own tokens have a buffer with room.

    Args:
        contexts: The context each row reads, S tokens each; the same object where rows share it.
        room: Own tokens at most.
        joined: Whether `update` returns contexts and own tokens in one tensor, for attention that knows nothing of sharing.
    """

    def __init__(self, contexts: Sequence[KV], room: int, joined: bool) -> None:
        super().__init__()
        self._contexts, self._room, self._joined = contexts, room, joined
        self._length = 0
        self._buffers: list[torch.Tensor] = []
        self.device, self.dtype = contexts[0].keys.device, contexts[0].keys.dtype
        self.is_initialized = True
        rows_of: dict[int, list[int]] = {}
        for row, kv in enumerate(contexts):
            rows_of.setdefault(id(kv), []).append(row)
        self.sources = [
            (contexts[rows[0]], torch.tensor(rows, device=contexts[rows[0]].keys.device)) for rows in rows_of.values()
        ]

    def get_seq_length(self) -> int:
        return self._contexts[0].keys.shape[-2] + self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens behind the own ones; returns own tokens, or everything if `joined`."""
        new = (key_states, value_states)
        if not self._buffers:
            self._buffers = [part.new_empty(*part.shape[:2], self._room, part.shape[-1]) for part in new]
        start, self._length = self._length, self._length + key_states.shape[-2]
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer[:, :, start : self._length] = part
        keys, values = (buffer[:, :, : self._length] for buffer in self._buffers)
        if not self._joined:
            return keys, values
        return (
            torch.cat([torch.cat([kv.keys for kv in self._contexts]), keys], dim=-2),
            torch.cat([torch.cat([kv.values for kv in self._contexts]), values], dim=-2),
        )

    def select(self, rows: Sequence[int], length: int) -> _RowsLayer:
        """Returns a copy of some rows with their first `length` own tokens."""
        chosen = _RowsLayer([self._contexts[row] for row in rows], self._room, self._joined)
        index = torch.tensor(rows, device=self.device)
        chosen._buffers = [buffer[index] for buffer in self._buffers]
        chosen._length = length
        return chosen


class RowsCache(DynamicCache):  # type: ignore[misc]
    """A cache of rows that read shared contexts.

    Args:
        contexts: For every layer, the context of each row; the number of rows may differ between layers.
        room: Tokens behind the contexts at most.
        joined: As for `_RowsLayer`.
    """

    def __init__(self, contexts: Sequence[Sequence[KV]], room: int, joined: bool) -> None:
        super().__init__()
        self.layers = [_RowsLayer(rows, room, joined) for rows in contexts]
        self.joined = joined
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = {}
        self.attended: set[int] = set()

    def sources(self, layer: int) -> list[tuple[KV, torch.Tensor]]:
        """Returns the different contexts of a layer, each with the rows that read it; notes that attention has asked."""
        self.attended.add(layer)
        sources: list[tuple[KV, torch.Tensor]] = self.layers[layer].sources
        return sources

    def masks(self, mask: torch.Tensor, own: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Splits a `(B, 1, T, S + own)` mask, equal for all rows: over the context (None if all is seen) and over own tokens."""
        if id(mask) not in self._masks:
            seen = mask.shape[-1] - own
            context, behind = mask[0, 0, :, :seen], mask[0, 0, :, seen:]
            self._masks[id(mask)] = (mask, None if context.all() else context, behind)
        return self._masks[id(mask)][1:]

    def select(self, rows: Sequence[Sequence[int]], length: int) -> RowsCache:
        """Returns a copy of some rows, given for every layer, with their first `length` own tokens."""
        chosen = RowsCache([], 0, self.joined)
        chosen.layers = [layer.select(index, length) for layer, index in zip(self.layers, rows, strict=True)]
        return chosen


def empty_cache() -> Cache:
    """Returns a cache that holds every token of every layer.

    NOTE: made without the model's config on purpose. With it, Transformers drops what a sliding window no longer sees, and the
    layers' caches then differ in length; the window itself is applied by the attention mask either way.
    """
    return DynamicCache()


def prefilled_cache(context: ContextKV) -> Cache:
    """Returns a cache of one row that starts with a context."""
    cache = DynamicCache()
    for index, kv in enumerate(context):
        cache.update(kv.keys, kv.values, index)
    return cache


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
