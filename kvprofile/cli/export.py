"""`kvprofile export`: a profile for runtimes in other languages."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvprofile.cli.output import JsonFlag, out, print_json


class ExportFormat(StrEnum):
    """How to write it."""

    json = "json"
    arrow = "arrow"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile export outputs -o profile.json")(export)


def export(
    profile: Annotated[
        str, typer.Argument(help="A profile's folder, its profile.parquet, a pair's folder, a store or an export.")
    ],
    form: Annotated[
        ExportFormat, typer.Option("--format", help="json: all that a runtime needs; arrow: rows and header.")
    ] = ExportFormat.json,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; standard output if not said (json only).")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a profile as one JSON document, described by a JSON Schema, or as an Arrow file.

    `kvprofile.runtime.load_profile` reads the JSON document, with nothing but the standard library.
    """
    from kvprofile.errors import BadInput
    from kvprofile.report.text import print_line
    from kvprofile.runtime.export import export_text, write_arrow
    from kvprofile.runtime.store import load_profile
    from kvprofile.store.temporary import temporary_beside

    if output is None and form is ExportFormat.arrow:
        raise BadInput("an Arrow file is not for a terminal; give -o profile.arrow")
    if output is not None and output.is_dir():
        raise BadInput(f"{output} is a folder; give -o a file, such as {output / f'profile.{form.value}'}")
    loaded = load_profile(profile)
    if output is None:
        typer.echo(export_text(loaded), nl=False)
        return
    temporary = temporary_beside(output)
    try:
        if form is ExportFormat.json:
            temporary.write_text(export_text(loaded), "utf-8")
        else:
            write_arrow(loaded, temporary)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    if as_json:
        print_json({"export": str(output), "format": form.value, "bytes": output.stat().st_size})
    else:
        print_line(out(), str(output))
