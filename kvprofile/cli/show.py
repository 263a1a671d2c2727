"""`kvprofile show`: header and summary of a profile."""

from __future__ import annotations

import typer

from kvprofile.cli.arguments import ProfileArgument
from kvprofile.cli.output import JsonFlag, out, print_json


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile show outputs")(show)


def show(
    profile: ProfileArgument,
    as_json: JsonFlag = False,
) -> None:
    """Print a profile's header, pair, environment, data, baselines, plans, errors and files."""
    from kvprofile.report.overview import print_summary
    from kvprofile.report.summary import summarize
    from kvprofile.store.reader import load

    summary = summarize(load(profile))
    if as_json:
        print_json(summary)
    else:
        print_summary(out(), summary)
