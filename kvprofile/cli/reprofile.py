"""`kvprofile reprofile`: scheduled re-profiling."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvprofile.cli.arguments import MemoryOption
from kvprofile.cli.options import local_store, parse_bytes
from kvprofile.cli.output import out
from kvprofile.cli.progress import Display
from kvprofile.report.text import duration, print_line


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile reprofile recipes/demo.yaml --fail-if-worse 1pt --max-age 30d")(reprofile)


def reprofile(
    recipes: Annotated[list[str], typer.Argument(help="Recipe files or names of bundled ones.")],
    store: Annotated[str, typer.Option("--out", help="Store of profiles; a folder.")] = "outputs",
    check: Annotated[
        bool, typer.Option("--check", help="Only say what is stale; exits with 1 if anything is.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Search as the recipe says, not only from where the frontier was.")
    ] = False,
    fail_if_worse: Annotated[
        str | None,
        typer.Option(help="Keep the old version, and exit with 1, if a plan of its frontier loses more by 1pt or 1%."),
    ] = None,
    max_age: Annotated[str | None, typer.Option(help="Measure again what is older, such as 30d.")] = None,
    memory_limit: MemoryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each recipe.")] = False,
) -> None:
    """Measure again the pairs whose newest profile is stale, from where their frontier was; leave the others alone.

    Stale is a profile whose weights, tokenizer, chat template, config, data, recipe, metrics or strategies changed, or that
    is too old. No model is loaded to find out. Safe under a scheduler: one run at a time, and one that was cut off goes on.
    """
    from kvprofile.errors import KvprofileError
    from kvprofile.limits import parse_age, parse_loss
    from kvprofile.recipe import load_recipe
    from kvprofile.reprofile import reprofile as run

    options: dict[str, Any] = {
        "only_check": check,
        "full": full,
        "max_age": None if max_age is None else parse_age(max_age),
        "fail_if_worse": None if fail_if_worse is None else parse_loss(fail_if_worse),
        "memory_limit": parse_bytes(memory_limit),
    }
    place, codes = local_store(store, "reprofile"), []
    for recipe in recipes:
        try:
            with Display() as display:
                outcome = run(load_recipe(recipe), place, display, **options)
        except KvprofileError as error:  # the other recipes are not to wait for this one
            codes.append(error.exit_code)
            _print({"recipe": recipe, "status": "failed", "error": str(error)}, as_json)
        else:
            codes.append(int(outcome.status in ("stale", "rejected")))
            _print({"recipe": recipe, **outcome.document()}, as_json)
    if any(codes):
        raise typer.Exit(max(codes))


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=True, allow_nan=False))
        return
    console = out()
    place = document.get("profile") or document.get("pair") or ""
    print_line(console, f"{document['recipe']}: {document['status']} {place}".rstrip())
    if "error" in document:
        print_line(console, f"  {document['error']}")
        return
    for reason in document["reasons"]:
        print_line(console, f"  {reason['what']}: {reason['detail']}")
    for one in document["worse"]:
        print_line(
            console,
            f"  worse: {one['plan']} loses {one['grew_by']:.1f}{one['unit']} more on {one['task']}/{one['dataset']}",
        )
    if document["status"] == "rejected":
        print_line(console, f"  to serve it all the same: kvprofile store accept {document['profile']}")
    if moved := document["frontier"]:
        print_line(console, f"  frontier: {moved['stay']} plans stay, {moved['come']} come, {moved['leave']} leave")
    if document["work_share"] is not None:
        spent = f"{100 * document['work_share']:.0f}% of the work of measuring every group, in {duration(document['seconds'])}"
        print_line(console, f"  {spent}")
        if document["previous"]:
            print_line(console, f"  what moved: kvprofile compare {document['previous']} {document['profile']}")
