"""Writes a finished run as the files of one profile version."""

from __future__ import annotations

import json
import platform
import statistics
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import transformers

from kvprofile import __version__
from kvprofile.analysis.choice import REFERENCE_ARMS
from kvprofile.analysis.profile_table import PlanCost, Source, build_profile_rows
from kvprofile.cost.layer_times import LayerTiming
from kvprofile.cost.prefill import ModelShape, e_bytes_per_token, kv_bytes_per_token, prefill_flops
from kvprofile.cost.timing import Timing
from kvprofile.engine.gates import Numerics
from kvprofile.engine.shape import shape_of
from kvprofile.engine.timing import WARM_UP
from kvprofile.errors import Interrupted
from kvprofile.identity import json_sha256
from kvprofile.layers import PLAN_COLUMNS, LayerRange, Plan, largest_unit
from kvprofile.limits import BOUND_METHOD
from kvprofile.models.architecture import head_width, key_value_heads
from kvprofile.models.loading import LoadedModel
from kvprofile.models.machine import cpu_name
from kvprofile.recipe import Recipe, SearchMethod, to_yaml
from kvprofile.run import Portion, Run, end_ids_of, read_part
from kvprofile.samples import Part, datasets_of, metrics_of
from kvprofile.search import Removed
from kvprofile.store.reader import RECIPE_FILE
from kvprofile.store.schema import FORMAT_VERSION, SAMPLES, SEARCH, TIMINGS
from kvprofile.store.writer import write_table
from kvprofile.strategies import load_all


def write_profile(
    run: Run,
    numerics: Numerics,
    timings: Sequence[Timing],
    layer_timings: Sequence[LayerTiming],
    portions: Sequence[Portion],
    removed: Sequence[Removed],
    folder: Path,
    version: int,
    previous: str | None,
) -> None:
    """Writes all files of version `version` into `folder`.

    Args:
        run: The run.
        numerics: What its gates found.
        timings: Measured prefills.
        layer_timings: Measured layers.
        portions: All that was measured.
        removed: What an adaptive search left out.
        folder: An empty folder.
        version: The profile's number.
        previous: Id of the profile that this one takes the place of.
    """
    models = run.sender, run.receiver
    header = header_of(run.recipe, run.parts, *models, run.identity, version, run.search, previous)
    parts = []
    for portion in portions:
        part = read_part(run, portion)
        if part is None:
            name = portion.sample.sample_id
            raise Interrupted(f'the part of sample "{name}" cannot be read; run the same command again')
        parts.append(part)
    measurements = pa.concat_tables(parts)
    rows = build_profile_rows(
        measurements,
        _costs(run, timings),
        n_planned={part.key: len(part.records) for part in run.parts},
        confidence=run.recipe.confidence,
        resamples=run.recipe.resamples,
        seed=run.recipe.seed,
    )
    write_table(rows, folder / "profile.parquet", header)
    write_table(measurements, folder / "measurements.parquet", header)
    write_table(_samples_table(run), folder / "samples.parquet")
    if run.search == "adaptive":
        write_table(_search_table(removed), folder / "search.parquet")
    (folder / RECIPE_FILE).write_text(to_yaml(run.recipe), "utf-8")
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": header["device"],
        "attention": header["attention"],
        "numerics": numerics._asdict(),
        "prefill_warm_up_runs": WARM_UP,
        "prefill_timings": [timing.as_dict() for timing in timings],
        # Not with --no-text: whoever hides texts may hide folders, too.
        "recipe_folder": str(run.recipe.folder) if run.recipe.store_text else None,
        "boundary_moved": sum(s.boundary_moved for s in run.samples),
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2), "utf-8")
    timed = pa.Table.from_pylist([timing._asdict() for timing in layer_timings], schema=TIMINGS)
    write_table(timed, folder / "timings.parquet", header)


def _search_table(removed: Sequence[Removed]) -> pa.Table:
    rows = [
        {
            **dict(zip(PLAN_COLUMNS, Plan("layer_group", why.group).key, strict=True)),
            "round": why.round,
            "n_measured": why.samples,
            "mean_kl": why.mean_kl,
            "rival_start_layer": why.rival.start if why.rival else None,
            "rival_stop_layer": why.rival.stop if why.rival else None,
            "rival_mean_kl": why.rival_mean_kl,
            "reason": why.reason,
        }
        for why in removed
    ]
    return pa.Table.from_pylist(rows, schema=SEARCH)


