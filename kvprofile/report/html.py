"""The report of a profile: one HTML file that needs nothing else, and its figures as files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvprofile.analysis.choice import beaten_by, can_serve
from kvprofile.analysis.label_free import rankings
from kvprofile.analysis.scores import FULL_PREFILL, Scores, all_scores
from kvprofile.errors import BadInput
from kvprofile.layers import PLAN_COLUMNS, describe_set, plan_key
from kvprofile.limits import LossLimit, Rule
from kvprofile.report import figures
from kvprofile.report.cost import bytes_of, layer_times
from kvprofile.report.cost_figure import wire_drawing
from kvprofile.report.figures import Drawing
from kvprofile.report.frontier import Block, Row, frontier_blocks, plan_text, saved
from kvprofile.report.sensitivity import sensitivity_document
from kvprofile.report.summary import summarize
from kvprofile.report.terminal import answer_lines, number, percent
from kvprofile.report.text import harmless, size
from kvprofile.report.validations import loss_text, verdict
from kvprofile.scoring import BUILT_IN, agreement, metric
from kvprofile.store.reader import MEASUREMENTS_FILE, Profile

_MOST_ANSWERS = 10
_LONGEST_ANSWER = 300


class Section(NamedTuple):
    """What the report says of one task, dataset and metric."""

    block: Block
    answer: list[str]
    drawings: list[Drawing]
    frontier: list[dict[str, Any]]
    label_free: list[dict[str, Any]]
    sensitivity: dict[str, Any] | None
    answers: list[dict[str, Any]]
    validations: list[dict[str, Any]]


def sections(
    profile: Profile, limit: LossLimit, rule: Rule, palette: figures.Palette | None = None
) -> Iterator[Section]:
    """Yields the sections of a report, task by task, main metrics only.

    Args:
        profile: The profile.
        limit: The loss to accept.
        rule: Which loss must be within it.
        palette: Colours of the figures; those of the report's theme if None.
    """
    colours: Any = {} if palette is None else {"palette": palette}
    measurements = profile.measurements() if (profile.folder / MEASUREMENTS_FILE).is_file() else None
    scores = {} if measurements is None else {(s.task, s.dataset, s.metric): s for s in all_scores(measurements)}
    maps = {d: sensitivity_document(profile, d) for d in ("forward", "reverse") if profile.sensitivity(d) is not None}
    validations, times = profile.validations(), layer_times(profile)
    for block in frontier_blocks(profile, limit=limit, rule=rule):
        key = (block.task, block.dataset, block.metric)
        own: Scores | None = scores.get(key)
        fresh = [v for v in validations if (v["task"], v["metric"]) == (block.task, block.metric)]
        layers = {
            direction: next((b for b in held["blocks"] if (b["task"], b["dataset"], b["metric"]) == key), None)
            for direction, held in maps.items()
        }
        sensitive, reverse = layers.get("forward"), layers.get("reverse")
        shown = block.selected or (block.decision.measured if block.decision else None)
        differences = _differences(own, shown) if own and shown else []
        title = f"{plan_text(shown)} against full prefill, sample by sample" if shown else ""
        drawn = [
            figures.frontier_drawing(block, fresh, **colours),
            figures.groups_drawing(block, **colours),
            figures.sensitivity_drawing(sensitive, **colours) if sensitive else None,
            figures.sensitivity_drawing(reverse, reverse=True, **colours) if reverse else None,
            figures.differences_drawing(title, differences, **colours),
            wire_drawing(block, times, **colours) if times else None,
        ]
        yield Section(
            block=block,
            answer=answer_lines(block),
            drawings=[one for one in drawn if one is not None],
            frontier=[_frontier_row(row, chosen=row is block.selected) for row in block.frontier],
            label_free=_label_free(profile, own, block, measurements) if own else [],
            sensitivity=sensitive,
            answers=_answers(measurements, block, shown) if measurements is not None and shown else [],
            validations=fresh,
        )


def report_html(profile: Profile, limit: LossLimit, rule: Rule) -> str:
    """Returns the report as one HTML document; every text from models and files is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "number": number, "size": size, "ranges": describe_set}
    environment.globals |= {
        "loss_text": loss_text,
        "verdict": verdict,
        "svg": figures.svg,
        "place": figures.place,
        "tips": figures.tips,
    }
    template = environment.get_template("report.html.j2")
    return template.render(
        summary=summarize(profile),
        sections=list(sections(profile, limit, rule)),
        times=layer_times(profile),
    )


