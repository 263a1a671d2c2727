"""`kvprofile estimate`: what a sweep would run and about what it takes, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.output import JsonFlag, out, print_json


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
    from kvprofile.recipe import recipe_from_options

    options = {"contexts": contexts, "granularity": granularity, "max_context_tokens": max_context_tokens}
    result = estimated(recipe_from_options(recipe, None, None, None, None, options, {}))
    if as_json:
        print_json(result)
        return
    console = out()
    console.print(
        f"{result['samples']} samples, contexts of {result['context_tokens_median']} tokens (median), "
        f"{result['layers']} layers, measured at {result['matrix_gflops']:.0f} GFLOPS on {result['device']}",
        markup=False,
        soft_wrap=True,
    )
    for grid in result["grids"]:
        console.print(
            f"granularity {','.join(map(str, grid['granularity']))}: {grid['groups']} groups, "
            f"at least {_duration(grid['seconds'])}",
            markup=False,
            soft_wrap=True,
        )
    console.print(
        f"memory about {result['memory_bytes'] / 1e9:.1f} GB, disk about {result['disk_bytes'] / 1e6:.0f} MB",
        markup=False,
        soft_wrap=True,
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