def _costs(run: Run, timings: Sequence[Timing]) -> list[PlanCost]:
    shape = shape_of(run.receiver.model)
    lengths: dict[Source, int] = {}
    for part in run.parts:
        own = [len(s.context_token_ids) for s in run.samples if (s.task, s.dataset) == part.key]
        lengths[part.key] = int(statistics.median(own))
    measured = {timing.group: statistics.median(timing.milliseconds) for timing in timings}
    return [_cost(plan, run, shape, lengths, measured) for plan in run.plans]


def _cost(
    plan: Plan, run: Run, shape: ModelShape, lengths: dict[Source, int], measured: dict[LayerRange, float]
) -> PlanCost:
    whole = LayerRange(0, shape.layers)
    recomputed = run.strategies[plan.strategy].recomputed_layers(plan, shape.layers)
    group = plan.range or LayerRange(0, recomputed)
    ships = plan.strategy not in REFERENCE_ARMS
    timed = lengths if len(lengths) == 1 else {}  # prefills were timed at one length, so for one data set only
    return PlanCost(
        plan=plan,
        granularity=largest_unit(plan.range, shape.layers, run.recipe.granularity) if plan.range else None,
        recomputed_layers=recomputed,
        total_layers=shape.layers,
        prefill_flops={key: prefill_flops(shape, tokens, group) for key, tokens in lengths.items()},
        full_prefill_flops={key: prefill_flops(shape, tokens, whole) for key, tokens in lengths.items()},
        kv_bytes_per_token=kv_bytes_per_token(shape, shape.layers - recomputed) if ships else 0,
        e_bytes_per_token=e_bytes_per_token(shape, group) if ships else 0,
        measured_prefill_ms=dict.fromkeys(timed, measured.get(group)),
        measured_full_prefill_ms=dict.fromkeys(timed, measured.get(whole)),
        context_tokens_median=lengths,
    )


def _samples_table(run: Run) -> pa.Table:
    text = run.recipe.store_text
    rows = [
        {
            "sample_id": s.sample_id,
            "task": s.task,
            "dataset": s.dataset,
            "context_token_ids": s.context_token_ids if text else None,
            "suffix_token_ids": s.suffix_token_ids if text else None,
            "references": s.references if text else None,
            "head_tokens": s.head_tokens,
            "truncated_tokens": s.truncated_tokens,
            "max_new_tokens": s.max_new_tokens,
            "context_sha256": s.context_sha256,
        }
        for s in run.samples
    ]
    return pa.Table.from_pylist(rows, schema=SAMPLES)


def header_of(
    recipe: Recipe,
    parts: Sequence[Part],
    sender: LoadedModel,
    receiver: LoadedModel,
    identity: str,
    version: int,
    search: SearchMethod = "exhaustive",
    previous: str | None = None,
) -> dict[str, Any]:
    """Returns the footer of what was measured now, by what and with what."""
    device, created_at = receiver.device, datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "format_version": FORMAT_VERSION,
        "kvprofile_version": __version__,
        # Two machines may measure one recipe, and each is another measurement.
        "profile_id": json_sha256([identity, version, created_at, uuid.uuid4().hex])[:32],
        "version": version,
        "created_at": created_at,
        "sender": model_header(sender),
        "receiver": model_header(receiver),
        "recipe_sha256": recipe.sha256(),
        "datasets": datasets_of(parts),
        "metrics": metrics_of(parts),
        "end_ids": sorted(end_ids_of(receiver)),
        "strategies": {name: strategy.version for name, strategy in load_all().items()},
        "attention": receiver.model.config._attn_implementation,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "references": recipe.references,
        "search": search,
        "previous": previous,
        "seed": recipe.seed,
        "confidence": recipe.confidence,
        "resamples": recipe.resamples,
        "bounds": BOUND_METHOD,
    }


def model_header(loaded: LoadedModel) -> dict[str, Any]:
    """Returns what a footer says of a model."""
    config = loaded.model.config.get_text_config(decoder=True)
    quantization: Any = getattr(loaded.model.config, "quantization_config", None)
    return {
        "name": loaded.reference.name,
        "revision": loaded.commit or loaded.reference.revision,
        "weights_sha256": loaded.fingerprint.weights_sha256,
        "tokenizer_sha256": loaded.fingerprint.tokenizer_sha256,
        "template_sha256": loaded.fingerprint.template_sha256,
        "config_sha256": loaded.fingerprint.config_sha256,
        "architecture": type(loaded.model).__name__,
        "layers": config.num_hidden_layers,
        "kv_heads": key_value_heads(config),
        "head_dim": head_width(config),
        "hidden_size": config.hidden_size,
        "dtype": loaded.dtype,
        "quantization": quantization.to_dict() if hasattr(quantization, "to_dict") else quantization,
    }
