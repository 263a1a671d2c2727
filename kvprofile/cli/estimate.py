"""`kvprofile estimate`: what a sweep would run and about what it takes, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.options import recipe_with
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import duration, print_line, size


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile estimate recipes/demo.yaml --contexts 50")(estimate)


def estimate(
    recipe: Annotated[str, typer.Argument(help="A recipe file or the name of a bundled one.")],
    contexts: Annotated[int | None, typer.Option(help="Records of each data set.")] = None,
    granularity: Annotated[str | None, typer.Option(help="Layers in a unit, per grid, such as 1,2,3.")] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longer contexts are cut in the middle.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tells what a sweep would run, about how long it takes and how much memory and disk it needs; runs no model.

    The time is counted FLOPs over the rate of a matrix product measured now, so it is a lower bound of the order.
    """
    from kvprofile.estimate import estimate as estimated

    options = {"contexts": contexts, "granularity": granularity, "max_context_tokens": max_context_tokens}
    result = estimated(recipe_with(recipe, options))
    if as_json:
        print_json(result)
        return
    console = out()
    print_line(
        console,
        f"{result['samples']} samples, contexts of {result['context_tokens_median']} tokens (median), "
        f"{result['layers']} layers, measured at {result['matrix_gflops']:.0f} GFLOPS on {result['device']}",
    )
    for grid in result["grids"]:
        units = ",".join(map(str, grid["granularity"]))
        print_line(console, f"granularity {units}: {grid['groups']} groups, at least {duration(grid['seconds'])}")
    if result["search"] == "adaptive":
        print_line(console, "the adaptive search runs a part of this; how much, only the search tells")
    print_line(console, f"memory about {size(result['memory_bytes'])}, disk about {size(result['disk_bytes'])}")
