"""Draws frontiers on a terminal and writes them as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvprofile.analysis.choice import REFERENCE_ARMS, beaten_by
from kvprofile.layers import groups, plan_key
from kvprofile.limits import Rule
from kvprofile.report.documents import plan_document
from kvprofile.report.frontier import Block, Row, plan_text, saved
from kvprofile.report.terminal_plot import frontier_plot
from kvprofile.report.text import harmless, print_line

if TYPE_CHECKING:
    from kvprofile.analysis.decision import Decision

_WIDTH_OF_FILES = 500
_WIDTH_FOR_BYTES = 110
_UNKNOWN = "–"
_SURENESS: dict[Rule, str] = {"point": "measured", "bound": "bounded", "certified": "certified"}


def print_block(console: Console, block: Block) -> None:
    """Prints caption, frontier and answer for one task and dataset."""
    for line in _caption(block):
        print_line(console, line)
    wide = not console.is_terminal or console.width >= _WIDTH_FOR_BYTES
    print_table(console, _frontier_table(block, wide))
    if not wide:
        print_line(console, "(E and KV bytes per token: in a wider terminal, or with --format csv)")
    for line in (*frontier_plot(block), *answer_lines(block)):
        print_line(console, line)
    console.print()


def print_everywhere(console: Console, blocks: Sequence[Block], rows: Sequence[Row] | None) -> None:
    """Prints which plan is within the limit on every task, with its loss on each."""
    decision = blocks[0].decision
    assert decision is not None
    within = f"{_SURENESS[decision.rule]} within {blocks[0].limit}{_at(decision, blocks[0])}"
    if rows is None:
        print_line(console, f"No plan is {within} on all of the {len(blocks)} tasks and datasets: use full_prefill.")
        return
    losses = [f"{b.task} / {b.dataset} {_loss(row, b)}" for b, row in zip(blocks, rows, strict=True)]
    print_line(console, f"Cheapest plan {within} on all tasks: {plan_text(rows[0])}; loss on {', '.join(losses)}.")


def print_table(console: Console, table: Table) -> None:
    """Prints a table as wide as the terminal; without one, wide enough that nothing wraps."""
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)


def new_table(*columns: str, left: int = 1) -> Table:
    """Returns an empty table whose first `left` columns hold words, which may wrap, and whose others hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        heading = Text("\n".join(harmless(line) for line in column.split("\n")))
        words = i < left
        table.add_column(heading, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    return table


def add_row(table: Table, cells: Sequence[object]) -> None:
    """Adds a row of any texts; None is shown as a dash."""
    table.add_row(*(Text(_UNKNOWN if cell is None else harmless(cell)) for cell in cells))


def percent(share: float | None, digits: int = 1) -> str | None:
    """Returns a share as per cents, None for None."""
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    return None if share is None else f"{round(100 * share, digits) + 0.0:.{digits}f}%"


def number(value: float | None, digits: int) -> str | None:
    """Returns a rounded number, None for None."""
    return None if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def frontier_csv(blocks: Sequence[Block]) -> str:
    """Returns the frontiers as CSV, one row per plan, `selected` true for the plan within the loss."""
    file = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for block in blocks:
        for row in block.frontier:
            where = {"task": block.task, "dataset": block.dataset, "metric": block.metric}
            document: Row = {k: v for k, v in plan_document(row).items() if k != "not_known"}
            document["beaten_by"] = " ".join(document["beaten_by"])
            cells = {**where, **document, "confidence": block.confidence, "selected": row is block.selected}
            if writer is None:
                writer = csv.DictWriter(file, list(cells), lineterminator="\n")
                writer.writeheader()
            writer.writerow({k: harmless(v) if isinstance(v, str) else v for k, v in cells.items()})
    return file.getvalue()


def _caption(block: Block) -> list[str]:
    scores = [
        f"{arm} {number(block.arms[arm]['quality'], 3) or 'not measured'}"
        for arm in ("full_prefill", "full_reuse", "sender_alone", "no_context")
        if arm in block.arms
    ]
    sample = next(iter(block.arms.values()), None) or (block.frontier[0] if block.frontier else None)
    counts = f", {sample['n_scored']} of {sample['n_planned']} samples" if sample else ""
    grid = f", groups of granularity {block.granularity} only" if block.granularity else ""
    agreement = " of agreement with the receiver's own full prefill" if block.by_agreement else ""
    return [
        f"{block.task} / {block.dataset}, {block.metric}{agreement}{counts}{grid}",
        f"  {', '.join(scores)}",
        f"  upper bounds are one-sided at {100 * block.confidence:g}%, losses are against full_prefill",
        *(
            [f"  chosen on {chose} of the samples, all numbers are of the {sample['n_scored'] if sample else 0} others"]
            if (chose := block.decision.selection_samples if block.decision else None)
            else []
        ),
    ]


def _frontier_table(block: Block, wide: bool) -> Table:
    timed = any(row["measured_prefill_ms"] is not None for row in block.frontier)
    table = new_table(
        *("plan", "re-\ncompute", block.metric, "loss", "at\nmost", "points", "at\nmost", "prefill\nsaved,\nmodelled"),
        *(["prefill\nsaved,\nmeasured"] if timed else []),
        *(["E\nbytes/\ntoken", "KV\nbytes/\ntoken"] if wide else []),
    )
    for row in block.frontier:
        cells = [
            plan_text(row),
            percent(row["recompute_fraction"], 0),
            number(row["quality"], 3),
            percent(row["loss_rel"]),
            percent(row["loss_rel_upper"]),
            number(row["loss_points"], 1),
            number(row["loss_points_upper"], 1),
            percent(saved(row["prefill_flops"], row["full_prefill_flops"]), 0),
            *([percent(saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]), 0)] if timed else []),
            *([row["e_bytes_per_token"], row["kv_bytes_per_token"]] if wide else []),
        ]
        add_row(table, cells)
    return table


