"""The context caches a strategy may ask for, for one sample; each prefill runs once, when first asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from kvprofile.engine.cache import KV, ContextKV
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.reference import Capture, capture
from kvprofile.layers import LayerRange, furthest_stops


class ContextCaches:
    """Caches of one context by both models of a pair.

    Args:
        sender: The model whose cache is reused.
        receiver: The model that answers.
        token_ids: The context, S ids.
        head_tokens: How many leading ids stay when the context itself is left out.
    """

    def __init__(self, sender: Decoder, receiver: Decoder, token_ids: Sequence[int], head_tokens: int) -> None:
        self._sender, self._receiver = sender, receiver
        self._token_ids, self._head_tokens = tuple(token_ids), head_tokens
        self._stops: dict[int, int] = {}
        self._start: int | None = None
        self._from_start: ContextKV = ()

    @cached_property
    def sender_capture(self) -> Capture:
        """The sender's prefill, with the hidden states entering every layer."""
        return capture(self._sender, self._token_ids)

    @cached_property
    def sender_kv(self) -> ContextKV:
        """The sender's K/V, where the receiver reads them."""
        return self._receiver.own_devices(self.sender_capture.kv)

    @cached_property
    def receiver_kv(self) -> ContextKV:
        """The receiver's own full prefill: the ceiling."""
        return self._receiver.recompute(self._token_ids, self._receiver.all_layers, None)

    @cached_property
    def head_kv(self) -> ContextKV:
        """The receiver's prefill of what stands before the context, which may be nothing: the prompt without any context."""
        if self._head_tokens == 0:
            return tuple(KV(kv.keys[:, :, :0], kv.values[:, :, :0]) for kv in self.receiver_kv)
        return self._receiver.recompute(self._token_ids[: self._head_tokens], self._receiver.all_layers, None)

    def expect(self, groups: Iterable[LayerRange]) -> None:
        """Has `mixed` run no pass further than these groups need; without, passes go to the last layer."""
        self._stops = furthest_stops(groups)

    def recomputed(self, group: LayerRange) -> ContextKV:
        """Returns the K/V of a group's layers alone, recomputed from the sender's hidden states that enter it."""
        if group.start == 0:
            return self.receiver_kv[: group.stop]
        entering = self.sender_capture.entering[group.start]
        return self._receiver.recompute(self._token_ids, group, entering, keys_end_it=True)

    def mixed(self, group: LayerRange) -> ContextKV:
        """Returns the sender's K/V with the group's layers recomputed by the receiver.

        What layer `l` caches does not depend on where a group stops, so one pass from `group.start` to the furthest stop that is
        expected serves all groups with that start; from layer 0 on it is the receiver's own prefill. Only the latest start is
        held: ask for plans in order of their start.
        """
        if group.start == 0:
            return (*self.receiver_kv[: group.stop], *self.sender_kv[group.stop :])
        if self._start != group.start or len(self._from_start) < group.length:
            furthest = self._stops.get(group.start, self._receiver.all_layers.stop)
            rest = LayerRange(group.start, max(group.stop, furthest))
            self._from_start = ()  # freed before the next pass needs the room
            self._from_start = self._receiver.recompute(
                self._token_ids, rest, self.sender_capture.entering[group.start], keys_end_it=True
            )
            self._start = group.start
        return (*self.sender_kv[: group.start], *self._from_start[: group.length], *self.sender_kv[group.stop :])
