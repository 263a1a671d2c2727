"""What `--json` and a terminal say of a runtime's decision, and of plans under a budget for E."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from kvprofile.cost.timeline import Link
from kvprofile.errors import BadInput
from kvprofile.layers import plan_key
from kvprofile.limits import LossLimit
from kvprofile.report.frontier import Block, Row, frontier_blocks
from kvprofile.report.terminal import number
from kvprofile.report.validations import loss_text
from kvprofile.resources import expanded
from kvprofile.runtime.plan import ChosenPlan
from kvprofile.runtime.policy import Decision, Policy, PolicyRule, parse_policy_rule
from kvprofile.runtime.reading import from_reader, is_rejected
from kvprofile.runtime.validated import as_float, newest_by_dataset
from kvprofile.store.reader import PROFILE_FILE, Profile, is_url, versions

if TYPE_CHECKING:
    from kvprofile.analysis.e_storage import KeptStarts

Source = tuple[str, str, str]


class Served(NamedTuple):
    """A request as `kvprofile select` is told of it.

    Attributes:
        tokens: Of its context, None if not said.
        waiting: Requests that wait.
        link: What the cache comes through, None if not said.
        target_ms: Time to the first token that is good enough, None if not said.
    """

    tokens: int | None = None
    waiting: int = 0
    link: Link | None = None
    target_ms: float | None = None


class Decided(NamedTuple):
    """What a runtime would do.

    Attributes:
        decision: The decision.
        rule: By which rule.
        allows: Whether any plan is within the loss by that rule, even if none is taken.
    """

    decision: Decision
    rule: PolicyRule
    allows: bool


def decide(profile: Profile, block: Block, limit: LossLimit, rule: str, request: Served) -> Decided:
    """Returns what a runtime would do with a request about a block's task.

    Raises:
        BadInput: If the rule is none of a policy's.
    """
    by = parse_policy_rule(rule)
    policy = Policy(limit, by, request.target_ms, block.task, block.dataset, block.metric)
    tokens = 1 if request.tokens is None else request.tokens  # where they are not said, nothing asks for them
    decider = policy.on(from_reader(profile))
    return Decided(decider.decide(tokens, request.waiting, request.link), by, bool(decider.allowed))


def with_decision(document: Row, profile: Profile, rows: Sequence[Row] | None, decided: Decided) -> Row:
    """Returns what `kvprofile select` says, with what a runtime would do: its rule, how sure it is and its reasons.

    Args:
        document: From `selection_document`, of one block.
        profile: The profile.
        rows: From `decided_rows`.
        decided: From `decide`.
    """
    (task,) = document["tasks"]
    said: Row = {"rule": decided.rule}
    sureness = document["sureness"]
    if decided.rule == "validated" or (rows is None and decided.allows):
        said[
            "samples_needed"
        ] = []  # those are for the rule of one measurement, or for a plan that was not shown to be within
    if rows is None and decided.allows:
        untimed = decided.decision.first_token_ms is None
        why = "the time is not known" if untimed else "full prefill is taken for its time"
        sureness = f"a plan is within the limit, but {why}"
    elif rows is None and decided.rule == "validated":
        sureness = "no plan is shown to be within the limit on fresh data; check one with `kvprofile validate`"
    elif rows is not None and decided.rule == "validated":
        sureness = f"held on fresh data: {'; '.join(_held(rows[0], profile.validations()))}"
    return {
        **document,
        "rule": decided.rule,
        "sureness": sureness,
        "tasks": [{**task, **said}],
        "decision": decision_document(decided.decision),
    }


def _held(row: Row, validations: Sequence[Row]) -> Iterator[str]:
    """Yields on what data a plan was last validated, and at most how much it loses there."""
    for dataset, (one, plan) in newest_by_dataset(row, validations).items():
        upper = loss_text(as_float(plan["loss_upper"]), plan["unit"])
        at = f"{100 * one['confidence']:g}%"
        bound = "no upper bound of its loss is known" if upper is None else f"it loses at most {upper} at {at}"
        yield f"on {one['samples']} samples of {dataset}, {bound}"


def decided_rows(block: Block, decision: Decision) -> list[Row] | None:
    """Returns the row of what was decided, None for full prefill."""
    plan = decision.plan
    return None if plan is None else [next(row for row in block.rows if plan_key(row) == tuple(plan[:4]))]


def decision_document(decision: Decision) -> dict[str, Any]:
    """Returns what `kvprofile select` says of how a runtime would decide, and why not otherwise."""
    return {
        "plan": next(one.name for one in decision.considered if one.why_not is None),
        "why": decision.why,
        "modelled_first_token_ms": decision.first_token_ms,
        "considered": [
            {
                "plan": one.name,
                "why_not": one.why_not,
                "modelled_first_token_ms": one.first_token_ms,
                **{name: getattr(one.plan, name, None) for name in ChosenPlan._fields if name != "pair"},
            }
            for one in decision.considered
        ],
    }


def with_kept_starts(
    profile: Profile, most: int | None, task: str | None, dataset: str | None, metric: str | None
) -> tuple[Profile, dict[Source, KeptStarts]]:
    """Returns a profile without the plans that need E of starts that are not kept, and by block what is kept.

    Args:
        profile: The profile.
        most: Starts to keep at most, for each block by itself; None for all of them.
        task: As for `frontier_blocks`.
        dataset: Likewise.
        metric: Likewise.

    Raises:
        BadInput: If `most` is negative, or no plan of a block goes without E.
    """
    from kvprofile.analysis.e_storage import allowed, kept_starts

    kept: dict[Source, KeptStarts] = {}
    if most is None:
        return profile, kept
    if most < 0:
        raise BadInput(f"--max-starts {most} cannot be; give 0 or more")
    for block in frontier_blocks(profile, task=task, dataset=dataset, metric=metric):
        found = kept_starts(block.rows, most)
        if found is None:
            raise BadInput(
                f"{block.task}/{block.dataset} has no plan without E that was scored on every sample; sweep again"
            )
        kept[_source(block._asdict())] = found

    def stays(row: dict[str, Any]) -> bool:
        held = kept.get(_source(row))
        return held is None or allowed(row, held.starts)

    mask = pa.array([stays(row) for row in profile.rows.to_pylist()])
    return dataclasses.replace(profile, rows=profile.rows.filter(mask)), kept


def rejected_since(path: str, folder: Path) -> str | None:
    """Returns in a sentence that newer versions than the one a store or pair folder gave were rejected, None if none was.

    Args:
        path: What the user named; of a URL nothing is said, nor of a version's own folder.
        folder: The version that it gave.
    """
    if is_url(path) or expanded(path) in (folder, folder / PROFILE_FILE):
        return None
    found = versions(folder.parent)
    place = next((place for place, (_, one) in enumerate(found) if one == folder), len(found))
    newer = [one.name for _, one in found[place + 1 :] if is_rejected(one)]
    if not newer:
        return None
    return f"{newer[-1]} was rejected; this profile ({folder.name}) is of other weights if they changed since"


def kept_of(block: Block, kept: Mapping[Source, KeptStarts]) -> dict[str, Any]:
    """Returns what `--json` says of the E that a block's plans may need; nothing where all of it is kept."""
    found = kept.get(_source(block._asdict()))
    return {} if found is None else {"e_storage": found._asdict()}


def kept_lines(blocks: Sequence[Block], kept: Mapping[Source, KeptStarts]) -> list[str]:
    """Returns in sentences which E is kept and what the restriction costs."""
    lines = []
    for block in blocks if kept else ():
        one = kept[_source(block._asdict())]
        layers = f"layers {', '.join(map(str, one.starts))}" if one.starts else "no layer"
        how = "" if one.exact else " (chosen greedily)"
        points = [number(value, 2) for value in (one.lost_points_mean, one.lost_points_worst)]
        lines.append(
            f"{block.task} / {block.dataset}: E kept of {layers}{how}; the best quality at any recompute loses {points[0]} "
            f"points on average, {points[1]} at worst (at {one.worst_at} layers); {one.e_bytes_per_token} bytes per context "
            f"token, {one.e_bytes_saved_per_token} fewer than for the {len(one.frontier_starts)} starts of the whole frontier."
        )
    return lines


def _source(held: Mapping[str, Any]) -> Source:
    return held["task"], held["dataset"], held["metric"]
