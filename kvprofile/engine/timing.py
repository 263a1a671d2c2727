"""Measured times: of full and partial prefills of one context, raw samples kept, and of matrix products."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from kvprofile.cost.timing import Timing
from kvprofile.engine.decoder import Decoder
from kvprofile.engine.reference import Capture, partial_prefill
from kvprofile.layers import LayerRange

WARM_UP = 1
REPEATS = 5


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
            _synchronize(receiver)
            begun = time.perf_counter()
            partial_prefill(receiver, sender, group)
            _synchronize(receiver)
            if round_number >= WARM_UP:
                kept[group].append(1000 * (time.perf_counter() - begun))
    return [Timing(group, len(sender.token_ids), tuple(times)) for group, times in kept.items()]


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


def _synchronize(model: Decoder) -> None:
    if model.model.device.type == "cuda":
        torch.cuda.synchronize()
