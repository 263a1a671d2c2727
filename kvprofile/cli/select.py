"""`kvprofile select`: one plan as JSON, as a runtime would choose."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.options import RULE_HELP
from kvprofile.cli.output import JsonFlag, print_json


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile select outputs --max-loss 5% --rule bound")(select)


def select(
    profile: Annotated[
        str, typer.Argument(help="A profile's folder, its profile.parquet, a pair's folder or a store.")
    ],
    max_loss: Annotated[str, typer.Option(help="Loss to accept: 1% (relative) or 1pt (points).")],
    rule: Annotated[str, typer.Option(help=RULE_HELP)] = "point",
    split: Annotated[
        float | None, typer.Option(help="Share of the samples that chooses, such as 0.5; the others judge.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Needed if the profile has several.")] = None,
    all_tasks: Annotated[bool, typer.Option(help="One plan within the limit on every task and dataset.")] = False,
    dataset: Annotated[str | None, typer.Option(help="Only this dataset.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric; the task's first if not given.")] = None,
    confidence: Annotated[
        float | None, typer.Option(help="Of the upper bounds; the profile's own if not given.")
    ] = None,
    as_json: JsonFlag = True,
) -> None:
    """Print the cheapest plan within --max-loss as JSON; its loss as measured, its upper bound, and how sure it is.

    Exits with 1 if there is none: run the full prefill then.
    """
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss, parse_rule
    from kvprofile.report.documents import selection_document
    from kvprofile.report.frontier import everywhere, frontier_blocks
    from kvprofile.store.reader import load

    limit, by = parse_loss(max_loss), parse_rule(rule)
    if all_tasks and split is not None:
        raise BadInput("--all-tasks selects on all samples; give no --split")
    if all_tasks and (task or dataset or metric):
        raise BadInput(
            "--all-tasks means every task and dataset by its first metric; give no --task, --dataset or --metric"
        )
    loaded = load(profile)
    blocks = frontier_blocks(
        loaded, limit=limit, rule=by, split=split, task=task, dataset=dataset, metric=metric, confidence=confidence
    )
    if len(blocks) > 1 and not all_tasks:
        known = ", ".join(f"{block.task}/{block.dataset}" for block in blocks)
        raise BadInput(f"the profile has {known}; choose with --task and --dataset, or give --all-tasks")
    rows = everywhere(blocks, by) if all_tasks else None
    if not all_tasks and blocks[0].selected is not None:
        rows = [blocks[0].selected]
    print_json(selection_document(loaded, blocks, rows))
    if rows is None:
        raise typer.Exit(1)
