"""What `--json` and `--format csv` say of frontiers, plans and selections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprofile.analysis.choice import beaten_by
from kvprofile.layers import PLAN_COLUMNS, plan_key
from kvprofile.report.frontier import Block, Row, plan_text, saved
from kvprofile.store.reader import Profile

if TYPE_CHECKING:
    from kvprofile.analysis.decision import Decision

_BESIDE_THE_TABLE = (
    *("loss_rel_lower", "loss_points_lower", "gap_recovered_lower", "gap_recovered_upper"),
    *("loss_rel_certified", "loss_points_certified"),
)
"""What is made from the measurements when it is asked for, and not kept in `profile.parquet`."""


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
        **{name: value for name, value in row.items() if name in _BESIDE_THE_TABLE},
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
        reasons["loss_rel"] = "full_prefill scores 0 or less; go by points"
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
        "quality_is": "agreement with full prefill's own answer" if block.by_agreement else "score against references",
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
        "validated_on_fresh_data": []
        if rows is None
        else [said for b, r in zip(blocks, rows, strict=True) for said in b.validated.get(plan_key(r), [])],
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
        return "no plan is shown to be within the limit"
    at = f"at {100 * blocks[0].confidence:g}%"
    if decision.rule == "certified":
        among = f", for all {decision.tested} plans at once" if decision.tested > 1 else ""
        return f"certified {at}{among}"
    if all(limit.allows(row, "bound") for row in rows):
        others = decision.selection_samples is not None
        return f"bounded {at}{', on samples that did not choose it' if others else ', for this plan by itself'}"
    return "measured, not bounded"
