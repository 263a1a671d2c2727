"""Which plan a rule selects from measurements, how sure that is, and what it would take to be surer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kvprofile.analysis.choice import can_serve, cheapest, saves
from kvprofile.analysis.profile_table import mark_frontier, rescore, set_certified
from kvprofile.analysis.samples_needed import samples_needed
from kvprofile.analysis.scores import Scores
from kvprofile.layers import plan_key
from kvprofile.limits import LossLimit, Rule

Row = dict[str, Any]

_SUREST = 1 - 1e-12
"""Closer to 1, a confidence is lost in rounding."""


class Decision(NamedTuple):
    """What a rule selects from one task, dataset and metric.

    Attributes:
        rule: The rule.
        selected: Row of the cheapest plan that the rule allows, None if it allows none.
        measured: Row of the cheapest plan whose measured loss is within the limit, None if there is none.
        tested: Plans among which the confidence is shared, so that it holds for the best of them; 1 where it is of each plan by
            itself, or where the plans were put in order by other samples.
        selection_samples: Samples that put the plans in order, where they were split; the rows' numbers are of the others.
        needed: About how many samples like these would let the rule allow a plan (`point`: bound it): first `measured`, None
            if no number would do, then the plan of the frontier that needs fewest. Empty where that is so already.
    """

    rule: Rule
    selected: Row | None
    measured: Row | None
    tested: int
    selection_samples: int | None
    needed: tuple[tuple[Row, int | None], ...]


class Resampling(NamedTuple):
    """Of bounds made anew."""

    confidence: float
    resamples: int
    seed: int

    @classmethod
    def of(cls, header: Mapping[str, Any], confidence: float | None = None) -> Resampling:
        """Returns what a profile's header says, with another confidence if one is given."""
        made_at = header["confidence"] if confidence is None else confidence
        return cls(float(made_at), int(header["resamples"]), int(header["seed"]))


def decide(
    rows: list[Row],
    limit: LossLimit,
    rule: Rule,
    scores: Scores | None,
    resampling: Resampling,
    split: float | None = None,
    *,
    reckon: bool = True,
) -> Decision:
    """Returns what the rule selects, and sets what the rows say to what it looked at.

    With `split`, that share of the samples chooses the frontier, and the others judge it: from the plan with most recompute
    down to the first that the rule does not allow, which keeps the confidence whole (fixed-sequence testing). Without it,
    `certified` shares the confidence among all plans that could be selected (Bonferroni), and `bound` is of each by itself.

    Args:
        rows: Rows of one task, dataset and metric; changed in place.
        limit: The loss to accept.
        rule: Which loss must be within it.
        scores: The measurements behind the rows; None where there are none, which `point` and `bound` can do without.
        resampling: For bounds made anew.
        split: Share of the samples that choose.
        reckon: Whether to find out how many samples it would take.
    """
    if split is not None and scores is not None:
        return _decide_on_others(rows, limit, rule, scores, resampling, split, reckon)
    # Also plans that an adaptive search left: the samples that this is about decided which ones.
    tested = sum(map(saves, rows)) if rule == "certified" else 1
    confidence = min(_SUREST, 1 - (1 - resampling.confidence) / max(1, tested))
    if rule == "certified" and scores is not None:
        within = [row for row in rows if can_serve(row) and (limit.allows(row) or row["on_frontier"])]
        set_certified(within, scores, confidence, resampling.seed)
    measured, selected = cheapest(rows, limit), cheapest(rows, limit, rule)
    needed: list[tuple[Row, int | None]] = []
    if reckon and scores is not None and _unsure(selected, limit, rule):
        needed = [(row, _needed(row, limit, rule, scores, confidence)) for row in _worth_asking(rows, measured)]
    return Decision(rule, selected, measured, tested, None, _first_and_soonest(needed, measured))


def _decide_on_others(
    rows: list[Row], limit: LossLimit, rule: Rule, scores: Scores, resampling: Resampling, split: float, reckon: bool
) -> Decision:
    chooses = chosen_samples(len(scores.samples), split, resampling.seed)
    rescore(rows, scores.among(chooses), **resampling._asdict())
    mark_frontier(rows)
    candidates = [row for row in rows if row["on_frontier"] and can_serve(row)]
    candidates.sort(key=lambda row: float(-row["recompute_fraction"]))
    measured = cheapest(rows, limit)
    others = scores.among(~chooses)
    rescore(rows, others, **resampling._asdict())
    if rule == "certified":
        set_certified(candidates, others, min(_SUREST, resampling.confidence), resampling.seed)
    selected = None
    for row in [measured] if rule == "point" and measured else candidates:
        if not limit.allows(row, rule):
            break
        selected = row
    needed: list[tuple[Row, int | None]] = []
    if reckon and _unsure(selected, limit, rule):
        most: int | None = 1
        for row in candidates:  # each is asked only after those before it have passed
            count = _needed(row, limit, rule, others, resampling.confidence)
            most = None if most is None or count is None else max(most, math.ceil(count / (1 - split)))
            needed.append((row, most))
    return Decision(rule, selected, measured, 1, int(chooses.sum()), _first_and_soonest(needed, measured))


def chosen_samples(samples: int, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns a seeded draw of a share of the samples, at least one and not all where there are two."""
    count = min(max(1, round(share * samples)), max(1, samples - 1))
    chosen = np.zeros(samples, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(samples)[:count]] = True
    return chosen


def _unsure(selected: Row | None, limit: LossLimit, rule: Rule) -> bool:
    return selected is None or not limit.allows(selected, "bound" if rule == "point" else rule)


def _worth_asking(rows: Sequence[Row], measured: Row | None) -> list[Row]:
    return [row for row in rows if row is measured or (row["on_frontier"] and can_serve(row))]


def _needed(row: Row, limit: LossLimit, rule: Rule, scores: Scores, confidence: float) -> int | None:
    if not scores.in_unit_range:
        return None
    wanted: Literal["bound", "certified"] = "certified" if rule == "certified" else "bound"
    value = scores.of(plan_key(row), scores.value)
    return samples_needed(value, scores.baseline, limit, wanted, confidence=confidence)


def _first_and_soonest(
    needed: Sequence[tuple[Row, int | None]], measured: Row | None
) -> tuple[tuple[Row, int | None], ...]:
    own = [pair for pair in needed if pair[0] is measured]
    known = [(count, place) for place, (_, count) in enumerate(needed) if count is not None]
    soonest = needed[min(known)[1]] if known else None
    return (*own, *([soonest] if soonest and soonest[0] is not measured else []))
