"""`kvprofile validate`: measures chosen plans on data that the profile never saw."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import (
    RULE_HELP,
    DeviceOption,
    MetricOption,
    OneTaskOption,
    ProfileArgument,
    RemoteCodeOption,
)
from kvprofile.cli.options import require_folder
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.cli.progress import Display


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile validate outputs --dataset hotpotqa_validation --max-loss 5%")(validate)


def validate(
    profile: ProfileArgument,
    dataset: Annotated[
        list[str], typer.Option(help="Data that the profile never saw, with its columns; may be repeated.")
    ],
    plans: Annotated[
        str, typer.Option(help="frontier, selected (within --max-loss), or groups such as 1-2,0-10,full_reuse.")
    ] = "frontier",
    max_loss: Annotated[
        str | None, typer.Option(help="The promise: 1% or 1pt; each plan's own upper bound if not given.")
    ] = None,
    rule: Annotated[str, typer.Option(help=f"For --plans selected. {RULE_HELP}")] = "point",
    task: OneTaskOption = None,
    profiled_dataset: Annotated[
        str | None, typer.Option(help="The profile's own data whose prompt and frontier are taken, if it has several.")
    ] = None,
    metric: MetricOption = None,
    contexts: Annotated[int, typer.Option(help="Samples of each data set.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the choice of records.")] = 0,
    sender: Annotated[str | None, typer.Option(help="Where the sender is, if it moved since.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure chosen plans on fresh data, one plan at a time, and tell whether the profile's promise held.

    With --max-loss, a plan promises it that lost no more in the profile; without, every plan promises its own upper bound.
    Exits with 1 unless every promise is known to have held, on every data set. Interrupted, it goes on when the same command
    is run again.
    """
    from kvprofile.errors import BadInput
    from kvprofile.limits import parse_loss, parse_rule
    from kvprofile.profiled_pair import load_profiled_pair
    from kvprofile.report.validations import print_transfer, print_validation, promises_held
    from kvprofile.store.reader import load
    from kvprofile.validation import chosen_plans, fresh_data
    from kvprofile.validation import validate as run

    if contexts < 1:
        raise BadInput("--contexts must be at least 1")
    limit = None if max_loss is None else parse_loss(max_loss)
    require_folder(profile, "validate")
    loaded = load(profile)
    rows = chosen_plans(loaded, plans, limit, rule=parse_rule(rule), task=task, dataset=profiled_dataset, metric=metric)
    with Display() as display:
        pair = load_profiled_pair(loaded, display, sender, receiver, device, trust_remote_code)
        fresh = [fresh_data(loaded, pair, name, rows[0], contexts, seed, display) for name in dict.fromkeys(dataset)]
        found = [run(loaded, pair, data, rows, limit, display) for data in fresh]
    if as_json:
        print_json({"profile": str(loaded.folder), "validations": found})
    else:
        for one in found:
            print_validation(out(), one)
        print_transfer(out(), found)
    if not all(promises_held(one) for one in found):
        raise typer.Exit(1)
