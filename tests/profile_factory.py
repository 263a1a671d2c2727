"""Publishes a small synthetic profile through the real writer: layers 2 and 3 matter, the others do not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvprofile.analysis.profile_table import PlanCost, Source, build_profile_rows
from kvprofile.layers import LayerRange, Plan, grid_union, largest_unit, layer_params, set_params
from kvprofile.limits import BOUND_METHOD
from kvprofile.store.schema import FORMAT_VERSION, MEASUREMENTS, PROFILE, SAMPLES, TIMINGS
from kvprofile.store.writer import pair_folder, publish, write_table

ARMS = ("full_prefill", "full_reuse", "sender_alone", "no_context")
CRITICAL = frozenset({2, 3})


def header(**changes: Any) -> dict[str, Any]:
    model = {
        "name": "receiver",
        "revision": None,
        "weights_sha256": "a" * 64,
        "tokenizer_sha256": "b" * 64,
        "template_sha256": "1" * 64,
        "config_sha256": "2" * 64,
        "architecture": "LlamaForCausalLM",
        "layers": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "hidden_size": 64,
        "dtype": "float32",
        "quantization": None,
    }
    return {
        "format_version": FORMAT_VERSION,
        "kvprofile_version": "0.1.0",
        "profile_id": "0123456789abcdef",
        "version": 1,
        "created_at": "2026-01-02T03:04:05Z",
        "sender": {**model, "name": "sender", "weights_sha256": "c" * 64},
        "receiver": model,
        "recipe_sha256": "d" * 64,
        "datasets": [{"name": "hotpotqa", "sha256": "e" * 64, "sample_ids_sha256": "f" * 64}],
        "metrics": ["f1@1", "exact_match@1"],
        "end_ids": [2],
        "strategies": {"full_prefill": 1, "full_reuse": 1, "sender_alone": 1, "no_context": 1, "layer_group": 1},
        "references": "data",
        "search": "exhaustive",
        "attention": "sdpa",
        "device": "cpu",
        "torch": "2.13.0",
        "transformers": "5.24.0",
        "seed": 0,
        "confidence": 0.95,
        "resamples": 200,
        "bounds": BOUND_METHOD,
        **changes,
    }


def plans(layers: int, granularity: tuple[int, ...]) -> list[Plan]:
    return [*map(Plan, ARMS), *(Plan("layer_group", group) for group in grid_union(layers, granularity))]


def recomputed(plan: Plan, layers: int) -> int:
    return plan.range.length if plan.range else layers * (plan.strategy in ("full_prefill", "sender_alone"))


def cost(plan: Plan, layers: int, granularity: tuple[int, ...], sources: list[Source]) -> PlanCost:
    count = recomputed(plan, layers)
    return PlanCost(
        plan=plan,
        granularity=largest_unit(plan.range, layers, granularity) if plan.range else None,
        recomputed_layers=count,
        total_layers=layers,
        prefill_flops=dict.fromkeys(sources, count * 1e9),
        full_prefill_flops=dict.fromkeys(sources, layers * 1e9),
        kv_bytes_per_token=(layers - count) * 256,
        e_bytes_per_token=256 if plan.range and plan.range.start else 0,
        measured_prefill_ms=dict.fromkeys(sources, 10.0 * count if plan.range is None else None),
        measured_full_prefill_ms=dict.fromkeys(sources, 10.0 * layers),
        context_tokens_median=dict.fromkeys(sources, 100),
    )


def share_kept(plan: Plan) -> float:
    """Share of full prefill's score that a plan keeps."""
    if plan.range is None:
        return {"full_prefill": 1.0, "full_reuse": 0.6, "sender_alone": 0.4}.get(plan.strategy, 0.1)
    return 1 - 0.2 * len(CRITICAL - set(range(plan.range.start, plan.range.stop)))


