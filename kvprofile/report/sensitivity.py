"""The sensitivity map of a profile as one document, and drawn on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from kvprofile.analysis.decision import Resampling
from kvprofile.analysis.scores import Scores, all_scores
from kvprofile.analysis.sensitivity import CRITICAL, PERCENTILES, layer_losses, sets_against_groups
from kvprofile.errors import BadInput
from kvprofile.layers import LayerRange, describe, describe_set
from kvprofile.report.terminal import add_row, new_table, number, percent, print_table
from kvprofile.report.text import print_line
from kvprofile.store.reader import Profile


def sensitivity_document(profile: Profile, direction: str = "forward", critical: float = CRITICAL) -> dict[str, Any]:
    """Returns the loss of every layer and of sets against groups, per task, dataset and metric.

    Raises:
        BadInput: If the map was not measured.
    """
    table = profile.sensitivity(direction)
    if table is None:
        raise BadInput(f"{profile.folder} has no sensitivity map; run kvprofile sensitivity {profile.folder}")
    profiled: dict[tuple[str, str, str], Scores] = {}
    if direction == "forward":
        profiled = {_key(one): one for one in all_scores(profile.measurements())}
    rows = profile.rows.to_pylist()
    resampling = Resampling.of(profile.header)
    blocks = []
    for scores in all_scores(table):
        key = _key(scores)
        losses = layer_losses(scores, critical)
        own = [r for r in rows if (r["task"], r["dataset"], r["metric"]) == key and r["on_frontier"]]
        against = sets_against_groups(scores, profiled[key], own, **resampling._asdict()) if key in profiled else []
        blocks.append(
            {
                **dict(zip(("task", "dataset", "metric"), key, strict=True)),
                "samples": len(scores.samples),
                "full_prefill_quality": float(np.nanmean(scores.baseline)),
                "layers": [one._asdict() for one in losses],
                "critical_layers": [one.layer for one in losses if one.critical],
                "sets_against_groups": [one._asdict() for one in against],
            }
        )
    return {
        "direction": direction,
        "critical_above": critical,
        "total_layers": rows[0]["total_layers"],
        "blocks": blocks,
    }


def print_map(console: Console, document: Mapping[str, Any]) -> None:
    """Prints what `sensitivity_document` returned."""
    reader = "the receiver reads one layer of the sender's cache"
    if document["direction"] == "reverse":
        reader = "roles exchanged: the sender reads one layer of the receiver's cache"
    for block in document["blocks"]:
        print_line(
            console,
            f"{block['task']} / {block['dataset']}, {block['metric']}, {block['samples']} samples, "
            f"full prefill {number(block['full_prefill_quality'], 3)}; {reader}",
        )
        table = new_table("layer", "loss", "points", *(f"{p}%" for p in PERCENTILES), "KL", "critical")
        for one in block["layers"]:
            spread = [number(one["percentiles"].get(p), 1) for p in PERCENTILES]
            critical = "yes" if one["critical"] else ""
            cells = [
                percent(one["loss_rel"]),
                number(one["loss_points"], 1),
                *spread,
                number(one["mean_kl"], 4),
                critical,
            ]
            add_row(table, [one["layer"], *cells])
        print_table(console, table)
        print_line(
            console, "(per cents: percentiles over samples of the loss in points; KL: nats from full prefill's tokens)"
        )
        unknown = all(one["loss_rel"] is None for one in block["layers"])
        listed = (
            "cannot tell, full prefill scores 0" if unknown else ", ".join(map(str, block["critical_layers"])) or "none"
        )
        print_line(console, f"critical layers (loss above {percent(document['critical_above'], 0)}): {listed}")
        _print_sets(console, block, document["total_layers"])
        console.print()


def _print_sets(console: Console, block: Mapping[str, Any], layers: int) -> None:
    if not block["sets_against_groups"]:
        return
    print_line(
        console,
        "the layers of largest KL as a set, each range with hidden states (E) of its own, against the frontier's group of as "
        "many layers (which is the best of its length on these very samples); bounds of the difference are one-sided",
    )
    table = new_table(
        "set", "group", "set's E\nlayers", "set", "group", "set less\ngroup, points", "at\nleast", "at\nmost", left=2
    )
    for one in block["sets_against_groups"]:
        group = describe(LayerRange(*one["group"]), layers)
        cells = [number(one[name], 3) for name in ("set_quality", "group_quality")]
        points = [number(one[name], 1) for name in ("difference_points", "lower", "upper")]
        add_row(table, [describe_set(one["set_params"]), group, one["set_e_layers"], *cells, *points])
    print_table(console, table)


def _key(scores: Scores) -> tuple[str, str, str]:
    return scores.task, scores.dataset, scores.metric
