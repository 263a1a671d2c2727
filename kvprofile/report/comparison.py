"""What moved between two profiles, as one document and drawn on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from kvprofile.analysis.comparison import moved
from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.errors import BadInput
from kvprofile.identity import json_sha256
from kvprofile.layers import plan_key
from kvprofile.limits import LossLimit, Rule
from kvprofile.report.documents import plan_document
from kvprofile.report.frontier import Block, Row, frontier_blocks, plan_text
from kvprofile.report.terminal import add_row, new_table, number, percent, print_table
from kvprofile.report.text import print_line, short_list
from kvprofile.store.reader import Profile
from kvprofile.store.schema import ends_of

_HEADER = (
    "profile_id",
    "version",
    "created_at",
    "recipe_sha256",
    "attention",
    "device",
    "torch",
    "transformers",
    "search",
)
_ASKED = ("context_sha256", "suffix_token_ids", "max_new_tokens")
_MODEL = (
    "name",
    "revision",
    "weights_sha256",
    "tokenizer_sha256",
    "template_sha256",
    "config_sha256",
    "dtype",
    "quantization",
)


def comparison_document(
    before: Profile, after: Profile, limit: LossLimit | None = None, rule: Rule = "point", metric: str | None = None
) -> dict[str, Any]:
    """Returns what differs in the headers, which plans came to and left the frontier, how scores moved, and what is selected.

    Tasks are compared that both profiles have; where only the data differ, one task's data of each.

    Raises:
        BadInput: If the profiles have no task and metric in common, or score in different ways.
    """
    _require_one_scale(before, after)
    pairs = _paired(
        frontier_blocks(before, limit=limit, rule=rule, metric=metric),
        frontier_blocks(after, limit=limit, rule=rule, metric=metric),
    )
    scores = [{(s.task, s.dataset, s.metric): s for s in all_scores(one.measurements())} for one in (before, after)]
    contexts = [asked_contexts(one) for one in (before, after)]
    resampling = Resampling.of(before.header)
    blocks = []
    for old, new in pairs:
        own = [held.get((one.task, one.dataset, one.metric)) for held, one in zip(scores, (old, new), strict=True)]
        hashes = tuple(held.get((one.task, one.dataset), {}) for held, one in zip(contexts, (old, new), strict=True))
        if own[0] is None or own[1] is None:
            raise BadInput(
                f"one profile holds no measurements of {old.task}, {old.metric}; copy it again or sweep again"
            )
        blocks.append(_block(old, new, (own[0], own[1]), (hashes[0], hashes[1]), resampling))
    return {
        "before": str(before.folder),
        "after": str(after.folder),
        "header": _differences(before.header, after.header),
        "max_loss": None if limit is None else str(limit),
        "rule": rule,
        "blocks": blocks,
    }


def _paired(before: list[Block], after: list[Block]) -> list[tuple[Block, Block]]:
    exact = {(b.task, b.dataset, b.metric): b for b in after}
    partners = {(b.task, b.dataset, b.metric) for b in before}
    found = []
    for block in before:
        other_data = [
            b
            for b in after
            if (b.task, b.metric) == (block.task, block.metric) and (b.task, b.dataset, b.metric) not in partners
        ]
        other = exact.get((block.task, block.dataset, block.metric)) or (
            other_data[0] if len(other_data) == 1 else None
        )
        if other is not None:
            found.append((block, other))
    if not found:
        raise BadInput("the profiles have no task and metric in common; compare profiles of one task")
    return found


def _require_one_scale(before: Profile, after: Profile) -> None:
    """Refuses scores that are not of one kind: a difference of theirs would mean nothing."""
    kinds = [one.header["references"] for one in (before, after)]
    if kinds[0] != kinds[1]:
        raise BadInput(
            "one profile scores answers against references, the other by agreement with full prefill (references: none); "
            "compare profiles of one kind"
        )
    versions = [
        dict(str(name).split("@", 1) for name in one.header["metrics"] if "@" in str(name)) for one in (before, after)
    ]
    if differing := [name for name in versions[0] if versions[1].get(name, versions[0][name]) != versions[0][name]]:
        raise BadInput(f"the profiles have other versions of the metric {differing[0]}; sweep again with one version")


def asked_contexts(profile: Profile) -> dict[tuple[str, str], dict[str, str]]:
    """Returns, per task and data set, a hash of what each sample was asked by its id, as far as the profile tells."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    stop = ends_of(profile.header["datasets"])
    for row in profile.samples().select([*_ASKED, "task", "dataset", "sample_id"]).to_pylist():
        if row["context_sha256"] is not None:
            # Without texts, the recipe has to tell how questions were asked.
            recipe = profile.header["recipe_sha256"] if row["suffix_token_ids"] is None else None
            source = row["task"], row["dataset"]
            asked = json_sha256([*(row[name] for name in _ASKED), recipe, *stop.get(source, ())])
            found.setdefault(source, {})[row["sample_id"]] = asked
    return found


