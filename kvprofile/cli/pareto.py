"""`kvprofile pareto`: the frontier of a profile and the cheapest plan within a loss."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kvprofile.cli.arguments import (
    ConfidenceOption,
    LossOption,
    MaxStartsOption,
    MetricOption,
    OnlyDatasetOption,
    OnlyTaskOption,
    ProfileArgument,
    RuleOption,
    SplitOption,
)
from kvprofile.cli.options import MAX_STARTS_ALONE
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import print_line


class Format(StrEnum):
    """How the frontier is printed."""

    table = "table"
    csv = "csv"
    json = "json"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile pareto outputs --max-loss 1%")(pareto)


def pareto(
    profile: ProfileArgument,
    max_loss: LossOption = None,
    rule: RuleOption = "point",
    split: SplitOption = None,
    all_tasks: Annotated[bool, typer.Option(help="Select one plan for all tasks and datasets.")] = False,
    metric: MetricOption = None,
    task: OnlyTaskOption = None,
    dataset: OnlyDatasetOption = None,
    granularity: Annotated[
        int | None, typer.Option(help="Only groups that a sweep at this granularity alone would have measured.")
    ] = None,
    confidence: ConfidenceOption = None,
    max_starts: MaxStartsOption = None,
    as_json: JsonFlag = False,
    output: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
) -> None:
    """Print the frontier of recompute against quality, and the cheapest plan within --max-loss.

    Exits with 1 if a task has no plan within --max-loss, or with --all-tasks if no plan is within it on all of them.
    """
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss, parse_rule
    from kvprofile.report.documents import block_document, plan_document
    from kvprofile.report.frontier import everywhere, frontier_blocks
    from kvprofile.report.serving import kept_lines, kept_of, with_kept_starts
    from kvprofile.report.terminal import frontier_csv, print_block, print_everywhere
    from kvprofile.store.reader import load

    if as_json and output is Format.csv:
        raise BadInput("--json and --format csv contradict each other; give one of them")
    limit = None if max_loss is None else parse_loss(max_loss)
    if all_tasks and (limit is None or split is not None):
        raise BadInput("--all-tasks selects within --max-loss on all samples; give --max-loss and no --split")
    if all_tasks and (task or dataset or metric):
        raise BadInput(
            "--all-tasks means every task and dataset by its first metric; give no --task, --dataset or --metric"
        )
    if max_starts is not None and (all_tasks or split is not None or granularity is not None or rule == "certified"):
        raise BadInput(MAX_STARTS_ALONE)
    loaded, kept = with_kept_starts(load(profile), max_starts, task, dataset, metric)
    blocks = frontier_blocks(
        loaded,
        limit=limit,
        rule=parse_rule(rule),
        split=split,
        metric=metric,
        task=task,
        dataset=dataset,
        granularity=granularity,
        confidence=confidence,
    )
    if kept:  # what a coarser grid would have selected is asked of all starts
        blocks = [block._replace(grids={}) for block in blocks]
    common = everywhere(blocks, parse_rule(rule)) if all_tasks else None
    if as_json or output is Format.json:
        together = {"selected_on_all_tasks": common and [plan_document(row) for row in common]} if all_tasks else {}
        identity = {"profile": str(loaded.folder), "profile_id": loaded.header["profile_id"]}
        print_json({**identity, **together, "blocks": [{**block_document(b), **kept_of(b, kept)} for b in blocks]})
    elif output is Format.csv:
        typer.echo(frontier_csv(blocks), nl=False)
    else:
        console = out()
        for block in blocks:
            print_block(console, block)
        if all_tasks:
            print_everywhere(console, blocks, common)
        for line in kept_lines(blocks, kept):
            print_line(console, line)
        print_line(console, f"profile: {loaded.folder}")
    missing = common is None if all_tasks else any(block.selected is None for block in blocks)
    if limit is not None and missing:
        raise typer.Exit(1)
