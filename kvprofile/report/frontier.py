"""The frontier of a profile and the plan within a loss, per task and dataset, as rows; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvprofile.analysis.choice import REFERENCE_ARMS, beaten_by, cheapest, cheapest_everywhere, complete
from kvprofile.analysis.loss import BOUND_METHOD
from kvprofile.errors import BadInput, did_you_mean
from kvprofile.layers import PLAN_COLUMNS, LayerRange, describe, groups, on_grid
from kvprofile.limits import LossLimit, Rule
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
        rows = _on_grid(rows, granularity, whole=profile.header.get("search") == "adaptive")
    made_at = float(profile.header["confidence"])
    if confidence is not None and not 0 < confidence < 1:
        raise BadInput(f"--confidence {confidence} is not between 0 and 1; give one such as 0.95")
    if split is not None and not 0 < split < 1:
        raise BadInput(f"--split {split} is not between 0 and 1; give the share that chooses, such as 0.5")
    outdated = profile.header.get("bounds") != BOUND_METHOD or (confidence is not None and confidence != made_at)
    needed = split is not None or rule == "certified" or (confidence is not None and confidence != made_at)
    scores = _scores(profile) if needed or ((limit or outdated) and _has_measurements(profile)) else {}
    resampling = Resampling.of(profile.header, confidence)
    first_metric = {(r["task"], r["dataset"]): r["metric"] for r in reversed(rows)}
    blocks = []
    for source, name in sorted(first_metric.items()):
        key = (*source, name)
        own = [r for r in rows if (r["task"], r["dataset"], r["metric"]) == key]
        if outdated:
            _bound_anew(own, scores.get(key), resampling)
        blocks.append(_block(own, scores.get(key), limit, rule, split, granularity, resampling))
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


def plan_document(row: Row) -> Row:
    """Returns what `--json` and `--format csv` say of one plan."""
    same = (
        *("strategy", "start_layer", "stop_layer", "params", "recomputed_layers", "total_layers"),
        *("recompute_fraction", "quality", "loss_rel", "loss_rel_upper", "loss_points", "loss_points_upper"),
        *("gap_recovered", "kv_bytes_per_token", "e_bytes_per_token", "n_scored", "n_planned"),
    )
    return {
        "plan": plan_text(row),
        **{name: row[name] for name in same},
        **{name: value for name, value in row.items() if name.endswith("_certified")},
        "not_known": not_known(row),
        "beaten_by": beaten_by(row),
        "modelled_prefill_saved": saved(row["prefill_flops"], row["full_prefill_flops"]),
        "measured_prefill_saved": saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]),
    }


def not_known(row: Row) -> dict[str, str]:
    """Returns why losses of a row are null, by column."""
    if row["quality"] is None or row["baseline_quality"] is None:
        why = "no sample was scored for both the plan and full_prefill"
        return dict.fromkeys(("loss_rel", "loss_points", "gap_recovered"), why)
    reasons = {}
    if row["loss_rel"] is None:
        reasons["loss_rel"] = "full_prefill scores 0"
    if row["gap_recovered"] is None:
        floor = row["floor_quality"]
        reasons["gap_recovered"] = (
            "no_context was not scored" if floor is None else "full_prefill and no_context score alike"
        )
    if row["loss_points_upper"] is None:
        reasons["loss_points_upper"] = "the bounds were made by another method and the measurements are not there"
    return reasons


def block_document(block: Block) -> Row:
    """Returns what `--json` says of one block."""
    return {
        "task": block.task,
        "dataset": block.dataset,
        "metric": block.metric,
        "confidence": block.confidence,
        "granularity": block.granularity,
        "max_loss": None if block.limit is None else f"{block.limit.value:g}{block.limit.unit}",
        "quality": {arm: row["quality"] for arm, row in block.arms.items()},
        "frontier": [plan_document(row) for row in block.frontier],
        "selected": plan_document(block.selected) if block.selected else None,
        **_decision_document(block.decision),
        "selected_by_granularity": {str(u): plan_document(row) if row else None for u, row in block.grids.items()},
    }


def _decision_document(decision: Decision | None) -> Row:
    return {
        "rule": decision.rule if decision else None,
        "measured_within": plan_document(decision.measured) if decision and decision.measured else None,
        "samples_needed": [{"plan": plan_text(row), "samples": n} for row, n in decision.needed] if decision else [],
        "plans_tested": decision.tested if decision else None,
        "selection_samples": decision.selection_samples if decision else None,
    }


def selection_document(profile: Profile, blocks: Sequence[Block], rows: Sequence[Row] | None) -> Row:
    """Returns what `kvprofile select` says: the plan with its losses on every task, or that a full prefill is due.

    Args:
        profile: The profile.
        blocks: The tasks that were asked for.
        rows: The selected plan's row in each block; None if there is no plan.
    """
    decision = blocks[0].decision
    return {
        "profile": str(profile.folder),
        "profile_id": profile.header["profile_id"],
        "max_loss": str(blocks[0].limit),
        "rule": decision.rule if decision else None,
        "confidence": blocks[0].confidence,
        "selected": None if rows is None else {name: rows[0][name] for name in (*PLAN_COLUMNS, "recompute_fraction")},
        "plan": "full_prefill" if rows is None else plan_text(rows[0]),
        "sureness": sureness(blocks, rows),
        "tasks": [
            {
                **{name: getattr(block, name) for name in ("task", "dataset", "metric")},
                "plan": None if rows is None else plan_document(rows[place]),
                **_decision_document(block.decision),
            }
            for place, block in enumerate(blocks)
        ],
    }


def sureness(blocks: Sequence[Block], rows: Sequence[Row] | None) -> str:
    """Returns in words how sure it is that a selected plan keeps within the limit: by the weakest of its tasks."""
    decision, limit = blocks[0].decision, blocks[0].limit
    if rows is None or decision is None or limit is None:
        return "nothing is within the limit"
    at = f"at {100 * blocks[0].confidence:g}%"
    if decision.rule == "certified":
        among = f", for all {decision.tested} plans at once" if decision.tested > 1 else ""
        return f"certified {at}{among}"
    if all(limit.allows(row, "bound") for row in rows):
        others = decision.selection_samples is not None
        return f"bounded {at}{', on samples that did not choose it' if others else ', for this plan by itself'}"
    return "measured, not bounded"


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
    from kvprofile.analysis.profile_table import mark_frontier

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
    decision = decide(rows, limit, rule, scores, resampling, split) if limit else None
    return Block(
        first["task"],
        first["dataset"],
        first["metric"],
        resampling.confidence,
        granularity,
        arms={r["strategy"]: r for r in rows if not _is_group(r) and r["params"] is None},
        frontier=sorted((r for r in rows if r["on_frontier"]), key=lambda r: float(r["recompute_fraction"])),
        limit=limit,
        decision=decision,
        grids={u: cheapest([r for r in rows if not _is_group(r) or _lies_on(r, u)], limit, alone) for u in coarser}
        if limit and alone
        else {},
        unscored=sum(r["strategy"] not in REFERENCE_ARMS and not complete(r) for r in rows),
        rows=rows,
    )


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
