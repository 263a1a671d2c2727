"""`kvprofile sweep`: measures a pair and publishes its profile."""

from __future__ import annotations

from typing import Annotated

import typer

from kvprofile.cli.arguments import DeviceOption, MemoryOption, RemoteCodeOption
from kvprofile.cli.options import local_store, parse_bytes, recipe_with
from kvprofile.cli.output import JsonFlag, out, print_json
from kvprofile.cli.progress import Display
from kvprofile.report.text import print_line


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: kvprofile sweep recipes/demo.yaml --contexts 6 --granularity 3")(sweep)


def sweep(
    recipe: Annotated[str | None, typer.Argument(help="A recipe file or the name of a bundled one.")] = None,
    sender: Annotated[str | None, typer.Option(help="Hub id[@revision], folder, .gguf file or BASE+ADAPTER.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Bundled name, .jsonl/.parquet/.csv file or hub:NAME.")] = None,
    task: Annotated[str | None, typer.Option(help="qa, summarization or code.")] = None,
    contexts: Annotated[int | None, typer.Option(help="Records of each data set; 50 if not said.")] = None,
    granularity: Annotated[str | None, typer.Option(help="Layers in a unit, per grid; 1,2,3 if not said.")] = None,
    search: Annotated[str | None, typer.Option(help="exhaustive or adaptive: only groups near the frontier.")] = None,
    references: Annotated[
        str | None, typer.Option(help="data, or none: agreement with the receiver's own full prefill, without labels.")
    ] = None,
    max_context_tokens: Annotated[int | None, typer.Option(help="Longer contexts are cut in the middle.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: DeviceOption = None,
    attention: Annotated[str | None, typer.Option(help="auto, or Transformers' name of the attention kernel.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choice of records and of the bootstrap.")] = None,
    no_text: Annotated[bool, typer.Option("--no-text", help="Store no texts and no token ids.")] = False,
    memory_limit: MemoryOption = None,
    trust_remote_code: RemoteCodeOption = False,
    store: Annotated[str, typer.Option("--out", help="Store of profiles: a folder.")] = "outputs",
    as_json: JsonFlag = False,
) -> None:
    """Measures every way of reusing the sender's cache on a pair, and publishes the profile.

    Interrupted, it goes on where it stood when the same command is run again.
    """
    place = local_store(store, "sweep")
    from kvprofile.sweep import sweep as run

    options = {
        "sender": sender,
        "receiver": receiver,
        "dataset": dataset,
        "task": task,
        "contexts": contexts,
        "granularity": granularity,
        "references": references,
        "search": search,
        "max_context_tokens": max_context_tokens,
        "seed": seed,
        "store_text": False if no_text else None,
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "trust_remote_code": True if trust_remote_code else None,
    }
    with Display() as display:
        folder = run(recipe_with(recipe, options), place, display, parse_bytes(memory_limit))
    if as_json:
        print_json({"profile": str(folder)})
    else:
        print_line(out(), str(folder))
