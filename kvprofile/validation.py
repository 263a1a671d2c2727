"""Measures chosen plans of a profile on samples that it never saw, one plan at a time, and says whether its promise held."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from filelock import FileLock

from kvprofile.analysis.choice import beaten_by
from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.profile_table import lower_bounds, rescore
from kvprofile.analysis.scores import all_scores
from kvprofile.data.prompts import Sample
from kvprofile.engine.cache import ContextKV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import Answer
from kvprofile.engine.reference import greedy, partial_prefill
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.layers import PLAN_COLUMNS, LayerRange, Plan, plan_key
from kvprofile.limits import LossLimit
from kvprofile.measurement import Scoring, measured_samples, measurement_table
from kvprofile.profiled_pair import ProfiledPair
from kvprofile.recipe import DataSource, FieldMapping, with_options
from kvprofile.report.frontier import Row, frontier_blocks, plan_text
from kvprofile.resources import resource
from kvprofile.run import Part, Progress, build_samples, load_part
from kvprofile.store.reader import VALIDATIONS_FOLDER, Profile
from kvprofile.store.writer import alone, write_table
from kvprofile.strategies import load_all

ARMS = tuple(Plan(name) for name in ("full_prefill", "no_context", "sender_alone"))


class FreshData(NamedTuple):
    """Samples that a profile never saw.

    Attributes:
        part: The data source, with its metrics.
        samples: Those to measure.
        overlap: Samples left out because the profile has their id or their context.
    """

    part: Part
    samples: tuple[Sample, ...]
    overlap: int


class _OneAtATime(ContextCaches):
    """Contexts as the reference executor makes them: a pass of its own for every group."""

    def mixed(self, group: LayerRange) -> ContextKV:
        return partial_prefill(self._receiver, self.sender_capture, group)


def chosen_plans(
    profile: Profile, wanted: str, task: str | None, limit: LossLimit | None, metric: str | None = None
) -> list[Row]:
    """Returns the rows of the plans to validate: `frontier`, `selected`, or groups as shown, such as `1-2,0-10,full_reuse`.

    Raises:
        BadInput: If the profile has no such plan, or nothing is selected.
    """
    blocks = frontier_blocks(profile, limit=limit, task=task, metric=metric)
    if len(blocks) > 1:
        raise BadInput(f"the profile has {len(blocks)} tasks and data sets; name one with --task")
    block = blocks[0]
    if wanted == "frontier":
        return block.frontier
    if wanted == "selected":
        if limit is None:
            raise BadInput("--plans selected needs --max-loss, such as 5%")
        if block.selected is None:
            raise BadInput(f"the profile has no plan within {limit}; nothing to validate")
        return [block.selected]
    return [_named(block.rows, name.strip()) for name in wanted.split(",")]


def _named(rows: Sequence[Row], name: str) -> Row:
    match = re.fullmatch(r"(\d+)(?:[-–](\d+))?", name)
    wanted = (int(match[1]), int(match[2] or match[1]) + 1) if match else None
    for row in rows:
        if row["strategy"] == "layer_group" and (row["start_layer"], row["stop_layer"]) == wanted:
            return row
        if row["strategy"] == name and row["start_layer"] is None and row["params"] is None:
            return row
    raise BadInput(f'the profile has no plan "{name}"; give frontier, selected, or groups such as 1-2,0-10')


def fresh_data(profile: Profile, pair: ProfiledPair, dataset: str, task: str, contexts: int, seed: int) -> FreshData:
    """Returns samples of a data set, asked as the profile's task asks, without those that the profile has.

    Bundled sets have the bundled columns; any other has those of the profile's own data.

    Raises:
        BadInput: If the data cannot be used, or holds nothing that the profile did not see.
    """
    own = next(source for source in pair.recipe.data if source.task == task)
    bundled = (resource("datasets") / f"{dataset}.jsonl").is_file()
    fields = FieldMapping() if bundled else own.fields
    on_hub = dataset.startswith("hub:")
    changes = {"split": own.split if on_hub else None, "subset": own.subset if on_hub else None}
    source = DataSource(**{**own.model_dump(), **changes, "dataset": dataset, "fields": fields})
    everything = load_part(with_options(pair.recipe, seed=seed), source, None)
    seen = profile.samples()
    ids, contexts_seen = set(seen["sample_id"].to_pylist()), set(seen["context_sha256"].to_pylist())
    configs = [pair.sender.model.config, pair.receiver.model.config]
    samples: list[Sample] = []
    overlap = 0
    for record in everything.records:
        if len(samples) == contexts:
            break
        part = dataclasses.replace(everything, records=(record,))
        (sample,) = build_samples(pair.recipe, [part], pair.receiver.tokenizer, configs)
        if sample.sample_id in ids or sample.context_sha256 in contexts_seen:
            overlap += 1
        else:
            samples.append(sample)
    if not samples:
        raise BadInput(f"all {overlap} samples of {dataset} are in the profile; validate on data that it never saw")
    return FreshData(everything, tuple(samples), overlap)


def validate(
    profile: Profile,
    pair: ProfiledPair,
    data: FreshData,
    rows: Sequence[Row],
    limit: LossLimit | None,
    progress: Progress,
) -> dict[str, Any]:
    """Measures the plans of `rows` on fresh data, stores the result beside the profile and returns it.

    The promise of a plan is the limit, else its upper bound in the profile, in points. It held if the loss measured here is
    within it. A run that was cut off goes on where it stood.
    """
    plans = [*ARMS, *(plan for row in rows if (plan := _plan(row)) not in ARMS)]
    contexts = [sample.context_sha256 for sample in data.samples]
    keys = [plan.key for plan in plans]
    identity = json_sha256([profile.header["profile_id"], data.part.data.sha256, contexts, keys])
    work = profile.folder / VALIDATIONS_FOLDER / f".run-{identity[:16]}"
    with alone(work):
        measurements = measured_samples(
            data.samples, work, len(plans), progress, lambda sample: _measured(pair, data.part, sample, plans, progress)
        )
    summary = _summary(profile, data, rows, limit, measurements)
    with FileLock(work.parent / ".lock"):
        place = _next_place(work.parent, data.part.source.name)
        write_table(measurements, place, {**profile.header, "validation": summary})
    shutil.rmtree(work, ignore_errors=True)
    return {**summary, "file": str(place)}


def _summary(
    profile: Profile, data: FreshData, rows: Sequence[Row], limit: LossLimit | None, measurements: pa.Table
) -> dict[str, Any]:
    scores = next(one for one in all_scores(measurements) if one.metric == rows[0]["metric"])
    if np.isnan(scores.baseline).all():
        raise BadInput(f"no answer on {data.part.source.name} could be scored; check its references and the metric")
    resampling = Resampling.of(profile.header)
    fresh = [dict(row) for row in rows]
    rescore(fresh, scores, **resampling._asdict())
    lower = zip(*lower_bounds(fresh, scores, **resampling._asdict()), strict=True)
    return {
        "task": rows[0]["task"],
        "dataset": data.part.source.name,
        "dataset_sha256": data.part.data.sha256,
        "metric": rows[0]["metric"],
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "samples": len(data.samples),
        "overlap_left_out": data.overlap,
        "max_loss": None if limit is None else f"{limit.value:g}{limit.unit}",
        "confidence": resampling.confidence,
        "full_prefill_quality": float(np.nanmean(scores.baseline)),
        "plans": [_verdict(*line, limit) for line in zip(rows, fresh, lower, strict=True)],
    }


def _measured(pair: ProfiledPair, part: Part, sample: Sample, plans: Sequence[Plan], progress: Progress) -> pa.Table:
    caches = _OneAtATime(*pair.readers, sample.context_token_ids, sample.head_tokens)
    strategies, question = load_all(), pair.question(sample)
    answers = []
    for plan in plans:
        reading = strategies[plan.strategy].read(caches, plan)
        reader = pair.readers.sender if reading.by_sender else pair.readers.receiver
        answers.append(Answer(plan, greedy(reader, reading.context, *question)))
        progress.plans_done(1)
    without_labels = pair.recipe.references == "none"
    own = pair.text_of(answers[0].token_ids or ()) if without_labels else None
    return measurement_table(answers, Scoring(sample, part.metrics, pair.text_of, own, {}, pair.recipe.store_text))


def _plan(row: Row) -> Plan:
    start, stop = row["start_layer"], row["stop_layer"]
    return Plan(row["strategy"], None if start is None else LayerRange(start, stop), row["params"])


def _verdict(before: Row, after: Row, lower: tuple[float, float], limit: LossLimit | None) -> dict[str, Any]:
    """Returns what was promised of a plan, what was found, and whether the one lies within the other."""
    unit = "rel" if limit and limit.unit == "%" else "points"
    name = f"loss_{unit}"
    promise = limit.share * (1 if unit == "rel" else 100) if limit else before["loss_points_upper"]
    loss, upper, low = after[name], after[f"{name}_upper"], lower[unit == "points"]
    return {
        "plan": plan_text(before),
        **dict(zip(PLAN_COLUMNS, plan_key(before), strict=True)),
        "recompute_fraction": before["recompute_fraction"],
        "unit": "%" if unit == "rel" else "pt",
        "promised_at_most": promise,
        "profiled_loss": before[name],
        "loss": loss,
        "loss_lower": None if math.isnan(low) else float(low),
        "loss_upper": upper,
        "quality": after["quality"],
        "baseline_quality": after["baseline_quality"],
        "beaten_by": beaten_by(after),
        "held": None if loss is None or promise is None else loss <= promise + 1e-9,
        "bounded": None if upper is None or promise is None else upper <= promise,
        "beyond_chance": None if math.isnan(low) or promise is None else bool(low > promise),
    }


def _next_place(folder: Path, dataset: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", dataset)[:60].lstrip(".") or "data"
    numbers = [
        int(match[1]) for path in folder.glob("*.parquet") if (match := re.search(r"-(\d{4})\.parquet$", path.name))
    ]
    return folder / f"{safe}-{max(numbers, default=0) + 1:04d}.parquet"
