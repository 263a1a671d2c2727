"""`kvprofile pareto`: the frontier of a profile and the cheapest plan within a loss."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

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
    profile: Annotated[
        str, typer.Argument(help="A profile's folder, its profile.parquet, a pair's folder or a store.")
    ],
    max_loss: Annotated[str | None, typer.Option(help="Loss to accept: 1% (relative) or 1pt (points).")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric; the task's first if not given.")] = None,
    task: Annotated[str | None, typer.Option(help="Only this task.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Only this dataset.")] = None,
    granularity: Annotated[
        int | None, typer.Option(help="Only groups that a sweep at this granularity alone would have measured.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Of the upper bounds; the profile's own if not given.")
    ] = None,
    as_json: JsonFlag = False,
    output: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
) -> None:
    """Print the frontier of recompute against quality, and the cheapest plan within --max-loss.

    Exits with 1 if a task has no plan within --max-loss.
    """
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss
    from kvprofile.report.frontier import block_document, frontier_blocks
    from kvprofile.report.terminal import frontier_csv, print_block
    from kvprofile.store.reader import load

    if as_json and output is Format.csv:
        raise BadInput("--json and --format csv contradict each other; give one of them")
    limit = None if max_loss is None else parse_loss(max_loss)
    loaded = load(profile)
    blocks = frontier_blocks(
        loaded,
        limit=limit,
        metric=metric,
        task=task,
        dataset=dataset,
        granularity=granularity,
        confidence=confidence,
    )
    if as_json or output is Format.json:
        identity = {"profile": str(loaded.folder), "profile_id": loaded.header["profile_id"]}
        print_json({**identity, "blocks": [block_document(block) for block in blocks]})
    elif output is Format.csv:
        typer.echo(frontier_csv(blocks), nl=False)
    else:
        console = out()
        for block in blocks:
            print_block(console, block)
        print_line(console, f"profile: {loaded.folder}")
    if limit is not None and any(block.selected is None for block in blocks):
        raise typer.Exit(1)
