"""Measured milliseconds of every layer at several context lengths, and requests made of them and a plan's bytes.

Standard library only: a serving runtime imports it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kvprofile.cost.timeline import GBPS, LayerCost, Link, Mode, Request, first_tokens_ms, timeline
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange

_LONGEST_MS = 1e9
_TOLERANCE = 1e-9


class LayerTiming(NamedTuple):
    """What one layer took at one length, as in `timings.parquet`.

    Attributes:
        context_tokens: S.
        suffix_tokens: T.
        layer: The layer; None for what lies outside the layers: embedding, last norm, output matrix.
        recompute_ms: Median of running the context through the layer; None outside the layers.
        read_ms: Median of running the suffix through the layer, behind the context.
        repeats: Runs behind the medians.
    """

    context_tokens: int
    suffix_tokens: int
    layer: int | None
    recompute_ms: float | None
    read_ms: float
    repeats: int

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> LayerTiming:
        """Returns what a row of `timings.parquet` or `_asdict` holds.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: If it is nothing of that kind.
        """
        layer, recompute = held["layer"], held["recompute_ms"]
        made = cls(
            int(held["context_tokens"]),
            int(held["suffix_tokens"]),
            None if layer is None else int(layer),
            None if recompute is None else float(recompute),
            float(held["read_ms"]),
            int(held["repeats"]),
        )
        times = [made.read_ms, *([] if made.recompute_ms is None else [made.recompute_ms])]
        if (made.layer is None) != (made.recompute_ms is None) or not all(0 <= ms <= _LONGEST_MS for ms in times):
            raise ValueError(f"no times: {times}")
        if made.context_tokens < 1 or made.suffix_tokens < 1 or made.repeats < 1 or (made.layer or 0) < 0:
            raise ValueError("counts that cannot be")
        return made


class LayerMs(NamedTuple):
    """Milliseconds at one context length.

    Attributes:
        recompute: Per layer, running the context through it.
        read: Per layer, running the suffix through it, behind the context.
        outside: Of the suffix, outside the layers.
    """

    recompute: tuple[float, ...]
    read: tuple[float, ...]
    outside: float


class LayerTimes:
    """Layer times by context length; between two measured lengths they are interpolated linearly.

    Attention grows faster than linearly, so that between two lengths each time errs to the long side. NOTE: A comparison does
    not: full prefill recomputes more layers than a plan, so that its time is too long by more, and break-even and "faster than
    full prefill" err in the plan's favour.

    Args:
        measured: By context length.
        suffix_tokens: T, of all.
    """

    def __init__(self, measured: Mapping[int, LayerMs], suffix_tokens: int) -> None:
        self.lengths = tuple(sorted(measured))
        self.suffix_tokens = suffix_tokens
        self.layers = len(measured[self.lengths[0]].recompute)
        self._measured = dict(measured)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> LayerTimes:
        """Returns the times that rows of `timings.parquet` hold.

        Raises:
            BadInput: If they lack a layer or hold what no measurement gives.
        """
        held: dict[int, dict[int | None, LayerTiming]] = {}
        try:
            timings = [LayerTiming.from_dict(row) for row in rows]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(f"the layer times cannot be ({error}); copy the profile again or sweep again") from error
        for timing in timings:
            held.setdefault(timing.context_tokens, {})[timing.layer] = timing
        layers = max((timing.layer for timing in timings if timing.layer is not None), default=-1) + 1
        whole = all(own.keys() == {None, *range(layers)} for own in held.values()) and layers > 0
        suffixes = {timing.suffix_tokens for timing in timings}
        if not whole or len(suffixes) != 1 or len(timings) != len(held) * (layers + 1):
            raise BadInput("the layer times lack a layer or hold one twice; copy the profile again or sweep again")
        measured = {
            tokens: LayerMs(
                tuple(own[layer].recompute_ms or 0.0 for layer in range(layers)),
                tuple(own[layer].read_ms for layer in range(layers)),
                own[None].read_ms,
            )
            for tokens, own in held.items()
        }
        return cls(measured, suffixes.pop())

    def at(self, tokens: int) -> LayerMs:
        """Returns the times at a context of `tokens`.

        Raises:
            BadInput: If it is shorter or longer than every context that was timed.
        """
        if not self.lengths[0] <= tokens <= self.lengths[-1]:
            raise BadInput(
                f"layers were timed at contexts of {self.lengths[0]} to {self.lengths[-1]} tokens, not at {tokens}; "
                "give a length between, or sweep with contexts as long"
            )
        place = bisect_left(self.lengths, tokens)
        above = self._measured[self.lengths[place]]
        if self.lengths[place] == tokens:
            return above
        low, high = self.lengths[place - 1], self.lengths[place]
        below, share = self._measured[low], (tokens - low) / (high - low)

        def between(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
            return tuple((1 - share) * a + share * b for a, b in zip(one, other, strict=True))

        return LayerMs(
            between(below.recompute, above.recompute),
            between(below.read, above.read),
            *between([below.outside], [above.outside]),
        )


def kv_bytes_per_layer(rows: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Returns the bytes of keys and values per context token that each layer holds, as rows of a profile tell.

    Full reuse ships all of them, a group from layer 0 all but its own; where neighbouring layers are only known together, they
    share evenly, which moves nothing: no group of the profile parts them.

    Raises:
        BadInput: If there is no full reuse among the rows, or their bytes contradict each other.
    """
    rows = [row for row in rows if row["kv_bytes_per_token"] is not None]
    full = next((row for row in rows if row["strategy"] == "full_reuse"), None)
    if full is None:
        raise BadInput("the profile has no full_reuse, whose bytes tell what the cache holds; sweep again")
    whole, layers = full["kv_bytes_per_token"], full["total_layers"]
    before = {0: 0, layers: whole}
    for row in rows:
        if row["strategy"] == "layer_group" and row["start_layer"] == 0:
            before[row["stop_layer"]] = whole - row["kv_bytes_per_token"]
    edges = sorted(before)
    sizes: list[int] = []
    for low, high in pairwise(edges):
        each, more = divmod(before[high] - before[low], high - low)
        sizes += [each + (place < more) for place in range(high - low)]
    if min(sizes) < 0 or sum(sizes) != whole:
        raise BadInput("the profile's kv_bytes_per_token contradict each other; copy it again or sweep again")
    return tuple(sizes)


