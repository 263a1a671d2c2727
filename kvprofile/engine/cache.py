"""Keys and values per layer, and the one place that touches Transformers' cache objects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

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
        edges = [i for i, kv in enumerate(contexts) if i == 0 or kv is not contexts[i - 1]]
        self.sources = [(contexts[a], slice(a, b)) for a, b in pairwise([*edges, len(contexts)])]

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

    def free(self) -> None:
        """Gives own tokens back; the layer cannot be read any more."""
        self._buffers = []

    def take(self, origins: Sequence[tuple[_RowsLayer, int]], length: int) -> None:
        """Copies the first `length` own tokens of a row of another layer cache, with as much room, for each row."""
        self._length = length
        rows_of: dict[_RowsLayer, list[int]] = {}
        for row, (origin, _) in enumerate(origins):
            rows_of.setdefault(origin, []).append(row)
        order = torch.tensor([row for rows in rows_of.values() for row in rows], device=self.device).argsort()
        for part in range(2):
            chosen = [
                origin._buffers[part].index_select(
                    0, torch.tensor([origins[row][1] for row in rows], device=self.device)
                )
                for origin, rows in rows_of.items()
            ]
            self._buffers.append(chosen[0] if len(chosen) == 1 else torch.cat(chosen).index_select(0, order))


class AllWritten(Exception):
    """The last keys and values that a pass is for are written."""


class EndingCache(DynamicCache):  # type: ignore[misc]
    """An empty cache that ends the model's pass once the layer `ends_at` is written, if any."""

    ends_at: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        written = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self.ends_at:
            raise AllWritten
        return written


class RowsCache(EndingCache):
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

    def sources(self, layer: int) -> list[tuple[KV, slice]]:
        """Returns the contexts of a layer, each with the rows side by side that read it; notes that attention has asked."""
        self.attended.add(layer)
        sources: list[tuple[KV, slice]] = self.layers[layer].sources
        return sources

    def masks(self, mask: torch.Tensor, own: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Splits a `(B, 1, T, S + own)` mask, equal for all rows: over the context (None if all is seen) and over own tokens."""
        if id(mask) not in self._masks:
            seen = mask.shape[-1] - own
            context, behind = mask[0, 0, :, :seen], mask[0, 0, :, seen:]
            self._masks[id(mask)] = (mask, None if context.all() else context, behind)
        return self._masks[id(mask)][1:]

    def take(self, origins: Sequence[Sequence[tuple[RowsCache, int]]], length: int, spent: RowsCache | None) -> None:
        """Copies own tokens: for every layer and row, the first `length` of a row of another cache.

        Layers of `spent`, which nobody reads any more, are freed on the way.
        """
        for index, (layer, chosen) in enumerate(zip(self.layers, origins, strict=True)):
            layer.take([(cache.layers[index], row) for cache, row in chosen], length)
            if spent is not None:
                spent.layers[index].free()


def empty_cache() -> EndingCache:
    """Returns a cache that holds every token of every layer.

    NOTE: made without the model's config on purpose. With it, Transformers drops what a sliding window no longer sees, and the
    layers' caches then differ in length; the window itself is applied by the attention mask either way.
    """
    return EndingCache()


def prefilled_cache(context: ContextKV) -> Cache:
    """Returns a cache of one row that starts with a context."""
    cache = DynamicCache()
    for index, kv in enumerate(context):
        cache.update(kv.keys, kv.values, index)
    return cache


class _LaterLayer(DynamicLayer):  # type: ignore[misc]
    """One layer whose context comes later; until then it knows nothing but the length."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def get_seq_length(self) -> int:
        return int(super().get_seq_length()) if self.is_initialized else self._tokens

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new tokens behind the context.

        Raises:
            GateFailed: If it has not come: without it the layer would answer as if there were none.
        """
        if not self.is_initialized:
            raise GateFailed("a layer is read before its context came; its model does not call the layers in order")
        written: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return written

    def fill(self, context: KV) -> None:
        self.keys, self.values = context
        self.device, self.dtype = context.keys.device, context.keys.dtype
        self.is_initialized = True


class LaterCache(DynamicCache):  # type: ignore[misc]
    """A cache of one row whose context comes layer by layer, while a model may already read it.

    Args:
        layers: L.
        tokens: S.
    """

    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.layers = [_LaterLayer(tokens) for _ in range(layers)]

    def fill(self, layer: int, context: KV) -> None:
        """Puts a layer's context in, before the layer runs."""
        self.layers[layer].fill(context)


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
