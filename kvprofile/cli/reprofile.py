"""`kvprofile reprofile`: scheduled re-profiling."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvprofile.cli.arguments import MemoryOption
from kvprofile.cli.options import local_store, parse_bytes
from kvprofile.cli.output import log, out
from kvprofile.cli.progress import Display
from kvprofile.report.text import duration, print_line

_WORST_FIRST = (4, 2, 1, 3)


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile reprofile recipes/demo.yaml --fail-if-worse 5pt --max-age 30d")(reprofile)


def reprofile(
    recipes: Annotated[list[str], typer.Argument(help="Recipe files or names of bundled ones.")],
    store: Annotated[str, typer.Option("--out", help="Store of profiles; a folder.")] = "outputs",
    check: Annotated[
        bool, typer.Option("--check", help="Only say what is stale; exits with 1 if anything is.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Measure what is current, too, and search as the recipe says.")
    ] = False,
    fail_if_worse: Annotated[
        str | None,
        typer.Option(
            help="Keep the old version, and exit with 1, if the loss of a plan of its frontier grew by more, such as 5pt or "
            "5%. One answer of 50 weighs 2pt."
        ),
    ] = None,
    rule: Annotated[
        str, typer.Option(help="Which growth: point (as measured) or bound (its lower bound, so that chance passes).")
    ] = "point",
    max_loss: Annotated[
        str | None, typer.Option(help="With --fail-if-worse: only plans that lost no more than this before count.")
    ] = None,
    max_age: Annotated[str | None, typer.Option(help="Measure again what is older, such as 30d.")] = None,
    memory_limit: MemoryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each recipe, for logs.")] = False,
) -> None:
    """Measure again the pairs whose newest profile is stale, from where their frontier was; leave the others alone.

    Stale is a profile whose weights, tokenizer, chat template, config, end tokens, data, recipe, metrics or strategies changed,
    or that is too old. No model is loaded to find out. Safe under a scheduler: one run at a time for a store, and one that
    was cut off goes on. Exits with the gravest of its recipes' exit codes.
    """
    from kvprofile.cli import explained
    from kvprofile.gate import require_rule
    from kvprofile.limits import parse_age, parse_loss, parse_rule
    from kvprofile.recipe import load_recipe
    from kvprofile.reprofile import Options
    from kvprofile.reprofile import reprofile as run

    options = Options(
        only_check=check,
        full=full,
        max_age=None if max_age is None else parse_age(max_age),
        fail_if_worse=None if fail_if_worse is None else parse_loss(fail_if_worse),
        rule=parse_rule(rule),
        max_loss=None if max_loss is None else parse_loss(max_loss),
        memory_limit=parse_bytes(memory_limit),
    )
    require_rule(options.fail_if_worse, options.rule)
    place, codes = local_store(store, "reprofile"), set()
    for recipe in recipes:
        try:
            with Display() as display:
                outcome = run(load_recipe(recipe), place, display, options)
        except Exception as error:  # whatever it is, the other recipes do not wait for this one
            sentence, code = explained(error)
            codes.add(code)
            print_line(log(), f"kvprofile: {recipe}: {sentence}")
            _print({"recipe": recipe, "status": "failed", "error": sentence}, as_json)
        else:
            codes.add(int(outcome.status in ("stale", "rejected")))
            _print({"recipe": recipe, **outcome.document()}, as_json)
    if any(codes):
        raise typer.Exit(next(code for code in _WORST_FIRST if code in codes))


def _print(document: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=True, allow_nan=False))
        return
    for line in _lines(document):
        print_line(out(), line)


def _lines(document: dict[str, Any]) -> list[str]:
    """Returns what is said of one recipe."""
    from kvprofile.gate import Worse

    place = document.get("profile") or document.get("pair") or ""
    lines = [f"{document['recipe']}: {document['status']} {place}".rstrip()]
    lines += [f"  {reason['what']}: {reason['detail']}" for reason in document.get("reasons", ())]
    for one in document.get("worse", ()):
        try:
            lines.append(f"  worse: {Worse(**one).words()}")
        except (TypeError, ValueError):  # somebody wrote it by hand
            lines.append(f"  worse: {one}")
    if document["status"] == "rejected":
        lines.append(f"  to serve it all the same: kvprofile store accept {document['profile']}")
    if why := document.get("not_comparable"):
        lines.append(f"  --fail-if-worse could not compare: {why}")
    if moved := document.get("frontier"):
        lines.append(f"  frontier: {moved['stay']} plans stay, {moved['come']} come, {moved['leave']} leave")
    if document.get("work_share") is not None:
        share = f"{100 * document['work_share']:.0f}% of the work of measuring every group"
        lines.append(f"  {share}, in {duration(document['seconds'])}")
        if document["previous"]:
            lines.append(f"  what moved: kvprofile compare {document['previous']} {document['profile']}")
    return lines
