"""The frontier of a profile and the plan within a loss, per task and dataset, as rows; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvprofile.analysis.choice import REFERENCE_ARMS, cheapest, cheapest_everywhere, complete
from kvprofile.errors import BadInput, did_you_mean
from kvprofile.layers import LayerRange, PlanKey, describe, groups, on_grid, plan_key
from kvprofile.limits import BOUND_METHOD, LossLimit, Rule
from kvprofile.runtime.validated import as_float
from kvprofile.store.reader import MEASUREMENTS_FILE, Profile

if TYPE_CHECKING:
    from kvprofile.analysis.decision import Decision, Resampling
    from kvprofile.analysis.scores import Scores

Row = dict[str, Any]


class Block(NamedTuple):
    """The answer for one task, dataset and metric.

    Attributes:
        task: Value of the `task` column.
        dataset: Value of the `dataset` column.
        metric: Value of the `metric` column.
        confidence: Of the one-sided upper bounds.
        granularity: The grid that was asked for, None for all groups of the profile.
        arms: Row of each of the four arms that was measured.
        frontier: Rows of the frontier, by recompute.
        limit: The loss to accept, None if none was given.
        decision: What the rule selects within the limit.
        grids: What each coarser grid alone would have selected, by the rule `point` or `bound`.
        unscored: Plans that could serve a request but lack the score of a sample.
        rows: All rows.
        by_agreement: Whether quality is agreement with full prefill's own answer, for want of references.
        validated: By plan, what `kvprofile validate` found on data that the profile never saw.
    """

    task: str
    dataset: str
    metric: str
    confidence: float
    granularity: int | None
    arms: dict[str, Row]
    frontier: list[Row]
    limit: LossLimit | None
    decision: Decision | None
    grids: dict[int, Row | None]
    unscored: int
    rows: list[Row]
    by_agreement: bool
    validated: dict[PlanKey, list[str]]

    @property
    def selected(self) -> Row | None:
        """The row that the rule selects."""
        return self.decision.selected if self.decision else None


def frontier_blocks(
    profile: Profile,
    *,
    limit: LossLimit | None = None,
    rule: Rule = "point",
    split: float | None = None,
    metric: str | None = None,
    task: str | None = None,
    dataset: str | None = None,
    granularity: int | None = None,
    confidence: float | None = None,
) -> list[Block]:
    """Returns one block per task and dataset; the metric is the task's first if none is named.

    Args:
        profile: The profile.
        limit: The loss to accept.
        rule: Which loss must be within it.
        split: Share of the samples that chooses the frontier, which the others then judge.
        metric: Only this metric.
        task: Only this task.
        dataset: Only this dataset.
        granularity: Only groups that a sweep at this granularity alone has.
        confidence: Of the bounds; one that differs from the profile's makes them anew from the measurements.

    Raises:
        BadInput: If the profile does not have what is asked for.
    """
    from kvprofile.analysis.decision import Resampling

    rows: list[Row] = profile.rows.to_pylist()
    for name, wanted in (("task", task), ("dataset", dataset), ("metric", metric)):
        rows = _only(rows, name, wanted)
    if granularity is not None:
        rows = _on_grid(rows, granularity, whole=profile.header["search"] == "adaptive")
    made_at = float(profile.header["confidence"])
    if confidence is not None and not 0 < confidence < 1:
        raise BadInput(f"--confidence {confidence} is not between 0 and 1; give one such as 0.95")
    if limit is None and (split is not None or rule != "point"):
        raise BadInput("--rule and --split decide what is selected; give --max-loss, such as 5%")
    if split is not None and not 0 < split < 1:
        raise BadInput(f"--split {split} is not between 0 and 1; give the share that chooses, such as 0.5")
    outdated = profile.header["bounds"] != BOUND_METHOD or (confidence is not None and confidence != made_at)
    needed = split is not None or rule == "certified" or (confidence is not None and confidence != made_at)
    scores = _scores(profile) if needed or ((limit or outdated) and _has_measurements(profile)) else {}
    resampling = Resampling.of(profile.header, confidence)
    first_metric = {(r["task"], r["dataset"]): r["metric"] for r in reversed(rows)}
    by_agreement, validations = profile.header["references"] == "none", profile.validations()
    blocks = []
    for source, name in sorted(first_metric.items()):
        key = (*source, name)
        own = [r for r in rows if (r["task"], r["dataset"], r["metric"]) == key]
        if outdated:
            _bound_anew(own, scores.get(key), resampling)
        block = _block(own, scores.get(key), limit, rule, split, granularity, resampling)
        blocks.append(block._replace(by_agreement=by_agreement, validated=_validated(validations, block)))
    return blocks


def everywhere(blocks: Sequence[Block], rule: Rule) -> list[Row] | None:
    """Returns the row in every block of the cheapest plan that the rule allows in all of them, None if there is none."""
    limit = blocks[0].limit
    if limit is None:
        return None
    known = [[row for row in block.rows if limit.column(rule) in row] for block in blocks]
    return cheapest_everywhere(known, limit, rule)


def plan_text(row: Row) -> str:
    """Returns the plan as people read it, such as `layers 8–18 (11 of 30)` or `full_reuse`."""
    start, stop = row["start_layer"], row["stop_layer"]
    words = [] if row["strategy"] == "layer_group" else [str(row["strategy"])]
    if start is not None and stop is not None:
        words.append(describe(LayerRange(start, stop), row["total_layers"]))
    if row["params"] is not None:
        words.append(str(row["params"]))
    return " ".join(words)


def saved(cost: float | None, full: float | None) -> float | None:
    """Returns the share of full prefill's cost that a plan saves, None where either is not known."""
    return None if cost is None or not full else 1 - cost / full


