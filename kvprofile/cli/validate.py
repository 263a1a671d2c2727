"""`kvprofile validate`: measures chosen plans on data that the profile never saw."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.cli.progress import Display


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile validate outputs --dataset hotpotqa_validation --max-loss 5%")(validate)


def validate(
    profile: Annotated[
        str, typer.Argument(help="A profile's folder, its profile.parquet, a pair's folder or a store.")
    ],
    dataset: Annotated[list[str], typer.Option(help="Data that the profile never saw; may be given again.")],
    plans: Annotated[
        str, typer.Option(help="frontier, selected (within --max-loss), or groups such as 1-2,0-10,full_reuse.")
    ] = "frontier",
    max_loss: Annotated[
        str | None, typer.Option(help="The promise: 1% or 1pt; each plan's own upper bound if not given.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Needed if the profile has several.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric; the task's first if not given.")] = None,
    contexts: Annotated[int, typer.Option(help="Samples of each data set.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the choice of records.")] = 0,
    sender: Annotated[str | None, typer.Option(help="Where the sender is, if it moved since.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let a checkpoint bring code that is run.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure chosen plans on fresh data, one plan at a time, and tell whether the profile's promise held.

    Exits with 1 if a plan lost more than promised. Interrupted, it goes on when the same command is run again.
    """
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss
    from kvprofile.profiled_pair import load_profiled_pair
    from kvprofile.report.validations import print_validation
    from kvprofile.store.reader import load
    from kvprofile.validation import chosen_plans, fresh_data
    from kvprofile.validation import validate as run

    if contexts < 1:
        raise BadInput("--contexts must be at least 1")
    limit = None if max_loss is None else parse_loss(max_loss)
    loaded = load(profile)
    rows = chosen_plans(loaded, plans, task, limit, metric)
    found = []
    with Display() as display:
        pair = load_profiled_pair(loaded, display, sender, receiver, trust_remote_code)
        for name in dataset:
            data = fresh_data(loaded, pair, name, rows[0]["task"], contexts, seed)
            if data.overlap:
                display.say(f"{data.overlap} samples of {name} are in the profile and left out")
            found.append(run(loaded, pair, data, rows, limit, display))
    if as_json:
        print_json({"profile": str(loaded.folder), "validations": found})
    else:
        for one in found:
            print_validation(out(), one)
    if any(plan["held"] is False for one in found for plan in one["plans"]):
        raise typer.Exit(1)
