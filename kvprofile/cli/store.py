"""`kvprofile store`: what a store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvprofile.cli.output import JsonFlag, out, print_json


def register(app: typer.Typer) -> None:
    store = typer.Typer(help="List the profiles of a store.", no_args_is_help=True, rich_markup_mode=None)
    store.command("ls", epilog="Example: kvprofile store ls --out outputs")(ls)
    app.add_typer(store, name="store")


def ls(
    folder: Annotated[Path, typer.Option("--out", help="The store.")] = Path("outputs"), as_json: JsonFlag = False
) -> None:
    """List every version of every pair; an empty store is an empty list."""
    from kvprofile.report.overview import print_entries
    from kvprofile.store import index

    entries = index.ls(folder)
    if as_json:
        print_json([{**entry._asdict(), "path": str(entry.path)} for entry in entries])
    else:
        print_entries(out(), entries, str(folder))