def groups_on(rows: Sequence[Row], unit: int) -> set[LayerRange]:
    """Returns the layer groups among the rows that lie on the grid of `unit`-layer units."""
    return {LayerRange(r["start_layer"], r["stop_layer"]) for r in rows if _is_group(r) and _lies_on(r, unit)}


def grids(rows: Sequence[Row]) -> list[int]:
    """Returns the granularities that the profile's rows were swept at, finest first."""
    return sorted({r["granularity"] for r in rows if r["granularity"] is not None})


def _block(
    rows: list[Row],
    scores: Scores | None,
    limit: LossLimit | None,
    rule: Rule,
    split: float | None,
    granularity: int | None,
    resampling: Resampling,
) -> Block:
    from kvprofile.analysis.decision import decide
    from kvprofile.analysis.profile_table import mark_frontier, set_intervals

    mark_frontier(rows)
    first = rows[0]
    everything = {(r["start_layer"], r["stop_layer"]) for r in rows if _is_group(r)}
    measured = [r for r in rows if complete(r)]
    coarser = [
        u
        for u in grids(rows)
        if granularity is None and groups_on(measured, u) == groups_on(rows, u) and groups_on(rows, u) < everything
    ]
    alone: Rule | None = rule if rule != "certified" and split is None else None
    if split is not None and scores is not None and len(scores.samples) < 2:
        raise BadInput(
            f"--split needs two samples or more of {first['task']}/{first['dataset']}; measure more contexts"
        )
    decision = decide(rows, limit, rule, scores, resampling, split) if limit else None
    front = sorted((r for r in rows if r["on_frontier"]), key=lambda r: float(r["recompute_fraction"]))
    if scores is not None and split is None:
        set_intervals(front, scores, **resampling._asdict())
    return Block(
        first["task"],
        first["dataset"],
        first["metric"],
        resampling.confidence,
        granularity,
        arms={r["strategy"]: r for r in rows if not _is_group(r) and r["params"] is None},
        frontier=front,
        limit=limit,
        decision=decision,
        grids={u: cheapest([r for r in rows if not _is_group(r) or _lies_on(r, u)], limit, alone) for u in coarser}
        if limit and alone
        else {},
        unscored=sum(r["strategy"] not in REFERENCE_ARMS and not complete(r) for r in rows),
        rows=rows,
        by_agreement=False,
        validated={},
    )


def _validated(validations: Sequence[Mapping[str, Any]], block: Block) -> dict[PlanKey, list[str]]:
    """Returns by plan where it was validated and what came out."""
    found: dict[PlanKey, list[str]] = {}
    for one in validations:
        if (one["task"], one["metric"]) == (block.task, block.metric):
            for plan in one["plans"]:
                loss = as_float(plan["loss"])
                unit = f"{100 * loss:.1f}%" if plan["unit"] == "%" and loss is not None else f"{loss or 0:.1f} points"
                said = "not known" if loss is None else f"loss {unit}"
                found.setdefault(plan_key(plan), []).append(f"{one['dataset']} ({one['samples']} samples): {said}")
    return found


def _is_group(row: Row) -> bool:
    return row["start_layer"] is not None


def _lies_on(row: Row, unit: int) -> bool:
    return on_grid(LayerRange(row["start_layer"], row["stop_layer"]), row["total_layers"], unit)


def _only(rows: list[Row], column: str, wanted: str | None) -> list[Row]:
    if wanted is None:
        return rows
    known = list(dict.fromkeys(str(r[column]) for r in rows))
    if wanted not in known:
        raise BadInput(
            f'the profile has no {column} "{wanted}"{did_you_mean(wanted, known)}; it has {", ".join(known)}'
        )
    return [r for r in rows if r[column] == wanted]


def _on_grid(rows: list[Row], unit: int, whole: bool) -> list[Row]:
    layers = rows[0]["total_layers"]
    needed, there = groups(layers, unit), groups_on([r for r in rows if complete(r) or not whole], unit)
    if len(there) < len(needed):
        raise BadInput(
            f"the profile has {len(there)} of the {len(needed)} groups of granularity {unit}; "
            f"sweep again with --granularity {unit}"
        )
    return [r for r in rows if not _is_group(r) or _lies_on(r, unit)]


def _has_measurements(profile: Profile) -> bool:
    return (profile.folder / MEASUREMENTS_FILE).is_file()


def _scores(profile: Profile) -> dict[tuple[str, str, str], Scores]:
    from kvprofile.analysis.scores import all_scores

    return {(one.task, one.dataset, one.metric): one for one in all_scores(profile.measurements())}


def _bound_anew(rows: list[Row], scores: Scores | None, resampling: Resampling) -> None:
    from kvprofile.analysis.profile_table import set_bounds

    if scores is not None:
        set_bounds(rows, scores, **resampling._asdict())
    for row in rows if scores is None else ():
        row["loss_rel_upper"] = row["loss_points_upper"] = None