def answer_lines(block: Block) -> list[str]:
    """Returns what is selected, how sure that is, and what is worthless, in sentences."""
    worthless = _worthless(block)
    if block.decision is None:
        return worthless
    lines = [f"{_selected(block.decision, block)}." if block.selected else _none(block)]
    lines += [*_surer(block.decision, block), *worthless]
    for unit, row in block.grids.items():
        plan = f"{plan_text(row)}, loss {_loss(row, block)}" if row else "no plan"
        lines.append(f"Granularity {unit} alone ({_group_count(block, unit)} groups) would have selected {plan}.")
    return lines


def _worthless(block: Block) -> list[str]:
    """Returns which plans of the frontier the arms to compare with beat, in a sentence for each of these."""
    plans: dict[tuple[str, ...], list[str]] = {}
    for row in block.frontier:
        if beaten := beaten_by(row):
            plans.setdefault(tuple(beaten), []).append(plan_text(row))
    sentences = []
    for arms, names in plans.items():
        several, both = len(names) > 1, len(arms) == len(REFERENCE_ARMS)
        subject = f"{'are' if several else 'is'} worthless: {'they' if several else 'it'} " if both else ""
        sentences.append(
            f"{', '.join(names)} {subject}score{'' if several else 's'} no better than {' and '.join(arms)}."
        )
    return sentences


def _selected(decision: Decision, block: Block) -> str:
    row = block.selected
    assert row is not None
    within = f"{_SURENESS[decision.rule]} within {block.limit}" + _at(decision, block)
    if block.granularity:
        lead = f"A sweep at granularity {block.granularity} alone would have selected, {within},"
    else:
        lead = f"Cheapest plan {within}:"
    modelled = percent(saved(row["prefill_flops"], row["full_prefill_flops"]), 0)
    timed = percent(saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]), 0)
    parts = [
        f"{lead} {plan_text(row)}",
        f"{block.metric} {number(row['quality'], 3)} against {number(row['baseline_quality'], 3)}",
        f"loss {_loss(row, block)}",
        *([f"{modelled} of the prefill FLOPs saved (modelled)"] if modelled else []),
        *([f"{timed} of its time (measured)"] if timed else []),
    ]
    return ", ".join(parts)