def _block(
    old: Block,
    new: Block,
    scores: tuple[Scores, Scores],
    contexts: tuple[Mapping[str, str], Mapping[str, str]],
    resampling: Resampling,
) -> dict[str, Any]:
    rows: dict[Any, Row] = {plan_key(row): row for block in (new, old) for row in block.frontier}
    arms = {plan_key(row): row for block in (new, old) for row in block.arms.values()}
    changes = moved(*scores, [*arms, *(key for key in rows if key not in arms)], contexts, **resampling._asdict())
    fronts = [{plan_key(row) for row in block.frontier} for block in (old, new)]
    measured = [{plan_key(row) for row in block.rows} for block in (old, new)]
    return {
        "task": old.task,
        "metric": old.metric,
        "datasets": [old.dataset, new.dataset],
        "confidence": resampling.confidence,
        "moved": [
            {
                "plan": plan_text((rows | arms)[one.plan]),
                "on_frontier": [
                    one.plan in front if one.plan in there else None
                    for front, there in zip(fronts, measured, strict=True)
                ],
                **{name: getattr(one, name) for name in one._fields if name != "plan"},
            }
            for one in changes
        ],
        "selected": [plan_document(block.selected) if block.selected else None for block in (old, new)],
    }


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns what differs by name, first and second."""

    def flat(header: Mapping[str, Any]) -> dict[str, Any]:
        models = {f"{role}.{key}": header[role].get(key) for role in ("sender", "receiver") for key in _MODEL}
        data = ", ".join(
            f"{one['name']} {str(one['sha256'])[:12]}"
            + (f" until {short_list(one['stop'])} ({one['task']})" if "stop" in one else "")
            for one in header["datasets"]
        )
        return {**{key: header.get(key) for key in _HEADER}, **models, "datasets": data}

    first, second = flat(before), flat(after)
    return {key: [first[key], second[key]] for key in first if first[key] != second[key]}


def print_comparison(console: Console, document: Mapping[str, Any]) -> None:
    """Prints what `comparison_document` returned."""
    print_line(console, f"before: {document['before']}")
    print_line(console, f"after:  {document['after']}")
    for name, (old, new) in document["header"].items():
        short = 12 if name.endswith("sha256") else None
        print_line(console, f"  {name}: {str(old)[:short]} → {str(new)[:short]}")
    for block in document["blocks"]:
        data = " → ".join(dict.fromkeys(block["datasets"]))
        print_line(
            console,
            f"{block['task']} / {data}, {block['metric']}; before and after over all samples of each, points over shared ones, "
            f"bounds one-sided at {100 * block['confidence']:g}%",
        )
        table = new_table(
            "plan", "frontier", "before", "after", "shared\nsamples", "points", "at\nleast", "at\nmost", left=2
        )
        for one in block["moved"]:
            cells = [number(one["before"], 3), number(one["after"], 3), one["shared_samples"]]
            points = [number(one[name], 1) for name in ("difference_points", "lower", "upper")]
            add_row(table, [one["plan"], _FRONTIER.get(tuple(one["on_frontier"]), ""), *cells, *points])
        print_table(console, table)
        if document["max_loss"]:
            old, new = (_selected(one) for one in block["selected"])
            print_line(console, f"selected within {document['max_loss']} (rule {document['rule']}): {old} → {new}")
        console.print()


_FRONTIER = {
    (True, True): "stays",
    (True, False): "leaves",
    (False, True): "comes",
    (True, None): "not measured after",
    (None, True): "not measured before",
}


def _selected(plan: Mapping[str, Any] | None) -> str:
    return "no plan" if plan is None else f"{plan['plan']}, loss {percent(plan['loss_rel']) or 'unknown'}"
