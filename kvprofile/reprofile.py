"""Re-profiling on schedule: what is current is left alone, what is stale is measured again from where its frontier was."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from kvprofile.analysis.choice import can_serve
from kvprofile.cost.sweep import layer_tokens
from kvprofile.errors import BadInput, NewerFormat
from kvprofile.gate import Gate
from kvprofile.json_text import parse_json
from kvprofile.layers import LayerRange, plan_key
from kvprofile.limits import LossLimit, Rule
from kvprofile.models.reference import parse
from kvprofile.recipe import Recipe
from kvprofile.report.frontier import frontier_blocks
from kvprofile.staleness import Present, Reason, present, recipe_sha256, why_stale
from kvprofile.store.reader import REJECTED_FILE, Profile, load, rejection, versions
from kvprofile.store.writer import alone, pair_folder

Status = Literal["current", "stale", "published", "rejected"]


@dataclass(frozen=True)
class Options:
    """How to re-profile.

    Attributes:
        only_check: Whether to say only if the profile is stale.
        full: Whether to measure what is current, too, and to search as the recipe says instead of from where the frontier was.
        max_age: How old a profile may be.
        fail_if_worse: How much more than before a plan of the old frontier may lose; a version in which one loses more, or cannot
            be judged, is kept as rejected.
        rule: Which growth must be within it: `point` or `bound`, see `gate.Gate`.
        max_loss: Only plans that lost no more than this before count; None for all of the frontier.
        memory_limit: As for a sweep.
    """

    only_check: bool = False
    full: bool = False
    max_age: timedelta | None = None
    fail_if_worse: LossLimit | None = None
    rule: Rule = "point"
    max_loss: LossLimit | None = None
    memory_limit: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one recipe.

    Attributes:
        status: `current` (nothing to do), `stale` (only checked), `published`, or `rejected` (worse than what it was to replace).
        pair: Name of the pair's folder.
        reasons: Why it was measured, or would have to be.
        profile: Folder of the version that this is about; None if there is none.
        previous: Folder of the version that it takes the place of; None if there was none, or nothing was measured.
        worse: Plans of the old frontier that lose more than before, as `gate.Worse`, where that was asked.
        not_comparable: Why a new version was published without asking.
        frontier: Plans, per task, data set and first metric, that stay on the frontier, come to it, and leave it; None if nothing
            was measured or there was none before.
        work_share: Layer-tokens of the measurement over those of all groups on all samples; None if nothing was measured.
        seconds: Wall time.
    """

    status: Status
    pair: str
    reasons: list[Reason] = field(default_factory=list)
    profile: str | None = None
    previous: str | None = None
    worse: list[dict[str, Any]] = field(default_factory=list)
    not_comparable: str | None = None
    frontier: dict[str, int] | None = None
    work_share: float | None = None
    seconds: float = 0.0

    def document(self) -> dict[str, Any]:
        """Returns it as plain values for JSON."""
        return {**dataclasses.asdict(self), "reasons": [reason._asdict() for reason in self.reasons]}


def reprofile(recipe: Recipe, out: Path, progress: Any, options: Options) -> Outcome:
    """Measures a recipe's pair again if its newest profile is stale, publishes a new version and says what became of it.

    One run at a time for a store; a run that was cut off goes on where it stood.

    Args:
        recipe: What to measure.
        out: The store.
        progress: A `run.Progress`; who is told.
        options: How.

    Raises:
        BadInput: If the recipe, its data or its models cannot be used.
        Interrupted: If another process re-profiles this store.
    """
    begun = time.monotonic()
    pair = pair_folder(out, *(parse(text, recipe.search_folders).name for text in (recipe.sender, recipe.receiver)))
    now = present(recipe, fetch=not options.only_check)
    outcome = _look(pair, now, options)
    if outcome.status == "stale" and not options.only_check:
        with alone(out / ".reprofile"):
            outcome = _look(pair, now, options)  # another run may have published meanwhile
            if outcome.status == "stale":
                outcome = _measure(recipe, out, progress, options, outcome)
    return dataclasses.replace(outcome, seconds=round(time.monotonic() - begun, 1))


@dataclass(frozen=True)
class _Versions:
    """What a pair folder holds for a recipe.

    Attributes:
        current: The newest version of this recipe that serves; where there is none, the newest of any recipe.
        rejected: The newest version of this recipe that was rejected, if it is newer than `current`.
        unreadable: Newer versions that cannot be read, with why.
    """

    current: Profile | None
    rejected: Profile | None
    unreadable: list[Reason]


