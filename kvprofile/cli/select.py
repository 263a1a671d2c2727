"""`kvprofile select`: one plan as JSON, as a runtime would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvprofile.cli.arguments import (
    RULE_HELP,
    ConfidenceOption,
    MaxStartsOption,
    MetricOption,
    OneTaskOption,
    OnlyDatasetOption,
    ProfileArgument,
    SplitOption,
)
from kvprofile.cli.options import MAX_STARTS_ALONE
from kvprofile.cli.output import JsonFlag, log, print_json
from kvprofile.report.text import print_line

if TYPE_CHECKING:
    from kvprofile.report.serving import Served

_PER_REQUEST = "--tokens, --bandwidth, --latency, --waiting, --slo and --rule validated"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile select outputs --max-loss 5% --rule bound")(select)


def select(
    profile: ProfileArgument,
    max_loss: Annotated[str, typer.Option(help="Loss to accept: 1% (relative) or 1pt (points).")],
    rule: Annotated[
        str, typer.Option(help=f"{RULE_HELP[:-1]}; or validated (measured, and held on fresh data).")
    ] = "point",
    split: SplitOption = None,
    task: OneTaskOption = None,
    all_tasks: Annotated[bool, typer.Option(help="One plan within the limit on every task and dataset.")] = False,
    dataset: OnlyDatasetOption = None,
    metric: MetricOption = None,
    confidence: ConfidenceOption = None,
    tokens: Annotated[int | None, typer.Option(help="Of the request's context.")] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of the link that the cache comes through: 100Gbps or 12.5GB/s.")
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Of that link, such as 1ms.")] = None,
    waiting: Annotated[int, typer.Option(help="Requests that wait: then the fewest recomputed layers.")] = 0,
    slo: Annotated[str | None, typer.Option(help="Time to the first token that is good enough, such as 500ms.")] = None,
    max_starts: MaxStartsOption = None,
    as_json: JsonFlag = True,
) -> None:
    """Print the plan that a runtime would take within --max-loss as JSON: its loss, how sure it is, and why no other.

    That is the cheapest one, unless --slo leaves time for more recompute and so better quality. Exits with 1 if it is the full
    prefill.
    """
    from kvprofile.errors import BadInput, one_of
    from kvprofile.limits import BOUND_METHOD, RULES, parse_loss, parse_rule
    from kvprofile.report.documents import selection_document
    from kvprofile.report.frontier import everywhere, frontier_blocks
    from kvprofile.report.serving import (
        Served,
        decide,
        decided_rows,
        kept_of,
        rejected_since,
        with_decision,
        with_kept_starts,
    )
    from kvprofile.runtime.store import load_usable

    limit = parse_loss(max_loss)
    by = "point" if one_of(rule, (*RULES, "validated"), "rule") == "validated" else parse_rule(rule)
    request = _request(tokens, bandwidth, latency, waiting, slo)
    alone = split is None and not all_tasks and confidence is None and by != "certified"
    per_request = rule == "validated" or request != Served()
    _check_alone(alone, per_request, max_starts)
    if all_tasks:
        _check_all_tasks(split, task or dataset or metric)
    loaded, kept = with_kept_starts(load_usable(profile), max_starts, task, dataset, metric)
    blocks = frontier_blocks(
        loaded, limit=limit, rule=by, split=split, task=task, dataset=dataset, metric=metric, confidence=confidence
    )
    if len(blocks) > 1 and not all_tasks:
        known = ", ".join(f"{block.task}/{block.dataset}" for block in blocks)
        raise BadInput(f"the profile has {known}; choose with --task and --dataset, or give --all-tasks")
    block, decided = blocks[0], None
    rows = [block.selected] if block.selected is not None else None
    if all_tasks:
        rows = everywhere(blocks, by)
    elif per_request or (alone and loaded.header["bounds"] == BOUND_METHOD):
        decided = decide(loaded, block, limit, rule, request)
        rows = decided_rows(block, decided.decision)
    if remark := rejected_since(profile, loaded.folder):
        print_line(log(), remark)
    document = {**selection_document(loaded, blocks, rows), **kept_of(block, kept), "decision": None}
    print_json(document if decided is None else with_decision(document, loaded, rows, decided))
    if rows is None:
        raise typer.Exit(1)


def _check_all_tasks(split: float | None, only: str | None) -> None:
    from kvprofile.errors import BadInput

    if split is not None:
        raise BadInput("--all-tasks selects on all samples; give no --split")
    if only:
        raise BadInput(
            "--all-tasks means every task and dataset by its first metric; give no --task, --dataset or --metric"
        )


def _check_alone(alone: bool, per_request: bool, max_starts: int | None) -> None:
    """Refuses options that hold for one block of all samples at the profile's own confidence, where something else is asked."""
    from kvprofile.errors import BadInput

    if per_request and not alone:
        raise BadInput(
            f"{_PER_REQUEST} are about one request; give no --split, --all-tasks, --confidence or --rule certified"
        )
    if max_starts is not None and not alone:
        raise BadInput(MAX_STARTS_ALONE)


def _request(tokens: int | None, bandwidth: str | None, latency: str | None, waiting: int, slo: str | None) -> Served:
    from kvprofile.cost.timeline import Link
    from kvprofile.errors import BadInput
    from kvprofile.report.serving import Served
    from kvprofile.units import parse_bandwidth, parse_milliseconds

    if bandwidth is None and latency is not None:
        raise BadInput("--latency is of the link; give --bandwidth, too")
    if slo is not None and waiting == 0 and (tokens is None or bandwidth is None):
        raise BadInput("--slo needs the context's length and the link; give --tokens and --bandwidth")
    before = 0.0 if latency is None else parse_milliseconds(latency)
    link = None if bandwidth is None else Link(parse_bandwidth(bandwidth), before)
    return Served(tokens, waiting, link, None if slo is None else parse_milliseconds(slo))