def not_timed(row: Mapping[str, Any]) -> str | None:
    """Returns why the timeline cannot serve a row's plan, None if it can."""
    strategy = row["strategy"]
    if strategy == "full_prefill":
        return None
    if strategy == "full_reuse" or (strategy == "layer_group" and row["start_layer"] is not None):
        known = row["kv_bytes_per_token"] is not None and row["e_bytes_per_token"] is not None
        return None if known else "the profile does not say how many bytes it ships"
    if strategy == "layer_set":
        return "every range of a layer_set needs hidden states of its own, and the timeline ships one layer's"
    if strategy == "single_layer_reuse":
        return "single_layer_reuse is a diagnostic that serves no request"
    return f"the timeline does not know what {strategy} computes and ships"


def request_of(
    row: Mapping[str, Any], layer_bytes: Sequence[int], times: LayerTimes, tokens: int, arrives_ms: float = 0.0
) -> Request:
    """Returns how a row's plan serves a request of `tokens` context tokens and the suffix that was timed; see `request_at`."""
    return request_at(row, layer_bytes, times.at(tokens), tokens, arrives_ms)


def request_at(
    row: Mapping[str, Any], layer_bytes: Sequence[int], ms: LayerMs, tokens: int, arrives_ms: float = 0.0
) -> Request:
    """Returns how a row's plan serves a request of `tokens` context tokens and the suffix that was timed.

    The last layer of a group is charged in full, though a server may stop at its keys and values.

    Args:
        row: Of `profile.parquet`.
        layer_bytes: From `kv_bytes_per_layer` of the profile's rows.
        ms: What layers take at that length.
        tokens: S.
        arrives_ms: When the request may begin.

    Raises:
        BadInput: If the timeline cannot serve the plan, or the parts are of different models.
    """
    if reason := not_timed(row):
        raise BadInput(f"{reason}; choose another plan")
    if not len(ms.recompute) == len(ms.read) == len(layer_bytes) == row["total_layers"]:
        raise BadInput(
            f"layer times are of {len(ms.read)} layers, the plan of {row['total_layers']}; copy the profile again or sweep again"
        )
    if row["strategy"] == "full_prefill":
        return _full_prefill(ms, arrives_ms)
    group = LayerRange(0, 0)
    if row["strategy"] == "layer_group":
        group = LayerRange(row["start_layer"], row["stop_layer"])
    reused = sum(size for layer, size in enumerate(layer_bytes) if not group.start <= layer < group.stop)
    e_bytes = row["e_bytes_per_token"]
    if reused != row["kv_bytes_per_token"] or e_bytes < 0:
        raise BadInput(
            f"the bytes of a {row['strategy']} are not those of its layers; copy the profile again or sweep again"
        )
    layers = [LayerCost(tokens * size, *cost) for size, *cost in zip(layer_bytes, ms.recompute, ms.read, strict=True)]
    return Request(group, layers, tokens * e_bytes, ms.outside, arrives_ms)


def full_prefill_request(times: LayerTimes, tokens: int, arrives_ms: float = 0.0) -> Request:
    """Returns a request that recomputes every layer and ships nothing.

    Raises:
        BadInput: As `LayerTimes.at`.
    """
    return _full_prefill(times.at(tokens), arrives_ms)


def _full_prefill(ms: LayerMs, arrives_ms: float) -> Request:
    layers = [LayerCost(0, *cost) for cost in zip(ms.recompute, ms.read, strict=True)]
    return Request(LayerRange(0, len(layers)), layers, 0, ms.outside, arrives_ms)


def break_even_gbps(request: Request, full_ms: float, latency_ms: float, mode: Mode) -> float | None:
    """Returns the bandwidth in Gbit/s above which a lone request's first token comes before `full_ms`.

    The time falls as bandwidth grows, so that halving finds the place, to a relative 1e-9.

    Args:
        request: With its plan.
        full_ms: When the first token of full prefill comes.
        latency_ms: Of the link.
        mode: How caches are loaded.

    Returns:
        None if it comes no earlier at any bandwidth that a float holds, 0 if it comes earlier at every one.
    """
    alone = request._replace(arrives_ms=0.0)

    def later(ms_per_byte: float) -> bool:
        link = Link(1 / ms_per_byte if ms_per_byte > 0 else math.inf, latency_ms)
        return first_tokens_ms([alone], link, mode)[0] >= full_ms

    if later(0.0):
        return None
    shipped = sum(
        step.ends_ms - step.begins_ms for step in timeline([alone], Link(1.0), mode) if step.resource == "link"
    )
    if shipped == 0:
        return 0.0
    early, late = 0.0, full_ms / shipped  # no later than then everything would have come
    while late - early > _TOLERANCE * late:
        middle = (early + late) / 2
        if middle in (early, late):  # no float lies between
            break
        early, late = (early, middle) if later(middle) else (middle, late)
    even = math.inf if late * GBPS == 0 else 1 / (late * GBPS)
    return even if math.isfinite(even) else None
