"""Draws the summary of a profile and the list of a store on a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from kvprofile.report.summary import ARMS
from kvprofile.report.terminal import add_row, new_table, number, print_table
from kvprofile.report.text import print_line, short_list, size
from kvprofile.report.validations import print_validation
from kvprofile.store.index import Entry

_HASH_LENGTH = 12


def print_summary(console: Console, summary: Mapping[str, Any]) -> None:
    """Prints what `summarize` returned."""
    print_line(console, f"profile {summary['profile']}")
    for standing in _standing(summary["rejected"], summary["accepted"]):
        print_line(console, f"  {standing}")
    _print_fields(console, summary["header"])
    _print_pair(console, summary["pair"])
    print_line(console, "environment")
    environment = dict(summary["environment"] or {"environment.json": "not there"})
    timings = environment.pop("prefill_timings", [])
    _print_fields(console, environment)
    _print_timings(console, timings)
    print_line(console, "data")
    for entry in summary["data"]["datasets"]:
        until = f", answers of {entry['task']} end at {short_list(entry['stop'])}" if "stop" in entry else ""
        hashes = f"{_short(entry['sha256'])}, samples {_short(entry['sample_ids_sha256'])}"
        print_line(console, f"  {entry['name']}: {hashes}{until}")
    print_line(console, f"  metrics: {_shown(summary['data']['metrics'])}")
    _print_baselines(console, summary["baselines"])
    _print_counts(console, summary)
    for validation in summary["validations"]:
        print_validation(console, validation)


def _print_timings(console: Console, timings: Sequence[Mapping[str, Any]]) -> None:
    for timing in timings:
        times = timing["prefill_ms"]
        group = f"layers {timing['start_layer']}–{timing['stop_layer'] - 1}"
        print_line(
            console,
            f"  prefill of {timing['context_tokens']} tokens, {group}: {number(statistics.median(times), 1)} ms "
            f"(median of {len(times)}, {number(min(times), 1)} to {number(max(times), 1)})",
        )


def print_entries(console: Console, entries: Sequence[Entry], out: str) -> None:
    """Prints the versions of a store, or that there are none."""
    if not entries:
        print_line(console, f"no profiles in {out}; make one with `kvprofile sweep RECIPE --out {out}`")
        return
    table = new_table(
        "profile",
        "receiver",
        "sender",
        "created",
        "tasks",
        "search",
        "remarks",
        "plans",
        "samples",
        "format",
        "size",
        left=7,
    )
    for entry in entries:
        what = [entry.receiver, entry.sender, entry.created_at, ", ".join(entry.tasks), entry.search]
        if entry.problem is not None:
            what = [f"unreadable: {entry.problem}", "", "", "", ""]
        counts = (entry.plans, entry.samples, entry.format)
        add_row(table, [entry.path, *what, "; ".join(_remarks(entry)), *counts, size(entry.bytes)])
    print_table(console, table)


def _standing(rejected: str | None, accepted: str | None) -> list[str]:
    """Returns whether a version was rejected, and whether that holds; nothing of one that never was."""
    known = [] if rejected is None else [f"rejected: {rejected}"]
    return known if accepted is None else [*known, f"accepted (was rejected: {accepted})"]


def _remarks(entry: Entry) -> list[str]:
    times = f"validated {entry.validations} time{'' if entry.validations == 1 else 's'}"
    known = (("pinned", entry.pinned), (times, entry.validations > 0))
    return [*_standing(entry.rejected, entry.accepted), *(remark for remark, holds in known if holds)]


def _print_pair(console: Console, pair: Mapping[str, Any]) -> None:
    for role in ("receiver", "sender"):
        model = pair[role]
        revision = f" @ {model['revision']}" if model["revision"] else ""
        print_line(console, f"{role} {model['name']}{revision}")
        heads = f"{model['kv_heads']} KV heads of {model['head_dim']}"
        shape = f"{model['layers']} layers, {heads}, hidden {model['hidden_size']}"
        print_line(
            console,
            f"  {model['architecture']}, {shape}, {model['dtype']}, quantization {_shown(model['quantization'])}",
        )
        print_line(
            console, f"  weights {_short(model['weights_sha256'])}, tokenizer {_short(model['tokenizer_sha256'])}"
        )


def _print_baselines(console: Console, baselines: Sequence[Mapping[str, Any]]) -> None:
    table = new_table("task", "dataset", "metric", *ARMS, "scored", left=3)
    for block in baselines:
        arms = block["arms"]
        scored = sorted({f"{arm['n_scored']} of {arm['n_planned']}" for arm in arms.values()})
        qualities = [number(arms[arm]["quality"], 3) if arm in arms else None for arm in ARMS]
        add_row(table, [block["task"], block["dataset"], block["metric"], *qualities, ", ".join(scored)])
    print_table(console, table)


def _print_counts(console: Console, summary: Mapping[str, Any]) -> None:
    grids = ", ".join(f"{n} groups of granularity {g}" for g, n in summary["plans"]["groups_by_granularity"].items())
    print_line(console, f"plans: {summary['plans']['total']}{f' ({grids})' if grids else ''}")
    if summary["left_by_the_search"] is not None:
        print_line(console, f"groups that the search left: {summary['left_by_the_search']} (search.parquet says why)")
    if summary["sensitivity"]:
        print_line(console, f"sensitivity map: {', '.join(summary['sensitivity'])} (kvprofile sensitivity prints it)")
    samples, errors = summary["samples"], summary["errors"]
    if samples:
        cut = f" (up to {samples['most_truncated_tokens']} tokens)" if samples["truncated"] else ""
        print_line(console, f"samples: {samples['total']}, {samples['truncated']} truncated{cut}")
    if errors:
        print_line(console, f"errors: {errors['total']}")
        for entry in errors["most_frequent"]:
            print_line(console, f"  {entry['count']} × {entry['error']}")
    files = ", ".join(f"{file['name']} {size(file['bytes'])}" for file in summary["files"])
    print_line(console, f"files: {files}")


def _print_fields(console: Console, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        shown = _short(value) if name.endswith("sha256") else _shown(value)
        print_line(console, f"  {name}: {shown}")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_shown(item) for item in value)
    return str(value)


def _short(fingerprint: Any) -> str:
    return str(fingerprint)[:_HASH_LENGTH]
