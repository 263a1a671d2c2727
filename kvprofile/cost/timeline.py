"""When requests that read a sender's cache give their first token: a link and a compute unit, step by step.

The link carries the hidden states that enter the first recomputed layer (E) and the K/V of reused layers; the compute unit
recomputes layers of the context and then reads the suffix through all layers. Standard library only: a serving runtime
imports it. The three ways to load are those of arXiv 2411.02820.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from kvprofile.errors import one_of
from kvprofile.layers import LayerRange

Mode = Literal["load_all", "load_reused", "overlapped"]
"""`load_all`: E and the K/V of every layer, then compute. `load_reused`: E and the K/V of reused layers, then compute.
`overlapped`: E first, recompute as soon as it is there, K/V meanwhile in the order in which the suffix reads them."""
MODES: tuple[Mode, ...] = get_args(Mode)

Carried = Literal["e", "kv"]


class Link(NamedTuple):
    """What caches travel through.

    Attributes:
        bytes_per_ms: Bandwidth; see `GBPS`.
        latency_ms: Before the first byte of a request; what follows comes without a gap.
    """

    bytes_per_ms: float
    latency_ms: float = 0.0


class LayerCost(NamedTuple):
    """What one layer takes for one context and suffix.

    Attributes:
        kv_bytes: Of the context's keys and values.
        recompute_ms: Running the context through the layer.
        read_ms: Running the suffix through the layer, behind the context.
    """

    kv_bytes: int
    recompute_ms: float
    read_ms: float


class Request(NamedTuple):
    """One request and how it is served.

    Attributes:
        group: Layers to recompute; `LayerRange(0, 0)` for none.
        layers: Costs per layer.
        e_bytes: Of the hidden states that enter one layer, for the whole context.
        outside_ms: Compute outside the layers: embedding, output matrix.
        arrives_ms: When it may begin.
    """

    group: LayerRange
    layers: Sequence[LayerCost]
    e_bytes: int
    outside_ms: float = 0.0
    arrives_ms: float = 0.0


class Step(NamedTuple):
    """What one resource does for one request, from `begins_ms` to `ends_ms`.

    Attributes:
        layer: The layer; for `e` the one it enters, None for `outside`.
    """

    request: int
    resource: Literal["link", "compute"]
    work: Literal["e", "kv", "recompute", "read", "outside"]
    layer: int | None
    begins_ms: float
    ends_ms: float


GBPS = 125_000.0
"""Bytes per millisecond of 1 Gbit/s."""


def parse_mode(text: str) -> Mode:
    """Returns the mode of that name.

    Raises:
        BadInput: If there is none.
    """
    return one_of(text, MODES, "mode")


def timeline(requests: Sequence[Request], link: Link, mode: Mode) -> list[Step]:
    """Returns every step of the requests, which are served in the given order.

    Overlapped, each resource takes the requests one after the other. Otherwise a request begins once the one before is done.
    """
    steps: list[Step] = []
    link_free = compute_free = float("-inf")
    for number, request in enumerate(requests):
        begins = request.arrives_ms if mode == "overlapped" else max(request.arrives_ms, compute_free)
        ready: dict[int | None, float] = {}
        moves = [move for move in _moves(request, mode) if move[2] > 0]  # nothing to ship waits for no latency
        now = max(
            begins + link.latency_ms, link_free
        )  # while it waits, the link may still carry what was asked for before
        for work, layer, size in moves:
            ends = now + size / link.bytes_per_ms
            steps.append(Step(number, "link", work, layer, now, ends))
            ready[None if work == "e" else layer] = now = ends
        link_free = now if moves else link_free
        now = max(begins, compute_free)
        if mode != "overlapped" and moves:
            now = max(now, link_free)
        for layer in range(request.group.start, request.group.stop):
            now = max(now, ready.get(None, now))
            steps.append(Step(number, "compute", "recompute", layer, now, now + request.layers[layer].recompute_ms))
            now = steps[-1].ends_ms
        for layer, cost in enumerate(request.layers):
            now = max(now, ready.get(layer, now))
            steps.append(Step(number, "compute", "read", layer, now, now + cost.read_ms))
            now = steps[-1].ends_ms
        steps.append(Step(number, "compute", "outside", None, now, now + request.outside_ms))
        compute_free = steps[-1].ends_ms
    return steps


def first_tokens_ms(requests: Sequence[Request], link: Link, mode: Mode) -> list[float]:
    """Returns the time from each request's arrival to its first token."""
    ends = {step.request: step.ends_ms for step in timeline(requests, link, mode) if step.work == "outside"}
    return [ends[number] - request.arrives_ms for number, request in enumerate(requests)]


def link_order(group: LayerRange, layers: int, mode: Mode) -> list[tuple[Carried, int]]:
    """Returns what the link carries for a request, first one first: the E that enters a layer, or a layer's K/V."""
    e: list[tuple[Carried, int]] = [("e", group.start)] if group.start > 0 and group.length > 0 else []
    kv = [layer for layer in range(layers) if mode == "load_all" or not group.start <= layer < group.stop]
    return [*e, *(("kv", layer) for layer in kv)]


def _moves(request: Request, mode: Mode) -> list[tuple[Carried, int, int]]:
    """Returns what the link carries for a request, in its order: kind, layer, bytes."""
    order = link_order(request.group, len(request.layers), mode)
    return [(kind, layer, request.e_bytes if kind == "e" else request.layers[layer].kv_bytes) for kind, layer in order]