def _at(decision: Decision, block: Block) -> str:
    if decision.rule == "point":
        return ""
    among = f" for all {decision.tested} plans at once" if decision.tested > 1 else ""
    return f" at {100 * block.confidence:g}%{among}"


def _surer(decision: Decision, block: Block) -> list[str]:
    """Returns what would make the answer surer."""
    lines = []
    row = decision.selected
    if row is not None and (fresh := block.validated.get(plan_key(row))):
        lines.append(f"Validated on fresh data: {'; '.join(fresh)}.")
    if decision.rule == "point" and row is not None and block.limit and not block.limit.allows(row, "bound"):
        known = row[block.limit.column("bound")] is not None
        why = "Its upper bound lies above the limit" if known else "It has no upper bound"
        lines.append(f"{why}: measure more contexts to be sure.")
    verb = "certify" if decision.rule == "certified" else "bound"
    for asked, samples in decision.needed:
        lead = f"To {verb} {plan_text(asked)} within {block.limit} would take"
        if samples is None:
            lines.append(
                f"{lead} more samples than these can tell: they are too few, or its loss is too close to the limit or above it."
            )
        else:
            lines.append(f"{lead} about {samples} samples, if further ones look like these.")
    if decision.rule == "bound" and decision.selected and decision.selection_samples is None:
        lines.append("The bound is of each plan by itself; --split 0.5 chooses on one half and bounds on the other.")
    return lines


def _loss(row: Row, block: Block) -> str:
    unit = block.limit.unit if block.limit else "%"
    column = "loss_points" if unit == "pt" else "loss_rel"

    def shown(end: str) -> str:
        value = row.get(column + end)
        return (number(value, 1) if unit == "pt" else percent(value)) or "unknown"

    certified = f", certified at most {shown('_certified')}" if f"{column}_certified" in row else ""
    return f"{shown('')}{' points' if unit == 'pt' else ''} (at most {shown('_upper')}{certified})"


def _none(block: Block) -> str:
    full = block.arms.get("full_prefill")
    decision = block.decision
    assert decision is not None
    if (
        full is not None
        and full["quality"] is not None
        and full["quality"] <= 0
        and block.limit
        and block.limit.unit == "%"
    ):
        return f"No plan within {block.limit}: full_prefill scores {full['quality']:g}, so give points, such as 1pt."
    if decision.rule == "certified" and decision.measured and decision.measured.get("loss_points_certified") is None:
        return f"No plan can be certified: {block.metric} is not known to stay between 0 and 1; use --rule bound."
    if decision.measured is not None and decision.rule == "point":
        return (
            f"No plan: {plan_text(decision.measured)} is within {block.limit} on the samples that chose it, but measures "
            f"{_loss(decision.measured, block)} on the others; use full_prefill."
        )
    if decision.measured is not None:
        return (
            f"No plan is {_SURENESS[decision.rule]} within {block.limit}{_at(decision, block)}: insufficient evidence. "
            f"{plan_text(decision.measured)} measures {_loss(decision.measured, block)}; until more is known, use full_prefill."
        )
    if block.unscored:
        return (
            f"No plan within {block.limit} among those scored on all samples; {block.unscored} were not: they failed "
            "(see kvprofile show) or an adaptive search left them."
        )
    grid = f" of granularity {block.granularity}" if block.granularity else ""
    return f"No plan{grid} that saves prefill loses at most {block.limit}: use full_prefill or accept more loss."


def _group_count(block: Block, unit: int) -> int:
    layers = next(iter(block.arms.values()), None) or block.frontier[0]
    return len(groups(layers["total_layers"], unit))