def _shown(value: Any) -> Any:
    """Returns texts line by line without control and bidirectional characters; markup, which is ours, as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "\n".join(harmless(line) for line in value.split("\n"))


def write_report(profile: Profile, target: Path, limit: LossLimit, rule: Rule) -> None:
    """Writes the report under a temporary name and renames it.

    Raises:
        BadInput: If it cannot be written there.
    """
    _write(target, report_html(profile, limit, rule).encode("utf-8", "backslashreplace"))


def write_figures(profile: Profile, folder: Path, limit: LossLimit, rule: Rule) -> list[Path]:
    """Writes every figure as PNG and SVG and returns the files."""
    written = []
    for section in sections(profile, limit, rule, figures.LIGHT):
        block = section.block
        for drawing in section.drawings:
            stem = "-".join(_safe(part) for part in (drawing.name, block.task, block.dataset, block.metric))
            for kind in ("png", "svg"):
                written.append(folder / f"{stem}.{kind}")
                _write(written[-1], figures.file_bytes(drawing, kind))
    return written


def _write(target: Path, content: bytes) -> None:
    temporary = target.with_name(f".tmp-{os.getpid()}-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadInput(f"cannot write {target} ({error.strerror}); give another place") from error


def _safe(part: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in part)[:40].lstrip(".")


def _differences(scores: Scores, row: Row) -> list[tuple[str, float]]:
    value = 100 * (scores.of(plan_key(row), scores.value) - scores.baseline)
    return [(name, float(v)) for name, v in zip(scores.samples, value, strict=True) if not np.isnan(v)]


def _frontier_row(row: Row, chosen: bool) -> dict[str, Any]:
    tokens = row["context_tokens_median"]
    return {
        "gap_recovered_lower": None,
        "gap_recovered_upper": None,
        **row,
        "plan": plan_text(row),
        "chosen": chosen,
        "saved": saved(row["prefill_flops"], row["full_prefill_flops"]),
        "timed": saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]),
        "kv_bytes": bytes_of(row["kv_bytes_per_token"], tokens),
        "e_bytes": bytes_of(row["e_bytes_per_token"], tokens),
        "beaten_by": beaten_by(row),
    }


def _label_free(profile: Profile, scores: Scores, block: Block, measurements: Any) -> list[dict[str, Any]]:
    if profile.header["references"] == "none":
        return []
    plans = [plan_key(row) for row in block.rows if can_serve(row)]
    own = metric(block.metric) if block.metric in BUILT_IN else None
    agree = (lambda output, full: agreement(own, output, full)) if own else None
    return [one._asdict() for one in rankings(scores, plans, measurements, agree)]


def _answers(measurements: Any, block: Block, row: Row) -> list[dict[str, Any]]:
    """Returns the answers on which the plan loses most, beside full prefill's."""
    key = plan_key(row)
    wanted = (pc.field("task") == block.task) & (pc.field("dataset") == block.dataset)
    plans = pc.field("strategy").isin(["full_prefill", key[0]])
    columns = [*PLAN_COLUMNS, "sample_id", "value", "output_text"]
    table = measurements.filter(wanted & (pc.field("metric") == block.metric) & plans).select(columns)
    texts: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for one in table.to_pylist():
        if plan_key(one) in (key, FULL_PREFILL):
            texts.setdefault(one["sample_id"], {})[plan_key(one)] = one
    both = [
        {
            "sample": sample,
            "loss": pair[FULL_PREFILL]["value"] - pair[key]["value"],
            "texts": [str(pair[name]["output_text"])[:_LONGEST_ANSWER] for name in (FULL_PREFILL, key)],
        }
        for sample, pair in texts.items()
        if len(pair) == 2 and None not in [pair[name][c] for name in pair for c in ("value", "output_text")]
    ]
    return sorted((one for one in both if one["loss"] > 0), key=lambda one: -one["loss"])[:_MOST_ANSWERS]
