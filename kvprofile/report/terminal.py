"""Draws frontiers on a terminal and writes them as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvprofile.layers import groups
from kvprofile.report.frontier import Block, Row, plan_document, plan_text, saved
from kvprofile.report.text import harmless, print_line

_WIDTH_OF_FILES = 500
_WIDTH_FOR_BYTES = 110
_UNKNOWN = "–"
_UNSURE = "The upper bound lies above the limit: measure more contexts to be sure"


def print_block(console: Console, block: Block) -> None:
    """Prints caption, frontier and answer for one task and dataset."""
    for line in _caption(block):
        print_line(console, line)
    wide = not console.is_terminal or console.width >= _WIDTH_FOR_BYTES
    print_table(console, _frontier_table(block, wide))
    if not wide:
        print_line(console, "(E and KV bytes per token: in a wider terminal, or with --format csv)")
    for line in _answer(block):
        print_line(console, line)
    console.print()


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
            cells = {**where, **plan_document(row), "confidence": block.confidence, "selected": row is block.selected}
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
    return [
        f"{block.task} / {block.dataset}, {block.metric}{counts}{grid}",
        f"  {', '.join(scores)}",
        f"  upper bounds are one-sided at {100 * block.confidence:g}%, losses are against full_prefill",
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


def _answer(block: Block) -> list[str]:
    if block.limit is None:
        return []
    if block.granularity:
        lead = f"A sweep at granularity {block.granularity} alone would have selected"
    else:
        lead = f"Cheapest plan within {block.limit}:"
    lines = [f"{lead} {_sentence(block.selected, block)}." if block.selected else _none(block)]
    for unit, row in block.grids.items():
        plan = f"{plan_text(row)}, loss {_loss(row, block)}" if row else "no plan"
        lines.append(f"Granularity {unit} alone ({_group_count(block, unit)} groups) would have selected {plan}.")
    return lines


def _sentence(row: Row, block: Block) -> str:
    modelled = percent(saved(row["prefill_flops"], row["full_prefill_flops"]), 0)
    measured = percent(saved(row["measured_prefill_ms"], row["measured_full_prefill_ms"]), 0)
    parts = [
        plan_text(row),
        f"{block.metric} {number(row['quality'], 3)} against {number(row['baseline_quality'], 3)}",
        f"loss {_loss(row, block)}",
        *([f"{modelled} of the prefill FLOPs saved (modelled)"] if modelled else []),
        *([f"{measured} of its time (measured)"] if measured else []),
    ]
    return ", ".join(parts) + ("" if _sure(row, block) else f". {_UNSURE}")


def _sure(row: Row, block: Block) -> bool:
    upper = {"loss_rel": row["loss_rel_upper"], "loss_points": row["loss_points_upper"]}
    return block.limit is None or block.limit.allows(upper)


def _loss(row: Row, block: Block) -> str:
    if block.limit and block.limit.unit == "pt":
        value, upper = number(row["loss_points"], 1), number(row["loss_points_upper"], 1)
        return f"{value} points (at most {upper or 'unknown'})"
    return f"{percent(row['loss_rel'])} (at most {percent(row['loss_rel_upper']) or 'unknown'})"


def _none(block: Block) -> str:
    full = block.arms.get("full_prefill")
    if full is not None and full["quality"] == 0 and block.limit and block.limit.unit == "%":
        return f"No plan within {block.limit}: full_prefill scores 0, so give points, such as 1pt."
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
