"""Which plan a rule selects from measurements, how sure that is, and what it would take to be surer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from kvprofile.analysis.choice import can_serve, cheapest
from kvprofile.analysis.profile_table import mark_frontier, rescore, set_certified
from kvprofile.analysis.samples_needed import samples_needed
from kvprofile.analysis.scores import Scores
from kvprofile.layers import plan_key
from kvprofile.limits import LossLimit, Rule

Row = dict[str, Any]

_RESAMPLES = 10_000


class Decision(NamedTuple):
    """What a rule selects from one task, dataset and metric.

    Attributes:
        rule: The rule.
        selected: Row of the cheapest plan that the rule allows, None if it allows none.
        measured: Row of the cheapest plan whose measured loss is within the limit, None if there is none.
        tested: Plans among which the confidence is shared, so that it holds for the best of them; 1 where it is of each plan by
            itself, or where the plans were put in order by other samples.
        selection_samples: Samples that put the plans in order, where they were split; the rows' numbers are of the others.
        needed: About how many samples like these would let the rule allow a plan: first `measured`, then the plan of the
            frontier that needs fewest. Empty where the rule selects one, or `point` one that is bounded, too.
    """

    rule: Rule
    selected: Row | None
    measured: Row | None
    tested: int
    selection_samples: int | None
    needed: tuple[tuple[Row, int], ...]


class Resampling(NamedTuple):
    """Of bounds made anew."""

    confidence: float
    resamples: int
    seed: int

    @classmethod
    def of(cls, header: Mapping[str, Any], confidence: float | None = None) -> Resampling:
        """Returns what a profile's header says, with another confidence if one is given."""
        made_at = header["confidence"] if confidence is None else confidence
        return cls(float(made_at), int(header.get("resamples", _RESAMPLES)), int(header["seed"]))


def decide(
    rows: list[Row],
    limit: LossLimit,
    rule: Rule,
    scores: Scores | None,
    resampling: Resampling,
    split: float | None = None,
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
    """
    if split is not None and scores is not None:
        return _decide_on_others(rows, limit, rule, scores, resampling, split)
    tested = sum(map(can_serve, rows)) if rule == "certified" else 1
    if rule == "certified" and scores is not None:
        within = [row for row in rows if can_serve(row) and (limit.allows(row) or row["on_frontier"])]
        _certify(within, scores, resampling.confidence, tested)
    measured, selected = cheapest(rows, limit), cheapest(_known(rows, rule), limit, rule)
    needed = _needed(selected, measured, rows, limit, rule, scores, resampling.confidence, tested)
    return Decision(rule, selected, measured, tested, None, needed)


def _decide_on_others(
    rows: list[Row], limit: LossLimit, rule: Rule, scores: Scores, resampling: Resampling, split: float
) -> Decision:
    chooses = chosen_samples(len(scores.samples), split, resampling.seed)
    rescore(rows, scores.among(chooses), **resampling._asdict())
    mark_frontier(rows)
    in_order = sorted((r for r in rows if r["on_frontier"]), key=lambda r: float(-r["recompute_fraction"]))
    by_point = cheapest(rows, limit)
    others = scores.among(~chooses)
    rescore(rows, others, **resampling._asdict())
    candidates = [row for row in in_order if can_serve(row)]
    if rule == "certified":
        _certify(candidates, others, resampling.confidence, 1)
    if rule == "point":
        selected = by_point
    else:
        passed = []
        for row in candidates:
            if not limit.allows(row, rule):
                break
            passed.append(row)
        selected = passed[-1] if passed else None
    needed = _needed(selected, by_point, in_order, limit, rule, others, resampling.confidence, 1)
    return Decision(rule, selected, by_point, 1, int(chooses.sum()), needed)


def chosen_samples(samples: int, share: float, seed: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns a seeded draw of a share of the samples, at least one and not all where there are two."""
    count = min(max(1, round(share * samples)), max(1, samples - 1))
    chosen = np.zeros(samples, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(samples)[:count]] = True
    return chosen


def _certify(rows: Sequence[Row], scores: Scores, confidence: float, tested: int) -> None:
    set_certified(rows, scores, 1 - (1 - confidence) / max(1, tested))


def _known(rows: Sequence[Row], rule: Rule) -> list[Row]:
    return [row for row in rows if rule != "certified" or "loss_rel_certified" in row]


def _needed(
    selected: Row | None,
    measured: Row | None,
    rows: Sequence[Row],
    limit: LossLimit,
    rule: Rule,
    scores: Scores | None,
    confidence: float,
    tested: int,
) -> tuple[tuple[Row, int], ...]:
    wanted: Literal["bound", "certified"] = "certified" if rule == "certified" else "bound"
    if scores is None or (selected is not None and limit.allows(selected, wanted)) or not scores.in_unit_range:
        return ()
    shared = 1 - (1 - confidence) / max(1, tested)
    found: list[tuple[Row, int]] = []
    for row in rows:
        if row is measured or (row["on_frontier"] and can_serve(row)):
            value = scores.of(plan_key(row), scores.value)
            count = samples_needed(value, scores.baseline, limit, wanted, confidence=shared)
            if count is not None:
                found.append((row, count))
    own = [pair for pair in found if pair[0] is measured]
    soonest = min(found, key=lambda pair: pair[1], default=None)
    return (*own, *([soonest] if soonest and soonest[0] is not measured else []))
