"""`kvprofile sensitivity`: how sensitive each layer is, measured on a profile's own samples."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import DeviceOption, MemoryOption, ProfileArgument, RemoteCodeOption
from kvprofile.cli.options import parse_bytes, require_folder
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.cli.progress import Display


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile sensitivity outputs")(sensitivity)


def sensitivity(
    profile: ProfileArgument,
    critical: Annotated[float, typer.Option(help="Relative loss in per cent above which a layer is critical.")] = 10.0,
    reverse: Annotated[
        bool, typer.Option("--reverse", help="Exchange the roles: the sender reads one layer of the receiver's.")
    ] = False,
    sender: Annotated[str | None, typer.Option(help="Where the sender is, if it moved since.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    memory_limit: MemoryOption = None,
    device: DeviceOption = None,
    trust_remote_code: RemoteCodeOption = False,
    as_json: JsonFlag = False,
) -> None:
    """Take one layer at a time from the sender in the receiver's own prefill, and measure what each costs.

    Then recompute the most sensitive layers as scattered sets, as many as each group on the frontier, to compare the two.
    Measured once for a profile and direction; asked again, it prints what is kept.
    """
    from kvprofile.errors import BadInput
    from kvprofile.profiled_pair import load_profiled_pair
    from kvprofile.report.sensitivity import print_map, sensitivity_document
    from kvprofile.sensitivity import measure_sensitivity, profile_samples
    from kvprofile.store.reader import load

    if not 0 <= critical <= 100:
        raise BadInput(f"--critical {critical:g} is no loss between 0 and 100 per cent")
    limit = parse_bytes(memory_limit)
    require_folder(profile, "sensitivity")
    loaded, direction = load(profile), "reverse" if reverse else "forward"
    if loaded.sensitivity(direction) is None:
        profile_samples(loaded)  # says so before the models are loaded, if they were not kept
        with Display() as display:
            pair = load_profiled_pair(loaded, display, sender, receiver, device, trust_remote_code)
            measure_sensitivity(loaded, pair, display, reverse=reverse, memory_limit=limit)
    document = sensitivity_document(loaded, direction, critical / 100)
    if as_json:
        print_json({"profile": str(loaded.folder), **document})
    else:
        print_map(out(), document)
