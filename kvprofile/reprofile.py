"""Re-profiling on schedule: what is current is left alone, what is stale is measured again from where its frontier was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvprofile.analysis.choice import can_serve
from kvprofile.layers import LayerRange, plan_key
from kvprofile.limits import LossLimit
from kvprofile.models.reference import parse
from kvprofile.recipe import Recipe
from kvprofile.report.frontier import frontier_blocks, plan_text
from kvprofile.staleness import Reason, present, why_stale
from kvprofile.store.reader import REJECTED_FILE, Profile, load, rejection, versions
from kvprofile.store.writer import alone, pair_folder

Status = Literal["current", "stale", "published", "rejected"]


class Outcome(NamedTuple):
    """What became of one recipe.

    Attributes:
        status: `current` (nothing to do), `stale` (only checked), `published`, or `rejected` (worse than what it was to replace).
        pair: Name of the pair's folder.
        profile: Folder of the version that this is about; None if there is none.
        previous: Folder of the version that it takes the place of; None if there was none, or nothing was measured.
        reasons: Why it was measured, or would have to be.
        worse: Plans of the old frontier that lose more than before, where that was asked.
        frontier: Groups that stay on the frontier of every first metric, come to it, and leave it; None if nothing was measured.
        work_share: Layer-tokens of the measurement over those of all groups on all samples; None if nothing was measured.
        seconds: Wall time.
    """

    status: Status
    pair: str
    profile: str | None
    previous: str | None
    reasons: list[Reason]
    worse: list[dict[str, Any]]
    frontier: dict[str, int] | None
    work_share: float | None
    seconds: float

    def document(self) -> dict[str, Any]:
        """Returns it as plain values for JSON."""
        return {**self._asdict(), "reasons": [reason._asdict() for reason in self.reasons]}


def reprofile(
    recipe: Recipe,
    out: Path,
    progress: Any,
    *,
    only_check: bool = False,
    full: bool = False,
    max_age: timedelta | None = None,
    fail_if_worse: LossLimit | None = None,
    memory_limit: int | None = None,
) -> Outcome:
    """Measures a recipe's pair again if its newest profile is stale, publishes a new version and says what became of it.

    One run at a time for a store; a run that was cut off goes on where it stood.

    Args:
        recipe: What to measure.
        out: The store.
        progress: A `run.Progress`; who is told.
        only_check: Whether to say only if the profile is stale.
        full: Whether to search as the recipe says, instead of from where the frontier was.
        max_age: How old it may be.
        fail_if_worse: How much more than before a plan of the old frontier may lose; a version with more is kept as rejected.
        memory_limit: As for a sweep.

    Raises:
        BadInput: If the recipe, its data or its models cannot be used.
        Interrupted: If another process re-profiles this store.
    """
    begun = time.monotonic()
    pair = pair_folder(out, *(parse(text, recipe.search_folders).name for text in (recipe.sender, recipe.receiver)))

    def outcome(status: Status, profile: Path | None, reasons: list[Reason], **more: Any) -> Outcome:
        place = None if profile is None else str(profile)
        rest = {"previous": None, "worse": [], "frontier": None, "work_share": None, **more}
        return Outcome(status, pair.name, place, reasons=reasons, seconds=round(time.monotonic() - begun, 1), **rest)

    now = present(recipe)
    current, rejected = _newest(pair)
    reasons = why_stale(current, now, max_age)
    if not reasons and current:
        return outcome("current", current.folder, [])
    if rejected and not why_stale(rejected, now, max_age):
        return outcome("rejected", rejected.folder, reasons, worse=_why_rejected(rejected.folder))
    if only_check:
        return outcome("stale", current.folder if current else None, reasons)
    with alone(out / ".reprofile"):
        full = full or any(reason.what == "recipe" for reason in reasons)
        return _measure(recipe, out, progress, current, full, fail_if_worse, memory_limit, reasons, outcome)


def _measure(
    recipe: Recipe,
    out: Path,
    progress: Any,
    current: Profile | None,
    full: bool,
    fail_if_worse: LossLimit | None,
    memory_limit: int | None,
    reasons: list[Reason],
    outcome: Callable[..., Outcome],
) -> Outcome:
    from kvprofile.sweep import Earlier, sweep

    for reason in reasons:
        progress.say(f"stale: {reason.detail}")
    earlier = None
    if current:

        def judge(folder: Path) -> None:
            if fail_if_worse and (worse := _worse(current, load(folder), fail_if_worse)):
                why = {"reason": _in_words(worse), "limit": str(fail_if_worse), "worse": worse}
                (folder / REJECTED_FILE).write_text(json.dumps(why, indent=2), "utf-8")

        earlier = Earlier(current.header["profile_id"], () if full else known_groups(current), judge)
    folder = sweep(recipe, out, progress, memory_limit, earlier)
    profile = load(folder)
    return outcome(
        "rejected" if rejection(folder) else "published",
        folder,
        reasons,
        previous=str(current.folder) if current else None,
        worse=_why_rejected(folder),
        frontier=_moved(current, profile) if current else None,
        work_share=_work_share(profile),
    )


def known_groups(profile: Profile) -> tuple[LayerRange, ...]:
    """Returns the groups on a profile's frontiers, and those that no group beats on both recompute and KL."""
    rows = [
        row for row in profile.rows.to_pylist() if row["strategy"] in ("layer_group", "full_reuse") and can_serve(row)
    ]
    found = {(row["start_layer"], row["stop_layer"]) for row in rows if row["on_frontier"]}
    lowest: dict[str, float] = {}
    for row in sorted(
        (r for r in rows if r["mean_kl"] is not None), key=lambda r: (r["recomputed_layers"], r["mean_kl"])
    ):
        source = f"{row['task']}/{row['dataset']}"
        if row["mean_kl"] < lowest.get(source, float("inf")):
            lowest[source] = row["mean_kl"]
            found.add((row["start_layer"], row["stop_layer"]))
    return tuple(sorted(LayerRange(*group) for group in found if group[0] is not None))


