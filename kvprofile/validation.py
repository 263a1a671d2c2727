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
import torch
import transformers
from filelock import FileLock

from kvprofile import __version__
from kvprofile.analysis.choice import beaten_by
from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.profile_table import lower_bounds, rescore
from kvprofile.analysis.scores import all_scores
from kvprofile.data.prompts import Sample
from kvprofile.engine.cache import ContextKV
from kvprofile.engine.contexts import ContextCaches
from kvprofile.engine.executor import answer_alone, draft_of
from kvprofile.engine.reference import partial_prefill
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.layers import PLAN_COLUMNS, LayerRange, Plan, plan_key
from kvprofile.limits import LossLimit, Rule
from kvprofile.measurement import Scoring, measured_samples, measurement_table
from kvprofile.profiled_pair import ProfiledPair
from kvprofile.recipe import FieldMapping, with_options
from kvprofile.report.frontier import Row, frontier_blocks, plan_text
from kvprofile.resources import resource
from kvprofile.run import Progress, question_of
from kvprofile.samples import Part, build_samples, load_part, remark_on, require_same_ids, sample_identity
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
    profile: Profile,
    wanted: str,
    limit: LossLimit | None,
    *,
    rule: Rule = "point",
    task: str | None = None,
    dataset: str | None = None,
    metric: str | None = None,
) -> list[Row]:
    """Returns the rows of the plans to validate: `frontier`, `selected`, or groups as shown, such as `1-2,0-10,full_reuse`.

    Args:
        profile: The profile.
        wanted: Which plans.
        limit: For `selected`.
        rule: For `selected`.
        task: Needed if the profile has several.
        dataset: The profile's own; needed if it has several for the task.
        metric: The task's first if None.

    Raises:
        BadInput: If the profile has no such plan, or nothing is selected.
    """
    if wanted == "selected" and limit is None:
        raise BadInput("--plans selected needs --max-loss, such as 5%")
    blocks = frontier_blocks(
        profile, limit=limit, rule=rule if limit else "point", task=task, dataset=dataset, metric=metric
    )
    if len(blocks) > 1:
        known = ", ".join(f"{block.task}/{block.dataset}" for block in blocks)
        raise BadInput(f"the profile has {known}; choose with --task and --profiled-dataset")
    block = blocks[0]
    if wanted == "selected" and block.selected is None:
        raise BadInput(f"the profile has no plan within {limit} by rule {rule}; nothing to validate")
    if wanted == "selected":
        return [row for row in [block.selected] if row]
    rows = block.frontier if wanted == "frontier" else [_named(block.rows, name.strip()) for name in wanted.split(",")]
    rows = [row for row in rows if row["strategy"] != "full_prefill"]
    if not rows:
        raise BadInput("full_prefill alone is no plan to validate; the frontier holds nothing else")
    return rows


def _named(rows: Sequence[Row], name: str) -> Row:
    match = re.fullmatch(r"(\d+)(?:[-–](\d+))?", name)
    wanted = (int(match[1]), int(match[2] or match[1]) + 1) if match else None
    for row in rows:
        if row["strategy"] == "layer_group" and (row["start_layer"], row["stop_layer"]) == wanted:
            return row
        if row["strategy"] == name and row["start_layer"] is None and row["params"] is None:
            return row
    raise BadInput(f'the profile has no plan "{name}"; give frontier, selected, or groups such as 1-2,0-10')


def fresh_data(
    profile: Profile, pair: ProfiledPair, dataset: str, asked: Row, contexts: int, seed: int, progress: Progress
) -> FreshData:
    """Returns samples of a data set, asked as the profile's data of a task are, without those that the profile has.

    Bundled sets have the bundled columns; any other has those of the profile's own data.

    Args:
        profile: The profile.
        pair: Its models.
        dataset: As in a recipe.
        asked: A row of the task and data set of the profile whose prompt and limits are taken.
        contexts: Samples at most.
        seed: Of the choice of records.
        progress: Who is told what is left out.

    Raises:
        BadInput: If the data cannot be used, or holds nothing that the profile did not see.
        GateFailed: If the models read different token ids.
    """
    own = next(one for one in pair.recipe.data if (one.task, one.name) == (asked["task"], asked["dataset"]))
    bundled = (resource("datasets") / f"{dataset}.jsonl").is_file()
    fields = FieldMapping() if bundled else own.fields
    on_hub = dataset.startswith("hub:")
    changes = {"split": own.split if on_hub else None, "subset": own.subset if on_hub else None}
    source = {**own.model_dump(), **changes, "dataset": dataset, "fields": fields.model_dump()}
    recipe = with_options(pair.recipe, seed=seed, data=(source,))
    everything = load_part(recipe, recipe.data[0], None)
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
            require_same_ids(sample, pair.sender, pair.receiver)
            samples.append(sample)
    if not samples:
        raise BadInput(f"all {overlap} samples of {dataset} are in the profile; validate on data that it never saw")
    if overlap:
        progress.say(f"{overlap} samples of {dataset} are in the profile and left out")
    if len(samples) < contexts:
        progress.say(f"{dataset} holds only {len(samples)} fresh samples, {contexts} were asked for")
    remark_on(samples, progress)
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

    The promise of a plan is the limit, if its loss in the profile is within that, or without a limit its upper bound in the
    profile, in points. It held if the loss measured here is within it. A run that was cut off goes on where it stood.
    """
    plans = [*ARMS, *(plan for row in rows if (plan := _plan(row)) not in ARMS)]
    work = profile.folder / VALIDATIONS_FOLDER / f".run-{_identity(profile, data, plans)[:16]}"
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


def _identity(profile: Profile, data: FreshData, plans: Sequence[Plan]) -> str:
    """Returns what decides whether measurements of an earlier run may be taken."""
    samples = sample_identity(data.samples)
    made_by = [__version__, torch.__version__, transformers.__version__, *(one.identity for one in data.part.metrics)]
    versions = {name: strategy.version for name, strategy in load_all().items()}
    keys = [plan.key for plan in plans]
    return json_sha256([profile.header["profile_id"], data.part.data.sha256, samples, keys, made_by, versions])


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
    strategies, question = load_all(), question_of(sample, pair.receiver)
    draft = draft_of(pair.readers.receiver, caches.receiver_kv, question)
    answers = []
    for plan in plans:
        reading = strategies[plan.strategy].read(caches, plan)
        reader = pair.readers.sender if reading.by_sender else pair.readers.receiver
        answers.append(answer_alone(plan, reader, reading.context, question, draft))
        progress.plans_done(1)
    by_agreement = pair.recipe.references == "none"
    scoring = Scoring(sample, part.metrics, question.ending.text, by_agreement, None, {}, pair.recipe.store_text)
    return measurement_table(answers, scoring)


def _plan(row: Row) -> Plan:
    start, stop = row["start_layer"], row["stop_layer"]
    return Plan(row["strategy"], None if start is None else LayerRange(start, stop), row["params"])


def _verdict(before: Row, after: Row, lower: tuple[float, float], limit: LossLimit | None) -> dict[str, Any]:
    """Returns what was promised of a plan, what was found, and whether the one lies within the other."""
    unit = "rel" if limit and limit.unit == "%" else "points"
    name = f"loss_{unit}"
    promise = before["loss_points_upper"] if limit is None else None
    if limit is not None and limit.allows(before):
        promise = limit.share * (1 if unit == "rel" else 100)
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
        int(match[1]) for path in folder.glob("[!.]*.parquet") if (match := re.search(r"-(\d{4})\.parquet$", path.name))
    ]
    return folder / f"{safe}-{max(numbers, default=0) + 1:04d}.parquet"
