"""`kvprofile compare`: what moved between two profiles."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import RuleOption
from kvprofile.cli.output import JsonFlag, out, print_json


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile compare outputs/PAIR/v0001 outputs/PAIR/v0002 --max-loss 5%")(compare)


def compare(
    before: Annotated[str, typer.Argument(help="A profile.")],
    after: Annotated[
        str, typer.Argument(help="Another: later weights, other data, the other direction, another engine.")
    ],
    max_loss: Annotated[str | None, typer.Option(help="Loss to accept, to compare what is selected.")] = None,
    rule: RuleOption = "point",
    metric: Annotated[str | None, typer.Option(help="Metric; each task's first if not given.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print what differs between two profiles: models, data, frontier, scores on shared samples, selected plan."""
    from kvprofile.limits import parse_loss, parse_rule
    from kvprofile.report.comparison import comparison_document, print_comparison
    from kvprofile.store.reader import load

    limit = None if max_loss is None else parse_loss(max_loss)
    document = comparison_document(load(before), load(after), limit, parse_rule(rule), metric)
    if as_json:
        print_json(document)
    else:
        print_comparison(out(), document)
