"""`kvprofile report`: one HTML file for people who would rather look than read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprofile.cli.arguments import ProfileArgument, RuleOption
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import print_line


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile report outputs -o report.html --max-loss 5%")(report)


def report(
    profile: ProfileArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; report.html in the profile's folder if not said.")
    ] = None,
    max_loss: Annotated[str, typer.Option(help="Loss to accept: 1% (relative) or 1pt (points).")] = "5%",
    rule: RuleOption = "point",
    plots: Annotated[Path | None, typer.Option(help="Folder for the figures as PNG and SVG.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a self-contained HTML report: verdict, frontier, all groups, layers, samples, costs, provenance, glossary."""
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss, parse_rule
    from kvprofile.report.html import write_figures, write_report
    from kvprofile.store.reader import is_url, load

    limit, by = parse_loss(max_loss), parse_rule(rule)
    if output is None and is_url(profile):
        raise BadInput(f"{profile} cannot be changed; give the report a place with -o FILE")
    loaded = load(profile)
    target = output or loaded.folder / "report.html"
    write_report(loaded, target, limit, by)
    figures = write_figures(loaded, plots, limit, by) if plots else []
    if as_json:
        print_json({"report": str(target), "figures": [str(path) for path in figures]})
    else:
        for path in (target, *figures):
            print_line(out(), str(path))