def _versions_for(pair: Path, recipe_hash: str) -> _Versions:
    rejected: Profile | None = None
    another: Profile | None = None
    unreadable: list[Reason] = []
    for _, folder in reversed(versions(pair)):
        try:
            profile = load(folder)
        except NewerFormat:
            raise
        except BadInput as error:
            unreadable.append(Reason("unreadable", str(error)))
            continue
        own = recipe_sha256(profile) == recipe_hash
        if rejection(folder) is not None:
            rejected = rejected or (profile if own else None)
        elif own:
            return _Versions(profile, rejected, unreadable)
        else:
            another = another or profile
    return _Versions(another, rejected, unreadable)


def _look(pair: Path, now: Present, options: Options) -> Outcome:
    """Returns whether there is anything to do, without measuring."""
    found = _versions_for(pair, now.recipe_sha256)
    reasons = [*why_stale(found.current, now, options.max_age), *found.unreadable]
    place = None if found.current is None else str(found.current.folder)
    if options.full:
        reasons.append(Reason("asked", "a full search was asked for"))
    if not reasons:
        return Outcome("current", pair.name, profile=place)
    if found.rejected and not options.full and not why_stale(found.rejected, now, options.max_age):
        folder = found.rejected.folder
        return Outcome("rejected", pair.name, reasons, str(folder), worse=_why_rejected(folder))
    return Outcome("stale", pair.name, reasons, place)


def _measure(recipe: Recipe, out: Path, progress: Any, options: Options, stale: Outcome) -> Outcome:
    from kvprofile.run import Frontier
    from kvprofile.sweep import Earlier, sweep

    for reason in stale.reasons:
        progress.say(f"stale: {reason.detail}")
    if stale.profile is None:
        folder = sweep(recipe, out, progress, options.memory_limit)
        share = _work_share(load(folder))
        return dataclasses.replace(stale, status="published", profile=str(folder), work_share=share)
    current = load(stale.profile)
    gate = Gate(current, options.fail_if_worse, options.rule, options.max_loss) if options.fail_if_worse else None
    before = _frontier(current)
    not_comparable: list[str] = []

    def judge(temporary: Path) -> None:
        if gate is None:
            return
        new = load(temporary)
        if why := gate.not_comparable(new):
            not_comparable.append(why)
        elif worse := gate.worse(new):
            more = f", and {len(worse) - 1} more plans" if len(worse) > 1 else ""
            document = {
                "reason": f"{worse[0].words()}{more}",
                "limit": str(options.fail_if_worse),
                "worse": [one._asdict() for one in worse],
            }
            (temporary / REJECTED_FILE).write_text(json.dumps(document, indent=2), "utf-8")

    anew = options.full or any(reason.what == "recipe" for reason in stale.reasons)
    layers = current.rows["total_layers"][0].as_py()
    folder = sweep(
        recipe,
        out,
        progress,
        options.memory_limit,
        Earlier(current.header["profile_id"], Frontier(known_groups(current), layers, anew), judge),
    )
    profile = load(folder)
    after = _frontier(profile)
    return dataclasses.replace(
        stale,
        status="rejected" if rejection(folder) else "published",
        profile=str(folder),
        previous=str(current.folder),
        worse=_why_rejected(folder),
        not_comparable=not_comparable[0] if not_comparable else None,
        frontier={"stay": len(before & after), "come": len(after - before), "leave": len(before - after)},
        work_share=_work_share(profile),
    )


def known_groups(profile: Profile) -> tuple[LayerRange, ...]:
    """Returns the groups on a profile's frontiers, and those that no group beats on both recompute and KL."""
    rows = [
        row for row in profile.rows.to_pylist() if row["strategy"] in ("layer_group", "full_reuse") and can_serve(row)
    ]
    found = {(row["start_layer"], row["stop_layer"]) for row in rows if row["on_frontier"]}
    lowest: dict[tuple[str, str], float] = {}
    by_cost = sorted(
        (row for row in rows if row["mean_kl"] is not None), key=lambda row: (row["recomputed_layers"], row["mean_kl"])
    )
    for row in by_cost:
        source = row["task"], row["dataset"]
        if row["mean_kl"] < lowest.get(source, float("inf")):
            lowest[source] = row["mean_kl"]
            found.add((row["start_layer"], row["stop_layer"]))
    return tuple(sorted(LayerRange(*group) for group in found if group[0] is not None))


def _why_rejected(folder: Path) -> list[dict[str, Any]]:
    """Returns the plans that a rejection names; none where somebody wrote it by hand."""
    if rejection(folder) is None:
        return []
    try:
        held = parse_json((folder / REJECTED_FILE).read_bytes())["worse"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [one for one in held if isinstance(one, dict)] if isinstance(held, list) else []


def _frontier(profile: Profile) -> set[tuple[Any, ...]]:
    return {
        (block.task, block.dataset, block.metric, *plan_key(row))
        for block in frontier_blocks(profile)
        for row in block.frontier
    }


def _work_share(profile: Profile) -> float:
    """Returns the layer-tokens of the groups that were measured, each once, over those of all groups on all samples."""
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
