"""Answers become scored rows of `measurements.parquet`: the same way for sweeps, validations and sensitivity maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from kvprofile.data.prompts import Sample
from kvprofile.engine.executor import Answer
from kvprofile.engine.fidelity import Fidelity
from kvprofile.identity import json_sha256
from kvprofile.layers import PLAN_COLUMNS
from kvprofile.run import Progress, kept_table
from kvprofile.scoring import Metric, agreement
from kvprofile.store.schema import MEASUREMENTS
from kvprofile.store.writer import write_table


class Scoring(NamedTuple):
    """How the answers on one sample become rows.

    Attributes:
        sample: The sample.
        metrics: Of its task.
        text_of: Token ids to the text that is scored.
        by_agreement: Whether agreement with full prefill's answer is the quality, instead of the sample's references.
        own: Full prefill's answer, where it is not among the answers; None if there is none.
        baseline: Full prefill's scores by metric, where it is not among the answers.
        keep_text: Whether texts and token ids go into the rows.
    """

    sample: Sample
    metrics: Sequence[Metric]
    text_of: Callable[[Sequence[int]], str]
    by_agreement: bool
    own: str | None
    baseline: Mapping[str, float]
    keep_text: bool


class _Scored(NamedTuple):
    """One plan's answer with its scores; a metric is either in `values` or, if it failed, in `errors`."""

    answer: Answer
    text: str | None
    values: dict[str, float]
    errors: dict[str, str]


def measurement_table(answers: Iterable[Answer], scoring: Scoring) -> pa.Table:
    """Returns a row per answer and metric."""
    answers = list(answers)
    held = (one for one in answers if one.plan.strategy == "full_prefill" and one.token_ids is not None)
    if (full := next(held, None)) is not None and full.token_ids is not None:
        scoring = scoring._replace(own=scoring.text_of(full.token_ids))
    scored = [_score(answer, scoring) for answer in answers]
    baseline = next((one.values for one in scored if one.answer.plan.strategy == "full_prefill"), scoring.baseline)
    rows = [_row(one, metric.name, baseline, scoring) for one in scored for metric in scoring.metrics]
    return pa.Table.from_pylist(rows, schema=MEASUREMENTS)


def measured_samples(
    samples: Sequence[Sample], work: Path, plans: int, progress: Progress, measure: Callable[[Sample], pa.Table]
) -> pa.Table:
    """Returns what `measure` says of all samples; what an earlier run kept in `work` is not measured again."""
    parts = [_part(work, sample) for sample in samples]
    kept = {part: table for part in parts if (table := kept_table(part)) is not None}
    progress.begin(len(samples), plans, len(kept))
    for sample, part in zip(samples, parts, strict=True):
        if part not in kept:
            kept[part] = measure(sample)
            write_table(kept[part], part)
            progress.sample_done()
    return pa.concat_tables([kept[part] for part in parts])


def _part(work: Path, sample: Sample) -> Path:
    return work / f"{json_sha256([sample.task, sample.dataset, sample.sample_id])[:24]}.parquet"


def _score(answer: Answer, scoring: Scoring) -> _Scored:
    missing = scoring.by_agreement and scoring.own is None
    if answer.token_ids is None or missing:
        error = answer.error or "full prefill gave no answer to agree with"
        return _Scored(answer, None, {}, dict.fromkeys((one.name for one in scoring.metrics), error))
    text = scoring.text_of(answer.token_ids)
    scored = _Scored(answer, text, {}, {})
    for one in scoring.metrics:
        try:
            if scoring.by_agreement and scoring.own is not None:
                scored.values[one.name] = agreement(one, text, scoring.own)
            else:
                scored.values[one.name] = one.score(text, scoring.sample.references)
        except Exception as error:  # a metric of `evaluate` may raise anything; the row says so
            scored.errors[one.name] = f"metric {one.name} failed: {error}"
    return scored


def _row(scored: _Scored, metric: str, baseline: Mapping[str, float], scoring: Scoring) -> dict[str, Any]:
    sample, fidelity = scoring.sample, scored.answer.fidelity
    return {
        "sample_id": sample.sample_id,
        "task": sample.task,
        "dataset": sample.dataset,
        "metric": metric,
        **dict(zip(PLAN_COLUMNS, scored.answer.plan.key, strict=True)),
        "value": scored.values.get(metric),
        "baseline_value": baseline.get(metric),
        **(fidelity._asdict() if fidelity else dict.fromkeys(Fidelity._fields)),
        "output_token_ids": scored.answer.token_ids if scoring.keep_text else None,
        "output_text": scored.text if scoring.keep_text else None,
        "context_tokens": len(sample.context_token_ids),
        "suffix_tokens": len(sample.suffix_token_ids),
        "status": "error" if metric in scored.errors else "ok",
        "error": scored.errors.get(metric),
    }
