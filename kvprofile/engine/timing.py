"""Measured times: of full and partial prefills of one context, of single layers at several lengths, of matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from kvprofile.cost.layer_times import LayerTiming
from kvprofile.cost.timing import Timing
from kvprofile.engine.cache import prefilled_cache
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.reference import Capture
from kvprofile.layers import LayerRange

WARM_UP = 1
REPEATS = 5
LAYER_REPEATS = 5
LAYER_SECONDS = 15.0
LENGTHS = 4


def spread_of_groups(groups: Sequence[LayerRange], layers: int) -> list[LayerRange]:
    """Returns all layers and, for a few lengths, the group of that length nearest to the middle."""
    lengths = sorted({group.length for group in groups})
    wanted = sorted({lengths[round(i * (len(lengths) - 1) / 4)] for i in range(5)})
    nearest = [min((g for g in groups if g.length == n), key=lambda g: abs(g.start + g.stop - layers)) for n in wanted]
    return sorted({LayerRange(0, layers), *nearest})


def time_prefills(receiver: Decoder, sender: Capture, groups: Sequence[LayerRange]) -> list[Timing]:
    """Returns the times of recomputing each group when the sender's hidden states are at hand.

    Groups take turns in every round, so that a drift of the machine's speed touches all alike.
    """
    kept: dict[LayerRange, list[float]] = {group: [] for group in groups}
    for round_number in range(WARM_UP + REPEATS):
        for group in groups:
            wait_for(receiver.devices)
            begun = time.perf_counter()
            receiver.recompute(sender.token_ids, group, sender.entering[group.start] if group.start > 0 else None)
            wait_for(receiver.devices)
            if round_number >= WARM_UP:
                kept[group].append(1000 * (time.perf_counter() - begun))
    return [Timing(group, len(sender.token_ids), tuple(times)) for group, times in kept.items()]


def lengths_to_time(context_tokens: Sequence[int]) -> list[int]:
    """Returns four lengths, each longer than the last by one factor, from short contexts to the longest.

    The shortest is an eighth of the longest, but no shorter than 64, and no longer than the shortest context.
    """
    longest = max(context_tokens)
    shortest = min(*context_tokens, longest, max(64, longest // 8))
    ratio = longest / shortest
    return sorted({round(shortest * ratio ** (i / (LENGTHS - 1))) for i in range(LENGTHS)})


def time_layers(
    receiver: Decoder, token_ids: Sequence[int], lengths: Sequence[int], suffix: Sequence[int]
) -> list[LayerTiming]:
    """Returns what every layer takes to recompute a context and to read a suffix behind it, at each length.

    Lengths take turns in every round, as groups do in `time_prefills`. There are at most `LAYER_REPEATS` rounds, and after the
    first none that would end beyond `LAYER_SECONDS`. A CPU warms up on the shortest length, which others do on every one.

    Args:
        receiver: The model.
        token_ids: A context at least as long as the longest length; it is cut to each.
        lengths: Context lengths, shortest first.
        suffix: T ids.
    """
    if len(token_ids) < lengths[-1]:
        raise ValueError(f"a context of {len(token_ids)} tokens cannot be cut to {lengths[-1]}")
    begun = time.perf_counter()
    for length in lengths[:1] if {device.type for device in receiver.devices} == {"cpu"} else lengths:
        _time_passes(receiver, token_ids[:length], suffix)
    runs: dict[int, list[_Passes]] = {length: [] for length in lengths}
    for _ in range(LAYER_REPEATS):
        round_begun = time.perf_counter()
        for length in lengths:
            runs[length].append(_time_passes(receiver, token_ids[:length], suffix))
        now = time.perf_counter()
        if now - begun + (now - round_begun) > LAYER_SECONDS:
            break
    return [
        LayerTiming(
            length,
            len(suffix),
            layer,
            None if layer is None else statistics.median(one.recompute[layer] for one in held),
            statistics.median(one.read[layer] for one in held),
            len(held),
        )
        for length, held in runs.items()
        for layer in (*range(len(receiver.layers)), None)
    ]


class _Passes(NamedTuple):
    """Milliseconds by layer, and outside the layers under None, of a context's pass and of the suffix's behind it."""

    recompute: dict[int | None, float]
    read: dict[int | None, float]


def _time_passes(receiver: Decoder, context: Sequence[int], suffix: Sequence[int]) -> _Passes:
    with layer_clock(receiver) as recomputing:
        kv = receiver.recompute(context, receiver.all_layers, None)
    cache = prefilled_cache(kv)
    with layer_clock(receiver) as reading:
        receiver.logits(torch.tensor([list(suffix)]), cache, keep=1)
    return _Passes(recomputing.milliseconds(), reading.milliseconds())


class LayerClock:
    """Marks of one pass: of CUDA events where one GPU holds the model, else of a clock that waits for all devices."""

    def __init__(self, devices: Collection[torch.device], layers: int) -> None:
        self._devices = devices
        self._events = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self._marks: dict[tuple[int | None, bool], Any] = {}
        self._layers = layers

    def mark(self, layer: int | None, ends: bool) -> None:
        """Notes that a layer, or with None the pass, begins or ends now."""
        if self._events:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(next(iter(self._devices))))
            self._marks[layer, ends] = event
        else:
            wait_for(self._devices)
            self._marks[layer, ends] = time.perf_counter()

    def milliseconds(self) -> dict[int | None, float]:
        """Returns what each layer took, and with None what the pass took outside of them."""
        wait_for(self._devices)
        layers: dict[int | None, float] = {layer: self._between(layer) for layer in range(self._layers)}
        return {**layers, None: max(0.0, self._between(None) - sum(layers.values()))}

    def _between(self, layer: int | None) -> float:
        begun, ended = self._marks[layer, False], self._marks[layer, True]
        return float(begun.elapsed_time(ended)) if self._events else 1000 * float(ended - begun)


@contextmanager
def layer_clock(model: Decoder) -> Iterator[LayerClock]:
    """Takes the time of every layer in one pass of the model, which the caller runs inside; leaves no hook behind."""
    clock = LayerClock(set(model.devices), len(model.layers))
    hooks = []
    try:
        for index, layer in enumerate(model.layers):
            hooks.append(layer.register_forward_pre_hook(partial(_mark, clock, index, False)))
            hooks.append(layer.register_forward_hook(partial(_mark, clock, index, True)))
        wait_for(model.devices)
        clock.mark(None, ends=False)
        yield clock
        clock.mark(None, ends=True)
    finally:
        for hook in hooks:
            hook.remove()


def _mark(clock: LayerClock, layer: int, ends: bool, *_: Any) -> None:
    clock.mark(layer, ends)


def matrix_flops_per_second(width: int, device: torch.device, dtype: torch.dtype) -> float:
    """Returns the rate of `(512, width) @ (width, 4 · width)`, the fastest of ten runs."""
    left = torch.randn(512, width, device=device, dtype=dtype)
    right = torch.randn(width, 4 * width, device=device, dtype=dtype)
    fastest = float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        (left @ right).sum().item()  # .item() waits for a GPU
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * 512 * 4 * width**2 / fastest


def wait_for(devices: Iterable[torch.device]) -> None:
    """Waits until devices have done what they were given."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif device.type != "cpu":
            torch.accelerator.synchronize(device)
