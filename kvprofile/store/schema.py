"""Arrow schemas of a profile's tables and the keys of their footer. A change here is a new `FORMAT_VERSION`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

FORMAT_VERSION = 2
FOOTER_KEY = "kvprofile"

_PLAN: list[tuple[str, pa.DataType]] = [
    ("strategy", pa.string()),
    ("start_layer", pa.int16()),
    ("stop_layer", pa.int16()),
    ("params", pa.string()),
]

PROFILE = pa.schema(
    [
        *_PLAN,
        ("granularity", pa.int8()),
        ("recomputed_layers", pa.int16()),
        ("total_layers", pa.int16()),
        ("recompute_fraction", pa.float64()),
        ("context_tokens_median", pa.int64()),
        ("prefill_flops", pa.float64()),
        ("full_prefill_flops", pa.float64()),
        ("kv_bytes_per_token", pa.int64()),
        ("e_bytes_per_token", pa.int64()),
        ("measured_prefill_ms", pa.float64()),
        ("measured_full_prefill_ms", pa.float64()),
        ("task", pa.string()),
        ("dataset", pa.string()),
        ("metric", pa.string()),
        ("n_planned", pa.int32()),
        ("n_scored", pa.int32()),
        ("quality", pa.float64()),
        ("baseline_quality", pa.float64()),
        ("floor_quality", pa.float64()),
        ("sender_quality", pa.float64()),
        ("loss_rel", pa.float64()),
        ("loss_points", pa.float64()),
        ("loss_rel_upper", pa.float64()),
        ("loss_points_upper", pa.float64()),
        ("gap_recovered", pa.float64()),
        ("mean_kl", pa.float64()),
        ("top1_agreement", pa.float64()),
        ("exact_match_rate", pa.float64()),
        ("on_frontier", pa.bool_()),
    ]
)

MEASUREMENTS = pa.schema(
    [
        ("sample_id", pa.string()),
        ("task", pa.string()),
        ("dataset", pa.string()),
        ("metric", pa.string()),
        *_PLAN,
        ("value", pa.float64()),
        ("baseline_value", pa.float64()),
        ("kl", pa.float64()),
        ("nll", pa.float64()),
        ("top1_agreement", pa.float64()),
        ("output_token_ids", pa.list_(pa.int32())),
        ("output_text", pa.string()),
        ("context_tokens", pa.int32()),
        ("suffix_tokens", pa.int32()),
        ("status", pa.string()),
        ("error", pa.string()),
    ]
)

SAMPLES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("task", pa.string()),
        ("dataset", pa.string()),
        ("context_token_ids", pa.list_(pa.int32())),
        ("suffix_token_ids", pa.list_(pa.int32())),
        ("references", pa.list_(pa.string())),
        ("head_tokens", pa.int32()),
        ("truncated_tokens", pa.int32()),
        ("max_new_tokens", pa.int32()),
        ("context_sha256", pa.string()),
    ]
)

SEARCH = pa.schema(
    [
        *_PLAN,
        ("round", pa.int16()),
        ("n_measured", pa.int32()),
        ("mean_kl", pa.float64()),
        ("rival_start_layer", pa.int16()),
        ("rival_stop_layer", pa.int16()),
        ("rival_mean_kl", pa.float64()),
        ("reason", pa.string()),
    ]
)
"""Groups that an adaptive search did not measure on all samples, and why; a rival from layer 0 to 0 is full reuse."""

_LAYER_TIMES: list[tuple[str, pa.DataType]] = [
    ("context_tokens", pa.int32()),
    ("suffix_tokens", pa.int32()),
    ("layer", pa.int16()),
    ("recompute_ms", pa.float64()),
    ("read_ms", pa.float64()),
    ("repeats", pa.int16()),
]
TIMINGS = pa.schema(_LAYER_TIMES)
"""Medians of running a context through a layer, and a suffix behind it; a null layer is what lies outside the layers."""

HEADER_KEYS = (
    "format_version",
    "kvprofile_version",
    "profile_id",
    "version",
    "created_at",
    "sender",
    "receiver",
    "recipe_sha256",
    "datasets",
    "metrics",
    "end_ids",
    "strategies",
    "references",
    "search",
    "attention",
    "device",
    "torch",
    "transformers",
    "seed",
    "confidence",
    "resamples",
    "bounds",
)
MODEL_KEYS = (
    "name",
    "revision",
    "weights_sha256",
    "tokenizer_sha256",
    "template_sha256",
    "config_sha256",
    "architecture",
    "layers",
    "kv_heads",
    "head_dim",
    "hidden_size",
    "dtype",
    "quantization",
)
DATASET_KEYS = ("name", "sha256", "sample_ids_sha256")


def ends_of(datasets: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Returns the texts that end an answer by task and data set, where there are any, of a header's `datasets`."""
    return {(one["task"], one["name"]): one["stop"] for one in datasets if "stop" in one}


def missing_header_keys(header: Mapping[str, Any]) -> list[str]:
    """Returns the required footer keys that a header lacks, nested ones as `sender.name` or `datasets.0.sha256`."""
    missing = [key for key in HEADER_KEYS if key not in header]
    for role in ("sender", "receiver"):
        model = header.get(role)
        if role in header:
            missing += [f"{role}.{key}" for key in MODEL_KEYS if not isinstance(model, Mapping) or key not in model]
    datasets = header.get("datasets", [])
    for i, entry in enumerate(datasets if isinstance(datasets, list | tuple) else [None]):
        missing += [f"datasets.{i}.{key}" for key in DATASET_KEYS if not isinstance(entry, Mapping) or key not in entry]
    return missing