def _newest(pair: Path) -> tuple[Profile | None, Profile | None]:
    """Returns the pair's newest version that serves, and a newer one that was rejected; None where there is none."""
    rejected = None
    for _, folder in reversed(versions(pair)):
        if rejection(folder) is None:
            return load(folder), rejected
        rejected = rejected or load(folder)
    return None, rejected


def _why_rejected(folder: Path) -> list[dict[str, Any]]:
    if rejection(folder) is None:
        return []
    worse: list[dict[str, Any]] = json.loads((folder / REJECTED_FILE).read_text("utf-8"))["worse"]
    return worse


def _worse(before: Profile, after: Profile, limit: LossLimit) -> list[dict[str, Any]]:
    """Returns the plans of the old frontier, by each task's first metric, whose loss grew by more than the limit."""
    column = limit.column()
    scale = 100 if limit.unit == "%" else 1
    now = {(r["task"], r["dataset"], r["metric"], *plan_key(r)): r for r in after.rows.to_pylist()}
    found = []
    for block in frontier_blocks(before):
        for row in block.frontier:
            new = now.get((block.task, block.dataset, block.metric, *plan_key(row)))
            if not can_serve(row) or new is None or row[column] is None or new[column] is None:
                continue
            grew = scale * (new[column] - row[column])
            if grew > limit.value:
                own = {"task": block.task, "dataset": block.dataset, "metric": block.metric, "plan": plan_text(row)}
                found.append({**own, "before": row[column], "after": new[column], "grew_by": grew, "unit": limit.unit})
    return sorted(found, key=lambda one: -one["grew_by"])


def _in_words(worse: Sequence[dict[str, Any]]) -> str:
    first = worse[0]
    more = f", and {len(worse) - 1} more plans lose more" if len(worse) > 1 else ""
    return f"{first['plan']} loses {first['grew_by']:.1f}{first['unit']} more than before on {first['task']}{more}"


def _moved(before: Profile, after: Profile) -> dict[str, int]:
    fronts = [
        {(b.task, b.dataset, b.metric, *plan_key(row)) for b in frontier_blocks(one) for row in b.frontier}
        for one in (before, after)
    ]
    old, new = fronts
    return {"stay": len(old & new), "come": len(new - old), "leave": len(old - new)}


def _work_share(profile: Profile) -> float:
    """Returns the layer-tokens of the groups that were measured, each once, over those of all groups on all samples."""
    from kvprofile.cost.sweep import layer_tokens

    rows = profile.rows.to_pylist()
    layers = rows[0]["total_layers"]
    every = sorted({LayerRange(r["start_layer"], r["stop_layer"]) for r in rows if r["strategy"] == "layer_group"})
    samples: dict[tuple[str, str, str], tuple[set[LayerRange], int, int]] = {}
    columns = [
        "sample_id",
        "task",
        "dataset",
        "strategy",
        "start_layer",
        "stop_layer",
        "context_tokens",
        "suffix_tokens",
    ]
    for row in profile.measurements().select(columns).to_pylist():
        key = (row["sample_id"], row["task"], row["dataset"])
        groups, *_ = samples.setdefault(key, (set(), row["context_tokens"], row["suffix_tokens"]))
        if row["strategy"] == "layer_group":
            groups.add(LayerRange(row["start_layer"], row["stop_layer"]))
    measured, whole = (
        sum(
            layer_tokens(sorted(groups) if own else every, layers, context, new)
            for groups, context, new in samples.values()
        )
        for own in (True, False)
    )
    return measured / whole
