"""A measured chain as one document, and drawn on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from kvprofile.analysis.chain import FULL, MIDDLE_FULL, Arm, arms, chain_against_hops, read_by_middle
from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.profile_table import lower_bounds, rescore
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.errors import BadInput
from kvprofile.layers import PLAN_COLUMNS, LayerRange, describe
from kvprofile.report.terminal import add_row, new_table, number, percent, print_table
from kvprofile.report.text import print_line

_KEPT = (
    *("n_scored", "quality", "baseline_quality", "loss_rel", "loss_rel_upper", "loss_points"),
    *("loss_points_lower", "loss_points_upper", "mean_kl"),
)
_DIFFERENCES = ("more_than_direct", "more_than_last_hop", "more_than_added")


def chain_document(
    header: Mapping[str, Any],
    table: pa.Table,
    firsts: Sequence[LayerRange],
    seconds: Sequence[LayerRange],
) -> dict[str, Any]:
    """Returns the losses of a chain and of its single hops, per metric.

    Args:
        header: Footer of the chain's file.
        table: Its measurements.
        firsts: What B recomputed.
        seconds: What C recomputes.

    Raises:
        BadInput: If no answer of C's full prefill could be scored.
    """
    resampling = Resampling.of(header)
    blocks = []
    for scores in all_scores(table):
        if np.isnan(scores.baseline).all():
            raise BadInput(f"no answer on {scores.dataset} could be scored; check its references and the metric")
        blocks.append(
            {
                **{name: getattr(scores, name) for name in ("task", "dataset", "metric")},
                "samples": len(scores.samples),
                "arms": _arm_rows(scores, arms(firsts, seconds), resampling),
                "chains": [_against(scores, first, second, resampling) for first in firsts for second in seconds],
            }
        )
    models = (header["sender"], header["chain"]["middle"], header["receiver"])
    return {
        "models": dict(zip("ABC", (model["name"] for model in models), strict=True)),
        "total_layers": header["receiver"]["layers"],
        "references": header["references"],
        "confidence": resampling.confidence,
        "blocks": blocks,
    }


def _arm_rows(scores: Scores, shown: Sequence[Arm], resampling: Resampling) -> list[dict[str, Any]]:
    """Returns what every arm scores and loses, against the full prefill of the model that answers."""
    keys = (FULL.plan.key if arm == MIDDLE_FULL else arm.plan.key for arm in shown)  # it loses nothing against itself
    rows: list[dict[str, Any]] = [dict(zip(PLAN_COLUMNS, key, strict=True)) for key in keys]
    for by_middle, own_scores in ((False, scores), (True, read_by_middle(scores))):
        own = [row for row, arm in zip(rows, shown, strict=True) if arm.by_middle is by_middle]
        rescore(own, own_scores, **resampling._asdict())
        bounds = lower_bounds(own, own_scores, **resampling._asdict()).loss_points
        for row, bound in zip(own, bounds, strict=True):
            row["loss_points_lower"] = None if np.isnan(bound) else float(bound)
    return [
        {
            "path": arm.path,
            "strategy": row["strategy"],
            "first": arm.first,
            "second": arm.second,
            **{name: row[name] for name in _KEPT},
        }
        for arm, row in zip(shown, rows, strict=True)
    ]


def _against(scores: Scores, first: LayerRange, second: LayerRange, resampling: Resampling) -> dict[str, Any]:
    found = chain_against_hops(scores, first, second, resampling)
    return {**found._asdict(), **{name: getattr(found, name)._asdict() for name in _DIFFERENCES}}


def print_chain(console: Console, document: Mapping[str, Any]) -> None:
    """Prints what `chain_document` returned."""
    models, layers = document["models"], document["total_layers"]
    print_line(console, ", ".join(f"{letter} = {name}" for letter, name in models.items()))
    for block in document["blocks"]:
        agreement = " of agreement with the reader's own full prefill" if document["references"] == "none" else ""
        print_line(
            console,
            f"{block['task']} / {block['dataset']}, {block['metric']}{agreement}, {block['samples']} samples; losses are against "
            f"the full prefill of the model that answers, bounds one-sided at {100 * document['confidence']:g}%, each by itself",
        )
        _print_arms(console, block, layers)
        _print_differences(console, block, layers)
        print_line(console, _sentence(block))
        console.print()


def _print_arms(console: Console, block: Mapping[str, Any], layers: int) -> None:
    heads = ("path", "B recomputes", "C recomputes")
    numbers = (block["metric"], "loss", "points", "at\nleast", "at\nmost", "KL")
    table = new_table(*heads, *numbers, left=len(heads))
    for arm in block["arms"]:
        path = arm["path"] if arm["strategy"] in ("layer_group", "chain") else f"{arm['path']}, {arm['strategy']}"
        points = (number(arm[name], 1) for name in ("loss_points", "loss_points_lower", "loss_points_upper"))
        add_row(
            table,
            [
                path,
                *(_group(arm[name], layers) for name in ("first", "second")),
                number(arm["quality"], 3),
                percent(arm["loss_rel"]),
                *points,
                number(arm["mean_kl"], 4),
            ],
        )
    print_table(console, table)


def _print_differences(console: Console, block: Mapping[str, Any], layers: int) -> None:
    print_line(console, "points that the chain A→B→C loses more than A→C, than B→C, and than A→B and B→C added up")
    each = ("at\nleast", "at\nmost")
    table = new_table(
        *("B recomputes", "C recomputes", "more than\nA→C", *each, "more than\nB→C", *each),
        *("A→B + B→C", "more than\nthat", *each),
        left=2,
    )
    for one in block["chains"]:
        cells = [_group(one["first"], layers), _group(one["second"], layers)]
        for name in _DIFFERENCES:
            if name == "more_than_added":
                cells.append(number(one["added_points"], 1))
            cells += [number(value, 1) for value in one[name].values()]
        add_row(table, cells)
    print_table(console, table)
    if any(one["same_as_direct"] for one in block["chains"]):
        print_line(console, "(where C recomputes all that B did, the chain is A→C, on every sample)")


def _sentence(block: Mapping[str, Any]) -> str:
    """Returns in how many chains the difference to the sum of the hops is more than chance, each chain judged by itself."""
    apart, chains = sum(_is_apart(one["more_than_added"]) for one in block["chains"]), len(block["chains"])
    alone = "each judged by itself with no allowance for their number, " if chains > 1 else ""
    return (
        f"Beyond chance, {alone}{apart} of {chains} chain{'s' if chains > 1 else ''} lost more or less than the hops added up. "
        "Use the chain's own loss: what its hops add up to is no measurement."
    )


def _is_apart(difference: Mapping[str, float | None]) -> bool:
    lower, upper = difference["lower"], difference["upper"]
    return lower is not None and upper is not None and (lower > 0 or upper < 0)


def _group(group: Sequence[int] | None, layers: int) -> str | None:
    return None if group is None else describe(LayerRange(*group), layers)
