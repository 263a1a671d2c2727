"""How well measures that need no labels rank plans by their true quality, where there are labels to tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.stats import spearmanr

from kvprofile.analysis.loss import Floats
from kvprofile.analysis.scores import FULL_PREFILL, Scores
from kvprofile.layers import PLAN_COLUMNS, PlanKey, plan_key


class Ranking(NamedTuple):
    """How one measure orders the plans.

    Attributes:
        measure: `mean_kl`, `top1_agreement`, `exact_match_rate`, or `agreement`, the metric against full prefill's own answer.
        rank_correlation: Spearman's, with the true mean score, signed so that 1 is perfect; None if either is constant.
        plans: How many plans it is over.
    """

    measure: str
    rank_correlation: float | None
    plans: int


def rankings(
    scores: Scores, plans: Sequence[PlanKey], measurements: pa.Table, agree: Callable[[str, str], float] | None
) -> list[Ranking]:
    """Returns the rank correlation of each label-free measure with the true score over plans.

    Args:
        scores: With labels.
        plans: Those to rank; full prefill is no use here.
        measurements: Where the answers' texts are.
        agree: The metric of an answer against full prefill's; None leaves that measure out.
    """
    true = _means(scores, plans, scores.value)
    measures = {
        "mean_kl": -_means(scores, plans, scores.kl),
        "top1_agreement": _means(scores, plans, scores.top1_agreement),
        "exact_match_rate": _means(scores, plans, scores.same_output),
    }
    if agree is not None:
        measures["agreement"] = _agreement(scores, plans, measurements, agree)
    return [_ranking(name, values, true) for name, values in measures.items() if not np.isnan(values).all()]


def _ranking(name: str, values: Floats, true: Floats) -> Ranking:
    known = ~np.isnan(values) & ~np.isnan(true)
    values, true = values[known], true[known]
    varied = len(values) > 2 and np.ptp(values) > 0 and np.ptp(true) > 0
    return Ranking(name, float(spearmanr(values, true).statistic) if varied else None, int(known.sum()))


def _means(scores: Scores, plans: Sequence[PlanKey], array: Floats) -> Floats:
    lines = [scores.of(plan, array) for plan in plans]
    return np.array([np.nan if np.isnan(line).all() else np.nanmean(line) for line in lines])


def _agreement(
    scores: Scores, plans: Sequence[PlanKey], measurements: pa.Table, agree: Callable[[str, str], float]
) -> Floats:
    block = (pc.field("task") == scores.task) & (pc.field("dataset") == scores.dataset)
    table = measurements.filter(block & (pc.field("metric") == scores.metric))
    texts: dict[PlanKey, dict[str, str]] = {}
    for row in table.select([*PLAN_COLUMNS, "sample_id", "output_text"]).to_pylist():
        if row["output_text"] is not None:
            texts.setdefault(plan_key(row), {})[row["sample_id"]] = row["output_text"]
    own = texts.get(FULL_PREFILL, {})
    found = []
    for plan in plans:
        pairs = [(text, own[sample]) for sample, text in texts.get(plan, {}).items() if sample in own]
        found.append(float(np.mean([agree(*pair) for pair in pairs])) if pairs else np.nan)
    return np.array(found)
