"""`kvprofile doctor`: what this machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.report.text import size


def register(app: typer.Typer) -> None:
    app.command("doctor", epilog="Example: kvprofile doctor --json")(doctor)


def doctor(
    store: Annotated[Path, typer.Option("--out", help="The store whose disk is looked at.")] = Path("outputs"),
    as_json: JsonFlag = False,
) -> None:
    """Shows versions, devices, attention kernels, memory, disk, cache, and whether the hub answers."""
    from kvprofile.models import machine

    found = machine.describe(store)
    if as_json:
        print_json(found)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _rows(found):
        table.add_row(Text(name, style="bold"), Text(value))
    out().print(table)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("python", f"{found['python']} on {found['platform']}")]
    rows += [(name, version or "not installed") for name, version in found["versions"].items()]
    rows += [("device", _device(device)) for device in found["devices"]]
    kernels = found["attention_kernels"]
    rows.append(("attention kernels", ", ".join(name for name, here in kernels.items() if here)))
    if absent := [name for name, here in kernels.items() if not here]:
        rows.append(("not available", ", ".join(absent)))
    rows.append(("memory free", _known(found["memory_free_bytes"])))
    cache, outputs, hub = found["cache"], found["outputs"], found["hub"]
    free = _known(cache["disk_free_bytes"])
    rows.append(("cache", f"{cache['folder']} ({_known(cache['bytes'])} used, {free} free on its disk)"))
    rows.append(("outputs", f"{outputs['folder']} ({_known(outputs['disk_free_bytes'])} free on its disk)"))
    rows.append(("hub", f"{hub['address']} " + ("answers" if hub["reachable"] else f"not reachable: {hub['reason']}")))
    return rows


def _device(device: dict[str, Any]) -> str:
    bfloat16 = "fast bfloat16" if device["bfloat16"] else "no fast bfloat16"
    if "threads" in device:
        return f"{device['device']}: {device['name']}, {device['threads']} threads, {bfloat16}"
    memory = f"{_known(device['memory_free_bytes'])} of {_known(device['memory_bytes'])} free"
    return f"{device['device']}: {device['name']}, {memory}, {bfloat16}"


def _known(count: int | None) -> str:
    return "unknown" if count is None else size(count)
