"""The columns that other programs rely on, written out once more: a renamed or retyped one fails here."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kvprofile.store.schema import MEASUREMENTS, PROFILE, SAMPLES, SEARCH, TIMINGS

TEXT, IDS, TEXTS = pa.string(), pa.list_(pa.int32()), pa.list_(pa.string())
PLAN = {"strategy": TEXT, "start_layer": pa.int16(), "stop_layer": pa.int16(), "params": TEXT}
SOURCE = {"task": TEXT, "dataset": TEXT}

CONTRACT: dict[str, dict[str, pa.DataType]] = {
    "profile": {
        **PLAN,
        "granularity": pa.int8(),
        "recomputed_layers": pa.int16(),
        "total_layers": pa.int16(),
        "recompute_fraction": pa.float64(),
        "context_tokens_median": pa.int64(),
        "prefill_flops": pa.float64(),
        "full_prefill_flops": pa.float64(),
        "kv_bytes_per_token": pa.int64(),
        "e_bytes_per_token": pa.int64(),
        "measured_prefill_ms": pa.float64(),
        "measured_full_prefill_ms": pa.float64(),
        **SOURCE,
        "metric": TEXT,
        "n_planned": pa.int32(),
        "n_scored": pa.int32(),
        "quality": pa.float64(),
        "baseline_quality": pa.float64(),
        "floor_quality": pa.float64(),
        "sender_quality": pa.float64(),
        "loss_rel": pa.float64(),
        "loss_points": pa.float64(),
        "loss_rel_upper": pa.float64(),
        "loss_points_upper": pa.float64(),
        "gap_recovered": pa.float64(),
        "mean_kl": pa.float64(),
        "top1_agreement": pa.float64(),
        "exact_match_rate": pa.float64(),
        "on_frontier": pa.bool_(),
    },
    "measurements": {
        "sample_id": TEXT,
        **SOURCE,
        "metric": TEXT,
        **PLAN,
        "value": pa.float64(),
        "baseline_value": pa.float64(),
        "kl": pa.float64(),
        "nll": pa.float64(),
        "top1_agreement": pa.float64(),
        "output_token_ids": IDS,
        "output_text": TEXT,
        "context_tokens": pa.int32(),
        "suffix_tokens": pa.int32(),
        "status": TEXT,
        "error": TEXT,
    },
    "samples": {
        "sample_id": TEXT,
        **SOURCE,
        "context_token_ids": IDS,
        "suffix_token_ids": IDS,
        "references": TEXTS,
        "truncated_tokens": pa.int32(),
        "max_new_tokens": pa.int32(),
        "context_sha256": TEXT,
    },
    "search": {
        **PLAN,
        "round": pa.int16(),
        "n_measured": pa.int32(),
        "mean_kl": pa.float64(),
        "rival_start_layer": pa.int16(),
        "rival_stop_layer": pa.int16(),
        "rival_mean_kl": pa.float64(),
        "reason": TEXT,
    },
    "timings": {
        "context_tokens": pa.int32(),
        "suffix_tokens": pa.int32(),
        "layer": pa.int16(),
        "recompute_ms": pa.float64(),
        "read_ms": pa.float64(),
        "repeats": pa.int16(),
    },
}
BEYOND = {"samples": {"head_tokens": pa.int32()}}
"""Columns that the code has and nobody was promised."""

SCHEMAS = {"profile": PROFILE, "measurements": MEASUREMENTS, "samples": SAMPLES, "search": SEARCH, "timings": TIMINGS}


@pytest.mark.parametrize("table", SCHEMAS)
def test_columns_are_those_promised(table: str) -> None:
    found = {field.name: field.type for field in SCHEMAS[table]}
    assert found == CONTRACT[table] | BEYOND.get(table, {})
    assert len(SCHEMAS[table]) == len(found), "a column twice"
