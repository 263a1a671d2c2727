"""What every command shares: the `--json` option, one JSON document on standard output, consoles that know their stream."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def out() -> Console:
    """Returns a console on standard output; texts from models and files must be passed as `rich.text.Text` or escaped."""
    return Console(highlight=False)


def log() -> Console:
    """Returns a console on standard error, for progress and remarks."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """Prints one JSON document; NaN and infinity are refused, so that any JSON reader can take it."""
    typer.echo(json.dumps(document, ensure_ascii=True, indent=2, allow_nan=False))