def measurements(
    *, layers: int = 6, samples: int = 8, granularity: tuple[int, ...] = (1, 2, 3), sources: list[Source], seed: int = 0
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for task, dataset in sources:
        for i, score in enumerate(rng.uniform(0.4, 1.0, samples)):
            for plan in plans(layers, granularity):
                kept = share_kept(plan)
                strategy, start, stop, params = plan.key
                rows += [
                    {
                        "sample_id": f"s{i}",
                        "task": task,
                        "dataset": dataset,
                        "metric": metric,
                        "strategy": strategy,
                        "start_layer": start,
                        "stop_layer": stop,
                        "params": params,
                        "value": kept * score if metric == "f1" else float(kept == 1),
                        "baseline_value": score if metric == "f1" else 1.0,
                        "kl": 1 - kept,
                        "nll": 1.0,
                        "top1_agreement": kept,
                        "output_token_ids": [i, round(100 * kept)],
                        "output_text": f"answer {i}",
                        "context_tokens": 100,
                        "suffix_tokens": 10,
                        "status": "ok",
                        "error": None,
                    }
                    for metric in ("f1", "exact_match")
                ]
    return rows


def fail(row: dict[str, Any], error: str = "out of memory") -> None:
    """Makes a measurement one that failed."""
    row.update(value=None, kl=None, nll=None, top1_agreement=None, output_token_ids=None, status="error", error=error)


def publish_profile(
    out: Path,
    rows: list[dict[str, Any]] | None = None,
    *,
    layers: int = 6,
    samples: int = 8,
    granularity: tuple[int, ...] = (1, 2, 3),
    sources: list[Source] | None = None,
    **header_changes: Any,
) -> Path:
    """Returns the folder of a new version in the store `out`; `rows` are its measurements."""
    sources = sources or [("qa", "hotpotqa")]
    if rows is None:
        rows = measurements(layers=layers, samples=samples, granularity=granularity, sources=sources)
    footer = header(**header_changes)
    table = pa.Table.from_pylist(rows, schema=MEASUREMENTS)
    profile = build_profile_rows(
        table,
        [cost(plan, layers, granularity, sources) for plan in plans(layers, granularity)],
        n_planned=dict.fromkeys(sources, samples),
        confidence=footer["confidence"],
        resamples=footer["resamples"],
        seed=footer["seed"],
    )
    ids = [
        {
            "sample_id": f"s{i}",
            "task": task,
            "dataset": dataset,
            "context_token_ids": [1, 2, 3],
            "suffix_token_ids": [4],
            "references": ["x"],
            "head_tokens": 1,
            "truncated_tokens": 7 if i == 0 else 0,
            "max_new_tokens": 32,
            "context_sha256": hashlib.sha256(f"{dataset} {i}".encode()).hexdigest(),
        }
        for task, dataset in sources
        for i in range(samples)
    ]

    def build(folder: Path, version: int) -> None:
        numbered = {**footer, "version": version}
        write_table(profile, folder / "profile.parquet", numbered)
        write_table(table, folder / "measurements.parquet", numbered)
        write_table(pa.Table.from_pylist(ids, schema=SAMPLES), folder / "samples.parquet")
        (folder / "environment.json").write_text('{"python": "3.11"}', encoding="utf-8")
        (folder / "recipe.yaml").write_text("seed: 0\n", encoding="utf-8")

    return publish(pair_folder(out, footer["sender"]["name"], footer["receiver"]["name"]), build)


def add_sensitivity(folder: Path) -> None:
    """Writes a map beside a profile of six layers: reusing a critical layer costs a fifth, and one set of two layers."""
    full = {
        r["sample_id"]: r
        for r in measurements(sources=[("qa", "hotpotqa")])
        if r["metric"] == "f1" and r["strategy"] == "full_prefill"
    }
    rows = []
    for row in full.values():
        rows.append(row)
        for layer in range(6):
            kept = 0.8 if layer in CRITICAL else 1.0
            params = {"strategy": "single_layer_reuse", "params": layer_params(layer)}
            rows.append({**row, **params, "value": kept * row["value"], "kl": 1 - kept})
        rows.append({**row, "strategy": "layer_set", "params": set_params([1, 3]), "value": 0.8 * row["value"]})
    header = json.loads(pq.read_schema(folder / "profile.parquet").metadata[b"kvprofile"])
    (folder / "sensitivity").mkdir()
    write_table(pa.Table.from_pylist(rows, schema=MEASUREMENTS), folder / "sensitivity" / "forward.parquet", header)


def layer_timings(layers: int = 6, lengths: tuple[int, ...] = (50, 100, 200)) -> list[dict[str, Any]]:
    """Rows of `timings.parquet`: a layer takes 10 µs a token to recompute and 0.5 ms to read behind any context."""
    return [
        {
            "context_tokens": length,
            "suffix_tokens": 10,
            "layer": layer,
            "recompute_ms": None if layer is None else length / 100,
            "read_ms": 0.25 if layer is None else 0.5,
            "repeats": 3,
        }
        for length in lengths
        for layer in (*range(layers), None)
    ]


def add_timings(folder: Path, rows: list[dict[str, Any]] | None = None, **header_changes: Any) -> None:
    """Writes layer times beside a profile of six layers."""
    header = json.loads(pq.read_schema(folder / "profile.parquet").metadata[b"kvprofile"]) | header_changes
    table = pa.Table.from_pylist(layer_timings() if rows is None else rows, schema=TIMINGS)
    write_table(table, folder / "timings.parquet", header)


def add_validation(folder: Path, number: int = 1, **plan_changes: Any) -> Path:
    """Writes a validation of the critical layers on fresh data beside a profile; returns its file."""
    plan = {
        **{"plan": "layers 2–3 (2 of 6)", "strategy": "layer_group", "start_layer": 2, "stop_layer": 4, "params": None},
        **{"recompute_fraction": 1 / 3, "unit": "%", "promised_at_most": 0.05, "profiled_loss": 0.0, "loss": 0.0},
        **{"loss_lower": 0.0, "loss_upper": 0.1, "quality": 0.5, "baseline_quality": 0.5, "beaten_by": []},
        **{"held": True, "bounded": False, "beyond_chance": False, **plan_changes},
    }
    said = {
        **{"task": "qa", "dataset": "musique", "metric": "f1", "created_at": "2026-02-01T00:00:00Z", "samples": 8},
        **{"overlap_left_out": 0, "max_loss": "5%", "confidence": 0.95, "full_prefill_quality": 0.5, "plans": [plan]},
    }
    own = json.loads(pq.read_schema(folder / "profile.parquet").metadata[b"kvprofile"])
    table = pa.Table.from_pylist(measurements(samples=2, sources=[("qa", "musique")]), schema=MEASUREMENTS)
    file = folder / "validations" / f"musique-{number:04d}.parquet"
    file.parent.mkdir(exist_ok=True)
    write_table(table, file, {**own, "validation": said})
    return file


def change_rows(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes every row of a published profile."""
    file = folder / "profile.parquet"
    own = json.loads(pq.read_schema(file).metadata[b"kvprofile"])
    rows = pq.read_table(file).to_pylist()
    for row in rows:
        change(row)
    write_table(pa.Table.from_pylist(rows, schema=PROFILE), file, own)


def group_rows(profile: pa.Table, start: int, stop: int) -> list[dict[str, Any]]:
    wanted = LayerRange(start, stop)
    return [r for r in profile.to_pylist() if (r["start_layer"], r["stop_layer"]) == wanted]
