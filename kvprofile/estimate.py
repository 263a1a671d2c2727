"""What a sweep would run, and about what it takes, from configs, tokens and one measured matrix product."""

from __future__ import annotations

import statistics
from typing import Any

from kvprofile.cost.memory import Lengths, block_bytes, plan_bytes, sample_bytes, starts_bytes
from kvprofile.cost.prefill import ModelShape, prefill_flops
from kvprofile.cost.sweep import start_flops, suffix_flops
from kvprofile.engine.executor import MOST_PLANS, MOST_VERIFIED
from kvprofile.engine.shape import shape_of
from kvprofile.engine.timing import (
    LAYER_REPEATS,
    LAYER_SECONDS,
    REPEATS,
    WARM_UP,
    lengths_to_time,
    matrix_flops_per_second,
    spread_of_groups,
)
from kvprofile.layers import LayerRange, grid_union
from kvprofile.models.loading import load_outline
from kvprofile.recipe import Recipe
from kvprofile.samples import build_samples, load_parts

_BYTES_PER_MEASUREMENT, _BYTES_PER_PLAN, _BYTES_PER_TOKEN = 12, 53, 2
"""Of the README's sweep of 50: measurements.parquet per row, profile.parquet per row, samples.parquet per context token."""


def estimate(recipe: Recipe) -> dict[str, Any]:
    """Returns plans, time, memory and disk of a sweep; loads no weights and runs no model.

    The time counts the FLOPs of the prefills and layers that are timed first, of both full prefills, of one pass per start and
    of the suffixes as a tree, at the rate of a matrix product of the model's width. Gates, answers, attention kernels and
    loading come on top. Memory is the peak of the longest context if nothing is cut into blocks; a sweep takes less where less
    is there.

    Raises:
        BadInput: If recipe, data or models cannot be used.
    """
    parts = load_parts(recipe)
    outline = load_outline(recipe.receiver, recipe.models, recipe.search_folders)
    shape = shape_of(outline.model)
    samples = build_samples(recipe, parts, outline.tokenizer, [outline.model.config])
    tokens = int(statistics.median(len(s.context_token_ids) for s in samples))
    suffix = int(statistics.median(len(s.suffix_token_ids) for s in samples))
    rate = matrix_flops_per_second(shape.hidden_size, outline.device, outline.model.dtype)
    timed = lengths_to_time([len(s.context_token_ids) for s in samples])
    layers_timed = LAYER_REPEATS * sum(prefill_flops(shape, n, LayerRange(0, shape.layers)) for n in timed)
    weights = sum(p.numel() * p.element_size() for p in outline.model.parameters())
    groups = grid_union(shape.layers, recipe.granularity)
    plans = len(groups)
    longest = max(s.max_new_tokens for s in samples)
    lengths = Lengths(max(len(s.context_token_ids) for s in samples), suffix, longest, longest)
    together = min(plans, MOST_PLANS)
    held = sample_bytes(shape, lengths) + starts_bytes(shape, lengths, groups) + together * plan_bytes(shape, lengths)
    metrics = sum(len(part.metrics) for part in parts)
    rows = plans * sum(len(part.metrics) * len(part.records) for part in parts)
    return {
        "samples": len(samples),
        "search": recipe.search,
        "context_tokens_median": tokens,
        "suffix_tokens_median": suffix,
        "layers": shape.layers,
        "device": str(outline.device),
        "matrix_gflops": rate / 1e9,
        "grids": [
            {
                "granularity": list(units),
                "groups": len(grid_union(shape.layers, units)),
                "seconds": (
                    _timing_flops(shape, tokens, units) + len(samples) * _sample_flops(shape, tokens, suffix, units)
                )
                / rate
                + min(LAYER_SECONDS, layers_timed / rate),
            }
            for units in dict.fromkeys([*((unit,) for unit in recipe.granularity), recipe.granularity])
        ],
        "memory_bytes": 2 * weights + held + block_bytes(shape, lengths, MOST_VERIFIED, together),
        "disk_bytes": rows * _BYTES_PER_MEASUREMENT
        + plans * metrics * _BYTES_PER_PLAN
        + sum(len(s.context_token_ids) for s in samples) * _BYTES_PER_TOKEN,
    }


def _timing_flops(shape: ModelShape, tokens: int, units: tuple[int, ...]) -> float:
    """Returns the FLOPs of the prefills that are timed before the first sample."""
    spread = spread_of_groups(grid_union(shape.layers, units), shape.layers)
    return (WARM_UP + REPEATS) * sum(prefill_flops(shape, tokens, group) for group in spread)


def _sample_flops(shape: ModelShape, tokens: int, suffix: int, units: tuple[int, ...]) -> float:
    groups = grid_union(shape.layers, units)
    prefills = 2 * prefill_flops(shape, tokens, LayerRange(0, shape.layers))
    return (
        prefills
        + start_flops(shape, tokens, [g for g in groups if g.start > 0])
        + suffix_flops(shape, tokens, suffix, groups)
    )
